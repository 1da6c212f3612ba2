"""Ports of children that start at the same time and must know each other's address.

A reserved port is bound with SO_REUSEPORT by a socket that never listens. No other process gets the
port, and the child may bind it too. Connections are refused until the child listens.

The supervisor tries all addresses in a fixed order before it starts a child. So the error for a
port in use does not depend on which child is first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tidemill.common.addresses import PORT_MAX
from tidemill.common.lifecycle import StartError, bound_sockets

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
        for one in bound_sockets(request.host, request.port, settings=request.flags):
            one.close()


@contextlib.contextmanager
def reserve(host: str, port: int) -> Iterator[int]:
    """Reserve `port` (0: a free one) for the block, and return it; raise StartError if in use."""
    sockets = bound_sockets(host, port, settings=GRPC_FLAGS, reuse_port=True)
    try:
        yield sockets[0].getsockname()[1]
    finally:
        for one in sockets:
            one.close()
