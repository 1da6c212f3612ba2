"""Topics and groups: configuration records and their fold."""
