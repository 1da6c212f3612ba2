"""What replica and master say to each other on a stream, as values.

On the wire they are `proto/tidemill/replication`; the shell converts.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidemill.broker.engine.replication.epoch_journal import Agreement, LogExtent
from tidemill.common.replica_group import ReplicaRun, ReplicationView


class Hello(NamedTuple):
    """A replica's first word: who it is, what it has seen, and what its log is."""

    group: str
    member: ReplicaRun
    store_uuid: str
    epoch_seen: int
    version_seen: int
    extent: LogExtent
    durable_end: int
    is_full: bool = False  # its disk has no room: it wants no data on this stream


class Digest(NamedTuple):
    """A checksum over the bytes of a log in front of an offset."""

    begin: int
    end: int
    crc: int


class Welcome(NamedTuple):
    """A master's first word: up to where both logs are the same, and what it has itself."""

    epoch: int
    master: ReplicaRun
    agreement: Agreement
    digest: Digest  # of what lies before the cut
    extent: LogExtent
    confirm: int


class Refusal(NamedTuple):
    """A master does not serve this replica; the stream ends."""

    why: str
    view: ReplicationView | None  # what the one who refuses knows: it may be news


class Data(NamedTuple):
    """Whole records, or the pad behind the last one of a segment."""

    epoch: int
    offset: int
    data: bytes | memoryview
    crc: int
    confirm: int
    # Of the segment in which these bytes stand: both logs are cut into the same files.
    segment_start: int
    segment_bytes: int

    @property
    def end(self) -> int:
        """Return where the next frame begins."""
        return self.offset + len(self.data)


class Beat(NamedTuple):
    """The master is there; its log is confirmed up to `confirm`."""

    epoch: int
    confirm: int


class News(NamedTuple):
    """A view that the master has learned first: a replica that is to take over need not wait."""

    view: ReplicationView


class Ack(NamedTuple):
    """What a replica has of the stream's log; each end takes in all before it."""

    epoch: int
    member: ReplicaRun
    received_end: int
    durable_end: int
    applied_end: int
    is_slow: bool = False  # its disk is


ToReplica: TypeAlias = Welcome | Refusal | Data | Beat | News
ToMaster: TypeAlias = Hello | Ack
