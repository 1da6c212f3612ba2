"""Turns at work that only a few requests may do at once, in rotation between keys.

A key with a hundred requests gets one turn per rotation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from typing import final


@final
class FairTurns:
    """At most `count` concurrent turns. The key that has waited longest gets the next one."""

    def __init__(self, count: int) -> None:
        self._left = count
        # Waiting requests by key, in their order; the key that was served last comes last. The
        # concurrent calls of a connection and of the process limit their number.
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        """Hold a turn during the block, as one request of `key`."""
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
                self._end()  # The caller was cancelled in the same turn of the event loop.
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
        """Pass the turn to the next waiting key."""
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
