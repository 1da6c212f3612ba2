"""The store: commit log and what is derived from it (consume queues, index, checkpoint file)."""
