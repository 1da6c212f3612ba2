"""Background work of the engine: checkpoints, retention, merges and rebuilds."""
