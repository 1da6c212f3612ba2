"""Dead letters of consumer groups: what operators see of them, and settle (ADR 0093)."""
