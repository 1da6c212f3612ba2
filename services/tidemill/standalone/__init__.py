"""The supervisor that runs all other processes on one machine, for a laptop."""
