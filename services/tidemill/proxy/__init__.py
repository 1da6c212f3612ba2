"""The stateless process between clients and brokers: the public protocol in, the link out."""
