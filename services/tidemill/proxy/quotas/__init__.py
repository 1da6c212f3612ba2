"""Quotas: leased permits, and the sends, polls and pulls that wait for them."""
