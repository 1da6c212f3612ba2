"""Configuration as protobuf messages and as log lines."""
