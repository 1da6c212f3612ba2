"""The round loop: rounds, the release point, parked polls and background work."""
