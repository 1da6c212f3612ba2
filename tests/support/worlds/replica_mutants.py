"""Relaxed rules of the replication: omitted rules and omitted comparisons.

An exploration with a relaxed rule must find a broken invariant. Otherwise the rule is unnecessary,
or the exploration does not cover it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.simulation.replica_values import ValueLog
from tests.support.disk import claims as claim
from tests.support.worlds import replica_world
from tidemill.broker.engine.replication import confirm as commits
from tidemill.broker.engine.replication import epoch_journal, fencing
from tidemill.broker.engine.replication.confirm import Commitment
from tidemill.broker.engine.replication.epoch_journal import (
    Agreement,
    CommonPrefix,
    Journal,
    LogExtent,
)
from tidemill.common.replica_group import Proposal, ReplicaRun, ReplicationView
from tidemill.controller.election import elect, membership, record, registration
from tidemill.controller.election.record import GroupRecord, ids_of

_confirm_offset = commits.confirm_offset
_with_ack, _with_proposal = commits.with_ack, commits.with_proposal
_with_sets, _change, _register = (
    record.with_sets,
    membership.change_sync_state_set,
    registration.register,
)
_with_master, _agree = elect.with_master, epoch_journal.agree


def _minimum_of_the_union(**arguments: Any) -> int:
    union = arguments["confirmed"] | arguments["proposed"]
    return _confirm_offset(**{**arguments, "confirmed": union})


def _acks_of_the_confirmed_alone(**arguments: Any) -> int:
    return _confirm_offset(**{**arguments, "proposed": frozenset()})


def _no_minimum(**arguments: Any) -> int:
    return _confirm_offset(**{**arguments, "min_in_sync": 0})


def _confirms_what_it_inherits(**arguments: Any) -> int:
    return _confirm_offset(**{**arguments, "epoch_start_end": 0})


def _ack_of_any_run(commitment: Commitment, member: ReplicaRun, end: int) -> Commitment:
    same = [one for one in commitment.view.sss if one.replica_id == member.replica_id]
    return _with_ack(commitment, same[0] if same else member, end)


def _proposal_ends_by_itself(
    commitment: Commitment, wanted: frozenset[ReplicaRun]
) -> tuple[Commitment, Proposal]:
    after, proposal = _with_proposal(commitment._replace(proposed=frozenset()), wanted)
    return after, proposal


def _keeps_eligible(before: GroupRecord, sss: frozenset[ReplicaRun], also: Any) -> GroupRecord:
    kept = (before.eligible | also) - ids_of(sss)
    return _with_sets(before, sss, also)._replace(eligible=kept)


def _unclean_is_clean(before: GroupRecord, request: Any, *more: Any) -> Any:
    return _register(before, request._replace(is_clean=True), *more)


def _unclean_is_eligible(before: GroupRecord, request: Any, *more: Any) -> Any:
    after = _register(before, request, *more)
    if isinstance(after, GroupRecord) and not request.is_clean:
        id_ = request.member.replica_id
        was = any(one.replica_id == id_ for one in before.sss)
        if was and len(after.sss) < after.min_in_sync:
            replica = after.find(id_)
            assert replica is not None
            after = after.with_replica(id_, replica._replace(is_unclean=False))
            return after._replace(eligible=after.eligible | {id_})
    return after


def _anybody_registers(before: GroupRecord, request: Any, *more: Any) -> Any:
    known = before.find(request.member.replica_id)
    instead_of = "" if known is None else known.incarnation
    return _register(before, request._replace(instead_of=instead_of), *more)


def _any_version(before: GroupRecord, proposal: Proposal, live: Any) -> Any:
    return _change(before, proposal._replace(version=before.version), live)


def _any_epoch(before: GroupRecord, proposal: Proposal, live: Any) -> Any:
    assert before.master is not None
    same = before._replace(epoch=proposal.epoch, master=proposal.master)
    after = _change(same, proposal._replace(version=before.version), live)
    if isinstance(after, GroupRecord):
        return after._replace(epoch=before.epoch, master=before.master)
    return after


def _any_run_joins(before: GroupRecord, proposal: Proposal, live: Any) -> Any:
    runs = {one.replica_id: before.find_member(one.replica_id) for one in proposal.sss}
    sss = frozenset(one for one in runs.values() if one is not None)
    return _change(before, proposal._replace(sss=sss), live | sss)


def _everybody_alive_goes_along(
    before: GroupRecord, master: ReplicaRun, live: Any, **more: Any
) -> GroupRecord:
    after = _with_master(before, master, live, **more)
    all_runs = [before.find_member(id_) for id_, _ in before.replicas]
    sss = frozenset(one for one in all_runs if one is not None)
    return after._replace(sss=sss, eligible=frozenset())


def _anybody_is_elected(before: GroupRecord, member: ReplicaRun) -> bool:
    return before.find_member(member.replica_id) == member


def _unclean_is_elected(before: GroupRecord, member: ReplicaRun) -> bool:
    ids = ids_of(before.sss) | before.eligible | before.suspects
    return member.replica_id in ids


def _starts_do_not_matter(master: LogExtent, replica: LogExtent) -> Agreement:
    starts = {entry.epoch: entry.start for entry in replica.journal}
    same = tuple(
        entry._replace(start=starts.get(entry.epoch, entry.start)) for entry in master.journal
    )
    return _agree(master._replace(journal=same), replica)


def _cuts_at_the_shorter_log(master: LogExtent, replica: LogExtent) -> Agreement:
    return CommonPrefix(min(master.log_end, replica.log_end))


def _keeps_what_was_cut(journal: Journal, _log_offset: int) -> Journal:
    return journal


def _last_epoch_is_kept(journal: Journal, epoch: int, start: int, *, log_min: int) -> Journal:
    """Keep the existing entry if a new one begins at the same offset: E9."""
    if journal and journal[-1].start >= start:
        return journal
    return (*journal, epoch_journal.EpochEntry(epoch, start))


def _older_views(known: ReplicationView | None, view: ReplicationView, *, epoch_seen: int) -> bool:
    return view.epoch >= epoch_seen


def _older_epochs(known: ReplicationView | None, view: ReplicationView, *, epoch_seen: int) -> bool:
    return known is None or view.version > known.version


def _any_run_leads(view: ReplicationView, me: ReplicaRun, *, epoch_seen: int) -> bool:
    return view.master is not None and view.master.replica_id == me.replica_id


def _leads_again(view: ReplicationView, me: ReplicaRun, **_: Any) -> bool:
    return view.master == me


def _takes_any_view(commitment: Commitment, view: ReplicationView) -> Commitment:
    return _with_view(commitment._replace(view=view._replace(version=-1)), view)


def _ends_in_memory(n: int, node: Any, scope: Any) -> Any:
    return _acks_of(n, node, scope._replace(is_synced=False))


_acks_of = replica_world.acks_of
_with_view = commits.with_view


def _always(*_: Any, **__: Any) -> bool:
    return True


def _forgets_at_start(last: Any, *, boot_id: str, is_accepted: bool) -> Any:
    return claim.LastRun(boot_id)


Patch = tuple[Any, str, Any]
# The first six are those of Part VIII.
MUTANTS: dict[str, list[Patch]] = {
    "the minimum is counted on the union": [(commits, "confirm_offset", _minimum_of_the_union)],
    "no union while a proposal is under way": [
        (commits, "confirm_offset", _acks_of_the_confirmed_alone)
    ],
    "eligible is not cleared": [(record, "with_sets", _keeps_eligible)],
    "an unclean start stays a member": [(registration, "register", _unclean_is_clean)],
    "unclean is not sticky": [(claim, "after_registration", _forgets_at_start)],
    "acks count for any run": [(commits, "with_ack", _ack_of_any_run)],
    "acks before the sync": [
        (replica_world, "acks_of", _ends_in_memory),
        (ValueLog, "durable_offset", property(lambda log: log.log_end)),
    ],
    "no minimum": [(commits, "confirm_offset", _no_minimum)],
    "a proposal ends with the next one": [(commits, "with_proposal", _proposal_ends_by_itself)],
    "an unclean start is eligible": [(registration, "register", _unclean_is_eligible)],
    "a proposal against an older version": [(membership, "change_sync_state_set", _any_version)],
    "a proposal of an older epoch": [(membership, "change_sync_state_set", _any_epoch)],
    "another run joins": [(membership, "change_sync_state_set", _any_run_joins)],
    "every live replica joins": [(elect, "with_master", _everybody_alive_goes_along)],
    "any replica is elected": [(elect, "may_be_master", _anybody_is_elected)],
    "the unclean are elected": [(elect, "may_be_master", _unclean_is_elected)],
    "logs agree where both go on": [(epoch_journal, "agree", _cuts_at_the_shorter_log)],
    "the journal keeps cut epochs": [(epoch_journal, "cut_at", _keeps_what_was_cut)],
    "an epoch begins where another did": [
        (epoch_journal, "cut_at", _keeps_what_was_cut),
        (epoch_journal, "with_epoch", _last_epoch_is_kept),
    ],
    "an older view is news": [
        (fencing, "is_news", _older_views),
        (commits, "with_view", _takes_any_view),
    ],
    "an older epoch begins again": [
        (fencing, "is_news", _older_epochs),
        (fencing, "may_begin", _leads_again),
    ],
    "another run is master": [(fencing, "may_lead", _any_run_leads)],
    "a deposed master serves, and is followed": [
        (fencing, "may_serve", _always),
        (fencing, "may_follow", _always),
    ],
    "an ack of another epoch": [(fencing, "is_of_epoch", _always)],
}


# Rules that whole processes in the simulation never use, with the test that needs each rule. In the
# exploration messages do not belong to a stream, so it needs both rules.
#   an ack of another epoch: a master lives for one epoch and accepts acks only on streams that it
#     has welcomed. A replica acks on the stream that it dialled in this epoch. So a late ack of
#     another epoch comes on an unknown stream (`Master.ack`, `Replication.receive`).
#   acks of another run: an ack counts on the stream of its run. If a clean run replaces a member,
#     it has all messages that the member acked, so the ack may count for either run. Any other run
#     is not a member, and the master does not welcome it while it hears the previous run
#     (`Master._has_another`). Later the previous run's stream has ended (`_replace_streams_of`), so
#     its acks do not arrive after the new run has become a member.
_EXPLORED = "tests/property/test_replication_exploration.py::"
NEVER_ASKED = {
    "acks count for any run": f"{_EXPLORED}test_the_exploration_finds_acks_of_another_run",
    "an ack of another epoch": f"{_EXPLORED}test_the_exploration_finds_each_relaxed_rule",
}

# Relaxed rules without a violation in any exploration, because another rule gives the same
# guarantee. The rules stay as a second line of defence.
#   the first record: the elected replica has all records of every member, of any epoch
#   the replaced run of a registration: a late one changes no bytes, but fences the live run
#   the starts of epochs: each epoch begins with a record, so all logs agree on its start
NOT_REFUTED: dict[str, list[Patch]] = {
    "a tail is confirmed without its epoch's first record": [
        (commits, "confirm_offset", _confirms_what_it_inherits)
    ],
    "a late registration counts": [(registration, "register", _anybody_registers)],
    "logs agree where epochs are the same": [(epoch_journal, "agree", _starts_do_not_matter)],
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Relax a rule in all its users during the block."""
    with contextlib.ExitStack() as stack:
        for patch in {**MUTANTS, **NOT_REFUTED}[name]:
            stack.enter_context(replaced(*patch))
        yield


@contextlib.contextmanager
def replaced(owner: Any, attribute: str, replacement: Any) -> Iterator[None]:
    """Replace a rule in its owner and in all modules that import it, during the block."""
    with contextlib.ExitStack() as stack:
        for user, name in _users(owner, attribute, _module_of(replacement)):
            stack.enter_context(mock.patch.object(user, name, replacement))
        yield


def _module_of(replacement: Any) -> str:
    """Return the module of a relaxed rule; empty for a value."""
    return replacement.__module__ if inspect.isfunction(replacement) else ""


def _users(owner: Any, attribute: str, author: str) -> list[tuple[Any, str]]:
    rule, found = inspect.getattr_static(owner, attribute), [(owner, attribute)]
    for name, module in list(sys.modules.items()):
        # Skip the author's module: a relaxed rule calls the original rule.
        if module is owner or name == author or not name.startswith(("tests.", "tidemill.")):
            continue
        # Equal small values are the same object, so values must also have the same name.
        found += [
            (module, one)
            for one, value in vars(module).items()
            if value is rule and (one == attribute or callable(rule))
        ]
    return found
