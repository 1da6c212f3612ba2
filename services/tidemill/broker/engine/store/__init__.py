"""The store: the commit log and its derived files (consume queues, message index)."""
