"""Deadlines of many calls on few timers: one timer a tick, since one a call costs more than it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar, final

TICK_S: Final = 0.05  # a call ends this much after its deadline at most


class Expiring(Protocol):
    """What has a deadline; it remembers which tick it is filed under."""

    tick: int


Item = TypeVar("Item", bound=Expiring)


@final
class Deadlines(Generic[Item]):
    """Calls by the tick in which their time is up."""

    def __init__(self, expire: Callable[[Item], None]) -> None:
        self._expire = expire
        self._ticks: dict[int, tuple[set[Item], asyncio.TimerHandle]] = {}

    def add(self, item: Item, timeout_s: float) -> None:
        """Call `expire` with `item` once `timeout_s` have passed, unless it is discarded."""
        loop = asyncio.get_running_loop()
        item.tick = tick = int((loop.time() + timeout_s) / TICK_S) + 1
        found = self._ticks.get(tick)
        if found is None:
            timer = loop.call_at(tick * TICK_S, self._expire_tick, tick)
            self._ticks[tick] = {item}, timer
        else:
            found[0].add(item)

    def discard(self, item: Item) -> None:
        """Forget `item`; it has ended."""
        found = self._ticks.get(item.tick)
        if found is None:
            return
        items, timer = found
        items.discard(item)
        if not items:
            # Deadlines may be hours away; nothing is kept for those who have ended.
            timer.cancel()
            del self._ticks[item.tick]

    def _expire_tick(self, tick: int) -> None:
        items, _ = self._ticks.pop(tick)
        for item in items:
            self._expire(item)

    def __len__(self) -> int:
        """Return how many timers there are."""
        return len(self._ticks)
