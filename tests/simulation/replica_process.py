"""A simulated replica: the production state machines over a log on a faulty disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, final

from tidemill.broker.engine.replication.actions import (
    Action,
    DivergenceAlarm,
    MastershipRelease,
    Promotion,
    SetProposal,
    StepDown,
    StreamClose,
    StreamDial,
    StreamSend,
)
from tidemill.broker.engine.replication.config import AckMode, ReplicationConfig
from tidemill.broker.engine.replication.epoch_journal import cut_at, last_epoch
from tidemill.broker.engine.replication.messages import Ack, Hello
from tidemill.broker.engine.replication.replicated_log import ReplicatedLog
from tidemill.broker.engine.replication.replication import Replication
from tidemill.broker.server.round.sync_pace import SyncPace
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView
from tidemill.controller.election.registration import Registration
from tidemill.controller.election.sessions import Heartbeat, ReplicaHealth

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.replica_group import World

Answer = Callable[[], None]  # delivers a reply to the client, which records it
TICK_S = 0.05
HEARTBEAT_S = 0.2
SYNC_S_MAX = 0.004
STALL_PART = 0.005
STALL_S_MAX = 2.0
REOPEN_S = 0.1
AGAIN_S = 0.3  # between two requests for registration


class Volume(Protocol):
    """The part of a replica that survives its process."""

    is_stuck: bool  # its syncs do not end
    is_full: bool  # it has no room for messages of a master

    @property
    def store_uuid(self) -> str:
        """The id of the store."""

    def open(self, replica: ReplicaProcess, confirmed: Callable[[int], None]) -> ReplicatedLog:
        """Open the log for a run; `confirmed` is called when the confirm offset grows."""

    def close(self) -> None:
        """Close the log at the end of a run, which may be a kill."""

    def cut_power(self, random: Random) -> None:
        """Lose a random part of the bytes that are not durable."""

    def begin_sync(self) -> Callable[[], None]:
        """Begin a sync of all written bytes; return the function that ends it."""

    def pass_time(self) -> None:
        """Prepare for an event at the current time."""

    def claims_clean(self, mode: AckMode) -> bool:
        """Return whether this log has everything that its replica acked."""

    def is_registered(self) -> None:
        """Process the acceptance of the claim."""

    def is_member(self) -> None:
        """Process the entry into the sync state set."""

    def log_bytes(self) -> bytes:
        """Return the whole log, also its unconfirmed part."""

    def confirmed_bytes(self, begin: int, end: int) -> bytes:
        """Return a confirmed range of the log."""


@final
class ReplicaProcess:
    """One replica: its volume and, while it is up, its process."""

    def __init__(self, world: World, replica_id: int, config: ReplicationConfig) -> None:
        self.id = ReplicaId(replica_id)
        self.name = f"replica-{replica_id}"
        self.boot = 0
        self.lives = 0
        self.volume: Volume = world.contents.volume(self)
        self.is_alive = False
        self.is_paused = False
        self.member = ReplicaRun(self.id, "")
        self.machine: Replication | None = None
        self.log: ReplicatedLog
        self.is_registered = False
        self._is_clean = False  # the last claim
        self.sync_s = 0.0  # the additional time of each sync
        # Its disk has room for frames of a master, and not for a segment: it takes no sends.
        self.is_nearly_full = False
        self._pace = SyncPace()
        self.world = world
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: list[tuple[int, Answer]] = []  # answers by the offset to be confirmed
        self._written = asyncio.Event()
        self._blocked_since_s: float | None = None
        self._proposal: Proposal | None = None  # the last one
        self.deferred: list[Callable[[], object]] = []  # messages that came during a pause

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """Start a run."""
        self.lives += 1
        self.is_alive, self.is_paused, self.is_registered = True, False, False
        self.member = ReplicaRun(self.id, f"{self.id}.{self.lives}")
        self._written = asyncio.Event()
        self._pace = SyncPace()
        self._open()
        for work in (self._tick, self._sync, self._beat, self._register):
            self._tasks.append(asyncio.ensure_future(work()))

    def stop(self) -> None:
        """Kill the process."""
        self.is_alive = self.is_paused = False
        for task in self._tasks:
            task.cancel()
        self.deferred, self._waiting, self.machine = [], [], None
        self.volume.close()
        self.world.network.end_streams_of(self.name)

    def check(self) -> None:
        """Raise the error that has ended a task."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def _open(self) -> None:
        self.log = self.volume.open(self, self._confirmed)
        self.machine = Replication(
            self.member,
            group="group",
            store_uuid=self.volume.store_uuid,
            log=self.log,
            config=self._config,
        )
        self._written.set()

    async def _reopen(self) -> None:
        await asyncio.sleep(REOPEN_S)
        self._open()
        if self.world.latest.get(self.name):
            self.learn(self.world.latest[self.name])

    async def _register(self) -> None:
        """Register this run with the controllers."""
        volume = self.volume
        self._is_clean = volume.claims_clean(self._config.ack_mode)
        await self._request_registration(volume, is_clean=self._is_clean)

    def register_again(self) -> None:
        """Register the run with the same claim, after its record was deleted."""
        if self.is_alive and self.is_registered:
            self.is_registered = False
            again = self._request_registration(self.volume, is_clean=self._is_clean)
            self._tasks.append(asyncio.ensure_future(again))

    async def _request_registration(self, volume: Volume, *, is_clean: bool) -> None:
        while not self.is_registered:
            for controller in self.world.controllers:
                instead_of = await controller.registered_of(self)
                if instead_of is None:
                    continue
                asked = Registration(
                    self.member, instead_of, volume.store_uuid, self.name, is_clean=is_clean
                )
                self.world.network.send(self.name, controller.name, partial(controller.ask, asked))
            await asyncio.sleep(AGAIN_S)
        volume.is_registered()

    def _now_ms(self) -> int:
        """Prepare the log for an event; return the monotonic time."""
        self.volume.pass_time()
        return self.world.now_ms()

    # ------------------------------------------------------------ messages

    def learn(self, view: ReplicationView) -> None:
        """Process a view from a controller."""
        machine = self.machine
        if machine is not None and self.is_registered:
            self.world.latest[self.name] = view
            machine.learn(view, self._now_ms())
            if self.member in view.sss:
                self.volume.is_member()
            self._act()

    def receive(self, stream: int, message: object) -> None:
        """Process a message of a stream."""
        machine, now_ms = self.machine, self._now_ms()
        if machine is None:
            return
        if isinstance(message, Hello):
            machine.handle_hello(stream, message, now_ms)
        elif isinstance(message, Ack):
            machine.handle_ack(stream, message, now_ms)
        else:
            machine.handle_message(stream, message, now_ms)  # type: ignore[arg-type]
            self._written.set()
        self._act()

    def stream_closed(self, stream: int | None) -> None:
        """Process the end of a stream."""
        if self.machine is not None:
            self.machine.handle_closed(stream, self._now_ms())
            self._act()

    def stream_opened(self, stream: int) -> None:
        """Process a successful dial."""
        if self.machine is not None:
            self.machine.handle_connected(stream, self._now_ms())
            self._act()

    def proposal_accepted(self, proposal: Proposal) -> None:
        """Process the acceptance of a proposal; it matters only for the last one."""
        if self.machine is not None and proposal is self._proposal:
            self.machine.handle_acceptance(proposal.version, self._now_ms())
            self._act()

    def proposal_rejected(self, version: int) -> None:
        """Process the rejection of a proposal."""
        if self.machine is not None:
            self.machine.handle_rejection(version, self._now_ms())

    def hand_over(self, target: ReplicaId | None) -> None:
        """Begin a planned transfer."""
        if self.machine is not None:
            self.machine.hand_over(target, self._now_ms())
            self._act()

    # ------------------------------------------------------------ sends

    @property
    def takes_sends(self) -> bool:
        """Whether clients may send to this replica."""
        master = self.machine.master if self.machine is not None else None
        if master is None or self.is_paused:
            return False
        return master.accepts_sends and not master.sync_state.is_short

    def carry_out(self, act: Callable[[ReplicaProcess], Answer]) -> None:
        """Execute a request; the answer leaves when everything recorded so far is confirmed."""
        answer = act(self)
        assert self.machine is not None, "the replica is starting"
        self._waiting.append((self.log.log_end, answer))
        self.machine.handle_progress(self._now_ms())
        self._written.set()
        self._act()

    @property
    def epoch(self) -> int:
        """The epoch of this master."""
        assert self.machine is not None, "the replica is starting"
        assert self.machine.master is not None, "the replica is not the master"
        return self.machine.master.epoch

    def _confirmed(self, offset: int) -> None:
        if self.machine is not None and self.machine.master is not None:
            self.world.check_confirmed(self, offset)
            while self._waiting and self._waiting[0][0] <= offset:
                _, answer = self._waiting.pop(0)
                answer()

    # ------------------------------------------------------------ actions

    def _act(self) -> None:
        if self.machine is None:
            return
        network, world = self.world.network, self.world
        for action in self.machine.take_actions():
            self._do(action, network, world)

    def _do(self, action: Action, network: object, world: World) -> None:
        match action:
            case StreamDial(master, _):
                world.network.dial(self, world.replicas[master.replica_id])
            case StreamSend(stream, message):
                if isinstance(message, Ack):
                    world.check_ack(self, message)
                world.network.send_on(stream, self.name, message)
            case StreamClose(stream, _):
                world.network.close(stream, self.name)
            case SetProposal(proposal):
                self._proposal = proposal
                for controller in world.controllers:
                    world.network.send(
                        self.name, controller.name, partial(controller.ask, proposal)
                    )
            case MastershipRelease():
                for controller in world.controllers:
                    world.network.send(self.name, controller.name, partial(controller.ask, action))
            case Promotion(view):
                world.check_promotion(self, view)
                self._written.set()
            case StepDown():
                self._waiting = []
                self.machine = None
                self.volume.close()
                world.network.end_streams_of(self.name)
                self._tasks.append(asyncio.ensure_future(self._reopen()))
            case DivergenceAlarm(why):
                world.findings.append(f"C2: {self.name} diverges: {why}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.machine is not None and not self.is_paused:
                self.machine.is_disk_slow = self.is_slow
                self.machine.tick(self._now_ms())
                self._act()

    async def _sync(self) -> None:
        random = self.world.random
        while True:
            await self._written.wait()
            self._written.clear()
            machine, finish = self.machine, self.volume.begin_sync()
            is_stall = self.world.has_stalls and random.random() < STALL_PART
            self._pace.note_begin(self.world.now_ms())
            longest_s = STALL_S_MAX if is_stall else SYNC_S_MAX
            await asyncio.sleep(self.sync_s + random.uniform(0, longest_s))
            while self.volume.is_stuck:  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(TICK_S)
            if self.is_paused:
                # A process that continues sees the end of its sync before it reads a message.
                seen = asyncio.Event()
                self.deferred.append(partial(self._end_sync, machine, finish, seen))
                await seen.wait()
            else:
                self._end_sync(machine, finish)

    def _end_sync(
        self,
        machine: Replication | None,
        finish: Callable[[], None],
        seen: asyncio.Event | None = None,
    ) -> None:
        self._pace.note_end(self.world.now_ms())
        if seen is not None:
            seen.set()
        # After a reopen, the next sync covers the bytes of this one.
        if machine is not None and machine is self.machine:
            finish()
            machine.handle_progress(self._now_ms())
            self._act()
        elif self.machine is not None:
            self._written.set()

    @property
    def is_slow(self) -> bool:
        """Whether the disk is too slow for the master to wait for this replica."""
        return self._pace.is_slow(self.world.now_ms())

    async def _beat(self) -> None:
        while True:
            if self.is_registered:
                for controller in self.world.controllers:
                    beat = self._heartbeat()
                    self.world.network.send(
                        self.name, controller.name, partial(controller.heartbeat, self.member, beat)
                    )
            await asyncio.sleep(HEARTBEAT_S)

    @property
    def _health(self) -> ReplicaHealth:
        if self.volume.is_full or self.is_nearly_full:
            return ReplicaHealth.FULL
        return ReplicaHealth.SLOW if self.is_slow else ReplicaHealth.OK

    def _heartbeat(self) -> Heartbeat:
        now_s, machine, log = self.world.loop.time(), self.machine, self.log
        master = machine.master if machine is not None else None
        if master is None or not master.sync_state.is_short:
            self._blocked_since_s = None
        elif self._blocked_since_s is None:
            self._blocked_since_s = now_s
        blocked_s = 0.0 if self._blocked_since_s is None else now_s - self._blocked_since_s
        paused_ms = round(1000 * self.world.paused_for_s(self)) if self.is_paused else 0
        return Heartbeat(
            is_master=master is not None,
            epoch_seen=log.epoch_seen,
            version_seen=0 if machine is None or machine.view is None else machine.view.version,
            log_epoch=last_epoch(cut_at(log.journal, log.log_end)),
            log_end=log.log_end,
            durable_end=log.durable_offset,
            confirm=log.confirm_offset,
            health=self._health,
            page_age_ms=paused_ms,
            blocked_ms=round(1000 * blocked_s),
            peer_silence_ms=self.world.network.silences(self),
        )
