"""Lifecycle events: what the records of the log say happened to messages (ADR 0048)."""
