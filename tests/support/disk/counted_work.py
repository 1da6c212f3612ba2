"""A meter for the work of the engine's slices, in items and bytes instead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from tidemill.broker.engine.engine import Engine

K = TypeVar("K")
V = TypeVar("V")


class WalkedDict(dict[K, V]):
    """A dictionary that counts the iterations over all its entries."""

    walks = 0

    def __iter__(self) -> Iterator[K]:
        self.walks += 1
        return super().__iter__()

    def keys(self) -> Any:
        self.walks += 1
        return super().keys()

    def values(self) -> Any:
        self.walks += 1
        return super().values()

    def items(self) -> Any:
        self.walks += 1
        return super().items()


class SliceWork(NamedTuple):
    """The work of one slice."""

    items: int  # counted by the engine
    size_bytes: int
    records: int  # appended to the log
    log_bytes: int


class Meter:
    """A counter of an engine's work."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = self._totals()

    def take(self) -> SliceWork:
        """Return the work since the last call."""
        totals = self._totals()
        spent = [now - before for now, before in zip(totals, self._seen, strict=True)]
        self._seen = totals
        return SliceWork(*spent)

    def _totals(self) -> SliceWork:
        tally, log = self._engine.tally, self._engine.log
        return SliceWork(tally.items, tally.size_bytes, log.record_count, log.log_end)


def each_turn(engine: Engine, now_ms: int, after: Callable[[], None]) -> Iterator[SliceWork]:
    """Yield the work of each due slice until none is due. Call `after` at the end of a round."""
    meter = Meter(engine)
    has_more: bool | None = True
    while has_more:
        slices = engine.due_slices(now_ms, firing_ms=now_ms)
        has_more = None
        while has_more is None:
            try:
                next(slices)
            except StopIteration as ended:
                has_more = ended.value
            yield meter.take()
        after()
        meter.take()
