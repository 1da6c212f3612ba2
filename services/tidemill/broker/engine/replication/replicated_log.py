"""What the machines of this package ask of the log that they replicate; the store implements it.

All calls are plain: they happen at changes of roles, but for `append`, which writes and does not
sync. What must be durable when a call returns says so. A failed write or sync raises DiskFailed and
is final, as everywhere.
"""

from __future__ import annotations

from typing import Protocol

from tidemill.broker.engine.replication.epoch_journal import Journal
from tidemill.broker.engine.replication.messages import Data, Digest

DIGEST_BYTES = 64 << 10  # before a cut, or a record: what diverged there shows in a few records


class ReplicatedLog(Protocol):
    """A log, and the two facts that must survive with it."""

    @property
    def log_min(self) -> int:
        """Where it begins."""

    @property
    def log_end(self) -> int:
        """Where it ends: all before is written, or about to be in this round."""

    @property
    def durable_offset(self) -> int:
        """Up to where it is durable here."""

    @property
    def confirm_offset(self) -> int:
        """Up to where it is known here to be confirmed; after a start maybe less, never more."""

    @property
    def applied_offset(self) -> int:
        """Up to where memory here is the fold of the log."""

    @property
    def epoch_seen(self) -> int:
        """The highest epoch that this store has heard of, in any life."""

    @property
    def journal(self) -> Journal:
        """The journal that was saved last, of which only what begins before `log_end` counts."""

    def save_epoch_seen(self, epoch: int) -> None:
        """Make durable that an epoch exists: of a lower one nothing is acked any more (F-10)."""

    def save_journal(self, journal: Journal) -> None:
        """Make a journal durable. It may name epochs that begin behind `log_end`."""

    def begin_epoch(self, epoch: int) -> int:
        """Append EPOCH_START of an epoch of our own, and return where that record ends."""

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        """Return whole records from `offset` on, at least one; None: they are not written yet.

        Never of two segments. The pad at the end of one belongs to its last frame. Epoch and
        confirm offset are for the caller to fill in.
        """

    def has_room_for(self, size: int) -> bool:
        """Whether so many bytes may be appended, and the disk has room for the rest of the work."""

    def append(self, frame: Data) -> None:
        """Write what a master has sent, at `log_end`."""

    def digest(self, low: int, end: int) -> Digest | None:
        """Return the checksum of the last records before `end`, none of which begins before `low`.

        There are none where `low` is `end`. None: they are damaged here, which says nothing of
        another log. In two logs that are the same it is the same.
        """

    def truncate(self, cut: int) -> None:
        """Take away all from `cut` on, durably, whole or not at all (F-16).

        Nothing behind it is confirmed then, whatever was said before.
        """

    def start_at(self, log_min: int) -> None:
        """Take everything away, durably, and begin an empty log there."""

    def confirm(self, offset: int) -> None:
        """Hear that all before `offset` is confirmed: it may be applied, and its effects leave."""
