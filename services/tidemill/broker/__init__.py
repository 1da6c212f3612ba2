"""The broker-store: commit log, pop, ack, revive, and the server that proxies talk to."""
