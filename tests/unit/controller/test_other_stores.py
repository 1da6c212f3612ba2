"""A replica registers with another store: a mistake, or a lost volume."""

from __future__ import annotations

from tests.support.worlds.replica_records import member_of, record_of_three
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.decide import Intent, NoEligibleReplica, RecordWrite, decide
from tidemill.controller.election.elect import with_survivor
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, KeptStore
from tidemill.controller.election.registration import (
    FencedRun,
    Registration,
    RunPresence,
    presence_of,
    register,
)
from tidemill.controller.election.retirement import is_out
from tidemill.controller.election.sessions import (
    ElectionTiming,
    Heartbeat,
    ReplicaHealth,
    ReplicaSessions,
)
from tidemill.controller.record_json import from_text, to_text

TIMING = ElectionTiming()
BEAT = Heartbeat(
    is_master=False,
    epoch_seen=3,
    version_seen=7,
    log_epoch=3,
    log_end=100,
    durable_end=100,
    confirm=100,
    health=ReplicaHealth.OK,
    page_age_ms=20,
)


def coming(record: GroupRecord, replica: int, run: int, store: str) -> Registration:
    known = record.find(ReplicaId(replica))
    assert known is not None
    return Registration(
        member_of(replica, run), known.incarnation, store, f"10.0.0.{replica}:10911", is_clean=True
    )


def come(record: GroupRecord, replica: int, run: int, store: str) -> GroupRecord:
    after = register(record, coming(record, replica, run, store))
    assert isinstance(after, GroupRecord)
    return after


def decision(record: GroupRecord) -> Intent:
    """Return the decision while all registered runs are live."""
    sessions = ReplicaSessions(TIMING)
    sessions.note_record(record, 0)
    for id_, _ in record.replicas:
        member = record.find_member(id_)
        assert member is not None
        sessions.note_heartbeat(member, BEAT, 100_000)
    return decide(record, sessions.observe(rank=0, now_ms=100_000), TIMING)


def all_in_the_wrong_folder() -> GroupRecord:
    record = record_of_three()
    for replica in range(3):
        record = come(record, replica, 1, f"empty-{replica}")
    return record


def test_another_store_does_not_replace_a_live_run() -> None:
    record = record_of_three()
    for replica in (0, 1):
        asked = coming(record, replica, 1, "another")
        refusal = register(record, asked, RunPresence.HEARD)
        assert isinstance(refusal, FencedRun)
        assert f"replica {replica} is running at 10.0.0.{replica}:10911" in refusal.why
        # It may be restarting.
        assert isinstance(register(record, asked, RunPresence.HEARD_LATELY), ChangeRejection)
        assert isinstance(register(record, asked, RunPresence.SILENT), GroupRecord)
    same = coming(record, 1, 1, "store-1")
    assert isinstance(register(record, same, RunPresence.HEARD), GroupRecord)


def test_the_presence_of_a_run_follows_from_its_last_heartbeat() -> None:
    record, sessions = record_of_three(), ReplicaSessions(TIMING)
    zero = ReplicaId(0)

    def presence(now_ms: int) -> RunPresence:
        return presence_of(record, zero, sessions.observe(rank=0, now_ms=now_ms), TIMING)

    # A controller that has just started has no heartbeats yet.
    sessions.note_record(record, 1_000)
    assert presence(1_000) is RunPresence.HEARD_LATELY
    assert presence(1_000 + TIMING.other_store_ms + 1) is RunPresence.SILENT
    sessions.note_heartbeat(member_of(0), BEAT, 10_000)
    assert presence(10_000) is RunPresence.HEARD
    assert presence(10_001 + TIMING.session_timeout_ms) is RunPresence.HEARD_LATELY
    sessions.note_heartbeat(member_of(0), BEAT, 20_000)
    sessions.note_death(member_of(0), 20_100)
    assert presence(20_100) is RunPresence.HEARD_LATELY
    assert presence(20_101 + TIMING.other_store_ms) is RunPresence.SILENT


def test_the_record_does_not_keep_a_store_that_the_group_does_not_need() -> None:
    after = come(record_of_three(), 1, 1, "empty")
    assert after.sss == {member_of(0), member_of(2)}
    assert not after.kept_stores
    # Replica 1 had not caught up, so its store is not kept either.
    again = come(come(after, 0, 1, "empty-0"), 1, 2, "empty-again")
    assert again.kept_stores == (KeptStore(ReplicaId(0), "store-0", is_unclean=False),)


def test_a_group_recovers_when_its_previous_stores_come_back() -> None:
    record = all_in_the_wrong_folder()
    assert not record.sss
    assert not record.eligible
    assert [one.store_uuid for one in record.kept_stores] == ["store-1", "store-2"]
    alarm = decision(record)
    assert isinstance(alarm, NoEligibleReplica)
    assert "replicas 1 and 2 started with another store" in alarm.reason
    assert not is_out(record, ReplicaId(1))
    record = come(record, 0, 2, "store-0")
    assert isinstance(decision(record), NoEligibleReplica)
    # The kept store replaces the empty one, although the run with the empty store is live.
    back = register(record, coming(record, 1, 2, "store-1"), RunPresence.HEARD)
    assert isinstance(back, GroupRecord)
    assert back.eligible == {1}
    intent = decision(back)
    assert isinstance(intent, RecordWrite)
    assert intent.record.master == member_of(1, 2)
    assert not intent.record.unclean_since
    # The other store is kept until the set is full.
    assert [one.replica_id for one in intent.record.kept_stores] == [2]
    assert from_text(to_text(intent.record)) == intent.record


def test_a_kept_store_that_comes_back_unclean_is_a_suspect() -> None:
    record = all_in_the_wrong_folder()
    unclean = coming(record, 2, 2, "store-2")._replace(is_clean=False)
    after = register(record, unclean)
    assert isinstance(after, GroupRecord)
    assert after.suspects == {2}
    assert not after.eligible
    # The comparison of all suspects needs this store.
    lost = come(after, 2, 3, "empty-again")
    assert KeptStore(ReplicaId(2), "store-2", is_unclean=True) in lost.kept_stores
    back = come(lost, 2, 4, "store-2")
    assert back.suspects == {2}
    assert not back.eligible


def test_suspects_are_not_elected_while_a_kept_store_is_missing() -> None:
    record = record_of_three()
    record = come(record, 0, 1, "empty-0")
    unclean = register(record, coming(record, 1, 1, "store-1")._replace(is_clean=False))
    assert isinstance(unclean, GroupRecord)
    assert unclean.suspects == {1}
    record = come(unclean, 2, 1, "empty-2")
    assert isinstance(decision(record), NoEligibleReplica)


def test_a_group_of_one_keeps_a_replaced_store() -> None:
    record = record_of_three()._replace(min_in_sync=1, sss=frozenset({member_of(0)}))
    slip = come(record, 0, 1, "empty")
    assert slip.kept_stores == (KeptStore(ReplicaId(0), "store-0", is_unclean=False),)
    back = come(slip, 0, 2, "store-0")
    assert back.eligible == {0}
    assert not back.kept_stores


def test_a_survivor_drops_the_kept_stores() -> None:
    after = with_survivor(all_in_the_wrong_folder(), member_of(0, 1), reason="an operator")
    assert not after.kept_stores
