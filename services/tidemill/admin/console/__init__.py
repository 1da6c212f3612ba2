"""The console: HTML pages below `/ui/`, made from the documents of the REST API (ADR 0090)."""
