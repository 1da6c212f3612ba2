"""The public protocol: one module a family of RPCs, behind a seam that hides what carries them."""
