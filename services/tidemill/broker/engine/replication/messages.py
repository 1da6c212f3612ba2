"""Messages between a replica and its master, as values.

`proto/tidemill/replication` defines them on the wire. The shell converts.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidemill.broker.engine.replication.epoch_journal import Agreement, LogExtent
from tidemill.common.feature_level import FEATURE_LEVEL
from tidemill.common.replica_group import ReplicaRun, ReplicationView


class Hello(NamedTuple):
    """The first message of a replica: its identity, the epoch it has seen, and its log."""

    group: str
    member: ReplicaRun
    store_uuid: str
    epoch_seen: int
    version_seen: int
    extent: LogExtent
    durable_end: int
    is_full: bool = False  # its disk is full; it wants no data on this stream
    feature_level: int = FEATURE_LEVEL  # of its program


class Digest(NamedTuple):
    """A checksum of the last records before an offset."""

    begin: int
    end: int
    crc: int
    # In this log, a stub ends at `begin`; not sent.
    is_behind_stub: bool = False

    def matches(self, mine: Digest) -> bool:
        """Return whether another log may be the same up to `end`.

        `mine` is its digest of the same range. If a stub is in the range there, nothing before its
        end can be compared.
        """
        if mine.begin > self.begin:
            return mine.is_behind_stub
        return mine[:3] == self[:3]


class Welcome(NamedTuple):
    """The first message of a master: the common part of both logs, and its own log."""

    epoch: int
    master: ReplicaRun
    agreement: Agreement
    digest: Digest  # of the records before the cut
    extent: LogExtent
    confirm: int


class Refusal(NamedTuple):
    """The master rejects this replica and ends the stream."""

    why: str
    view: ReplicationView | None  # newest view of the sender, which may be news for the replica


class Data(NamedTuple):
    """Whole records, or the pad after the last record of a segment."""

    epoch: int
    offset: int
    data: bytes | memoryview
    crc: int
    confirm: int
    # The segment of these bytes: both logs have the same segments.
    segment_start: int
    segment_bytes: int
    # Of the log, if that is not the size of `data`: a pack has stubs (feature level 2).
    log_bytes: int = 0

    @property
    def end(self) -> int:
        """Log offset of the next frame."""
        return self.offset + (self.log_bytes or len(self.data))


class MasterHeartbeat(NamedTuple):
    """A heartbeat of the master with its confirm offset."""

    epoch: int
    confirm: int


class ForwardedView(NamedTuple):
    """A view that the master learned first. A replica that takes over need not wait for it."""

    view: ReplicationView


class Ack(NamedTuple):
    """How much of the log a replica has. Each end is exclusive."""

    epoch: int
    member: ReplicaRun
    received_end: int
    durable_end: int
    applied_end: int
    is_slow: bool = False  # its disk is slow


ToReplica: TypeAlias = Welcome | Refusal | Data | MasterHeartbeat | ForwardedView
ToMaster: TypeAlias = Hello | Ack
