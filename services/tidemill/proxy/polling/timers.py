"""Due times in ticks. A heap of all items would be slower, because most are discarded."""

from __future__ import annotations

import heapq
from typing import Final, Generic, TypeVar, final

TICK_MS: Final = 5  # largest delay of an item; well below a back-off

Item = TypeVar("Item")


@final
class DueTimes(Generic[Item]):
    """Items by the tick of their due time; each has one due time."""

    def __init__(self) -> None:
        self._ticks: dict[int, dict[Item, None]] = {}
        self._tick_of: dict[Item, int] = {}
        # The number of a tick stays until its time, even if the tick is empty.
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._tick_of)

    def set(self, item: Item, at_ms: int) -> None:
        """Set the due time of `item`."""
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
        """Remove the due time of `item`."""
        tick = self._tick_of.pop(item, None)
        if tick is not None:
            self._forget(item, tick)

    def take_due(self, now_ms: int) -> Item | None:
        """Remove and return the first due item; None if there is none.

        Items are taken one by one, because the work for one item may discard another.
        """
        next_ms = self.next_ms()
        if next_ms is None or next_ms > now_ms:
            return None
        item = next(iter(self._ticks[self._order[0]]))
        self.discard(item)
        return item

    def next_ms(self) -> int | None:
        """Return the next due time; None if there is none."""
        while self._order and self._order[0] not in self._ticks:
            heapq.heappop(self._order)
        return self._order[0] * TICK_MS if self._order else None

    def _forget(self, item: Item, tick: int) -> None:
        items = self._ticks[tick]
        del items[item]
        if not items:
            del self._ticks[tick]
