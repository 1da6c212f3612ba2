"""Ports of children that start at the same time and must know each other's address.

A reserved port is bound with SO_REUSEPORT by a socket that never listens. No other process gets the
port, and the child may bind it too. Connections are refused until the child listens.

The supervisor tries all addresses in a fixed order before it starts a child. So the error for a
port in use does not depend on which child is first.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from tidemill.common.lifecycle import StartError, cannot_listen

PORT_MAX = 65_535  # the largest 16-bit number
GRPC_FLAGS = "--grpc-host", "--grpc-port"


class PortRequest(NamedTuple):
    """A port that a child will listen on, and the flags that set it."""

    host: str
    port: int  # 0: a free port
    flags: tuple[str, str]  # for host and port
    use: str


def check_free(requests: Sequence[PortRequest]) -> None:
    """Raise StartError for a port that is in use or requested twice, or for an invalid host."""
    seen: dict[int, PortRequest] = {}
    for request in (request for request in requests if request.port):
        first = seen.setdefault(request.port, request)
        if first is not request:
            raise StartError(
                f"port {request.port} is requested twice, for {first.use} and for {request.use}; "
                f"change {first.flags[1]} or {request.flags[1]}"
            )
        if request.port > PORT_MAX:
            raise StartError(
                f"port {request.port} for {request.use} is higher than {PORT_MAX}; "
                f"lower {request.flags[1]}"
            )
    for request in requests:
        # Without SO_REUSEPORT, so that a port that another standalone shares counts as in use.
        with _bind(request.host, request.port, request.flags, is_shared=False):
            pass


def reserve(host: str, port: int) -> socket.socket:
    """Reserve `port` (0: a free one) until the socket is closed; raise StartError if in use."""
    return _bind(host, port, GRPC_FLAGS, is_shared=True)


def _bind(host: str, port: int, flags: tuple[str, str], *, is_shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        raise cannot_listen(host, port, settings=flags, error=error) from error
    return reserved
