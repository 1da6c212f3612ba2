"""Values that the broker reads in a round for its metrics."""
