"""The broker's metrics: hot paths count by id; a scrape adds names and labels.

A deleted topic thus takes its series with it, and a new topic shows zeros from the next scrape on.
"""
