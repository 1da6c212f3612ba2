"""Values that the broker reads in rounds for its metrics."""
