"""BrokerAdmin: one module per subject, and the relay of questions to proxies."""
