"""Checks of half messages: the producers at the proxies, and the checks on their way (ADR 0085)."""
