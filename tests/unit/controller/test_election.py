"""Decisions of controllers, case by case. The simulation covers all orders of steps."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun
from tidemill.controller.election.alarms import of_fewer
from tidemill.controller.election.decide import (
    FullMaster,
    Intent,
    MetaRollback,
    NoAction,
    NoEligibleReplica,
    NoFounder,
    RecordWrite,
    ShortSyncStateSet,
    TransferRequest,
    decide,
    live_of,
    release,
)
from tidemill.controller.election.elect import with_master, with_survivor
from tidemill.controller.election.failure import Failure, find_failure
from tidemill.controller.election.leadership import Leadership, LeaseSeen, LeaseTiming
from tidemill.controller.election.membership import ChangeRejection, change_sync_state_set
from tidemill.controller.election.record import (
    HISTORY_MAX,
    GroupRecord,
    RegisteredRun,
    Retirement,
    view_of,
)
from tidemill.controller.election.registration import FencedRun, Registration, register
from tidemill.controller.election.replacement import replace_master
from tidemill.controller.election.sessions import (
    ElectionTiming,
    Heartbeat,
    ReplicaHealth,
    ReplicaSessions,
)
from tidemill.controller.election.swap import (
    StoredRecord,
    WriteOutcome,
    attempt_no_change,
    attempt_write,
    outcome_of,
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
    page_age_ms=20,
)


def run(replica_id: int, number: int = 0) -> ReplicaRun:
    return ReplicaRun(ReplicaId(replica_id), f"{replica_id}.{number}")


def record(*, sss: tuple[int, ...] = (0, 1, 2), eligible: tuple[int, ...] = ()) -> GroupRecord:
    replicas = tuple(
        (ReplicaId(n), RegisteredRun(f"store {n}", f"{n}.0", f"host-{n}", is_unclean=False))
        for n in range(3)
    )
    return GroupRecord(
        min_in_sync=2,
        epoch=3,
        version=7,
        master=run(0),
        sss=frozenset(map(run, sss)),
        eligible=frozenset(map(ReplicaId, eligible)),
        replicas=replicas,
    )


def with_drained(group: GroupRecord, number: int) -> GroupRecord:
    """Return the record with a drained replica."""
    registered = group.find(ReplicaId(number))
    assert registered is not None
    return group.with_replica(ReplicaId(number), registered._replace(retired=Retirement.DRAINED))


def sessions(
    group: GroupRecord, beats: dict[int, Heartbeat], at_ms: int = NOW_MS
) -> ReplicaSessions:
    found = ReplicaSessions(TIMING)
    found.note_record(group, at_ms - 60_000)
    for replica_id, beat in beats.items():
        member = group.find_member(ReplicaId(replica_id))
        assert member is not None
        found.note_heartbeat(member, beat, at_ms)
    return found


def decision(
    group: GroupRecord, known: ReplicaSessions, *, rank: int = 0, now_ms: int = NOW_MS + 10
) -> Intent:
    known.note_record(group, now_ms)
    observation = known.observe(rank=rank, now_ms=now_ms)
    has_failed = find_failure(group, observation, TIMING) is not None
    known.note_failure(group.master, has_failed=has_failed, now_ms=now_ms)
    return decide(group, known.observe(rank=rank, now_ms=now_ms), TIMING)


def written(intent: Intent) -> GroupRecord:
    assert isinstance(intent, RecordWrite), intent
    return intent.record


# ------------------------------------------------------------ elections


def test_a_healthy_group_needs_no_action() -> None:
    group = record()
    assert decision(group, sessions(group, {0: BEAT, 1: BEAT, 2: BEAT})) == NoAction()


def test_the_longest_log_replaces_a_dead_master_and_live_members_stay() -> None:
    group = record()
    known = sessions(group, {0: BEAT, 1: BEAT, 2: BEAT._replace(log_end=150)})
    known.note_death(run(0), NOW_MS)
    after = written(decision(group, known))
    assert (after.epoch, after.version, after.master) == (4, 8, run(2))
    assert after.sss == {run(1), run(2)}
    assert not after.eligible
    assert after.history[-1].reason == Failure.DIED.value


def test_members_outside_the_new_set_stay_eligible_while_it_is_too_small() -> None:
    after = with_master(record(), run(1), frozenset())
    assert after.sss == {run(1)}
    assert after.eligible == {0, 2}


def test_a_silent_master_stays_while_a_member_receives_its_frames() -> None:
    group = record()
    hears = BEAT._replace(peer_silence_ms=((ReplicaId(0), 100),))
    assert decision(group, sessions(group, {1: hears, 2: BEAT})) == NoAction()
    silence = BEAT._replace(peer_silence_ms=((ReplicaId(0), 700),))
    assert written(decision(group, sessions(group, {1: silence, 2: BEAT}))).master == run(1)


def test_a_stalled_master_is_replaced() -> None:
    group = record()
    stalled = BEAT._replace(page_age_ms=1_600)
    after = written(decision(group, sessions(group, {0: stalled, 1: BEAT, 2: BEAT})))
    assert after.master == run(1)
    assert run(0) not in after.sss


def test_a_restarted_master_loses_its_epoch_but_may_be_elected() -> None:
    group = record(sss=(0,))
    asked = Registration(run(0, 1), "0.0", "store 0", "host-0", is_clean=True)
    registered = register(group, asked)
    assert isinstance(registered, GroupRecord)
    assert registered.master == run(0)
    after = written(decision(registered, sessions(registered, {0: BEAT})))
    assert (after.epoch, after.master) == (4, run(0, 1))


def test_a_deputy_waits_for_its_turn() -> None:
    group = record()
    known = sessions(group, {0: BEAT, 1: BEAT, 2: BEAT})
    known.note_death(run(0), NOW_MS)
    first = decision(group, known, rank=1)
    assert first == NoAction(NOW_MS + 10 + TIMING.deputy_step_ms)
    for replica_id in (1, 2):
        known.note_heartbeat(run(replica_id), BEAT, NOW_MS + 1_000)
    assert isinstance(decision(group, known, rank=1, now_ms=NOW_MS + 1_011), RecordWrite)


def test_a_replica_that_may_lack_messages_is_not_elected() -> None:
    group = record(sss=(0, 1))
    known = sessions(group, {2: BEAT})
    known.note_death(run(0), NOW_MS)
    assert isinstance(decision(group, known), NoEligibleReplica)


def test_an_eligible_replica_is_elected_when_no_member_lives() -> None:
    group = record(sss=(0,), eligible=(1, 2))
    known = sessions(group, {1: BEAT, 2: BEAT._replace(log_epoch=2, log_end=900)})
    known.note_death(run(0), NOW_MS)
    after = written(decision(group, known))
    assert after.master == run(1)
    assert after.eligible == {0, 2}


def test_a_blocked_master_is_replaced_by_a_candidate_that_reaches_another() -> None:
    group = record(sss=(0,), eligible=(1, 2))
    blocked = BEAT._replace(is_master=True, blocked_ms=1_200)
    reaches = BEAT._replace(peer_silence_ms=((ReplicaId(2), 50),))
    known = sessions(group, {0: blocked, 1: reaches, 2: BEAT})
    assert written(decision(group, known)).master == run(1)
    alone = sessions(group, {0: blocked, 1: BEAT, 2: BEAT})
    assert decision(group, alone) == NoAction()


def test_a_blocked_master_is_replaced_even_if_it_was_just_elected() -> None:
    """It confirms no message, so the flapping guard does not apply."""
    group = record(sss=(0,), eligible=(1, 2))
    known = ReplicaSessions(TIMING)
    known.note_record(
        group._replace(epoch=group.epoch - 1, version=group.version - 1), NOW_MS - 1_300
    )
    known.note_record(group, NOW_MS - 1_250)
    known.note_heartbeat(run(0), BEAT._replace(is_master=True, blocked_ms=1_200), NOW_MS)
    known.note_heartbeat(run(1), BEAT._replace(peer_silence_ms=((ReplicaId(2), 50),)), NOW_MS)
    known.note_heartbeat(run(2), BEAT, NOW_MS)
    assert written(decision(group, known)).master == run(1)


def test_a_group_without_a_complete_replica_raises_an_alarm() -> None:
    group = record(sss=(), eligible=())
    known = sessions(group, {1: BEAT, 2: BEAT})
    known.note_death(run(0), NOW_MS)
    intent = decision(group, known)
    assert isinstance(intent, NoEligibleReplica)
    assert intent.reason == "no replica has all confirmed messages"


def test_a_slow_master_is_asked_to_hand_over_to_a_fast_replica() -> None:
    group = record()
    slow = BEAT._replace(health=ReplicaHealth.SLOW)
    assert decision(group, sessions(group, {0: slow, 1: slow, 2: BEAT})) == TransferRequest(
        ReplicaId(2)
    )


FULL = BEAT._replace(health=ReplicaHealth.FULL)


def test_a_full_master_is_asked_to_hand_over_to_a_replica_with_room() -> None:
    group = record()
    assert decision(group, sessions(group, {0: FULL, 1: BEAT, 2: BEAT})) == TransferRequest(
        ReplicaId(1)
    )
    assert isinstance(decision(group, sessions(group, {0: BEAT, 1: FULL, 2: BEAT})), NoAction)


@pytest.mark.parametrize(
    "beats", [{0: FULL, 1: FULL, 2: BEAT}, {0: FULL, 1: FULL, 2: FULL}, {0: FULL, 1: BEAT}]
)
def test_a_full_master_stays_if_too_few_replicas_have_room(beats: dict[int, Heartbeat]) -> None:
    group = record()
    intent = decision(group, sessions(group, beats))
    assert isinstance(intent, FullMaster)
    assert intent.reason.startswith("no message is accepted: the disk of the master, replica 0, is")
    # With one replica as the minimum, one with room is enough.
    alone = group._replace(min_in_sync=1)
    has_room = any(beat is BEAT for beat in beats.values())
    intent = decision(alone, sessions(alone, beats))
    assert isinstance(intent, TransferRequest if has_room else FullMaster)


def test_a_full_master_hands_over_once_in_half_a_minute() -> None:
    group = record()
    beats = {0: FULL, 1: BEAT, 2: BEAT}
    known = sessions(group, beats)
    later = group._replace(epoch=group.epoch + 1, version=group.version + 1)
    known.note_record(later, NOW_MS)
    assert isinstance(decision(later, known), NoAction)
    end_ms = NOW_MS + TIMING.flapping_guard_ms + 10
    for replica_id, beat in beats.items():
        known.note_heartbeat(run(replica_id), beat, end_ms)
    assert isinstance(decision(later, known, now_ms=end_ms + 10), TransferRequest)


def test_a_replica_with_room_is_elected_before_a_full_one() -> None:
    group = record()
    ahead = FULL._replace(log_end=BEAT.log_end + 1)
    known = sessions(group, {1: ahead, 2: BEAT})
    known.note_death(run(0), NOW_MS)
    assert written(decision(group, known)).master == run(2)
    known = sessions(group, {1: ahead})
    known.note_death(run(0), NOW_MS)
    assert written(decision(group, known)).master == run(1)


def test_each_planned_or_forced_move_prefers_a_replica_with_room() -> None:
    """Replica 1 is full and has the longest log; replica 2 has room."""
    group, ahead = record(), FULL._replace(log_end=BEAT.log_end + 1)
    drained = with_drained(group, 0)
    to_two = TransferRequest(ReplicaId(2))
    assert decision(drained, sessions(drained, {0: BEAT, 1: ahead, 2: BEAT})) == to_two
    reaching = reached_decision(group, {0: BEAT, 1: ahead, 2: BEAT}, instead=(1, 2))
    assert reaching == to_two
    hears = ((ReplicaId(1), 50), (ReplicaId(2), 50))
    alone = record(sss=(0,), eligible=(1, 2))
    blocked = BEAT._replace(is_master=True, blocked_ms=1_200)
    known = {
        0: blocked,
        1: ahead._replace(peer_silence_ms=hears),
        2: BEAT._replace(peer_silence_ms=hears),
    }
    assert written(decision(alone, sessions(alone, known))).master == run(2)
    # A drain and a failure do not wait for room.
    known[2] = BEAT
    assert written(decision(alone, sessions(alone, known))).master == run(1)
    intent = decision(drained, sessions(drained, {0: BEAT, 1: ahead}))
    assert intent == TransferRequest(ReplicaId(1))


def test_a_master_does_not_move_back_and_forth_between_a_full_and_an_unreachable_replica() -> None:
    """Proxies reach only replica 1, which is full: as master it would hand over to replica 0."""
    group = record()
    beats = {0: BEAT, 1: FULL, 2: BEAT}
    assert reached_decision(group, beats, instead=(1,)) == NoAction()


def reached_decision(
    group: GroupRecord, beats: dict[int, Heartbeat], *, instead: tuple[int, ...]
) -> Intent:
    """Return the decision while most proxies reach `instead` and not the master."""
    observation = sessions(group, beats).observe(rank=0, now_ms=NOW_MS + 10)
    reached = frozenset(map(ReplicaId, instead))
    return decide(group, observation._replace(reached_instead=reached), TIMING)


def test_a_release_elects_its_target_and_keeps_a_needed_old_master() -> None:
    group = record()
    observation = sessions(group, {0: BEAT, 1: BEAT, 2: BEAT}).observe(rank=0, now_ms=NOW_MS)
    live = live_of(group, observation, TIMING)
    after = release(group, epoch=3, master=run(0), target=ReplicaId(2), live=live)
    assert after is not None
    assert (after.master, after.sss) == (run(2), frozenset({run(1), run(2)}))
    two = record(sss=(0, 2))
    after = release(two, epoch=3, master=run(0), target=ReplicaId(2), live=live)
    assert after is not None
    assert (after.master, after.sss) == (run(2), two.sss)
    assert release(group, epoch=2, master=run(0), target=ReplicaId(2), live=live) is None
    outside = record(sss=(0, 1))
    assert release(outside, epoch=3, master=run(0), target=ReplicaId(2), live=live) is None


def test_replica_0_founds_a_group_above_the_epochs_of_its_log() -> None:
    group = record()._replace(epoch=0, version=3, master=None, sss=frozenset())
    others = {1: BEAT._replace(epoch_seen=0), 2: BEAT._replace(epoch_seen=0)}
    assert isinstance(decision(group, sessions(group, others)), NoFounder)
    founder = BEAT._replace(epoch_seen=0, log_epoch=17)
    after = written(decision(group, sessions(group, {**others, 0: founder})))
    assert (after.epoch, after.master) == (18, run(0))
    assert after.sss == {run(0)}


@pytest.mark.parametrize(
    ("log_end", "has_spec", "minimum"), [(100, True, 1), (0, True, 2), (100, False, 2)]
)
def test_a_broker_that_was_alone_goes_on_alone_until_others_have_its_log(
    log_end: int, minimum: int, *, has_spec: bool
) -> None:
    """Otherwise no message is acknowledged while a replica copies a long log."""
    group = record()._replace(epoch=0, version=3, master=None, sss=frozenset())
    beat = BEAT._replace(epoch_seen=0, log_epoch=0, log_end=log_end)
    known = sessions(group, {0: beat})
    observation = known.observe(rank=0, now_ms=NOW_MS + 10, has_spec=has_spec)
    assert written(decide(group, observation, TIMING)).min_in_sync == minimum


def test_min_in_sync_does_not_rise_with_a_replica_that_is_retired() -> None:
    """It leaves the set. With it counted, the group would need one more replica than it keeps."""
    group = record(sss=(0, 1, 2))
    retired = dict(group.replicas)[ReplicaId(2)]._replace(retired=Retirement.DRAINED)
    known = sessions(group, {0: BEAT._replace(is_master=True), 1: BEAT, 2: BEAT})
    known.note_record(group, NOW_MS)
    observation = known.observe(rank=0, now_ms=NOW_MS + 10, wanted_min_in_sync=3)
    intent = decide(group.with_replica(ReplicaId(2), retired), observation, TIMING)
    assert not isinstance(intent, RecordWrite) or intent.record.min_in_sync == group.min_in_sync


@pytest.mark.parametrize(
    ("sss", "minimum", "wanted", "after"),
    [
        ((0,), 1, 2, None),
        ((0,), 1, 3, None),
        ((0, 1), 1, 2, 2),
        ((0, 1), 1, 3, 2),
        ((0, 1, 2), 1, 3, 3),
        ((0, 1, 2), 2, 3, 3),
        ((0, 1, 2), 1, 2, 2),
        ((0,), 2, 1, 1),
        ((0,), 2, 3, None),
        ((0, 1), 2, 3, None),
    ],
)
def test_min_in_sync_rises_with_the_replicas_in_sync(
    sss: tuple[int, ...], minimum: int, wanted: int, after: int | None
) -> None:
    group = record(sss=sss)._replace(min_in_sync=minimum)
    known = sessions(group, {0: BEAT._replace(is_master=True), 1: BEAT, 2: BEAT})
    known.note_record(group, NOW_MS)
    observation = known.observe(rank=0, now_ms=NOW_MS + 10, wanted_min_in_sync=wanted)
    intent = decide(group, observation, TIMING)
    assert (intent.record.min_in_sync if isinstance(intent, RecordWrite) else None) == after


def test_a_lower_min_in_sync_leaves_only_members_of_the_set_eligible() -> None:
    """From then on the members alone acknowledge messages."""
    group = record(sss=(0, 1), eligible=(2,))._replace(min_in_sync=3)
    known = sessions(group, {0: BEAT._replace(is_master=True), 1: BEAT, 2: BEAT})
    observation = known.observe(rank=0, now_ms=NOW_MS, has_spec=True, wanted_min_in_sync=2)
    after = written(decide(group, observation, TIMING))
    assert (after.min_in_sync, after.eligible) == (2, frozenset())
    assert after.version == group.version + 1


def test_no_decision_is_made_from_a_record_older_than_the_replicas() -> None:
    group = record()
    known = sessions(group, {1: BEAT._replace(epoch_seen=9), 2: BEAT})
    known.note_death(run(0), NOW_MS)
    rollback = decision(group, known)
    assert isinstance(rollback, MetaRollback)
    assert "have seen epoch 9 and the record has epoch 3" in rollback.reason


@pytest.mark.parametrize("change", [{"epoch_seen": 9}, {"version_seen": 9}])
def test_the_alarm_of_an_outdated_record_names_a_master_only_if_all_logs_can_be_compared(
    change: dict[str, int],
) -> None:
    """Its sets do not tell which replica has all confirmed messages: a missing one may have."""
    group = record()
    ahead = BEAT._replace(log_end=150)._replace(**change)  # type: ignore[arg-type]  # any field
    rollback = decision(group, sessions(group, {1: ahead}))
    assert isinstance(rollback, MetaRollback)
    assert rollback.survivor is None
    assert "replicas 0 and 2 are missing in the comparison of the logs" in rollback.reason
    # A record of the same epoch registers no replica that has restarted.
    assert ("only the newest record registers them" in rollback.reason) == (
        "version_seen" in change
    )
    rollback = decision(group, sessions(group, {0: BEAT, 1: ahead, 2: BEAT}))
    assert isinstance(rollback, MetaRollback)
    assert rollback.survivor == 1
    assert "missing" not in rollback.reason


def test_the_alarm_of_a_record_that_was_created_again_waits_for_the_replicas_of_the_spec() -> None:
    group = record()._replace(epoch=0, version=3, master=None, sss=frozenset())
    known = sessions(group, {0: BEAT, 1: BEAT, 2: BEAT})
    for wanted, missing in ((4, "replica 3 is missing"), (3, "")):
        seen = known.observe(rank=0, now_ms=NOW_MS, has_spec=True, wanted_replicas=wanted)
        rollback = decide(group, seen, TIMING)
        assert isinstance(rollback, MetaRollback)
        assert (rollback.survivor is None) == bool(missing)
        assert missing in rollback.reason


@pytest.mark.parametrize("is_stalled", [False, True])
def test_no_order_replaces_a_master_that_may_only_stand_still(is_stalled: bool) -> None:
    """When it continues after less than a second, it confirms what the new master may lack."""
    known = sessions(record(), {2: BEAT})
    for member in (run(0), run(1)):
        known.note_heartbeat(member, BEAT._replace(page_age_ms=1_000 * is_stalled), NOW_MS)

    def order(after_ms: int) -> GroupRecord | ChangeRejection:
        known.note_heartbeat(run(2), BEAT, NOW_MS + after_ms)
        seen = known.observe(rank=0, now_ms=NOW_MS + after_ms)
        without_2 = record(sss=(0, 1))
        return replace_master(without_2, ReplicaId(2), seen, TIMING, reason="lost")

    early = order(1_000 if is_stalled else 2_000)
    assert isinstance(early, ChangeRejection)
    assert "which were live in the last 2 s" in early.why
    late = order(1_001 if is_stalled else 2_001)
    assert isinstance(late, GroupRecord)
    assert late.master == run(2)


def test_no_order_replaces_a_master_that_a_new_controller_has_not_heard_yet() -> None:
    """A controller that has just started knows nothing of its silence."""
    group = record(sss=(0,))._replace(min_in_sync=1)
    known = ReplicaSessions(TIMING)
    known.note_record(group, NOW_MS)

    def order(after_ms: int) -> GroupRecord | ChangeRejection:
        known.note_heartbeat(run(2), BEAT, NOW_MS + after_ms)
        seen = known.observe(rank=0, now_ms=NOW_MS + after_ms)
        return replace_master(group, ReplicaId(2), seen, TIMING, reason="lost")

    assert isinstance(order(2_000), ChangeRejection)
    assert isinstance(order(2_001), GroupRecord)


@pytest.mark.parametrize("reporter", [1, 2])
def test_no_order_replaces_a_master_that_another_replica_hears(reporter: int) -> None:
    """Only the network between the controllers and the master fails: it acknowledges messages."""
    group = record(sss=(0,))._replace(min_in_sync=1)

    def order(silent_ms: int) -> GroupRecord | ChangeRejection:
        report = BEAT._replace(peer_silence_ms=((ReplicaId(0), silent_ms), (ReplicaId(1), 0)))
        known = sessions(group, {2: BEAT, reporter: report})
        seen = known.observe(rank=0, now_ms=NOW_MS + 100)
        return replace_master(group, ReplicaId(2), seen, TIMING, reason="lost")

    # It was heard `silent_ms` before a state that is 20 ms old in a heartbeat 100 ms ago.
    heard = order(1_880)
    assert isinstance(heard, ChangeRejection)
    assert f"replica {reporter} heard replica 0 in the last 2 s" in heard.why
    silent = order(1_881)
    assert isinstance(silent, GroupRecord)
    assert silent.master == run(2)


def test_a_replica_whose_process_has_ended_does_not_delay_an_order() -> None:
    group = record(sss=(0,))._replace(min_in_sync=1)
    known = sessions(group, {2: BEAT._replace(peer_silence_ms=((ReplicaId(0), 100),))})
    known.note_death(run(0), NOW_MS)
    seen = known.observe(rank=0, now_ms=NOW_MS)
    after = replace_master(group, ReplicaId(2), seen, TIMING, reason="lost")
    assert isinstance(after, GroupRecord)
    assert after.master == run(2)


def test_the_alarm_of_a_group_without_a_complete_replica_says_what_the_controllers_know() -> None:
    """They may only not hear replicas that run."""
    group = record(sss=(0, 1))
    alarm = decision(group, sessions(group, {2: BEAT}))
    assert isinstance(alarm, NoEligibleReplica)
    assert alarm.reason == (
        "only replicas 0 and 1 have all confirmed messages, and the controllers do not hear them;"
        " if they are down, start one of them again with its own store"
    )
    group = record(sss=(1,))
    alarm = decision(group, sessions(group, {2: BEAT}))
    assert isinstance(alarm, NoEligibleReplica)
    assert alarm.reason == (
        "only replica 1 has all confirmed messages, and the controllers do not hear it; if it is"
        " down, start it again with its own store"
    )


def test_a_repeated_order_does_not_elect_the_master_that_it_names_again() -> None:
    group = record()
    seen = sessions(group, {0: BEAT, 1: BEAT}).observe(rank=0, now_ms=NOW_MS)
    assert replace_master(group, ReplicaId(0), seen, TIMING, reason="again") is group


def test_no_decision_is_made_from_an_older_record_of_the_same_epoch() -> None:
    """Replica 2 has left the set since: it lacks confirmed messages, and only it is live."""
    restored = record()
    known = sessions(restored, {2: BEAT._replace(version_seen=8, log_end=50)})
    known.note_death(run(0), NOW_MS)
    rollback = decision(restored, known)
    assert isinstance(rollback, MetaRollback)
    assert "have seen version 8 of the record, which has version 7" in rollback.reason
    seen = known.observe(rank=0, now_ms=NOW_MS + 10)
    after = replace_master(restored, ReplicaId(2), seen, TIMING, reason="restored")
    assert isinstance(after, GroupRecord)
    assert after.version > 8
    assert (after.master, after.sss, after.unclean_since) == (
        run(2),
        frozenset({run(2)}),
        after.epoch,
    )
    assert not isinstance(decision(after, known), MetaRollback)


def test_the_alarm_of_a_blocked_group_names_missing_replicas() -> None:
    group = record(sss=(0,), eligible=(1,))
    blocked = BEAT._replace(is_master=True, blocked_ms=TIMING.too_few_ms + 1)
    for rank in (0, 1):  # Operators ask any controller.
        alarm = decision(group, sessions(group, {0: blocked, 2: BEAT}), rank=rank)
        assert isinstance(alarm, ShortSyncStateSet)
        assert "1 replica in sync, min-in-sync is 2" in alarm.reason
        assert "replica 2 is catching up" in alarm.reason
        assert (
            "replica 1 is down or hangs; restart it, with an empty data directory if"
            in alarm.reason
        )
    # A drained replica is not catching up. The operator may undo the drain.
    drained = with_drained(group, 2)
    alarm = decision(drained, sessions(drained, {0: blocked, 2: BEAT}))
    assert isinstance(alarm, ShortSyncStateSet)
    assert "replica 2 is drained" in alarm.reason
    assert "catching up" not in alarm.reason
    text = alarm.reason + of_fewer("broker-0", drained, alarm.drained)
    assert "`tidemill replica undrain broker-0-2`" in text
    assert "drain" not in of_fewer("broker-0", group)
    # No alarm during a failover.
    short = blocked._replace(blocked_ms=TIMING.too_few_ms)
    assert isinstance(decision(group, sessions(group, {0: short, 2: BEAT})), NoAction)
    # A replica that never registered is missing, too.
    alone = group._replace(replicas=group.replicas[:1], eligible=frozenset())
    alarm = decision(alone, sessions(alone, {0: blocked}))
    assert isinstance(alarm, ShortSyncStateSet)
    assert "replica 1 is down" in alarm.reason


def test_offsets_beyond_32_bits_are_compared_exactly() -> None:
    group = record()
    far = 1 << 40
    known = sessions(group, {1: BEAT._replace(log_end=far), 2: BEAT._replace(log_end=far + 1)})
    known.note_death(run(0), NOW_MS)
    assert written(decision(group, known)).master == run(2)


def test_the_longest_suspect_is_elected_when_all_suspects_are_live() -> None:
    group: GroupRecord = record()
    for n in range(3):
        asked = Registration(run(n, 1), f"{n}.0", f"store {n}", "", is_clean=False)
        registered = register(group, asked)
        assert isinstance(registered, GroupRecord)
        group = registered
    assert not group.sss
    assert not group.eligible
    assert group.suspects == {1, 2}
    some = sessions(group, {1: BEAT})
    assert isinstance(decision(group, some), NoEligibleReplica)
    known = sessions(group, {1: BEAT, 2: BEAT._replace(log_end=101)})
    after = written(decision(group, known))
    assert (after.master, after.unclean_since) == (run(2, 1), 4)
    assert after.sss == {run(2, 1)}


def test_the_history_is_bounded() -> None:
    group = record()
    for _ in range(40):
        assert group.master is not None
        group = with_master(group, run((group.master.replica_id + 1) % 3), group.sss)
    assert [one.epoch for one in group.history] == list(range(28, 28 + HISTORY_MAX))


# ------------------------------------------------------------ the sync state set


@pytest.mark.parametrize(
    "change",
    [
        {"version": 6},
        {"epoch": 2},
        {"master": run(1)},
        {"sss": frozenset({run(1)})},
        {"sss": frozenset({run(0), run(2, 1)})},
    ],
    ids=["an older version", "another epoch", "another master", "without itself", "another run"],
)
def test_a_proposal_that_does_not_fit_the_record_is_rejected(change: dict[str, Any]) -> None:
    group = record(sss=(0, 1))
    proposal = Proposal(3, 7, run(0), frozenset({run(0), run(1), run(2)}))
    live = {run(n) for n in range(3)}
    assert isinstance(change_sync_state_set(group, proposal, live), GroupRecord)
    changed = proposal._replace(**change)
    assert isinstance(change_sync_state_set(group, changed, live), ChangeRejection)


def test_a_silent_replica_may_stay_in_the_set_but_not_join() -> None:
    group = record(sss=(0, 1))
    stay = Proposal(3, 7, run(0), frozenset({run(0), run(1)}))
    assert isinstance(change_sync_state_set(group, stay, {run(0)}), GroupRecord)
    join = stay._replace(sss=stay.sss | {run(2)})
    assert isinstance(change_sync_state_set(group, join, {run(0), run(1)}), ChangeRejection)


def test_a_replica_that_leaves_a_small_set_is_eligible_until_the_set_is_full() -> None:
    group = record(sss=(0, 1))
    alone = change_sync_state_set(group, Proposal(3, 7, run(0), frozenset({run(0)})), set())
    assert isinstance(alone, GroupRecord)
    assert alone.eligible == {1}
    both = frozenset({run(0), run(2)})
    full = change_sync_state_set(alone, Proposal(3, 8, run(0), both), set(both))
    assert isinstance(full, GroupRecord)
    assert not full.eligible


# ------------------------------------------------------------ registrations


def test_a_clean_run_replaces_the_old_run_in_the_set() -> None:
    asked = Registration(run(1, 1), "1.0", "store 1", "elsewhere", is_clean=True)
    after = register(record(), asked)
    assert isinstance(after, GroupRecord)
    assert after.sss == {run(0), run(1, 1), run(2)}
    assert (after.version, after.master) == (8, run(0))
    assert register(after, asked) is after
    assert view_of(after).address_of(ReplicaId(1)) == "elsewhere"


@pytest.mark.parametrize(
    "change", [{"is_clean": False}, {"store_uuid": "another"}], ids=["unclean", "another store"]
)
def test_a_run_that_may_lack_messages_leaves_both_sets(change: dict[str, Any]) -> None:
    asked = Registration(run(1, 1), "1.0", "store 1", "", is_clean=True)._replace(**change)
    for group in (record(), record(sss=(0,), eligible=(1, 2))):
        after = register(group, asked)
        assert isinstance(after, GroupRecord)
        assert 1 not in after.eligible | {member.replica_id for member in after.sss}
        found = after.find(ReplicaId(1))
        assert found is not None
        assert found.is_unclean


def test_a_late_or_repeated_registration_is_fenced() -> None:
    asked = Registration(run(1, 1), "1.0", "store 1", "", is_clean=True)
    later = Registration(run(1, 2), "1.1", "store 1", "", is_clean=True)
    first = register(record(), asked)
    assert isinstance(first, GroupRecord)
    second = register(first, later)
    assert isinstance(second, GroupRecord)
    assert isinstance(register(second, asked), FencedRun)


def test_an_unclean_replica_is_clean_after_it_has_caught_up() -> None:
    asked = Registration(run(1, 1), "1.0", "store 1", "", is_clean=False)
    group = register(record(), asked)
    assert isinstance(group, GroupRecord)
    both = frozenset({run(0), run(1, 1), run(2)})
    after = change_sync_state_set(group, Proposal(3, 8, run(0), both), set(both))
    assert isinstance(after, GroupRecord)
    found = after.find(ReplicaId(1))
    assert found is not None
    assert not found.is_unclean


# ------------------------------------------------------------ the store


def test_the_outcome_of_a_write_follows_from_the_stored_record() -> None:
    base = StoredRecord(record(), "token 1")
    made = attempt_write(base, with_master(base.record, run(1), frozenset()), "mine")
    assert outcome_of(made, base) is WriteOutcome.PENDING
    assert outcome_of(made, StoredRecord(made.record, "token 2")) is WriteOutcome.APPLIED
    other = attempt_no_change(base, "another's")
    assert outcome_of(made, StoredRecord(other.record, "token 2")) is WriteOutcome.OVERTAKEN
    # Another write followed: the history still has our election.
    later = attempt_no_change(StoredRecord(made.record, "token 2"), "another's")
    assert outcome_of(made, StoredRecord(later.record, "token 3")) is WriteOutcome.APPLIED


def test_a_write_without_a_change_keeps_the_version() -> None:
    """A record restored from a backup must stay older than the one that replicas have seen."""
    base = StoredRecord(record(), "token 1")
    written = attempt_no_change(base, "another's").record
    assert written == base.record._replace(write_id="another's")


def test_json_keeps_a_record() -> None:
    survivor = with_survivor(record(), run(2), reason="an operator")
    for group in (record(eligible=(1,)), survivor, record()._replace(master=None)):
        assert from_text(to_text(group)) == group


def test_a_lease_is_free_after_its_duration_without_a_change() -> None:
    timing = LeaseTiming()
    other = Leadership("controller-1", timing)
    other.note_lease(LeaseSeen("controller-0", 5), 1_000)
    other.note_lease(LeaseSeen("controller-0", 5), 4_900)
    assert not other.may_take(4_999)
    assert other.may_take(5_000)
    other.note_lease(LeaseSeen("controller-0", 6), 5_000)
    assert not other.may_take(8_999)
    other.note_lease(LeaseSeen("", 7), 9_000)
    assert other.may_take(9_000)


def test_a_leader_stops_before_its_lease_is_free() -> None:
    timing = LeaseTiming()
    mine, other = Leadership("controller-0", timing), Leadership("controller-1", timing)
    lease = LeaseSeen("controller-0", 5)
    mine.note_renewal(lease, 1_000)
    other.note_lease(lease, 1_000)
    ends_ms = next(at for at in range(1_000, 9_000) if not mine.is_leading(at))
    free_ms = next(at for at in range(1_000, 9_000) if other.may_take(at))
    assert ends_ms < free_ms
