"""What a controller serves: sessions of replicas, routes for proxies, calls of operators."""
