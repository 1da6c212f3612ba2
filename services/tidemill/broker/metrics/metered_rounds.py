"""The source of the metrics, and their common labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.timer.firing_clock import FiringClock
    from tidemill.common.histogram import Histogram

MS_PER_S: Final = 1_000
# RocketMQ puts these labels on all metrics of its store.
STORAGE_LABELS: Final = ("storage_type", "storage_medium")
STORAGE: Final = ("local", "disk")
PAIR_LABELS: Final = ("topic", "consumer_group")


class MeteredRounds(Protocol):
    """The part of `Rounds` that the metrics read."""

    @property
    def engine(self) -> Engine:
        """The engine."""
        ...

    @property
    def now_ms(self) -> int:
        """The begin of the last round."""
        ...

    @property
    def pending_count(self) -> int:
        """The number of frames and calls that wait for the next round."""
        ...

    @property
    def failed_read_count(self) -> int:
        """The number of reads that failed because of an unexpected error."""
        ...

    @property
    def firing_clock(self) -> FiringClock:
        """The clock of delayed messages."""
        ...

    @property
    def disk_full_in_s(self) -> float:
        """Seconds until the disk is full; infinite: never."""
        ...

    @property
    def append_times_us(self) -> Histogram[tuple[()]]:
        """Durations of the writes of rounds."""
        ...

    @property
    def sync_times_us(self) -> Histogram[tuple[()]]:
        """Durations of the syncs of the log."""
        ...

    @property
    def revive_latencies(self) -> Histogram[tuple[()]]:
        """Durations of the revive step of rounds."""
        ...


def flag(value: bool) -> str:
    """Return the value of a boolean label."""
    return "true" if value else "false"
