"""The broker's state machine: pure and synchronous. Time, disk and chance are handed to it."""
