"""Simulated controllers, over a store that is slow, forgets to answer, and answers of late.

What a controller does is in `tidemill.controller.election`; here is only the loop around it: read,
decide, swap, find out what became of it, tell everybody.
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
from tidemill.controller.election.sessions import ElectionTiming, Heartbeat, ReplicaSessions
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
TELL_AGAIN_S = 0.3
LOST_PART = 0.04  # of swaps: half of them were done
LATE_PART = 0.03  # of swaps that arrive when nobody waits any more
LATE_S_MAX = 3.0


class Drain(NamedTuple):
    """An operator empties a replica, or takes that back."""

    replica_id: ReplicaId
    undo: bool


class Forget(NamedTuple):
    """The pod of a replica that was retired is gone."""

    replica_id: ReplicaId


class Replace(NamedTuple):
    """An operator makes a replica master, whatever it lacks."""

    replica_id: ReplicaId


class MinInSync(NamedTuple):
    """An operator says how many replicas must have a message."""

    wanted: int


class ForgetGroup(NamedTuple):
    """An operator takes away what is known of the group: all its replicas seem to be gone."""


Change = Registration | Proposal | MastershipRelease | Drain | Forget | Replace | MinInSync
Request = Change | ForgetGroup


@final
class ModelStore:
    """A linearizable store of one record and one lease, as seen through a bad network."""

    def __init__(self, record: GroupRecord, random: Random) -> None:
        self.stored = StoredRecord(
            record, "0"
        )  # what is there, or would be if the group were made now
        self.is_there = True
        self.removals = 0  # a watch tells of each
        self._first = record
        self.lease: LeaseSeen | None = None
        self.is_away = False
        self.writes = 0
        self.on_replaced: Callable[[GroupRecord], None] = lambda _: None  # by an operator
        self.on_removed: Callable[[], None] = lambda: None
        self._random = random

    async def _call(self) -> None:
        slow = self._random.random() < 0.03
        await asyncio.sleep(self._random.uniform(0.001, 0.9 if slow else 0.01))
        if self.is_away:
            await asyncio.sleep(CALL_TIMEOUT_S)
            raise StoreUnreachable("it does not answer")

    async def get(self) -> StoredRecord:
        await self._call()
        if not self.is_there:
            raise StoreUnreachable("there is no such group")
        return self.stored

    async def create(self) -> None:
        """Store the first record of the group, if there is none."""
        await self._call()
        self.is_there = True

    async def remove(self, token: str) -> bool:
        """Forget the group, if its record is as it was read; whether it is."""
        await self._call()
        if token != self.stored.token:
            return False
        self.writes += 1
        self.removals += 1
        # A token is never used twice: what is late finds another one.
        self.stored, self.is_there = StoredRecord(self._first, str(self.writes)), False
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
        if not self.is_there or made.base.token != self.stored.token:
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
        """Begin without any memory."""
        self.is_alive, self.is_paused = True, False
        self._leadership = Leadership(self.name, LeaseTiming())
        self._requests: list[Request] = []
        self._has_work = asyncio.Event()
        self._know_nothing()
        self._tasks = [asyncio.ensure_future(work()) for work in (self._work, self._lead)]

    def _know_nothing(self) -> None:
        """Begin anew with a group."""
        self._sessions = ReplicaSessions(self._timing)
        self._known: StoredRecord | None = None
        self._told: dict[ReplicaRun, tuple[int, float]] = {}
        self._seen: dict[ReplicaRun, int] = {}  # versions, of heartbeats
        self._removals = self._world.store.removals

    def stop(self) -> None:
        """Kill it."""
        self.is_alive = False
        for task in self._tasks:
            task.cancel()

    def check(self) -> None:
        """Raise what has ended one of its tasks."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    # ------------------------------------------------------------ what comes

    def heard(self, member: ReplicaRun, beat: Heartbeat) -> None:
        """Take a heartbeat."""
        if self.is_alive:
            self._sessions.note_heartbeat(member, beat, self._world.now_ms())
            self._seen[member] = beat.version_seen

    def died(self, member: ReplicaRun) -> None:
        """Take a death certificate."""
        if self.is_alive:
            self._sessions.note_death(member, self._world.now_ms())
            self._has_work.set()

    def ask(self, request: Request) -> None:
        """Take a request that changes the record."""
        if self.is_alive and len(self._requests) < 100:
            self._requests.append(request)
            self._has_work.set()

    async def registered_of(self, replica: ReplicaProcess) -> str | None:
        """Say which run of a replica is registered, as far as is known; None: no answer."""
        network = self._world.network
        await asyncio.sleep(network.delay_s())
        ways = {(replica.name, self.name), (self.name, replica.name)}
        if not self.is_alive or ways & network.blocked:
            return None
        if self._known is None:
            # Who begins a group, or has seen an epoch of it, has it made by coming.
            makes_it = replica.id == FOUNDER or replica.log.epoch_seen > 0
            return "" if makes_it and not self._world.store.is_there else None
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
            await self._awake()
            if self._removals != self._world.store.removals:
                self._know_nothing()
            try:
                if self._world.store.is_there:
                    await self._look()
                requests, self._requests = self._requests, []
                for request in requests:
                    await self._serve(request)
            except StoreUnreachable:
                self._world.counts["store away"] += 1

    async def _awake(self) -> None:
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
            # Heartbeats say what was heard: what is not is told again.
            told_version, told_at_s = self._told.get(replica.member, (-1, 0.0))
            is_due = view.version > told_version or now_s - told_at_s > TELL_AGAIN_S
            if self._seen.get(replica.member, -1) < view.version and is_due:
                self._world.tell(self, replica, view)
                self._told[replica.member] = (view.version, now_s)

    async def _look(self) -> None:
        stored = await self._read()
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
            self._world.ask_to_hand_over(self, record, intent.target)
        elif isinstance(intent, NoEligibleReplica):
            self._world.counts["unavailable"] += 1
        elif isinstance(intent, MetaRollback):
            self._world.counts["newer than what was read"] += 1

    async def _serve(self, request: Request) -> None:
        await self._awake()
        if isinstance(request, Registration) and not self._world.store.is_there:
            await self._world.store.create()
        stored = await self._read()
        if isinstance(request, ForgetGroup):
            await self._forget(stored)
            return
        after = self._answer(stored.record, request)
        if after is not None:
            await self._swap(stored, after)

    def _answer(self, record: GroupRecord, request: Change) -> GroupRecord | None:
        sight = self._sessions.observe(rank=0, now_ms=self._world.now_ms())
        live = live_of(record, sight, self._timing)
        if isinstance(request, Registration):
            before = presence_of(record, request.member.replica_id, sight, self._timing)
            registered = register(record, request, before)
            if isinstance(registered, ChangeRejection):
                return None  # It asks again.
            if isinstance(registered, FencedRun):
                self._world.counts["fenced"] += 1
                return None
            return None if registered is record else registered
        if isinstance(request, Proposal):
            changed = change_sync_state_set(record, request, {one.member for one in live})
            if isinstance(changed, ChangeRejection):
                self._world.tell_refused(self, request)
                return None
            return changed
        if isinstance(request, Replace | MinInSync):
            wanted = self._ordered(record, request, live)
            if isinstance(wanted, ChangeRejection):
                self._world.counts["order refused"] += 1
                return None
            return None if wanted is record else wanted
        if isinstance(request, Drain | Forget):
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
        self, record: GroupRecord, order: Replace | MinInSync, live: list[Candidate]
    ) -> GroupRecord | ChangeRejection:
        """Return what comes of what an operator orders."""
        if isinstance(order, Replace):
            return replace_master(record, order.replica_id, live, reason="simulated")
        is_led = record.master in {one.member for one in live}
        return with_min_in_sync(record, order.wanted, is_led=is_led)

    async def _swap(self, base: StoredRecord, record: GroupRecord) -> None:
        made = attempt_write(base, record, self._world.new_id())
        result = await self._world.store.swap(made)
        tries = 0
        while result is WriteFailure.UNKNOWN:
            found = await self._read()
            if outcome_of(made, found) is not WriteOutcome.PENDING:
                return
            tries += 1
            if tries > 1:
                # It may arrive for as long as nothing else is written.
                result = await self._world.store.swap(
                    attempt_no_change(found, self._world.new_id())
                )
        if isinstance(result, StoredRecord):
            self._learn(result)

    async def _lead(self) -> None:
        store, leadership, world = self._world.store, self._leadership, self._world
        while True:
            await self._awake()
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
                world.counts["lease away"] += 1
            now_ms = world.now_ms()
            await asyncio.sleep((leadership.next_try_ms(now_ms) - now_ms) / 1000)


def _retired(record: GroupRecord, request: Drain | Forget) -> GroupRecord | ChangeRejection:
    if isinstance(request, Forget):
        return forget(record, request.replica_id)
    if request.undo:
        return stay(record, request.replica_id, Retirement.DRAINED)
    return retire(record, request.replica_id, Retirement.DRAINED)


def _text(record: GroupRecord) -> str:
    return f"epoch {record.epoch} v{record.version} {view_text(view_of(record))}"


def view_text(view: ReplicationView) -> str:
    """Return a view in a few words, for a trace."""
    names = ",".join(sorted(member.incarnation for member in view.sss))
    master = "nobody" if view.master is None else view.master.incarnation
    return f"master {master} sss {names} eligible {sorted(view.eligible)}"
