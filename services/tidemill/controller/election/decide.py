"""The next step of a controller for a group: the reconcile decision.

Controllers call it after every event, and at least twice a second. It keeps no state. Its record is
written by compare-and-swap against the record that it received.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election import alarms
from tidemill.controller.election.elect import (
    Candidate,
    best_of,
    may_be_master,
    with_founder,
    with_master,
    with_survivor,
)
from tidemill.controller.election.failure import Failure, find_failure
from tidemill.controller.election.feature_levels import with_raised_level
from tidemill.controller.election.history import BLOCKED, HANDED_OVER, LOST_MEMORY
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, with_sets
from tidemill.controller.election.retirement import find_leaver, is_retired, with_number, without
from tidemill.controller.election.rollback import (
    is_outdated,
    is_outdated_in_epoch,
    newest_seen,
    not_compared,
)
from tidemill.controller.election.sessions import ElectionTiming, GroupObservation, ReplicaHealth

FOUNDER = ReplicaId(0)  # its store may be older than the group: one replica that became several


class NoAction(NamedTuple):
    """No step now; decide again at `again_at_ms` or after the next event."""

    again_at_ms: int | None = None


class RecordWrite(NamedTuple):
    """A record that replaces the one that was decided on."""

    record: GroupRecord
    reason: str


class NoEligibleReplica(NamedTuple):
    """An alarm: the group needs a master, and no live replica is eligible."""

    reason: str
    # The live replica with the longest log, which an operator may make master.
    survivor: ReplicaId | None = None


class NoFounder(NamedTuple):
    """The founder of the group is not live yet; no message was ever confirmed."""

    reason: str


class ShortSyncStateSet(NamedTuple):
    """An alarm: the master cannot confirm messages, and no write of the record can help."""

    reason: str
    again_at_ms: int | None = None
    drained: tuple[ReplicaId, ...] = ()  # live replicas that do not count only because of a drain


class FullMaster(NamedTuple):
    """An alarm: the master's disk is full, and no other replica can take over."""

    reason: str


class MetaRollback(NamedTuple):
    """An alarm: a replica has seen a newer record, so this one was restored from a backup.

    Controllers decide nothing until an operator sets the record above those of replicas.
    """

    reason: str
    survivor: ReplicaId | None = None


class TransferRequest(NamedTuple):
    """A request to the master to hand over."""

    target: ReplicaId


Intent: TypeAlias = (
    NoAction
    | RecordWrite
    | NoEligibleReplica
    | NoFounder
    | ShortSyncStateSet
    | FullMaster
    | MetaRollback
    | TransferRequest
)


def decide(record: GroupRecord, observation: GroupObservation, timing: ElectionTiming) -> Intent:
    """Return the next step for the group of a record."""
    live = live_of(record, observation, timing)
    if is_outdated(record, live):
        return _correct(record, observation, live)
    if record.epoch == 0:
        return _found(record, observation, live)
    failure = find_failure(record, observation, timing)
    if failure is not None:
        return _replace(record, observation, timing, live, failure)
    # Only the leading controller takes other steps.
    intent = NoAction() if observation.rank else _lead(record, observation, timing, live)
    if isinstance(intent, NoAction) and _is_too_few(record, observation, timing):
        drained = tuple(alarms.drained_of(record, live))
        return ShortSyncStateSet(alarms.of_too_few(record, live), intent.again_at_ms, drained)
    return intent


def _correct(
    record: GroupRecord, observation: GroupObservation, live: list[Candidate]
) -> MetaRollback:
    """Return the alarm for an outdated record; name a master only if all logs can be compared."""
    reason = alarms.of_rollback(record, newest_seen(live))
    missing = not_compared(record, live, observation.wanted_replicas)
    if not missing:
        return MetaRollback(reason, _longest(live))
    is_in_epoch = is_outdated_in_epoch(record, live)
    return MetaRollback(reason + alarms.of_not_compared(missing, is_in_epoch=is_in_epoch))


def _lead(
    record: GroupRecord,
    observation: GroupObservation,
    timing: ElectionTiming,
    live: list[Candidate],
) -> Intent:
    """Decide about a group whose master has not failed."""
    wanted = observation.wanted_min_in_sync
    if wanted is not None:
        # It rises with the replicas in sync. Above their number, no message would be acknowledged.
        # A retired replica is about to leave the set.
        in_sync = [one for one in record.sss if not is_retired(record, one.replica_id)]
        minimum = min(wanted, max(record.min_in_sync, len(in_sync)))
        if minimum != record.min_in_sync:
            changed = record._replace(min_in_sync=minimum)
            return RecordWrite(
                with_sets(changed, record.sss, frozenset()), f"the spec sets minInSync {wanted}"
            )
    ids = {one.member.replica_id for one in live}
    raised = with_raised_level(record, live=ids, cap=observation.feature_level_max)
    if raised != record:
        level = raised.feature_level
        return RecordWrite(raised, f"all replicas have feature level {level} or a higher one")
    return _retire(record, observation) or _hand_over(record, observation, timing, live)


def _is_too_few(record: GroupRecord, observation: GroupObservation, timing: ElectionTiming) -> bool:
    beat = observation.find_live(record.master, timing)
    return (
        len(record.sss) < record.min_in_sync
        and beat is not None
        and beat.blocked_ms > timing.too_few_ms
    )


def live_of(
    record: GroupRecord, observation: GroupObservation, timing: ElectionTiming
) -> list[Candidate]:
    """Return the registered runs that are live, by replica."""
    candidates = []
    for replica_id, _ in record.replicas:
        member = record.find_member(replica_id)
        beat = observation.find_live(member, timing)
        if member is not None and beat is not None:
            candidates.append(Candidate(member, beat))
    return candidates


def _found(record: GroupRecord, observation: GroupObservation, live: list[Candidate]) -> Intent:
    """Found the group with replica FOUNDER as its master.

    A broker that was alone may have a long log. It acknowledges messages alone, as before, until
    others have copied the log, because a copy takes long. `min_in_sync` then rises to the spec.
    """
    founder = next((one for one in live if one.member.replica_id == FOUNDER), None)
    if founder is None:
        return NoFounder(f"replica {FOUNDER}, which founds the group, is not live yet; start it")
    if observation.has_spec and founder.beat.log_end:
        record = record._replace(min_in_sync=1)
    return RecordWrite(
        with_founder(record, founder.member, log_epoch=founder.beat.log_epoch), "founded"
    )


def _replace(
    record: GroupRecord,
    observation: GroupObservation,
    timing: ElectionTiming,
    live: list[Candidate],
    failure: Failure,
) -> Intent:
    """Elect another master after a failure."""
    since_ms = (
        observation.now_ms if observation.failed_since_ms is None else observation.failed_since_ms
    )
    # A deputy acts if no other controller has, for this time after it saw the failure itself.
    turn_ms = max(since_ms, observation.version_since_ms) + timing.deputy_step_ms * observation.rank
    if observation.rank and observation.now_ms < turn_ms:
        return NoAction(turn_ms)
    able = _able(record, live)
    staying = _staying(record, able)
    chosen = _best_with_room(staying) or best_of(able)
    if chosen is None:
        return _last_resort(record, live)
    return RecordWrite(_elected(record, chosen.member, live, failure.value), failure.value)


def _able(record: GroupRecord, live: list[Candidate]) -> list[Candidate]:
    """Return live members of the sync state set; if there are none, the eligible replicas."""
    members = [one for one in live if one.member in record.sss]
    return members or [one for one in live if may_be_master(record, one.member)]


def _staying(record: GroupRecord, candidates: list[Candidate]) -> list[Candidate]:
    """Return candidates that are not retired: a retired master has to hand over at once."""
    return [one for one in candidates if not is_retired(record, one.member.replica_id)]


def _with_room(candidates: list[Candidate]) -> list[Candidate]:
    """Return candidates that accept messages as a master."""
    return [one for one in candidates if one.beat.health is not ReplicaHealth.FULL]


def _best_with_room(candidates: list[Candidate]) -> Candidate | None:
    """Return the best candidate with room; the best one if none has room."""
    return best_of(_with_room(candidates)) or best_of(candidates)


def _elected(
    record: GroupRecord, master: ReplicaRun, live: list[Candidate], reason: str
) -> GroupRecord:
    return with_master(record, master, {one.member for one in live}, reason=reason)


def _last_resort(record: GroupRecord, live: list[Candidate]) -> Intent:
    """Elect the suspect with the longest log, if all suspects are live and none is clean."""
    suspects = [one for one in live if one.member.replica_id in record.suspects]
    chosen = best_of(suspects)
    # A kept store may have messages that all suspects lack.
    is_complete = bool(record.sss or record.eligible or record.kept_stores)
    if is_complete or chosen is None or len(suspects) < len(record.suspects):
        return NoEligibleReplica(alarms.of_nobody_complete(record, live), _longest(live))
    return RecordWrite(with_survivor(record, chosen.member, reason=LOST_MEMORY), LOST_MEMORY)


def _longest(live: list[Candidate]) -> ReplicaId | None:
    chosen = best_of(live)
    return None if chosen is None else chosen.member.replica_id


def _retire(record: GroupRecord, observation: GroupObservation) -> RecordWrite | None:
    """Take a retired replica out of the sets, if the group does not need it."""
    leaver = find_leaver(record)
    if leaver is not None:
        return RecordWrite(without(record, leaver), f"replica {leaver.replica_id} is retired")
    if observation.wanted_replicas is not None:
        after = with_number(record, observation.wanted_replicas)
        # A rejected step succeeds later, when other replicas have caught up.
        if not isinstance(after, ChangeRejection) and after != record:
            return RecordWrite(after, f"the spec sets {observation.wanted_replicas} replicas")
    return None


def _hand_over(
    record: GroupRecord,
    observation: GroupObservation,
    timing: ElectionTiming,
    live: list[Candidate],
) -> Intent:
    """Decide about a master that works: it may be blocked, slow or full, or asked to transfer."""
    assert record.master is not None, "each epoch has a master"
    others = [one for one in live if one.member != record.master]
    if record.transfer is not None and record.transfer != record.master.replica_id:
        return TransferRequest(record.transfer)
    if is_retired(record, record.master.replica_id):
        members = [one for one in others if one.member in record.sss]
        heir = _best_with_room(_staying(record, members))
        return NoAction() if heir is None else TransferRequest(heir.member.replica_id)
    beat = observation.find_live(record.master, timing)
    if beat is None:
        return NoAction()
    # A blocked master is replaced like a failed one, without the flapping guard.
    if len(record.sss) < record.min_in_sync and beat.blocked_ms > timing.blocked_ms:
        able = [one for one in others if _can_form(record, one, others, timing)]
        chosen = _best_with_room(able)
        if chosen is not None:
            return RecordWrite(_elected(record, chosen.member, live, BLOCKED), BLOCKED)
    guard_ms = (observation.epoch_since_ms or 0) + timing.flapping_guard_ms
    if observation.epoch_since_ms is not None and observation.now_ms < guard_ms:
        return NoAction(guard_ms)
    reached = [
        one for one in _able(record, others) if one.member.replica_id in observation.reached_instead
    ]
    # A full replica takes no messages either, and would hand over again.
    chosen = best_of(_with_room(_staying(record, reached)))
    if chosen is not None:
        return TransferRequest(chosen.member.replica_id)
    if beat.health is ReplicaHealth.SLOW:
        better = [one for one in _able(record, others) if one.beat.health is ReplicaHealth.OK]
        chosen = best_of(_staying(record, better))
        if chosen is not None:
            return TransferRequest(chosen.member.replica_id)
    if beat.health is ReplicaHealth.FULL:
        return _replace_full_master(record, others)
    return NoAction()


def _replace_full_master(record: GroupRecord, others: list[Candidate]) -> Intent:
    """Ask a master whose disk is full to hand over, if enough replicas have room.

    The next master needs `min_in_sync` replicas with room, itself included. A replica counts as
    full until a segment fits, so a group with little room does not change masters repeatedly.
    """
    assert record.master is not None, "each epoch has a master"
    with_room = _with_room(_staying(record, [one for one in others if one.member in record.sss]))
    healthy = [one for one in with_room if one.beat.health is ReplicaHealth.OK]
    chosen = best_of(healthy) or best_of(with_room)
    if chosen is None or len(with_room) < record.min_in_sync:
        return FullMaster(alarms.of_full_master(record, [one.member for one in with_room]))
    return TransferRequest(chosen.member.replica_id)


def _can_form(
    record: GroupRecord, candidate: Candidate, others: list[Candidate], timing: ElectionTiming
) -> bool:
    """Return whether a candidate reaches enough other replicas to confirm messages."""
    silence_ms = dict(candidate.beat.peer_silence_ms)
    reached = sum(
        silence_ms.get(one.member.replica_id, timing.peer_silence_ms + 1) <= timing.peer_silence_ms
        for one in others
        if one.member != candidate.member
    )
    return may_be_master(record, candidate.member) and reached + 1 >= record.min_in_sync


def release(
    record: GroupRecord, *, epoch: int, master: ReplicaRun, target: ReplicaId, live: list[Candidate]
) -> GroupRecord | None:
    """Return the record after a planned transfer; None: it is not allowed."""
    chosen = next(
        (one for one in live if one.member.replica_id == target and one.member in record.sss), None
    )
    if (record.epoch, record.master) != (epoch, master) or chosen is None:
        return None
    # A master that steps down opens its store again. As a member it would block the confirmation
    # of messages meanwhile. If the other members are enough, it leaves the set and joins later.
    others = [one for one in live if one.member != master]
    enough = len(record.sss & {one.member for one in others}) >= max(record.min_in_sync, 2)
    return _elected(record, chosen.member, others if enough else live, HANDED_OVER)
