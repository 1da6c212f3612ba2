"""SQL92 filters: tokens, grammar, conditions and their evaluation (ADR 0082)."""
