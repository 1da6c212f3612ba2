"""Producer deduplication: known keys, and the decision about each keyed send (ADR 0087)."""
