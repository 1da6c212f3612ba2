"""Live replicas that cannot work together, for people.

No decision depends on this. A log that must not be cut needs an operator, and so does a partition
of the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.elect import Candidate
from tidemill.controller.election.record import GroupRecord

# A closed stream is opened again within two seconds. A replica that has just started has received
# nothing yet.
UNHEARD_MS: Final = 5_000


def diverged_of(live: Iterable[Candidate]) -> frozenset[ReplicaId]:
    """Return replicas with a log that differs from their master's, as live replicas report."""
    return frozenset[ReplicaId]().union(*(one.beat.diverged for one in live))


def unheard_of(
    record: GroupRecord, live: list[Candidate]
) -> frozenset[tuple[ReplicaId, ReplicaId]]:
    """Return pairs of live replicas, if the first receives nothing from the second.

    One direction alone may fail. A master and its followers receive from each other over the
    streams of the log. Other replicas probe each other.
    """
    master = None if record.master is None else record.master.replica_id
    diverged = diverged_of(live)
    pairs = set()
    for one in live:
        silence_ms = dict(one.beat.peer_silence_ms)
        for other in live:
            ids = one.member.replica_id, other.member.replica_id
            # A diverged replica has no stream; `diverged_of` reports it.
            if ids[0] == ids[1] or diverged & set(ids):
                continue
            silent_ms = silence_ms.get(ids[1], UNHEARD_MS + 1 if master in ids else 0)
            if silent_ms > UNHEARD_MS:
                pairs.add(ids)
    return frozenset(pairs)
