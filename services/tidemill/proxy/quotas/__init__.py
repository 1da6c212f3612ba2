"""Quotas on sends: leased tokens, and sends that wait for them."""
