"""The feature level of a broker group: the lowest of its replicas, and never lower than before.

ADR 0065 has the reasons.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from tidemill.common.feature_level import cap_level
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.record import GroupRecord, ids_of
from tidemill.controller.election.retirement import staying


def with_raised_level(
    record: GroupRecord, *, live: AbstractSet[ReplicaId], cap: int
) -> GroupRecord:
    """Return the record with the level of its replicas; the same record if it has that level.

    Retired replicas count only while they are `live`, since they follow the log, or while the sync
    state set needs them. `cap` is the highest level that the settings allow; 0: any.
    """
    replicas = dict(record.replicas)
    counted = {*staying(record), *ids_of(record.sss), *record.eligible, *live} & replicas.keys()
    levels = [replicas[id_].feature_level for id_ in counted]
    level = cap_level(min(levels, default=record.feature_level), cap)
    if level <= record.feature_level:
        return record
    return record._replace(feature_level=level, version=record.version + 1)


def too_low(group: str, replica_id: int, level: int, record: GroupRecord) -> str:
    """Return why a replica cannot belong to its group; "" if its program has a sufficient level."""
    if level >= record.feature_level:
        return ""
    return (
        f"replica {group}-{replica_id} has feature level {level}; broker group {group} needs"
        f" {record.feature_level}. Start it with the version of the other replicas"
    )
