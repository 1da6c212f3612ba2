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
        self._items: dict[int, set[Item]] = {}

    def add(self, item: Item, timeout_s: float) -> None:
        """Call `expire` with `item` once `timeout_s` have passed, unless it is discarded."""
        loop = asyncio.get_running_loop()
        item.tick = tick = int((loop.time() + timeout_s) / TICK_S) + 1
        items = self._items.get(tick)
        if items is None:
            items = self._items[tick] = set()
            loop.call_at(tick * TICK_S, self._expire_tick, tick)
        items.add(item)

    def discard(self, item: Item) -> None:
        """Forget `item`; it has ended."""
        items = self._items.get(item.tick)
        if items is not None:
            items.discard(item)

    def _expire_tick(self, tick: int) -> None:
        for item in self._items.pop(tick):
            self._expire(item)
