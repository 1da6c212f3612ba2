"""The brokers behind this proxy: members of the cluster, names, routes and calls."""
