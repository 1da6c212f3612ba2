"""The gRPC service `Admin` of the public protocol, by the functions of the REST API (ADR 0088)."""
