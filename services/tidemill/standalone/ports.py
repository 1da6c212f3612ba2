"""Ports for children that start at the same time and must know each other's address.

A port is reserved by a socket that is bound with SO_REUSEPORT and never listens: nobody else gets
it, the child may bind it too, and a connection is refused until the child listens.

Before any child is started all addresses are tried, in one order: otherwise it would be chance
which child finds its port taken first, and is named.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from tidemill.common.lifecycle import StartError, cannot_listen

PORT_MAX = 65_535  # a u16
GRPC_FLAGS = "--grpc-host", "--grpc-port"


class PortRequest(NamedTuple):
    """A port that a child will listen on, and which flags of the standalone say so."""

    host: str
    port: int  # 0: a free one
    flags: tuple[str, str]  # of host and port
    what: str


def check_free(wanted: Sequence[PortRequest]) -> None:
    """Raise StartError for the first port that is taken or wanted twice, or host that is none."""
    seen: dict[int, PortRequest] = {}
    for one in (one for one in wanted if one.port):
        before = seen.setdefault(one.port, one)
        if before is not one:
            raise StartError(
                f"port {one.port} is wanted twice, for {before.what} and for {one.what}; "
                f"change {before.flags[1]} or {one.flags[1]}"
            )
        if one.port > PORT_MAX:
            raise StartError(
                f"there is no port {one.port} for {one.what}; choose a lower {one.flags[1]}"
            )
    for one in wanted:
        # Without SO_REUSEPORT: a port that another standalone shares among its proxies is taken.
        with _bound(one.host, one.port, one.flags, is_shared=False):
            pass


def reserve(host: str, port: int) -> socket.socket:
    """Reserve `port` (0: a free one) until the socket is closed; raise StartError if taken."""
    return _bound(host, port, GRPC_FLAGS, is_shared=True)


def _bound(host: str, port: int, flags: tuple[str, str], *, is_shared: bool) -> socket.socket:
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
