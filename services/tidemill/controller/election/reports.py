"""A master that most proxies cannot reach, while they reach another replica: it should hand over.

To the controllers and the replicas all is well then, and to applications nothing is. The word of
proxies moves a master by plan and never deposes one: nothing is lost by a wrong one but a pause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.record import GroupRecord

UNREACHABLE_MS: Final = 3_000  # longer than a failover takes
REPORT_LASTS_MS: Final = 2_500  # proxies repeat it every second


class UnreachableReport(NamedTuple):
    """What one proxy cannot reach."""

    proxy: str
    heard_at_ms: int
    master: str  # whom it cannot reach: host and port
    unreachable_ms: int
    reachable: frozenset[str]  # the other replicas that have answered it meanwhile


def find_reached_instead(
    record: GroupRecord, reports: Iterable[UnreachableReport], *, proxies: int, now_ms: int
) -> frozenset[ReplicaId]:
    """Return the replicas that more than half of the proxies reach instead of the master."""
    if record.master is None:
        return frozenset()
    addresses = {one.address: id_ for id_, one in record.replicas}
    told = [
        one
        for one in reports
        if now_ms - one.heard_at_ms <= REPORT_LASTS_MS
        and one.unreachable_ms >= UNREACHABLE_MS
        and addresses.get(one.master) == record.master.replica_id
    ]
    counted = Counter(addresses[at] for one in told for at in one.reachable if at in addresses)
    return frozenset(id_ for id_, count in counted.items() if count * 2 > proxies)
