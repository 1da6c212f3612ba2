"""Clients of the admin process for brokers, controllers and proxies."""
