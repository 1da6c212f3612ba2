"""The gRPC port of a controller: sessions of replicas, routes for proxies, operators' calls."""
