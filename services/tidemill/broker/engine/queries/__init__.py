"""Questions about the engine's state. Nothing here changes state."""
