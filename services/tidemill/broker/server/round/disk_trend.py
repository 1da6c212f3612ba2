"""The free space on the disk: its trend, and log lines when it becomes short."""

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
class DiskTrend:
    """Samples of the free space, and the states that were logged last."""

    def __init__(self) -> None:
        self._was_full = False
        self._was_without_snapshot = False
        # Bounded: (monotonic ms, free bytes), the oldest first.
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES_MAX)

    def update(self, engine: Engine, monotonic_ms: int) -> None:
        """Read the free space again, and log when sends begin and cease to be rejected."""
        engine.room.measure()
        if not self._samples or monotonic_ms - self._samples[-1][0] >= SAMPLE_PERIOD_MS:
            self._samples.append((monotonic_ms, engine.room.free_bytes))
        self._log_missing_snapshot(engine)
        if engine.room.is_full == self._was_full:
            return
        self._was_full = engine.room.is_full
        room = {
            "free_mib": engine.room.free_bytes >> 20,
            "reserve_mib": engine.config.disk_reserve_bytes >> 20,
        }
        if engine.room.is_full:
            log.warning("disk full: sends are rejected", **room)
        else:
            log.info("disk has room: sends are accepted again", **room)

    def _log_missing_snapshot(self, engine: Engine) -> None:
        is_without = engine.checkpoints.is_without_snapshot
        if is_without and not self._was_without_snapshot:
            log.warning(
                "no room for a snapshot: a start will replay more of the log",
                free_mib=engine.room.free_bytes >> 20,
                wanted_mib=engine.checkpoints.snapshot_size.size_bytes >> 20,
            )
        self._was_without_snapshot = is_without

    @property
    def full_in_s(self) -> float:
        """Seconds until the disk is full at the pace of the last hour; infinite: never."""
        if len(self._samples) < 2:
            return math.inf
        (first_ms, first), (last_ms, last) = self._samples[0], self._samples[-1]
        used_bytes = first - last
        return last * (last_ms - first_ms) / 1000 / used_bytes if used_bytes > 0 else math.inf
