"""What people are told of replicas that are there and cannot work together.

Nothing is decided by it: a log that nobody may cut needs somebody who looks, and a network of which
a part does not pass is mended by who runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.elect import Candidate
from tidemill.controller.election.record import GroupRecord

# A stream that was closed is opened again within a second or two; a replica that has just started
# has heard nobody yet.
UNHEARD_MS: Final = 5_000


def diverged_of(live: Iterable[Candidate]) -> frozenset[ReplicaId]:
    """Return whose log is not their master's, and may not be cut, as anybody says who is there."""
    return frozenset[ReplicaId]().union(*(one.beat.diverged for one in live))


def unheard_of(
    record: GroupRecord, live: list[Candidate]
) -> frozenset[tuple[ReplicaId, ReplicaId]]:
    """Return pairs of replicas that controllers hear, of which the first does not hear the other.

    In one direction alone it may be so, too. A master hears who follows it, and those hear it, by
    the streams of the log; who has none is not heard. The others hear each other by probes.
    """
    master = None if record.master is None else record.master.replica_id
    diverged = diverged_of(live)
    found = set()
    for one in live:
        silence_ms = dict(one.beat.peer_silence_ms)
        for other in live:
            ids = one.member.replica_id, other.member.replica_id
            # Who has diverged has no stream, and that is told.
            if ids[0] == ids[1] or diverged & set(ids):
                continue
            silent_ms = silence_ms.get(ids[1], UNHEARD_MS + 1 if master in ids else 0)
            if silent_ms > UNHEARD_MS:
                found.add(ids)
    return frozenset(found)
