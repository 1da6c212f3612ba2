"""A record that is older than the one that replicas have seen: its store was lost or restored.

The sets of such a record may contain replicas that lack confirmed messages. Replicas keep the epoch
on their disks and the version in memory, so an older version is found while one of them is live.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.elect import Candidate
from tidemill.controller.election.record import GroupRecord, ids_of


class SeenRecord(NamedTuple):
    """The highest epoch and version that live replicas have seen."""

    epoch: int
    version: int


def newest_seen(live: Collection[Candidate]) -> SeenRecord:
    """Return what live replicas have seen."""
    return SeenRecord(
        max((one.beat.epoch_seen for one in live), default=0),
        max((one.beat.version_seen for one in live), default=0),
    )


def is_outdated(record: GroupRecord, live: Collection[Candidate]) -> bool:
    """Return whether replicas have seen a newer record.

    Before the first epoch no message is confirmed, so an older version does no harm.
    """
    seen = newest_seen(live)
    return seen.epoch > record.epoch or (record.epoch > 0 and seen.version > record.version)


def is_outdated_in_epoch(record: GroupRecord, live: Collection[Candidate]) -> bool:
    """Return whether replicas have seen a newer record of the same epoch.

    A write would hide this, because it raises the version. A record of an older epoch stays
    outdated, and replicas register in it before an operator names a master.
    """
    return newest_seen(live).epoch <= record.epoch and is_outdated(record, live)


def not_compared(
    record: GroupRecord, live: Collection[Candidate], wanted_replicas: int | None
) -> list[ReplicaId]:
    """Return the known replicas whose logs cannot be compared, because they are not live.

    They may have confirmed messages that all live replicas lack: the sets of an outdated record do
    not tell. `wanted_replicas` are in the spec; a record that was created again may lack some.
    """
    known = {id_ for id_, _ in record.replicas} | set(map(ReplicaId, range(wanted_replicas or 0)))
    return sorted(known - ids_of(frozenset(one.member for one in live)))
