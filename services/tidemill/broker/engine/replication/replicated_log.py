"""The interface of the replicated log. The store implements it.

All calls are synchronous. They happen at role changes, except `append`, which writes without a
sync. A docstring says which effects are durable on return. A failed write or sync raises DiskFailed
and is final.
"""

from __future__ import annotations

from typing import Protocol

from tidemill.broker.engine.replication.epoch_journal import Journal
from tidemill.broker.engine.replication.messages import Data, Digest

# Before a cut, or one larger record: logs that diverged differ within a few records.
DIGEST_BYTES = 64 << 10


class ReplicatedLog(Protocol):
    """A log and the durable facts beside it."""

    @property
    def log_min(self) -> int:
        """Begin of the log."""

    @property
    def log_end(self) -> int:
        """End of the log. Everything before it is written, or will be in this round."""

    @property
    def state_floor(self) -> int:
        """Offset before which no state is stated only."""

    @property
    def durable_offset(self) -> int:
        """Offset before which the log is durable on this disk."""

    @property
    def confirm_offset(self) -> int:
        """Offset before which the log is known to be confirmed. After a start it may be too low."""

    @property
    def applied_offset(self) -> int:
        """Offset before which the log is applied to memory."""

    @property
    def epoch_seen(self) -> int:
        """The highest epoch that this store has learned of, across restarts."""

    @property
    def journal(self) -> Journal:
        """The last saved journal. Only entries that begin before `log_end` are valid."""

    def save_epoch_seen(self, epoch: int) -> None:
        """Make an epoch durable. Afterwards no lower epoch is acked (F-10)."""

    def save_journal(self, journal: Journal) -> None:
        """Make a journal durable. It may contain epochs that begin at or after `log_end`."""

    def begin_epoch(self, epoch: int) -> int:
        """Append EPOCH_START of this replica's own epoch; return the end of that record."""

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        """Return at least one whole record from `offset` on; None if it is not written yet.

        A frame has records of one segment. The pad at the end of a segment belongs to its last
        frame. The caller sets the epoch and the confirm offset.
        """

    def can_begin(self, offset: int) -> bool:
        """Return whether a frame may begin at `offset`: the records there are not missing."""

    def has_room_for(self, size: int) -> bool:
        """Return whether `size` bytes fit, with room for the other work of this replica."""

    def append(self, frame: Data) -> None:
        """Write a frame of the master at `log_end`."""

    def digest(self, low: int, end: int) -> Digest | None:
        """Return the checksum of the last records before `end`; none of them begins before `low`.

        They begin behind the last stub: another log may have the whole message.
        Without records (`low` equals `end`) the digest is empty. Equal logs have equal digests.
        Return None if the records are damaged here; that says nothing about another log.
        """

    def truncate(self, cut: int) -> None:
        """Cut the log at `cut`, durably and atomically (F-16).

        Afterwards nothing from `cut` on is confirmed.
        """

    def start_at(self, log_min: int) -> None:
        """Delete the whole log, durably, and begin an empty log at `log_min`."""

    def follow_state_floor(self, state_floor: int, stated_before: int) -> None:
        """Take no state from records before the master's state floor.

        It and all state from it on are stated before `stated_before`. Raise MustBeEmptied if state
        from such records was applied, and the log ends before the floor.
        """

    def confirm(self, offset: int) -> None:
        """Record that everything before `offset` is confirmed. The log may apply it."""
