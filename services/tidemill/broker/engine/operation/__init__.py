"""Bulk changes by operators, which run in slices and survive a failover (ADR 0093)."""
