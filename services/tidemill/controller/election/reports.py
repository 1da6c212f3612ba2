"""A master that most proxies cannot reach, while they reach another replica.

Controllers and replicas see no failure then, but applications cannot send. Reports of proxies cause
a planned transfer, never an election. A wrong report costs only a pause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.record import GroupRecord

UNREACHABLE_MS: Final = 3_000  # longer than a failover takes
REPORT_LASTS_MS: Final = 2_500  # proxies repeat a report every second


class UnreachableReport(NamedTuple):
    """The report of one proxy that it cannot reach a master."""

    proxy: str
    heard_at_ms: int
    master: str  # host and port
    unreachable_ms: int
    reachable: frozenset[str]  # host and port of the replicas that answered meanwhile


def find_reached_instead(
    record: GroupRecord, reports: Iterable[UnreachableReport], *, proxies: int, now_ms: int
) -> frozenset[ReplicaId]:
    """Return the replicas that more than half of the proxies reach instead of the master."""
    if record.master is None:
        return frozenset()
    addresses = {one.address: id_ for id_, one in record.replicas}
    valid = [
        one
        for one in reports
        if now_ms - one.heard_at_ms <= REPORT_LASTS_MS
        and one.unreachable_ms >= UNREACHABLE_MS
        and addresses.get(one.master) == record.master.replica_id
    ]
    counted = Counter(addresses[at] for one in valid for at in one.reachable if at in addresses)
    return frozenset(id_ for id_, count in counted.items() if count * 2 > proxies)
