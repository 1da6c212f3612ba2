"""The engine's log as a replica of a broker group."""
