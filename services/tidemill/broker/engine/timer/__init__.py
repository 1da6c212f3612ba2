"""Delayed messages: a state table and a timer wheel, both derived from the log."""
