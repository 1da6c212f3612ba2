"""Streams to the members of the cluster, and the home service."""
