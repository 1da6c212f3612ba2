"""The admin process: a REST API over the broker's configuration, progress and messages."""
