"""One round as its work sees it: the engine, the times of the round, and its effects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, final

from tidemill.broker.server.round.round_times import RoundTimes

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.durability import RoundEffect
    from tidemill.broker.server.round.long_polling import LongPolling
    from tidemill.common.clock import Clock


class Work(Protocol):
    """Commands that arrived together."""

    size_bytes: int

    def apply(self, turn: Turn) -> Iterator[None]:
        """Call the engine; yield between slices."""
        ...


@final
class Turn:
    """The view of one round for its work."""

    __slots__ = (
        "effects",
        "engine",
        "expiry_ms",
        "firing_ms",
        "is_draining",
        "monotonic_ms",
        "now_ms",
        "polls",
        "times",
    )

    def __init__(self, engine: Engine, polls: LongPolling, clock: Clock) -> None:
        self.engine = engine
        self.polls = polls
        self.now_ms = clock.wall_ms()
        self.monotonic_ms = clock.monotonic_ms()
        # Delayed messages fire by firing_ms, and invisible durations end by expiry_ms.
        self.firing_ms = self.expiry_ms = self.now_ms
        self.is_draining = False
        self.times = RoundTimes(time.monotonic())
        # Released in this order once the round is committed; the key is the receiver.
        self.effects: dict[object, RoundEffect] = {}
