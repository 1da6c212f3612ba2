"""The work that waits for the next round."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from tidemill.broker.server.round.turn import Work


@final
class WorkQueue:
    """Queued work, bounded in bytes: beyond `bytes_max` links are not read."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._work: deque[Work] = deque()
        self._bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def __len__(self) -> int:
        return len(self._work)

    async def wait_for_room(self) -> None:
        """Return once fewer than `bytes_max` bytes are queued."""
        while not self._has_room.is_set():
            await self._has_room.wait()

    def add(self, work: Work) -> None:
        """Queue `work`, even if there is no room."""
        self._work.append(work)
        self._bytes += work.size_bytes
        if self._bytes >= self._bytes_max:
            self._has_room.clear()

    def take(self) -> deque[Work]:
        """Return all queued work, and leave an empty queue."""
        work, self._work = self._work, deque()
        self._bytes = 0
        self._has_room.set()
        return work
