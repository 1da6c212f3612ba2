"""BrokerReader: pulls, and pages of queues, events, progress and deliveries."""
