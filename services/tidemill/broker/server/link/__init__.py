"""The stream to a proxy: its commands, parked pops and replies."""
