"""Quotas: leased tokens, and the sends, polls and pulls that wait for them."""
