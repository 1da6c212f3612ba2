"""A unary call over an open connection: one request, one response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.transport.aio.connect import OpenChannel


async def call_unary(channel: OpenChannel, path: str, request: bytes) -> bytes:
    """Call a unary method and return its response; a cancelled caller cancels the call.

    Raises RpcError.
    """
    responses: list[bytes] = []
    stream = channel.open(path, responses.append)
    try:
        stream.write_last(request)
        await stream.wait_ended()
    finally:
        stream.cancel()
    if not responses:
        raise RpcError(RpcCode.INTERNAL, "the server sent no response")
    return responses[0]
