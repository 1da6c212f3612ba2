"""A model of replicas, their record and a network: one value whose steps call production decisions.

The model covers the surroundings of these decisions. Replicas crash, and their disks keep a part of
the log. Messages are late, repeated or lost. Controllers may take any replica for alive or dead.
A log is a tuple of records, and offsets count records. A record is (epoch, number). Number 0 is the
first record of its epoch. Records of epoch 0 are those of a broker that was alone.

    memory scope   a written record survives a kill; a power cut removes any tail of the log, and
                   the next start reports itself as unclean until a registration is accepted
    fsync scope    a synced record survives; a crash removes any tail of the other records

The step that breaks an invariant raises `InvariantBroken` with its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from tests.support.disk import claims as claim
from tests.support.disk.claims import LastRun
from tidemill.broker.engine.replication import confirm as commits
from tidemill.broker.engine.replication import epoch_journal, fencing, truncation
from tidemill.broker.engine.replication.confirm import Commitment
from tidemill.broker.engine.replication.epoch_journal import (
    CommonPrefix,
    EpochEntry,
    Journal,
    LogExtent,
)
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView
from tidemill.controller.election import elect, membership, registration
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, RegisteredRun, view_of, with_sets
from tidemill.controller.election.registration import FencedRun, Registration

Entry = tuple[int, int]  # epoch, and number in it
Log = tuple[Entry, ...]


class InvariantBroken(AssertionError):
    """An invariant does not hold."""


class Scope(NamedTuple):
    """Limits on the number of events. They make an exploration finite."""

    is_synced: bool  # the fsync scope, or the memory scope
    epochs: int = 3
    appends: int = 1
    crashes: int = 1
    power_cuts: int = 0  # crashes that lose bytes; included in `crashes`
    proposals: int = 2
    stale_views: bool = True
    tells_confirm: bool = True  # the master sends replicas its confirmed offset
    min_in_sync: int = 2
    crashes_in_begin: bool = False  # after the journal has an epoch, and before its first record


class LateAck(NamedTuple):
    """An ack in flight."""

    epoch: int
    member: ReplicaRun
    end: int


class Node(NamedTuple):
    """One replica: its process and its disk."""

    is_alive: bool
    run: int
    seen: int
    log: Log
    durable: int  # records that survive a crash; in the memory scope all of them
    journal: Journal
    confirm: int  # the confirmed offset that this replica knows
    boot: int  # number of power cuts of its machine
    last: LastRun
    view: ReplicationView | None  # in the process's memory only
    stream: int  # epoch of the master that it follows; 0: none
    lead: Commitment | None
    request: Registration | None  # in flight to the controllers, even after its sender crashed
    late: frozenset[LateAck]  # acks from before a crash or a change of epoch
    mail: ReplicationView | None  # a delayed view


class State(NamedTuple):
    """The whole model at one moment."""

    record: GroupRecord
    nodes: tuple[Node, ...]
    wire: frozenset[Proposal]
    committed: Log  # all records that any master has confirmed
    appends: int
    crashes: int
    power_cuts: int
    proposals: int


Step = tuple[str, State]


def run_of(replica_id: int, run: int) -> ReplicaRun:
    """Return the identity of a replica's run."""
    return ReplicaRun(ReplicaId(replica_id), f"{replica_id}.{run}")


def beginning(scope: Scope, *, members: tuple[int, ...] = (0, 1, 2)) -> State:
    """Return a group in its first epoch. Replica 0 is the master, and `members` are in sync."""
    sss = frozenset(run_of(n, 0) for n in members)
    replicas = tuple(
        (ReplicaId(n), RegisteredRun(f"store {n}", f"{n}.0", "", is_unclean=False))
        for n in range(3)
    )
    record = GroupRecord(
        min_in_sync=scope.min_in_sync,
        epoch=1,
        version=1,
        master=run_of(0, 0),
        sss=sss,
        replicas=replicas,
    )
    view = view_of(record)
    first: Log = ((1, 0),)
    nodes = []
    for n in range(3):
        is_member = n in members
        log = first if is_member else ()
        lead = None
        if n == 0:
            acked = tuple(sorted((member, 1) for member in sss))
            is_confirmed = len(sss) >= scope.min_in_sync
            lead = Commitment(run_of(0, 0), view, 1, int(is_confirmed), acked=acked)
        nodes.append(
            Node(
                is_alive=True,
                run=0,
                seen=1,
                log=log,
                durable=len(log),
                journal=(EpochEntry(1, 0),) if is_member else (),
                confirm=0,
                boot=0,
                last=LastRun("0"),
                view=view if n == 0 else None,
                stream=0 if n == 0 else 1,
                lead=lead,
                request=None,
                late=frozenset(),
                mail=None,
            )
        )
    committed = first if len(sss) >= scope.min_in_sync else ()
    return State(record, tuple(nodes), frozenset(), committed, 0, 0, 0, 0)


def beginning_alone(scope: Scope) -> State:
    """Return a group in its first epoch, of a broker that was alone and has a log.

    The record permits one replica until enough are in sync (`decide`).
    """
    begin = beginning(scope._replace(min_in_sync=1), members=(0,))
    log: Log = ((0, 0), (0, 1))
    founder = begin.nodes[0]._replace(
        log=log, durable=len(log), journal=(), confirm=len(log), view=None, lead=None, seen=0
    )
    others = tuple(node._replace(seen=0, stream=0) for node in begin.nodes[1:])
    return begin._replace(nodes=(founder, *others), committed=log)


def steps(state: State, scope: Scope) -> Iterator[Step]:
    """Yield all possible next steps. Raises Broken if a step breaks an invariant."""
    for n, node in enumerate(state.nodes):
        if node.is_alive:
            yield from _node_steps(state, n, node, scope)
        else:
            yield f"start {n}", _started(state, n, node)
        if node.request is not None:
            yield f"register {n}", _registered(state, n, node, node.request)
    # Sorted, because the order of a set differs between processes.
    for proposal in sorted(state.wire, key=lambda one: (one.epoch, one.version, _names(one.sss))):
        # The controller takes all replicas for alive; that does not matter here.
        live = {run_of(n, node.run) for n, node in enumerate(state.nodes)}
        after = membership.change_sync_state_set(state.record, proposal, live)
        if not isinstance(after, ChangeRejection):
            yield f"accept {_names(proposal.sss)}", _with_record(state, after)
    if state.record.epoch < scope.epochs:
        yield from _elections(state)
    if state.record.min_in_sync < scope.min_in_sync <= len(state.record.sss):
        raised = state.record._replace(min_in_sync=scope.min_in_sync)
        raised = with_sets(raised, raised.sss, frozenset())
        yield f"raise min-in-sync to {scope.min_in_sync}", _with_record(state, raised)


def _node_steps(state: State, n: int, node: Node, scope: Scope) -> Iterator[Step]:
    master = state.record.master
    if node.lead is not None or (master is not None and master.replica_id == n):
        # Other replicas learn an epoch from its master. An earlier view would only limit them.
        after = _learned(state, n, node, view_of(state.record), scope)
        yield f"learn {n}", after
        begun = after.nodes[n]
        may_crash = scope.crashes_in_begin and state.crashes < scope.crashes
        if may_crash and len(begun.log) > len(node.log):
            ready = node._replace(journal=begun.journal, seen=begun.seen)
            crashed = _crashed(state, n, ready, len(node.log), scope, is_dirty=False)
            yield f"crash {n} before the first record of its epoch", crashed
    if scope.stale_views:
        if master is not None and master.replica_id == n:
            late = node._replace(mail=view_of(state.record))
            yield f"send a view to {n}, slowly", _with_node(state, n, late)
        if node.mail is not None:
            yield f"learn late {n}", _learned(state, n, node, node.mail, scope)
    if node.durable < len(node.log):
        synced = node._replace(durable=len(node.log))
        yield f"sync {n}", _own_ack(state, n, synced, scope)
    if node.lead is not None:
        yield from _master_steps(state, n, node, node.lead, scope)
    if state.crashes < scope.crashes:
        kept_from = node.durable if scope.is_synced else len(node.log)
        for kept in range(kept_from, len(node.log) + 1):
            yield f"crash {n}, {kept} left", _crashed(state, n, node, kept, scope, is_dirty=False)
        if state.power_cuts < scope.power_cuts:
            for kept in range(len(node.log)):
                cut = _crashed(state, n, node, kept, scope, is_dirty=True)
                yield (f"power cut {n}, {kept} left", cut._replace(power_cuts=state.power_cuts + 1))


def _master_steps(
    state: State, n: int, node: Node, lead: Commitment, scope: Scope
) -> Iterator[Step]:
    if state.appends < scope.appends:
        numbered = (lead.view.epoch, sum(entry[0] == lead.view.epoch for entry in node.log))
        appended = _written(node, (*node.log, numbered), scope)
        yield (
            f"append {n}",
            _own_ack(state, n, appended, scope)._replace(appends=state.appends + 1),
        )
    for r, other in enumerate(state.nodes):
        if r != n and other.is_alive and other.lead is None:
            yield from _replications(state, n, node, lead, r, other, scope)
        for ack in sorted(other.late | acks_of(r, other, scope)):
            if r != n and fencing.is_of_epoch(ack.epoch, lead.view.epoch):
                after = commits.with_ack(lead, ack.member, ack.end)
                if after is not lead:
                    yield f"hear: {n} of {r}, which has {ack.end}", _led(state, n, node, after)
    if state.proposals < scope.proposals:
        yield from _proposals(state, n, node, lead)


def acks_of(n: int, node: Node, scope: Scope) -> frozenset[LateAck]:
    """Return the acks that a replica may have in flight to its master."""
    if not node.is_alive or not node.stream:
        return frozenset()
    if not fencing.may_follow(node.stream, epoch_seen=node.seen):
        return frozenset()
    end = node.durable if scope.is_synced else len(node.log)
    return frozenset({LateAck(node.stream, run_of(n, node.run), end)})


def _written(node: Node, log: Log, scope: Scope) -> Node:
    return node._replace(log=log, durable=node.durable if scope.is_synced else len(log))


def _own_ack(state: State, n: int, node: Node, scope: Scope) -> State:
    """Count the master's own log end as an ack."""
    if node.lead is None:
        return _with_node(state, n, node)
    end = node.durable if scope.is_synced else len(node.log)
    return _led(state, n, node, commits.with_ack(node.lead, node.lead.me, end))


def _led(state: State, n: int, node: Node, lead: Commitment) -> State:
    """Give a master its new commitment, and check the records that it confirms."""
    confirmed = node.log[: lead.confirm]
    after = _with_node(state, n, node._replace(lead=lead, confirm=max(node.confirm, lead.confirm)))
    short, long = sorted((confirmed, state.committed), key=len)
    if long[: len(short)] != short:
        raise InvariantBroken(f"F-5: {n} confirms {confirmed}, and {state.committed} was confirmed")
    if len(confirmed) > len(state.committed):
        after = after._replace(committed=confirmed)
        check_sets(after)
    return after


def _replications(
    state: State, n: int, node: Node, lead: Commitment, r: int, other: Node, scope: Scope
) -> Iterator[Step]:
    epoch = lead.view.epoch
    if not fencing.may_serve(epoch, epoch_seen=other.seen):
        deposed = node._replace(lead=None, stream=0, view=None, seen=other.seen)
        yield f"meet: {n} serves {r}, which has seen more", _with_node(state, n, deposed)
        return
    if not fencing.may_follow(epoch, epoch_seen=other.seen):
        return
    own = epoch_journal.cut_at(other.journal, len(other.log))
    mine = LogExtent(epoch_journal.cut_at(node.journal, len(node.log)), 0, len(node.log))
    agreement = epoch_journal.agree(mine, LogExtent(own, 0, len(other.log)))
    if not isinstance(agreement, CommonPrefix):
        raise InvariantBroken(f"F-24: {r} and {n} diverge: {agreement}")
    cut = agreement.offset
    if not truncation.may_truncate(
        own, cut=cut, confirm=other.confirm, unclean_since=state.record.unclean_since
    ):
        raise InvariantBroken(
            f"F-5: {r} should cut at {cut}, and knows of {other.confirm} confirmed"
        )
    late = other.late if other.stream == epoch else other.late | acks_of(r, other, scope)
    kept = other._replace(
        late=late,
        seen=epoch,
        stream=epoch,
        log=other.log[:cut],
        durable=min(other.durable, cut),
        journal=node.journal,
    )
    for count in (0, 1) if cut < len(node.log) else (0,):
        log = kept.log + node.log[cut : cut + count]
        # In production the replicas compare a checksum of the bytes before the cut.
        if log != node.log[: len(log)]:
            raise InvariantBroken(f"F-6: {r} has {log} of {n}'s {node.log}")
        confirm = kept.confirm
        if scope.tells_confirm:
            confirm = max(confirm, min(lead.confirm, len(log)))
        copied = _written(kept, log, scope)._replace(confirm=confirm)
        if copied != other:
            yield f"copy: {r} takes {count} of {n}", _with_node(state, r, copied)


def _proposals(state: State, n: int, node: Node, lead: Commitment) -> Iterator[Step]:
    known = sorted(
        member
        for member in lead.view.sss | {member for member, _ in lead.acked}
        if member != lead.me and (member in lead.view.sss or commits.has_caught_up(lead, member))
    )
    for count in range(len(known) + 1):
        for chosen in combinations(known, count):
            wanted = frozenset({lead.me, *chosen})
            if len({member.replica_id for member in wanted}) < len(wanted):
                continue
            after, proposal = commits.with_proposal(lead, wanted)
            if proposal not in state.wire:
                proposed = _led(state, n, node, after)
                yield (
                    f"propose: {n} wants {_names(wanted)}",
                    proposed._replace(wire=state.wire | {proposal}, proposals=state.proposals + 1),
                )


def _learned(state: State, n: int, node: Node, view: ReplicationView, scope: Scope) -> State:
    """Take over a view as `Replication.learn` does."""
    if not fencing.is_news(node.view, view, epoch_seen=node.seen):
        return state
    me, lead = run_of(n, node.run), node.lead
    leads = fencing.may_lead(view, me, epoch_seen=node.seen)
    late = node.late if leads and lead is not None else node.late | acks_of(n, node, scope)
    node = node._replace(view=view, seen=max(node.seen, view.epoch), late=late)
    if lead is not None:
        if view.epoch == lead.view.epoch and leads:
            return _led(state, n, node, commits.with_view(lead, view))
        if not leads:
            # The broker opens its engine again and forgets all views except the epoch.
            return _with_node(state, n, node._replace(lead=None, stream=0, view=None))
    start = len(node.log)
    log_epoch = epoch_journal.last_epoch(epoch_journal.cut_at(node.journal, start))
    if not fencing.may_begin(view, me, epoch_seen=node.seen, log_epoch=log_epoch):
        return _with_node(state, n, node._replace(view=None))
    earlier = epoch_journal.cut_at(node.journal, start)
    journal = epoch_journal.with_epoch(earlier, view.epoch, start, log_min=0)
    for other in state.nodes:
        if other.lead is not None and other.lead.me != me and other.lead.view.epoch == view.epoch:
            raise InvariantBroken(f"F-1: two masters of epoch {view.epoch}")
    begun = _written(node, (*node.log, (view.epoch, 0)), scope)._replace(
        journal=journal, stream=0, lead=Commitment(me, view, start + 1, node.confirm)
    )
    return _own_ack(state, n, begun, scope)


def _crashed(state: State, n: int, node: Node, kept: int, scope: Scope, *, is_dirty: bool) -> State:
    node = node._replace(
        late=node.late | acks_of(n, node, scope),
        is_alive=False,
        log=node.log[:kept],
        durable=kept,
        lead=None,
        stream=0,
        view=None,
        confirm=min(node.confirm, kept),
        boot=node.boot + is_dirty,
    )
    return _with_node(state, n, node)._replace(crashes=state.crashes + 1)


def has_lost(node: Node) -> bool:
    """Return whether the replica lost bytes that it may have acked, and has not reported it."""
    return node.last.boot_id != str(node.boot)


def _started(state: State, n: int, node: Node) -> State:
    known = state.record.find(ReplicaId(n))
    assert known is not None, "all have registered once"
    run, boot_id = node.run + 1, str(node.boot)
    is_clean = claim.claims_clean(
        node.last, boot_id=boot_id, log_end=len(node.log), acks_are_durable=False
    )
    last = claim.after_registration(node.last, boot_id=boot_id, is_accepted=False)
    request = Registration(
        run_of(n, run), known.incarnation, known.store_uuid, "", is_clean=is_clean
    )
    return _with_node(state, n, node._replace(is_alive=True, run=run, request=request, last=last))


def _registered(state: State, n: int, node: Node, request: Registration) -> State:
    after = registration.register(state.record, request)
    is_mine = request.member == run_of(n, node.run)
    if isinstance(after, FencedRun):
        # This run ends. The next run names another predecessor.
        return _with_node(
            state, n, node._replace(request=None, is_alive=node.is_alive and not is_mine, stream=0)
        )
    assert isinstance(after, GroupRecord), "who comes with the same store is not asked to wait"
    done = _with_record(state, after)
    if is_mine and node.is_alive:
        last = claim.after_registration(node.last, boot_id=str(node.boot), is_accepted=True)
        node = node._replace(last=last)
    return _with_node(done, n, node._replace(request=None))


def _elections(state: State) -> Iterator[Step]:
    record = state.record
    for n in range(3):
        candidate = record.find_member(ReplicaId(n))
        if candidate is None or not elect.may_be_master(record, candidate):
            continue
        others = sorted(record.sss - {candidate})
        for count in range(len(others) + 1):
            for live in combinations(others, count):
                after = elect.with_master(record, candidate, frozenset(live))
                yield (
                    f"elect {n} with {_names(after.sss)}",
                    _with_record(state, after._replace(history=())),
                )


def _with_node(state: State, n: int, node: Node) -> State:
    nodes = state.nodes
    return state._replace(nodes=(*nodes[:n], node, *nodes[n + 1 :]))


def _with_record(state: State, record: GroupRecord) -> State:
    after = state._replace(record=record)
    check_sets(after)
    return after


def check_sets(state: State) -> None:
    """Check the invariants of the record. Raises Broken."""
    record, committed = state.record, state.committed
    members = {member.replica_id for member in record.sss}
    if len(record.sss) >= record.min_in_sync and record.eligible:
        raise InvariantBroken(f"F-13: {record.eligible} eligible beside {_names(record.sss)}")
    for n in sorted(members | record.eligible):
        node = state.nodes[n]
        # A replica that lost bytes stays in the sets until it reports the loss. Until then a
        # controller cannot elect it.
        if has_lost(node):
            continue
        if node.log[: len(committed)] != committed:
            raise InvariantBroken(f"F-4: {n} has {node.log}, and {committed} is confirmed")


def check(state: State) -> None:
    """Check all invariants between steps. Raises Broken."""
    check_sets(state)
    for n, node in enumerate(state.nodes):
        if node.log[: node.confirm] != state.committed[: node.confirm]:
            raise InvariantBroken(f"F-5: {n} takes {node.log[: node.confirm]} for confirmed")
        for entry in node.journal:
            begin = (entry.epoch, 0), (0, 0)  # the first epoch has the records before it
            if entry.start < len(node.log) and node.log[entry.start] not in begin:
                raise InvariantBroken(
                    f"F-15: {n} has {node.log}, and its journal says {node.journal}"
                )
        for other in state.nodes[:n]:
            _check_matching(node.log, other.log)


def _check_matching(one: Log, other: Log) -> None:
    same = [n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a == b]
    if same and one[: same[-1] + 1] != other[: same[-1] + 1]:
        raise InvariantBroken(f"F-6: {one} and {other}")


def _names(members: frozenset[ReplicaRun]) -> str:
    return ",".join(sorted(member.incarnation for member in members))
