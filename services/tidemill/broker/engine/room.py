"""Free space on the disk, and the writes that it allows.

A part of the disk is the reserve (`disk_reserve_bytes`). Writes stop in this order:

    free space below        the broker stops
    the whole reserve       sends, merges, prepared segments
    a quarter of it         pops, copies by the broker itself, rebuilds
    1/32 of it              all derived files, large packs; acks and retention continue

Owned by the engine's owner. A start measures everything again.
"""

from __future__ import annotations

from typing import Final, Protocol, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk
from tidemill.common.errors import DiskFull

WHOLE_RESERVE: Final = 1
COPY_RESERVE_PART: Final = 4
# A write that fails ends the process, so derived files stop before the disk is full.
DERIVED_RESERVE_PART: Final = 32


class SizeEstimate(Protocol):
    """The expected size of a file that is not written yet."""

    @property
    def size_bytes(self) -> int:
        """The expected size."""


@final
class DiskRoom:
    """The free space of the disk: the last measurement minus the growth of the log since then."""

    def __init__(
        self,
        disk: Disk,
        log: CommitLog,
        snapshot_size: SizeEstimate,
        *,
        reserve_bytes: int,
        segment_bytes: int,
    ) -> None:
        self._disk = disk
        self._log = log
        self._snapshot_size = snapshot_size
        self._reserve_bytes = reserve_bytes
        self._segment_bytes = segment_bytes
        self._copy_reserve_bytes = reserve_bytes // COPY_RESERVE_PART
        self._measured_bytes = 0  # free at the last measurement
        self._measured_at = LogOffset(0)  # the log end at that time
        self.send_limit = 0  # the broker rejects sends from this log offset on

    def measure(self) -> None:
        """Measure the free space again."""
        self._measured_bytes, self._measured_at = self._disk.free_bytes(), self._log.log_end
        reserve_bytes = self._reserve_bytes
        if reserve_bytes:
            # Deliveries in flight make the next snapshot larger. In the end it must fit.
            reserve_bytes = max(reserve_bytes, self._snapshot_size.size_bytes)
        self.send_limit = self._measured_at + self._measured_bytes - reserve_bytes

    @property
    def free_bytes(self) -> int:
        """The free space: the last measurement minus the growth of the log since then."""
        return self._measured_bytes - (self._log.log_end - self._measured_at)

    @property
    def is_full(self) -> bool:
        """Whether the broker rejects sends."""
        return self._log.log_end > self.send_limit

    @property
    def is_nearly_full(self) -> bool:
        """Whether less than a segment may be logged before the broker rejects sends."""
        return self.bytes_until_full < self._segment_bytes

    @property
    def bytes_until_full(self) -> int:
        """Bytes that may be logged before the broker rejects sends."""
        return self.send_limit - self._log.log_end

    @property
    def may_copy(self) -> bool:
        """Whether there is room for pops, and for copies that the broker makes by itself."""
        # As `free_bytes`, without a call: every pop reads this.
        free_bytes = self._measured_bytes - (self._log.log_end - self._measured_at)
        return free_bytes >= self._copy_reserve_bytes

    @property
    def may_prepare_segment(self) -> bool:
        """Whether a prepared segment leaves the whole reserve free."""
        return self.free_bytes >= self._reserve_bytes + self._segment_bytes

    def has_room(self, size: int, *, reserve_part: int) -> bool:
        """Measure; return whether writing `size` bytes leaves 1/`reserve_part` of the reserve."""
        self.measure()
        return self.free_bytes - size >= self._reserve_bytes // reserve_part

    def has_room_for_pack(self, size: int, *, part: int | None = None) -> bool:
        """Measure; return whether a pack of `size` bytes, or this part of it, may be written.

        A pack frees more than it takes. So it leaves only 1/32 of the reserve, or as much as its
        own size if that is less: packs that keep little free space on any disk.
        """
        self.measure()
        left = min(size, self._reserve_bytes // DERIVED_RESERVE_PART)
        return self.free_bytes - (size if part is None else part) >= left

    def sends_rejected(self) -> DiskFull:
        """Return the error of a send on a full disk."""
        limit_bytes = self._measured_at + self._measured_bytes - self.send_limit
        if limit_bytes > self._reserve_bytes:
            limit = f"the {_mib_up(limit_bytes)} MiB that the next snapshot needs"
        else:
            limit = f"the {_mib_up(limit_bytes)} MiB of disk_reserve_bytes"
        return self._disk_full(limit, "rejects messages")

    def copies_rejected(self, consequence: str) -> DiskFull:
        """Return the error of a rejected pop or copy; `consequence` completes "the broker ..."."""
        limit = f"{_mib_up(self._copy_reserve_bytes)} MiB, a quarter of disk_reserve_bytes"
        return self._disk_full(limit, consequence)

    def _disk_full(self, limit: str, consequence: str) -> DiskFull:
        return DiskFull(
            f"{max(self.free_bytes, 0) >> 20} MiB are free on the broker's disk, fewer than "
            f"{limit}: the broker {consequence} until there is room; delete topics, shorten the "
            f"retention, or enlarge the volume"
        )


def _mib_up(size_bytes: int) -> int:
    """Return the size in MiB, rounded up."""
    return -(-size_bytes >> 20)
