"""Users, roles and rights: what proxies, brokers, admin and the command line share.

Only `key_file` reads a file.
"""
