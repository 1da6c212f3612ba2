"""Where the time of a round goes, for replies that took long (ADR 0096)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final, NamedTuple, final

SYNCS_KEPT: Final = 256  # about a second of short syncs; an older one is unknown
MS_PER_S: Final = 1_000


@final
class SyncLog:
    """When the newest parts of the log became durable here."""

    def __init__(self) -> None:
        self._offsets: deque[int] = deque(maxlen=SYNCS_KEPT)  # ascending
        self._ended_s: deque[float] = deque(maxlen=SYNCS_KEPT)
        self._has_dropped = False

    def note(self, log_offset: int, ended_s: float) -> None:
        """Note that a sync of the log before an offset has ended (time.monotonic())."""
        self._has_dropped |= len(self._offsets) == SYNCS_KEPT
        self._offsets.append(log_offset)
        self._ended_s.append(ended_s)

    def find(self, log_offset: int) -> float | None:
        """Return when the log before an offset became durable; None if it is unknown."""
        number = bisect_left(self._offsets, log_offset)
        if number == len(self._offsets) or (number == 0 and self._has_dropped):
            return None
        return self._ended_s[number]


class RoundParts(NamedTuple):
    """The parts of the time of a round."""

    broker_ms: float
    sync_ms: float | None  # None: unknown
    replicate_ms: float | None  # None: unknown, or there are no replicas


@final
class RoundTimes:
    """The times of one round, by time.monotonic()."""

    __slots__ = ("_begun_s", "_has_replicas", "_log_end", "_syncs", "_written_s")

    def __init__(self, begun_s: float) -> None:
        self._begun_s = begun_s
        self._written_s = 0.0
        self._log_end = 0
        self._syncs: SyncLog | None = None
        self._has_replicas = False

    def note_written(
        self, at_s: float, log_end: int, syncs: SyncLog, *, has_replicas: bool
    ) -> None:
        """Note that the records of the round are written up to `log_end`."""
        self._written_s, self._log_end = at_s, log_end
        self._syncs, self._has_replicas = syncs, has_replicas

    def parts(self, now_s: float) -> RoundParts | None:
        """Return the parts of a committed round up to now; None if it was not written."""
        if self._syncs is None:
            return None
        written_s = self._written_s
        broker_ms = (written_s - self._begun_s) * MS_PER_S
        synced_s = self._syncs.find(self._log_end)
        if synced_s is None:
            return RoundParts(broker_ms, None, None)
        # A round without records may wait for the sync of an earlier round, or for none.
        synced_s = max(synced_s, written_s)
        sync_ms, rest_ms = (synced_s - written_s) * MS_PER_S, (now_s - synced_s) * MS_PER_S
        if self._has_replicas:
            return RoundParts(broker_ms, sync_ms, rest_ms)
        return RoundParts(broker_ms + rest_ms, sync_ms, None)
