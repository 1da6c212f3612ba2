"""Changes of topics, groups, offsets and broker groups, at the home and at followers."""
