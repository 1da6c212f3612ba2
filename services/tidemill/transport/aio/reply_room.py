"""Room of a connection for replies, taken in order by its calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from tidemill.transport.grpc.connection_memory import ConnectionMemory
    from tidemill.transport.grpc.server_call import ServerCall


@final
class ReplyRoom:
    """The requests of calls for room; at most as many as the connection has streams."""

    def __init__(self, memory: ConnectionMemory, loop: asyncio.AbstractEventLoop) -> None:
        self._memory = memory
        self._loop = loop
        self._requests: dict[asyncio.Future[bool], tuple[ServerCall, int]] = {}  # in order

    def has_room(self, count: int) -> bool:
        """Return whether the connection itself may hold `count` more bytes."""
        return not self._requests and self._memory.share.has_room(count)

    async def hold_in_turn(self, call: ServerCall, count: int, timeout_s: float) -> bool:
        """Take room as soon as the connection has it; return False if there is none in time."""
        granted: asyncio.Future[bool] = self._loop.create_future()
        self._requests[granted] = call, count
        self.grant()
        try:
            async with asyncio.timeout(timeout_s):
                return await granted
        except TimeoutError:
            return False
        finally:
            self._requests.pop(granted, None)
            self.grant()  # The next request may be smaller.

    def grant(self) -> None:
        """Grant the free room to the requests in their order."""
        while self._requests:
            granted, (call, count) = next(iter(self._requests.items()))
            if not granted.done():
                if not self._memory.share.has_room(count):
                    return
                granted.set_result(self._memory.hold(call, count))
            del self._requests[granted]
