"""Who is to be looked at when: ticks instead of a heap of all, since most are discarded."""

from __future__ import annotations

import heapq
from typing import Final, Generic, TypeVar, final

TICK_MS: Final = 5  # somebody is looked at this much late at most: well below a back-off

Item = TypeVar("Item")


@final
class Timers(Generic[Item]):
    """Items by the tick in which their time comes; each has one time."""

    def __init__(self) -> None:
        self._ticks: dict[int, dict[Item, None]] = {}
        self._tick_of: dict[Item, int] = {}
        # Of ticks that are empty meanwhile the number stays until it comes up.
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._tick_of)

    def set(self, item: Item, at_ms: int) -> None:
        """Look at `item` when it is `at_ms`, and not before."""
        tick = -(-at_ms // TICK_MS)
        before = self._tick_of.get(item)
        if before == tick:
            return
        if before is not None:
            self._forget(item, before)
        self._tick_of[item] = tick
        items = self._ticks.get(tick)
        if items is None:
            self._ticks[tick] = {item: None}
            heapq.heappush(self._order, tick)
        else:
            items[item] = None

    def discard(self, item: Item) -> None:
        """Do not look at `item`."""
        tick = self._tick_of.pop(item, None)
        if tick is not None:
            self._forget(item, tick)

    def take_due(self, now_ms: int) -> Item | None:
        """Return and forget one whose time has come, the first of them; None: there is none.

        One by one, since what is done for one may discard another.
        """
        next_ms = self.next_ms()
        if next_ms is None or next_ms > now_ms:
            return None
        item = next(iter(self._ticks[self._order[0]]))
        self.discard(item)
        return item

    def next_ms(self) -> int | None:
        """Return when somebody's time comes next; None: never."""
        while self._order and self._order[0] not in self._ticks:
            heapq.heappop(self._order)
        return self._order[0] * TICK_MS if self._order else None

    def _forget(self, item: Item, tick: int) -> None:
        items = self._ticks[tick]
        del items[item]
        if not items:
            del self._ticks[tick]
