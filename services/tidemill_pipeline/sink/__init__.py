"""The sink `rocketmq`: rows into topics, at least once. Modes that promise more come beside it."""
