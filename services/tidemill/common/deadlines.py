"""Deadlines of many on few timers: one timer a tick, since one each costs more than a request.

Who ends before its time is discarded where deadlines may be hours away. Where all are near, a
discard would cost as much as the rest: then those who have ended come up with the others of their
tick, and their owner passes over them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final, Generic, TypeVar, final

TICK_S: Final = 0.05  # a deadline is noticed this much late at most

Item = TypeVar("Item")


@final
class Deadlines(Generic[Item]):
    """Items by the tick in which their time is up; to be made in the loop that they live in."""

    def __init__(self, expire: Callable[[Collection[Item]], None]) -> None:
        """Call `expire` at each tick with the items that are still filed under it, in order."""
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._ticks: dict[int, tuple[dict[Item, None], asyncio.TimerHandle]] = {}

    def add(self, item: Item, timeout_s: float) -> int:
        """File `item` under the tick in which `timeout_s` have passed; return it, for `discard`."""
        tick = int((self._loop.time() + timeout_s) / TICK_S) + 1
        found = self._ticks.get(tick)
        if found is None:
            timer = self._loop.call_at(tick * TICK_S, self._expire_tick, tick)
            self._ticks[tick] = {item: None}, timer
        else:
            found[0][item] = None
        return tick

    def discard(self, item: Item, tick: int) -> None:
        """Forget `item`, which is filed under `tick`: it has ended."""
        found = self._ticks.get(tick)
        if found is None:
            return
        items, timer = found
        items.pop(item, None)
        if not items:
            timer.cancel()
            del self._ticks[tick]

    def __len__(self) -> int:
        """Return how many timers there are."""
        return len(self._ticks)

    def _expire_tick(self, tick: int) -> None:
        items, _ = self._ticks.pop(tick)
        self._expire(items)
