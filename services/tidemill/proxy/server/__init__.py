"""The public protocol: one module per family of RPCs, behind a seam that hides gRPC."""
