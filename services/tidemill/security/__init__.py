"""Users, roles and rights: what proxies, brokers, admin and the command line share, without I/O."""
