"""The commit rule: it computes the confirm offset. The rest of this package serves it.

A `Commitment` is the immutable input of the rule. Each view, proposal and ack makes a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tidemill.common.replica_group import Proposal, ReplicaRun, ReplicationView


class Commitment(NamedTuple):
    """The members that must ack in one epoch, their acks, and the resulting confirm offset."""

    me: ReplicaRun
    view: ReplicationView
    epoch_start_end: int  # end of the first record of the epoch
    confirm: int
    # The members of all sets that were proposed since this master learned `view`.
    proposed: frozenset[ReplicaRun] = frozenset()
    acked: tuple[tuple[ReplicaRun, int], ...] = ()  # in this epoch, by this incarnation (F-11)
    # Runs that the master is about to propose. The confirm offset waits for them, so that they can
    # catch up with a growing log.
    joiners: frozenset[ReplicaRun] = frozenset()
    # Runs that were silent. Their acks confirm nothing more until they ack again.
    silent: frozenset[ReplicaRun] = frozenset()
    # The master's process stood still, and its epoch may have ended. Acks confirm nothing until the
    # controllers accept a proposal of this epoch.
    is_doubtful: bool = False


def confirm_offset(
    *,
    confirmed: AbstractSet[ReplicaRun],
    proposed: AbstractSet[ReplicaRun],
    min_in_sync: int,
    acked: Mapping[ReplicaRun, int],
    epoch_start_end: int,
    before: int,
) -> int:
    """Return the confirm offset. It is at least `before`.

    Invariant: every member of the union must ack, because each of these sets may be the recorded
    one by now. The minimum counts `confirmed` alone: until a larger set is recorded, an eligible
    replica may lack what only the proposed members have.
    """
    if len(confirmed) < min_in_sync:
        return before
    end = min(acked.get(member, 0) for member in confirmed | proposed)
    # Records of older epochs are confirmed together with the first record of this epoch.
    return max(before, end) if end >= epoch_start_end else before


def with_view(commitment: Commitment, view: ReplicationView) -> Commitment:
    """Return the commitment after a newer view of the epoch. It ends all earlier proposals."""
    if view.version <= commitment.view.version:
        return commitment
    known = (commitment.view.epoch, commitment.me)
    assert (view.epoch, view.master) == known, "the view of another epoch"
    return _confirmed(commitment._replace(view=view, proposed=frozenset()))


def with_proposal(
    commitment: Commitment, members: frozenset[ReplicaRun]
) -> tuple[Commitment, Proposal]:
    """Return the commitment and the proposal of a set. The set is in force before it is sent."""
    me, view = commitment.me, commitment.view
    assert me in members, "a master belongs to its set"
    proposal = Proposal(view.epoch, view.version, me, members)
    return commitment._replace(proposed=commitment.proposed | members), proposal


def with_ack(commitment: Commitment, member: ReplicaRun, end: int) -> Commitment:
    """Return the commitment after `member` acked everything before `end`.

    `member` is a replica or the master itself. Acks belong to this epoch.
    """
    acked = dict(commitment.acked)
    if end <= acked.get(member, 0) and member not in commitment.silent:
        return commitment
    acked[member] = max(end, acked.get(member, 0))
    return _confirmed(
        commitment._replace(acked=tuple(sorted(acked.items())), silent=commitment.silent - {member})
    )


def without_acks_of(commitment: Commitment, member: ReplicaRun) -> Commitment:
    """Return the commitment without the acks of a run that belongs to no set."""
    acked = tuple(entry for entry in commitment.acked if entry[0] != member)
    return commitment._replace(acked=acked, silent=commitment.silent - {member})


def with_silent(commitment: Commitment, member: ReplicaRun) -> Commitment:
    """Return the commitment after a silence of `member`."""
    if member in commitment.silent:
        return commitment
    return commitment._replace(silent=commitment.silent | {member})


def with_doubt(commitment: Commitment, *, is_doubtful: bool) -> Commitment:
    """Return the commitment after a standstill of the master, or after the end of the doubt."""
    return _confirmed(commitment._replace(is_doubtful=is_doubtful))


def with_joiners(commitment: Commitment, joiners: frozenset[ReplicaRun]) -> Commitment:
    """Return the commitment that also waits for `joiners`.

    The joiners were not proposed, so the master may stop waiting at any time.
    """
    if joiners == commitment.joiners:
        return commitment
    return _confirmed(commitment._replace(joiners=joiners))


def has_caught_up(commitment: Commitment, member: ReplicaRun) -> bool:
    """Return whether `member` has everything confirmed and the first record of this epoch."""
    need = max(commitment.confirm, commitment.epoch_start_end)
    return dict(commitment.acked).get(member, 0) >= need


def _confirmed(commitment: Commitment) -> Commitment:
    if commitment.is_doubtful:
        return commitment
    confirm = confirm_offset(
        confirmed=commitment.view.sss,
        proposed=commitment.proposed | commitment.joiners,
        min_in_sync=commitment.view.min_in_sync,
        acked={run: end for run, end in commitment.acked if run not in commitment.silent},
        epoch_start_end=commitment.epoch_start_end,
        before=commitment.confirm,
    )
    return commitment if confirm == commitment.confirm else commitment._replace(confirm=confirm)
