"""Simulated controllers, over a store whose replies are slow, late or lost.

The decisions are those of `tidemill.controller.election`. This module has the loop around them:
read the record, decide, swap, find out the outcome of the swap, send the view to all replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple, final

from tidemill.broker.engine.replication.actions import MastershipRelease
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView
from tidemill.controller.election.decide import (
    FOUNDER,
    MetaRollback,
    NoEligibleReplica,
    RecordWrite,
    TransferRequest,
    decide,
    live_of,
    release,
)
from tidemill.controller.election.elect import Candidate
from tidemill.controller.election.failure import find_failure
from tidemill.controller.election.forgetting import may_forget
from tidemill.controller.election.history import BY_OPERATOR
from tidemill.controller.election.leadership import Leadership, LeaseSeen, LeaseTiming
from tidemill.controller.election.membership import (
    ChangeRejection,
    change_sync_state_set,
    with_min_in_sync,
)
from tidemill.controller.election.record import GroupRecord, Retirement, view_of
from tidemill.controller.election.registration import FencedRun, Registration, presence_of, register
from tidemill.controller.election.replacement import replace_master
from tidemill.controller.election.retirement import forget, retire, stay
from tidemill.controller.election.rollback import is_outdated, is_outdated_in_epoch
from tidemill.controller.election.sessions import (
    ElectionTiming,
    GroupObservation,
    Heartbeat,
    ReplicaSessions,
)
from tidemill.controller.election.swap import (
    StoredRecord,
    WriteAttempt,
    WriteOutcome,
    attempt_no_change,
    attempt_write,
    outcome_of,
)
from tidemill.controller.meta_store import StoreUnreachable, WriteFailure

if TYPE_CHECKING:
    from tests.simulation.replica_group import World
    from tests.simulation.replica_process import ReplicaProcess

LOOK_S = 0.1
CALL_TIMEOUT_S = 1.0
SEND_AGAIN_S = 0.3  # until a view is sent again that no heartbeat has confirmed
LOST_PART = 0.04  # the share of swaps without a reply; half of them are done
LATE_PART = 0.03  # the share of swaps that are done after the caller has given up
LATE_S_MAX = 3.0


class Drain(NamedTuple):
    """An operator drains a replica, or undoes that."""

    replica_id: ReplicaId
    undo: bool


class ForgetReplica(NamedTuple):
    """The pod of a retired replica was removed."""

    replica_id: ReplicaId


class ReplaceMaster(NamedTuple):
    """An operator makes a replica master, although it may lack acknowledged messages."""

    replica_id: ReplicaId


class MinInSync(NamedTuple):
    """An operator changes how many replicas must have a message before it is acknowledged."""

    replicas: int


class ForgetGroup(NamedTuple):
    """An operator deletes the record of the group, because all its replicas seem lost."""


Change = (
    Registration | Proposal | MastershipRelease | Drain | ForgetReplica | ReplaceMaster | MinInSync
)
Request = Change | ForgetGroup


@final
class ModelStore:
    """A linearizable store of one record and one lease, behind an unreliable network."""

    def __init__(self, record: GroupRecord, random: Random) -> None:
        # The stored record, or the first one of the group while it is deleted.
        self.stored = StoredRecord(record, "0")
        self.has_group = True
        self.removals = 0  # a watch reports each
        self._first = record
        self.lease: LeaseSeen | None = None
        self.is_unreachable = False
        self.writes = 0
        # Called after an operator has replaced the master.
        self.on_replaced: Callable[[GroupRecord], None] = lambda _: None
        self.on_removed: Callable[[], None] = lambda: None
        self._random = random

    async def _call(self) -> None:
        slow = self._random.random() < 0.03
        await asyncio.sleep(self._random.uniform(0.001, 0.9 if slow else 0.01))
        if self.is_unreachable:
            await asyncio.sleep(CALL_TIMEOUT_S)
            raise StoreUnreachable("the store does not answer")

    def restore(self, record: GroupRecord) -> None:
        """Replace the stored record by an earlier one, as from a backup."""
        self.writes += 1
        self.stored = StoredRecord(record, str(self.writes))

    async def get(self) -> StoredRecord:
        await self._call()
        if not self.has_group:
            raise StoreUnreachable("the store has no such group")
        return self.stored

    async def create(self) -> None:
        """Store the first record of the group if there is none."""
        await self._call()
        self.has_group = True

    async def remove(self, token: str) -> bool:
        """Delete the record if it has not changed since it was read; return whether it was."""
        await self._call()
        if token != self.stored.token:
            return False
        self.writes += 1
        self.removals += 1
        # A token is never used twice, so a late swap fails.
        self.stored, self.has_group = StoredRecord(self._first, str(self.writes)), False
        self.on_removed()
        return True

    async def swap(self, made: WriteAttempt) -> StoredRecord | WriteFailure:
        await self._call()
        chance = self._random.random()
        if chance < LATE_PART:
            asyncio.get_running_loop().call_later(
                self._random.uniform(0, LATE_S_MAX), self._write, made
            )
            return WriteFailure.UNKNOWN
        if chance < LATE_PART + LOST_PART:
            if self._random.random() < 0.5:
                self._write(made)
            return WriteFailure.UNKNOWN
        if not self._write(made):
            return WriteFailure.CONFLICT
        return self.stored

    def _write(self, made: WriteAttempt) -> bool:
        if not self.has_group or made.base.token != self.stored.token:
            return False
        self.writes += 1
        before, self.stored = self.stored.record, StoredRecord(made.record, str(self.writes))
        is_unclean = made.record.unclean_since > before.unclean_since
        if is_unclean and made.record.history[-1].reason.startswith(BY_OPERATOR):
            self.on_replaced(made.record)
        return True

    async def write_lease(self, seen: LeaseSeen | None, holder: str) -> LeaseSeen | WriteFailure:
        await self._call()
        if seen != self.lease:
            return WriteFailure.CONFLICT
        self.lease = LeaseSeen(holder, 0 if seen is None else seen.renewals + 1)
        return self.lease


@final
class Controller:
    """One controller process."""

    def __init__(self, world: World, number: int, timing: ElectionTiming) -> None:
        self.name = f"controller-{number}"
        self.is_alive = False
        self.is_paused = False
        self._rank = number
        self._world = world
        self._timing = timing
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the process, without memory."""
        self.is_alive, self.is_paused = True, False
        self._leadership = Leadership(self.name, LeaseTiming())
        self._requests: list[Request] = []
        self._has_work = asyncio.Event()
        self._forget_group()
        self._tasks = [asyncio.ensure_future(work()) for work in (self._work, self._lead)]

    def _forget_group(self) -> None:
        """Drop everything known about the group."""
        self._sessions = ReplicaSessions(self._timing)
        self._known: StoredRecord | None = None
        self._sent: dict[ReplicaRun, tuple[int, float]] = {}  # the last view and its time
        self._seen: dict[ReplicaRun, int] = {}  # the version in the last heartbeat
        self._removals = self._world.store.removals

    def stop(self) -> None:
        """Kill the process."""
        self.is_alive = False
        for task in self._tasks:
            task.cancel()

    def check(self) -> None:
        """Raise the error that has ended a task."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    # ------------------------------------------------------------ messages

    def heartbeat(self, member: ReplicaRun, beat: Heartbeat) -> None:
        """Process a heartbeat."""
        if self.is_alive:
            self._sessions.note_heartbeat(member, beat, self._world.now_ms())
            self._seen[member] = beat.version_seen

    def report_death(self, member: ReplicaRun) -> None:
        """Process a death certificate."""
        if self.is_alive:
            self._sessions.note_death(member, self._world.now_ms())
            self._has_work.set()

    def ask(self, request: Request) -> None:
        """Queue a request that changes the record."""
        if self.is_alive and len(self._requests) < 100:
            self._requests.append(request)
            self._has_work.set()

    async def registered_of(self, replica: ReplicaProcess) -> str | None:
        """Return the registered run of a replica, "" if it has none, None without an answer."""
        network = self._world.network
        await asyncio.sleep(network.delay_s())
        ways = {(replica.name, self.name), (self.name, replica.name)}
        if not self.is_alive or ways & network.blocked:
            return None
        if self._known is None:
            # The founder, or a replica that has seen an epoch, creates a missing group.
            creates_it = replica.id == FOUNDER or replica.log.epoch_seen > 0
            return "" if creates_it and not self._world.store.has_group else None
        found = self._known.record.find(replica.id)
        return "" if found is None else found.incarnation

    # ------------------------------------------------------------ the loop

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._has_work.wait()
            except TimeoutError:
                pass
            self._has_work.clear()
            await self._until_awake()
            if self._removals != self._world.store.removals:
                self._forget_group()
            try:
                if self._world.store.has_group:
                    await self._look()
                requests, self._requests = self._requests, []
                for request in requests:
                    await self._serve(request)
            except StoreUnreachable:
                self._world.counts["store unreachable"] += 1

    async def _until_awake(self) -> None:
        while self.is_paused:  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.05)

    async def _read(self) -> StoredRecord:
        stored = await self._world.store.get()
        self._learn(stored)
        return stored

    def _learn(self, stored: StoredRecord) -> None:
        if self._known is None or stored.record.version > self._known.record.version:
            self._known = stored
        view = view_of(self._known.record)
        now_s = self._world.loop.time()
        for replica in self._world.replicas:
            # A heartbeat reports the version that has arrived; a lost view is sent again.
            sent_version, sent_at_s = self._sent.get(replica.member, (-1, 0.0))
            is_due = view.version > sent_version or now_s - sent_at_s > SEND_AGAIN_S
            if self._seen.get(replica.member, -1) < view.version and is_due:
                self._world.send_view(self, replica, view)
                self._sent[replica.member] = (view.version, now_s)

    async def _read_newest(self) -> StoredRecord:
        """Read again while a heartbeat overtakes the answer of the read."""
        while True:
            before = self._sessions.observe(rank=0, now_ms=self._world.now_ms())
            stored = await self._read()
            was_outdated = is_outdated(stored.record, live_of(stored.record, before, self._timing))
            if was_outdated or not is_outdated(stored.record, self._live(stored.record)):
                return stored

    def _live(self, record: GroupRecord) -> list[Candidate]:
        sight = self._sessions.observe(rank=0, now_ms=self._world.now_ms())
        return live_of(record, sight, self._timing)

    async def _look(self) -> None:
        stored = await self._read_newest()
        record, now_ms = stored.record, self._world.now_ms()
        self._sessions.note_record(record, now_ms)
        rank = 0 if self._leadership.is_leading(now_ms) else self._rank + 1
        sight = self._sessions.observe(rank=rank, now_ms=now_ms)
        has_failed = find_failure(record, sight, self._timing) is not None
        self._sessions.note_failure(record.master, has_failed=has_failed, now_ms=now_ms)
        sight = self._sessions.observe(
            rank=rank, now_ms=now_ms, wanted_replicas=self._world.wanted_replicas
        )
        intent = decide(record, sight, self._timing)
        if isinstance(intent, RecordWrite):
            self._world.note(f"{self.name} {intent.reason}: {_text(intent.record)}")
            await self._swap(stored, intent.record)
        elif isinstance(intent, TransferRequest):
            self._world.request_transfer(self, record, intent.target)
        elif isinstance(intent, NoEligibleReplica):
            self._world.counts["unavailable"] += 1
        elif isinstance(intent, MetaRollback):
            self._world.counts["meta rollback"] += 1

    async def _serve(self, request: Request) -> None:
        await self._until_awake()
        if isinstance(request, Registration) and not self._world.store.has_group:
            await self._world.store.create()
        stored = await self._read_newest()
        if isinstance(request, ForgetGroup):
            await self._forget(stored)
            return
        is_outdated_now = is_outdated_in_epoch(stored.record, self._live(stored.record))
        if is_outdated_now and not isinstance(request, ReplaceMaster):
            self._world.counts["record outdated"] += 1
            if isinstance(request, Proposal):
                self._world.reject_proposal(self, request)
            return
        after = self._changed(stored.record, request)
        is_written = after is not None and await self._swap(stored, after)
        if is_written and isinstance(request, Proposal):
            self._world.accept_proposal(self, request)

    def _changed(self, record: GroupRecord, request: Change) -> GroupRecord | None:
        sight = self._sessions.observe(rank=0, now_ms=self._world.now_ms())
        live = live_of(record, sight, self._timing)
        if isinstance(request, Registration):
            before = presence_of(record, request.member.replica_id, sight, self._timing)
            registered = register(record, request, before)
            if isinstance(registered, ChangeRejection):
                return None  # The replica asks again.
            if isinstance(registered, FencedRun):
                self._world.counts["fenced"] += 1
                return None
            return None if registered is record else registered
        if isinstance(request, Proposal):
            changed = change_sync_state_set(record, request, {one.member for one in live})
            if isinstance(changed, ChangeRejection):
                self._world.reject_proposal(self, request)
                return None
            return changed
        if isinstance(request, ReplaceMaster | MinInSync):
            ordered = self._ordered(record, request, sight)
            if isinstance(ordered, ChangeRejection):
                self._world.counts["order rejected"] += 1
                return None
            return None if ordered is record else ordered
        if isinstance(request, Drain | ForgetReplica):
            after = _retired(record, request)
            if isinstance(after, ChangeRejection):
                self._world.counts["not retired"] += 1
                return None
            return None if after is record else after
        return release(
            record, epoch=request.epoch, master=request.master, target=request.target, live=live
        )

    async def _forget(self, stored: StoredRecord) -> None:
        now_ms = self._world.now_ms()
        sessions = self._sessions.observe(rank=0, now_ms=now_ms).sessions
        if may_forget(sessions, self._timing, now_ms=now_ms) is not None:
            self._world.counts["not forgotten"] += 1
        elif await self._world.store.remove(stored.token):
            self._world.note(f"{self.name} forgets the group: {_text(stored.record)}")

    def _ordered(
        self, record: GroupRecord, order: ReplaceMaster | MinInSync, sight: GroupObservation
    ) -> GroupRecord | ChangeRejection:
        """Return the record after an order of an operator."""
        if isinstance(order, ReplaceMaster):
            return replace_master(record, order.replica_id, sight, self._timing, reason="simulated")
        is_led = record.master in {one.member for one in live_of(record, sight, self._timing)}
        return with_min_in_sync(record, order.replicas, is_led=is_led)

    async def _swap(self, base: StoredRecord, record: GroupRecord) -> bool:
        """Write a record; return whether it is surely written."""
        made = attempt_write(base, record, self._world.new_id())
        result = await self._world.store.swap(made)
        tries = 0
        while result is WriteFailure.UNKNOWN:
            found = await self._read()
            outcome = outcome_of(made, found)
            if outcome is not WriteOutcome.PENDING:
                return outcome is WriteOutcome.APPLIED
            tries += 1
            if tries > 1:
                # The first swap may still arrive until another write changes the token.
                result = await self._world.store.swap(
                    attempt_no_change(found, self._world.new_id())
                )
        if isinstance(result, StoredRecord):
            self._learn(result)
        return isinstance(result, StoredRecord) and result.record == made.record

    async def _lead(self) -> None:
        store, leadership, world = self._world.store, self._leadership, self._world
        while True:
            await self._until_awake()
            try:
                await store._call()
                seen = store.lease
                if seen is not None:
                    leadership.note_lease(seen, world.now_ms())
                if leadership.may_take(world.now_ms()):
                    sent_at_ms = world.now_ms()
                    written = await store.write_lease(seen, self.name)
                    if isinstance(written, LeaseSeen):
                        leadership.note_renewal(written, sent_at_ms)
                    else:
                        leadership.note_loss()
            except StoreUnreachable:
                world.counts["lease unreachable"] += 1
            now_ms = world.now_ms()
            await asyncio.sleep((leadership.next_try_ms(now_ms) - now_ms) / 1000)


def _retired(record: GroupRecord, request: Drain | ForgetReplica) -> GroupRecord | ChangeRejection:
    if isinstance(request, ForgetReplica):
        return forget(record, request.replica_id)
    if request.undo:
        return stay(record, request.replica_id, Retirement.DRAINED)
    return retire(record, request.replica_id, Retirement.DRAINED)


def _text(record: GroupRecord) -> str:
    return f"epoch {record.epoch} v{record.version} {view_text(view_of(record))}"


def view_text(view: ReplicationView) -> str:
    """Return a short text of a view for the trace."""
    names = ",".join(sorted(member.incarnation for member in view.sss))
    master = "none" if view.master is None else view.master.incarnation
    return f"master {master} sss {names} eligible {sorted(view.eligible)}"
