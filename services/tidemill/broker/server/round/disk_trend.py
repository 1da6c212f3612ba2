"""Room on the disk: who is told when it ends, and when it will."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, final

import structlog

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine

log = structlog.get_logger()

SAMPLE_PERIOD_MS = 10_000
SAMPLES_MAX = 360  # an hour of them


@final
class DiskRoom:
    """What is free, and how fast it goes."""

    def __init__(self) -> None:
        self._was_full = False
        self._was_without_snapshot = False
        # Bounded: (monotonic ms, free bytes), the oldest first.
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES_MAX)

    def look(self, engine: Engine, monotonic_ms: int) -> None:
        """Look at the disk again; say once when messages begin to be refused, and when no more."""
        engine.refresh()
        if not self._samples or monotonic_ms - self._samples[-1][0] >= SAMPLE_PERIOD_MS:
            self._samples.append((monotonic_ms, engine.free_bytes))
        self._tell_of_snapshot(engine)
        if engine.is_disk_full == self._was_full:
            return
        self._was_full = engine.is_disk_full
        room = {
            "free_mib": engine.free_bytes >> 20,
            "reserve_mib": engine.config.disk_reserve_bytes >> 20,
        }
        if engine.is_disk_full:
            log.warning("disk full: messages are refused", **room)
        else:
            log.info("disk has room: messages are taken again", **room)

    def _tell_of_snapshot(self, engine: Engine) -> None:
        is_without = engine.checkpoints.is_without_snapshot
        if is_without and not self._was_without_snapshot:
            log.warning(
                "no room for a snapshot: a start will read more of the log",
                free_mib=engine.free_bytes >> 20,
                wanted_mib=engine.checkpoints.snapshot_bytes >> 20,
            )
        self._was_without_snapshot = is_without

    @property
    def full_in_s(self) -> float:
        """Seconds until the disk is full if it goes on like in the last hour; infinite: never."""
        if len(self._samples) < 2:
            return math.inf
        (first_ms, first), (last_ms, last) = self._samples[0], self._samples[-1]
        used_bytes = first - last
        return last * (last_ms - first_ms) / 1000 / used_bytes if used_bytes > 0 else math.inf
