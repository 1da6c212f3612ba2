"""Pop consumption: deliveries, acks, invisible durations, revive, dead letters, ordered groups."""
