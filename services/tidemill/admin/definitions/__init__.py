"""The configuration of a cluster as one file: read, compare, apply and convert it."""
