"""The replicas of the broker group: streams, frames, probes and mending."""
