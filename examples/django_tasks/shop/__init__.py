"""The application of the example."""
