"""The commit rule: up to where the log is confirmed. Everything else of this package serves it.

A `Commitment` is what the rule rests on, as a value: what is learned, proposed and acked makes
another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tidemill.common.replica_group import Proposal, ReplicaRun, ReplicationView


class Commitment(NamedTuple):
    """Who must ack in one epoch, who has, and what follows."""

    me: ReplicaRun
    view: ReplicationView
    epoch_start_end: int  # where the first record of the epoch ends
    confirm: int
    # Everybody in a set that was proposed since `view` was learned.
    proposed: frozenset[ReplicaRun] = frozenset()
    acked: tuple[tuple[ReplicaRun, int], ...] = ()  # in this epoch, of this incarnation (F-11)
    # Who is about to be proposed: waited for, so that it catches up with a log that goes on.
    joiners: frozenset[ReplicaRun] = frozenset()


def confirm_offset(
    *,
    confirmed: AbstractSet[ReplicaRun],
    proposed: AbstractSet[ReplicaRun],
    min_in_sync: int,
    acked: Mapping[ReplicaRun, int],
    epoch_start_end: int,
    before: int,
) -> int:
    """Return up to where the log is confirmed; it was `before`, and never goes back.

    Invariant: acks are needed of the union, since each of these sets may be the recorded one by
    now; the minimum is counted on `confirmed` alone, since until a larger set is recorded there may
    be a replica that is eligible and lacks what only the proposed have.
    """
    if len(confirmed) < min_in_sync:
        return before
    end = min(acked.get(member, 0) for member in confirmed | proposed)
    # What older epochs left behind is confirmed together with the first record of this one.
    return max(before, end) if end >= epoch_start_end else before


def with_view(commitment: Commitment, view: ReplicationView) -> Commitment:
    """Return what follows from a newer view of the epoch: it ends all that was proposed before."""
    if view.version <= commitment.view.version:
        return commitment
    known = (commitment.view.epoch, commitment.me)
    assert (view.epoch, view.master) == known, "another one's epoch"
    return _confirmed(commitment._replace(view=view, proposed=frozenset()))


def with_proposal(
    commitment: Commitment, wanted: frozenset[ReplicaRun]
) -> tuple[Commitment, Proposal]:
    """Return what follows from proposing a set, and the proposal: the set is in force before."""
    me, view = commitment.me, commitment.view
    assert me in wanted, "a master belongs to its set"
    proposal = Proposal(view.epoch, view.version, me, wanted)
    return commitment._replace(proposed=commitment.proposed | wanted), proposal


def with_ack(commitment: Commitment, member: ReplicaRun, end: int) -> Commitment:
    """Return what follows from `member`, a replica or the master itself, having all before `end`.

    Of this epoch, since a master lives no longer.
    """
    acked = dict(commitment.acked)
    if end <= acked.get(member, 0):
        return commitment
    acked[member] = end
    return _confirmed(commitment._replace(acked=tuple(sorted(acked.items()))))


def without_acks_of(commitment: Commitment, member: ReplicaRun) -> Commitment:
    """Return what is left when a run is forgotten that belongs to no set."""
    acked = tuple(entry for entry in commitment.acked if entry[0] != member)
    return commitment._replace(acked=acked)


def with_joiners(commitment: Commitment, joiners: frozenset[ReplicaRun]) -> Commitment:
    """Return what follows from waiting for others too; nobody was told, so it may end any time."""
    if joiners == commitment.joiners:
        return commitment
    return _confirmed(commitment._replace(joiners=joiners))


def has_caught_up(commitment: Commitment, member: ReplicaRun) -> bool:
    """Whether it holds all that is confirmed, and the first record of this epoch."""
    need = max(commitment.confirm, commitment.epoch_start_end)
    return dict(commitment.acked).get(member, 0) >= need


def _confirmed(commitment: Commitment) -> Commitment:
    confirm = confirm_offset(
        confirmed=commitment.view.sss,
        proposed=commitment.proposed | commitment.joiners,
        min_in_sync=commitment.view.min_in_sync,
        acked=dict(commitment.acked),
        epoch_start_end=commitment.epoch_start_end,
        before=commitment.confirm,
    )
    return commitment if confirm == commitment.confirm else commitment._replace(confirm=confirm)
