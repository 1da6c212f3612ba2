"""Reports of proxies that cannot reach a master, and the transfer that they cause."""

from __future__ import annotations

import pytest

from tests.support.worlds.replica_records import member_of, record_of_three
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.decide import NoAction, TransferRequest, decide
from tidemill.controller.election.reports import (
    REPORT_LASTS_MS,
    UNREACHABLE_MS,
    UnreachableReport,
    find_reached_instead,
)
from tidemill.controller.election.sessions import (
    ElectionTiming,
    Heartbeat,
    ReplicaHealth,
    ReplicaSessions,
)

NOW_MS = 1_000_000
A, B, C = (f"10.0.0.{n}:10911" for n in range(3))
BEAT = Heartbeat(
    is_master=False,
    epoch_seen=3,
    version_seen=7,
    log_epoch=3,
    log_end=100,
    durable_end=100,
    confirm=100,
    health=ReplicaHealth.OK,
    page_age_ms=0,
)


def report(number: int, **change: object) -> UnreachableReport:
    base = UnreachableReport(f"proxy-{number}", NOW_MS, A, UNREACHABLE_MS, frozenset({B}))
    return base._replace(**change)  # type: ignore[arg-type]  # By name.


def reached(*reports: UnreachableReport, proxies: int = 3) -> set[int]:
    found = find_reached_instead(record_of_three(), reports, proxies=proxies, now_ms=NOW_MS)
    return {int(one) for one in found}


def test_reports_of_more_than_half_of_the_proxies_count() -> None:
    assert reached(report(0), report(1)) == {1}
    assert reached(report(0), report(1), proxies=4) == set()
    assert reached(report(0), proxies=1) == {1}


@pytest.mark.parametrize(
    "change",
    [
        {"heard_at_ms": NOW_MS - REPORT_LASTS_MS - 1},
        {"unreachable_ms": UNREACHABLE_MS - 1},
        {"master": B},  # not the current master
        {"reachable": frozenset()},
        {"reachable": frozenset({C})},
    ],
)
def test_an_old_short_or_foreign_report_does_not_count(change: dict[str, object]) -> None:
    assert reached(report(0), report(1, **change)) == set()


def test_a_master_that_proxies_cannot_reach_is_asked_to_hand_over() -> None:
    record, known = record_of_three(), ReplicaSessions(ElectionTiming())
    known.note_record(record, NOW_MS - 60_000)
    for replica in range(3):
        known.note_heartbeat(member_of(replica), BEAT, NOW_MS)
    observation = known.observe(rank=0, now_ms=NOW_MS)
    assert decide(record, observation, ElectionTiming()) == NoAction()
    reported = observation._replace(reached_instead=frozenset({ReplicaId(2)}))
    assert decide(record, reported, ElectionTiming()) == TransferRequest(ReplicaId(2))
    # A replica that is not in sync cannot take over.
    short = record._replace(sss=frozenset({member_of(0), member_of(1)}))
    assert decide(short, reported, ElectionTiming()) == NoAction()
