"""Delayed messages: a state table and a timer wheel, both caches of the one log."""
