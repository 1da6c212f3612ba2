"""The level of a broker group: it is the lowest of its replicas, and never falls."""

from __future__ import annotations

import pytest

from tests.support.worlds.replica_records import member_of
from tidemill.common.feature_level import cap_level, read_level
from tidemill.common.replica_group import Proposal, ReplicaId
from tidemill.controller.election.decide import RecordWrite, decide
from tidemill.controller.election.feature_levels import too_low, with_raised_level
from tidemill.controller.election.membership import ChangeRejection, change_sync_state_set
from tidemill.controller.election.record import GroupRecord, RegisteredRun, Retirement, view_of
from tidemill.controller.election.retirement import stay, with_number
from tidemill.controller.election.sessions import (
    ElectionTiming,
    Heartbeat,
    ReplicaHealth,
    ReplicaSessions,
)
from tidemill.controller.record_json import from_text, to_text
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as replication
from tidemill.transport.replica_wire import from_view, to_view

TIMING = ElectionTiming()
NOW_MS = 1_000_000
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


def record_of(*levels: int, retired: tuple[int, ...] = (), in_sync: int = 3) -> GroupRecord:
    """Return a group whose replicas have these levels."""
    members = [member_of(n) for n in range(len(levels))]
    return GroupRecord(
        min_in_sync=2,
        epoch=3,
        version=7,
        master=members[0],
        sss=frozenset(members[:in_sync]),
        replicas=tuple(
            (
                ReplicaId(n),
                RegisteredRun(
                    f"store {n}",
                    members[n].incarnation,
                    f"host-{n}",
                    is_unclean=False,
                    retired=Retirement.DRAINED if n in retired else Retirement.NO,
                    feature_level=level,
                ),
            )
            for n, level in enumerate(levels)
        ),
    )


def test_the_level_is_the_lowest_of_the_replicas() -> None:
    assert with_raised_level(record_of(2, 1, 2), live=set(), cap=0).feature_level == 1
    raised = with_raised_level(record_of(3, 2, 2), live=set(), cap=0)
    assert (raised.feature_level, raised.version) == (2, 8)
    assert view_of(raised).feature_level == 2


def test_the_level_never_falls() -> None:
    raised = record_of(2, 1)._replace(feature_level=2)
    assert with_raised_level(raised, live=set(), cap=0) is raised
    assert with_raised_level(raised, live=set(), cap=1) is raised
    empty = raised._replace(replicas=())
    assert with_raised_level(empty, live=set(), cap=0) is empty


@pytest.mark.parametrize(("cap", "level"), [(0, 3), (1, 1), (2, 2), (4, 3)])
def test_a_cap_holds_the_level_down(cap: int, level: int) -> None:
    assert with_raised_level(record_of(3, 3, 3), live=set(), cap=cap).feature_level == level
    assert cap_level(3, cap) == level


def test_a_retired_replica_counts_only_while_the_set_needs_it() -> None:
    assert with_raised_level(record_of(2, 2, 1, retired=(2,)), live=set(), cap=0).feature_level == 1
    away = record_of(2, 2, 1, retired=(2,), in_sync=2)
    assert with_raised_level(away, live=set(), cap=0).feature_level == 2
    eligible = away._replace(eligible=frozenset({ReplicaId(2)}))
    assert with_raised_level(eligible, live=set(), cap=0).feature_level == 1


def test_a_retired_replica_that_is_live_follows_the_log_so_it_counts() -> None:
    record = record_of(2, 2, 1, retired=(2,), in_sync=2)
    assert with_raised_level(record, live={ReplicaId(2)}, cap=0).feature_level == 1
    assert not isinstance(_decision(record, also_live=(2,)), RecordWrite)
    assert isinstance(_decision(record), RecordWrite)


def test_a_replica_below_the_level_comes_back_in_no_way() -> None:
    record = record_of(2, 2, 1, retired=(2,), in_sync=2)._replace(feature_level=2)
    undone = stay(record, ReplicaId(2), Retirement.DRAINED)
    assert isinstance(undone, ChangeRejection)
    assert undone.why.startswith("replica 2 has feature level 1; its group needs 2")
    unknown = stay(record, ReplicaId(7), Retirement.DRAINED)
    assert unknown == ChangeRejection("replica 7 has not registered")
    surplus = record.with_replica(
        ReplicaId(2), dict(record.replicas)[ReplicaId(2)]._replace(retired=Retirement.SURPLUS)
    )
    assert isinstance(with_number(surplus, 3), ChangeRejection)
    counted = record_of(2, 2, 1, in_sync=2)._replace(feature_level=2)
    assert counted.master is not None
    joined = counted.sss | {member_of(2)}
    proposal = Proposal(counted.epoch, counted.version, counted.master, joined)
    refused = change_sync_state_set(counted, proposal, joined)
    assert refused == ChangeRejection("replica 2 has feature level 1; the group needs 2")


def _decision(
    record: GroupRecord, *, rank: int = 0, cap: int = 0, also_live: tuple[int, ...] = ()
) -> object:
    known = ReplicaSessions(TIMING)
    for member in record.sss | {member_of(n) for n in also_live}:
        beat = BEAT._replace(is_master=member == record.master)
        known.note_heartbeat(member, beat, NOW_MS)
    known.note_record(record, NOW_MS)
    observation = known.observe(rank=rank, now_ms=NOW_MS, feature_level_max=cap)
    return decide(record, observation, TIMING)


def test_the_leading_controller_alone_raises_the_level() -> None:
    intent = _decision(record_of(2, 2, 2))
    assert isinstance(intent, RecordWrite)
    assert intent.record == with_raised_level(record_of(2, 2, 2), live=set(), cap=0)
    assert not isinstance(_decision(intent.record), RecordWrite)
    assert not isinstance(_decision(record_of(2, 2, 2), rank=1), RecordWrite)
    assert not isinstance(_decision(record_of(2, 2, 2), cap=1), RecordWrite)


def test_a_replica_below_the_level_is_refused_by_name() -> None:
    record = record_of(3, 3)._replace(feature_level=3)
    assert too_low("broker-0", 2, 3, record) == ""
    assert too_low("broker-0", 2, 2, record).startswith(
        "replica broker-0-2 has feature level 2; broker group broker-0 needs 3"
    )


def test_a_record_and_a_view_keep_the_level() -> None:
    record = record_of(2, 3)._replace(feature_level=2)
    assert from_text(to_text(record)) == record
    assert from_view(to_view(view_of(record))) == view_of(record)


def test_a_missing_level_is_that_of_version_0_1_0() -> None:
    old = to_text(record_of(1)).replace('"featureLevel"', '"unknown"')
    assert from_text(old).feature_level == 1
    assert dict(from_text(old).replicas)[ReplicaId(0)].feature_level == 1
    assert from_view(replication.ReplicationView(version=7)).feature_level == 1
    assert read_level(wire.Register().feature_level) == 1
