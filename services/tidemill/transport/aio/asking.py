"""A unary call over a connection that is kept up: one request, one response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.transport.aio.connect import OpenChannel


async def ask(channel: OpenChannel, path: str, request: bytes) -> bytes:
    """Call a unary method, and return its response; who stops waiting cancels the call.

    Raises RpcError.
    """
    responses: list[bytes] = []
    stream = channel.open(path, responses.append)
    try:
        stream.write_last(request)
        await stream.ended()
    finally:
        stream.cancel()
    if not responses:
        raise RpcError(RpcCode.INTERNAL, "the server has answered nothing")
    return responses[0]
