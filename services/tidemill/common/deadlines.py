"""Many deadlines on few timers: one timer per tick, because a timer costs more than a request.

If deadlines may be hours away, the owner discards an item that ends early. If all deadlines are
near, a discard would cost as much as the other work. Then the items that ended early expire with
their tick, and the owner ignores them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final, Generic, TypeVar, final

TICK_S: Final = 0.05  # the longest delay between a deadline and its expiry

Item = TypeVar("Item")


@final
class Deadlines(Generic[Item]):
    """Items by the tick of their deadline; create it in the event loop that uses it."""

    def __init__(self, expire: Callable[[Collection[Item]], None]) -> None:
        """Call `expire` at each tick with its remaining items, in order."""
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._ticks: dict[int, tuple[dict[Item, None], asyncio.TimerHandle]] = {}

    def add(self, item: Item, timeout_s: float) -> int:
        """File `item` under the tick that follows `timeout_s`; return the tick for `discard`."""
        tick = int((self._loop.time() + timeout_s) / TICK_S) + 1
        found = self._ticks.get(tick)
        if found is None:
            timer = self._loop.call_at(tick * TICK_S, self._expire_tick, tick)
            self._ticks[tick] = {item: None}, timer
        else:
            found[0][item] = None
        return tick

    def discard(self, item: Item, tick: int) -> None:
        """Remove `item`, which is filed under `tick`."""
        found = self._ticks.get(tick)
        if found is None:
            return
        items, timer = found
        items.pop(item, None)
        if not items:
            timer.cancel()
            del self._ticks[tick]

    def __len__(self) -> int:
        """Return the number of timers."""
        return len(self._ticks)

    def _expire_tick(self, tick: int) -> None:
        items, _ = self._ticks.pop(tick)
        self._expire(items)
