"""Lifecycle events of messages, read from the records of the log (ADR 0048)."""
