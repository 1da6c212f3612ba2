"""Retirement of replicas: its conditions and its writes."""

from __future__ import annotations

from tests.support.worlds.replica_records import member_of
from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.decide import (
    Intent,
    NoAction,
    RecordWrite,
    TransferRequest,
    decide,
)
from tidemill.controller.election.elect import with_master
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, RegisteredRun, Retirement, view_of
from tidemill.controller.election.retirement import forget, is_out, retire, stay, with_number
from tidemill.controller.election.sessions import (
    ElectionTiming,
    Heartbeat,
    ReplicaHealth,
    ReplicaSessions,
)
from tidemill.controller.record_json import from_text, to_text

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


def record_of(count: int, *, out: tuple[int, ...] = (), min_in_sync: int = 2) -> GroupRecord:
    """Return a group with master 0, and all replicas in its set except `out`."""
    members = [member_of(n) for n in range(count)]
    return GroupRecord(
        min_in_sync=min_in_sync,
        epoch=3,
        version=7,
        master=members[0],
        sss=frozenset(one for one in members if one.replica_id not in out),
        replicas=tuple(
            (one.replica_id, RegisteredRun(f"store {n}", one.incarnation, f"host-{n}", False))
            for n, one in enumerate(members)
        ),
    )


def decision(
    record: GroupRecord, *, wanted: int | None = None, dead: ReplicaRun | None = None
) -> Intent:
    known = ReplicaSessions(TIMING)
    known.note_record(record, NOW_MS - 60_000)
    for replica_id, _ in record.replicas:
        known.note_heartbeat(member_of(replica_id), BEAT, NOW_MS)
    if dead is not None:
        known.note_death(dead, NOW_MS)
    return decide(record, known.observe(rank=0, now_ms=NOW_MS + 10, wanted_replicas=wanted), TIMING)


def done(found: GroupRecord | ChangeRejection) -> GroupRecord:
    assert isinstance(found, GroupRecord), found
    return found


def why(found: GroupRecord | ChangeRejection) -> str:
    assert isinstance(found, ChangeRejection), found
    return found.why


def run_to_rest(record: GroupRecord, *, wanted: int | None = None) -> tuple[GroupRecord, list[int]]:
    """Carry out all decisions, and delete pods of unneeded replicas; return these in order."""
    deleted: list[int] = []
    for _ in range(50):
        assert len(record.sss) >= record.min_in_sync, "no window below the minimum"
        intent = decision(record, wanted=wanted)
        if isinstance(intent, RecordWrite):
            assert intent.record.version == record.version + 1
            record = intent.record
        elif isinstance(intent, TransferRequest):
            record = with_master(record, member_of(intent.target), record.sss, reason="moved")
        else:
            assert intent == NoAction()
            last = max(id_ for id_, _ in record.replicas)
            if wanted is None or last < wanted or not is_out(record, last):
                return record, deleted
            record = done(forget(record, last))
            deleted.append(last)
    raise AssertionError("the decisions do not end")


def test_one_write_retires_a_replica_and_removes_it_from_the_set() -> None:
    after = done(retire(record_of(3), ReplicaId(2), Retirement.DRAINED))
    assert after.version == 8
    assert after.sss == {member_of(0), member_of(1)}
    assert not after.eligible
    assert view_of(after).retired == {2}
    assert is_out(after, ReplicaId(2))
    assert decision(after) == NoAction()
    assert done(retire(after, ReplicaId(2), Retirement.SURPLUS)) is after
    assert from_text(to_text(after)) == after


def test_a_retired_master_hands_over_before_it_leaves_the_set() -> None:
    marked = done(retire(record_of(3), ReplicaId(0), Retirement.DRAINED))
    assert marked.sss == {member_of(0), member_of(1), member_of(2)}
    assert decision(marked) == TransferRequest(ReplicaId(1))
    after, _ = run_to_rest(marked)
    assert after.master == member_of(1)
    assert after.sss == {member_of(1), member_of(2)}
    assert is_out(after, ReplicaId(0))


def test_retire_rejects_a_replica_that_min_in_sync_needs() -> None:
    alone = record_of(2)
    assert "the group has 1 of the 2 replicas" in why(
        retire(alone, ReplicaId(1), Retirement.DRAINED)
    )
    behind = record_of(3, out=(1,))
    assert "1 of the other replicas in sync" in why(
        retire(behind, ReplicaId(2), Retirement.DRAINED)
    )
    # A replica that is not in sync is not needed.
    assert done(retire(behind, ReplicaId(1), Retirement.DRAINED)).sss == behind.sss
    two_stay = done(retire(record_of(3), ReplicaId(2), Retirement.DRAINED))
    assert "the group has 1 of the 2 replicas" in why(
        retire(two_stay, ReplicaId(1), Retirement.DRAINED)
    )
    assert "replica 9 has not registered" in why(retire(alone, ReplicaId(9), Retirement.DRAINED))


def test_a_retired_replica_counts_again_after_an_undo() -> None:
    retired = done(retire(record_of(3), ReplicaId(2), Retirement.DRAINED))
    back = done(stay(retired, ReplicaId(2), Retirement.DRAINED))
    assert back.version == retired.version + 1
    assert not view_of(back).retired
    assert done(stay(back, ReplicaId(2), Retirement.DRAINED)) is back


def test_a_retired_replica_is_elected_only_without_another_candidate() -> None:
    marked = done(retire(record_of(3), ReplicaId(0), Retirement.DRAINED))
    handed = with_master(marked, member_of(2), marked.sss, reason="moved")
    intent = decision(handed, dead=member_of(2))
    assert isinstance(intent, RecordWrite)
    assert intent.record.master == member_of(1)  # and not 0, which has an equal log
    # It has all acknowledged messages, so it is elected if there is no other candidate.
    alone = marked._replace(sss=frozenset({member_of(0), member_of(2)}), master=member_of(2))
    chosen = decision(alone, dead=member_of(2))
    assert isinstance(chosen, RecordWrite)
    assert chosen.record.master == member_of(0)


def test_a_group_removes_surplus_replicas_one_by_one_from_the_highest() -> None:
    after, deleted = run_to_rest(record_of(5), wanted=3)
    assert deleted == [4, 3]
    assert [id_ for id_, _ in after.replicas] == [0, 1, 2]
    assert after.sss == {member_of(n) for n in range(3)}


def test_a_surplus_master_hands_over_to_a_replica_that_stays() -> None:
    led_by_four = record_of(5)._replace(master=member_of(4))
    after, deleted = run_to_rest(led_by_four, wanted=3)
    assert deleted == [4, 3]
    assert after.master is not None
    assert after.master.replica_id < 3


def test_a_removal_waits_until_other_replicas_have_caught_up() -> None:
    behind = record_of(5, out=(1, 2))
    first = decision(behind, wanted=3)
    assert isinstance(first, RecordWrite)
    assert first.record.sss == {member_of(0), member_of(3)}
    forgotten = done(forget(first.record, ReplicaId(4)))
    assert decision(forgotten, wanted=3) == NoAction()
    caught_up = forgotten._replace(sss=forgotten.sss | {member_of(1)})
    assert isinstance(decision(caught_up, wanted=3), RecordWrite)


def test_a_larger_group_keeps_surplus_replicas_but_not_drained_ones() -> None:
    drained = done(retire(record_of(5), ReplicaId(1), Retirement.DRAINED))
    shrinking = done(with_number(drained, 4))
    assert view_of(shrinking).retired == {1, 4}
    assert view_of(done(with_number(shrinking, 5))).retired == {1}
    assert done(with_number(drained, 5)) is drained
    assert "not drained but surplus" in why(stay(shrinking, ReplicaId(4), Retirement.DRAINED))


def test_forget_rejects_a_needed_replica() -> None:
    assert "needs replica 2" in why(forget(record_of(3), ReplicaId(2)))
    retired = done(retire(record_of(3), ReplicaId(2), Retirement.SURPLUS))
    after = done(forget(retired, ReplicaId(2)))
    assert [id_ for id_, _ in after.replicas] == [0, 1]
    assert done(forget(after, ReplicaId(2))) is after


def test_a_growing_group_retires_no_replica() -> None:
    assert decision(record_of(1, min_in_sync=1), wanted=3) == NoAction()
