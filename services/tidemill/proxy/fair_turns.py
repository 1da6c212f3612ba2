"""Turns at something that few may do at once: given in rotation to those who want them.

Who asks for a hundred has them one by one, between those of everybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from typing import final


@final
class FairTurns:
    """At most `count` turns under way; the next one is that of who has waited for longest."""

    def __init__(self, count: int) -> None:
        self._left = count
        # Of each who waits, the requests in their order; who was served last comes last. Bounded
        # by the calls that a connection, and the process, may have under way.
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        """Have a turn for the block, as one of the requests of `key`."""
        await self._begin(key)
        try:
            yield
        finally:
            self._end()

    async def _begin(self, key: Hashable) -> None:
        if self._left > 0:
            self._left -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._end()  # It was given in the turn of the loop in which its caller went.
            else:
                self._forget(key, future)
            raise

    def _forget(self, key: Hashable, future: asyncio.Future[None]) -> None:
        queue = self._waiting.get(key)
        if queue is not None and future in queue:
            queue.remove(future)
            if not queue:
                del self._waiting[key]

    def _end(self) -> None:
        """Give the turn to the next one who waits."""
        while self._waiting:
            key, queue = next(iter(self._waiting.items()))
            future = queue.popleft()
            if queue:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]
            if not future.done():
                future.set_result(None)
                return
        self._left += 1
