"""Ports for children that start at the same time and must know each other's address.

A port is reserved by a socket that is bound with SO_REUSEPORT and never listens: nobody else gets
it, the child may bind it too, and a connection is refused until the child listens.
"""

from __future__ import annotations

import socket

from tidemill.common.lifecycle import cannot_listen


def reserve(host: str, port: int) -> socket.socket:
    """Reserve `port` (0: a free one) until the socket is closed; raise StartRefused if taken."""
    if port:
        # Without SO_REUSEPORT: a port that another standalone shares among its proxies is taken.
        with _bound(host, port, is_shared=False):
            pass
    return _bound(host, port, is_shared=True)


def _bound(host: str, port: int, *, is_shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        settings = "grpc_host", "grpc_port"
        raise cannot_listen(host, port, settings=settings, error=error) from error
    return reserved
