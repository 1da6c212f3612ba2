"""BrokerReader: pulls, and pages of lifecycle events and progress."""
