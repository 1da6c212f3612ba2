"""What a slice of the owner's work touches, in items and bytes: never in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from tidemill.broker.engine.engine import Engine

K = TypeVar("K")
V = TypeVar("V")


class WalkedDict(dict[K, V]):
    """A dictionary that knows how often all of it was looked at, from one end to the other."""

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


class Spent(NamedTuple):
    """What one slice has touched."""

    items: int  # that the engine has counted
    size_bytes: int
    records: int  # appended to the log
    log_bytes: int


class Meter:
    """Counts what an engine touches between two looks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = self._totals()

    def take(self) -> Spent:
        """Return what was touched since the last time."""
        totals = self._totals()
        spent = [now - before for now, before in zip(totals, self._seen, strict=True)]
        self._seen = totals
        return Spent(*spent)

    def _totals(self) -> Spent:
        tally, log = self._engine.tally, self._engine.log
        return Spent(tally.items, tally.size_bytes, log.record_count, log.log_end)


def each_turn(engine: Engine, now_ms: int, after: Callable[[], None]) -> Iterator[Spent]:
    """Yield what each slice of `due_slices` touches, until nothing is due; `after` ends a round."""
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
