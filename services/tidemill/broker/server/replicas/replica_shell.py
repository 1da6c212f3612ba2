"""The shell around the pure replication machine of this replica.

    controllers ── learn(view) ──────▶  Replication ── dial, send, close ──▶  streams
    round loop  ── handle_progress() ▶      │       ── propose, release ───▶  controllers
    streams     ── messages, ends ───▶      └────── promotion, step down ──▶  this process

The shell handles each event at once and carries out its actions before the next event. If an event
fails, this life of the store ends; the next life repeats the unfinished actions or not.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Final, assert_never, final

import structlog

from tidemill.broker.controller_link.port import ReplicaIntroduction, ReplicaStatus
from tidemill.broker.engine.replica.replica_files import save_addresses
from tidemill.broker.engine.replication.actions import (
    DivergenceAlarm,
    MastershipRelease,
    Promotion,
    SetProposal,
    StepDown,
    StreamClose,
    StreamDial,
    StreamSend,
)
from tidemill.broker.engine.replication.epoch_journal import cut_at, last_epoch
from tidemill.broker.engine.replication.fencing import is_of_group
from tidemill.broker.engine.replication.messages import Ack, Data, Hello, Welcome
from tidemill.broker.engine.replication.replication import Replication
from tidemill.broker.server.replicas.frames import LogFloor, encode_to_master, encode_to_replica
from tidemill.broker.server.replicas.mending import serve_range
from tidemill.broker.server.replicas.probes import Probes, serve_probes
from tidemill.broker.server.replicas.replica_lags import ReplicaLags
from tidemill.broker.server.replicas.round_hold import RoundHold
from tidemill.broker.server.replicas.streams import ReplicaStreams
from tidemill.common.feature_level import FEATURE_LEVEL

if TYPE_CHECKING:
    from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
    from tidemill.broker.engine.replication.actions import Action
    from tidemill.broker.engine.replication.config import ReplicationConfig
    from tidemill.broker.engine.replication.messages import ToReplica
    from tidemill.broker.server.replicas.ports import ControllerPort
    from tidemill.broker.server.replicas.replica_lags import ReplicaLag
    from tidemill.broker.server.round.durability import Durability
    from tidemill.common.clock import Clock
    from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView
    from tidemill.transport.aio.call import RpcCall
    from tidemill.transport.aio.connect import Connector

log = structlog.get_logger()

TICK_S: Final = 0.05  # the shortest time of the machine: the wait before the first dial
# Replicas that are far behind get 64 MiB/s, so that new records do not wait behind old ones. The
# bytes are sent in steps, because each record is checked (5 us): 2 ms a step with records of 1 KB.
OLD_STEP_S: Final = 0.005
OLD_BYTES_A_STEP: Final = (64 << 20) // 200
SAVE_TICKS: Final = 100  # every five seconds
# Every second: replicas drop a segment, and the durable offset is noted, with this delay.
FLOOR_TICKS: Final = 20


class SteppedDown(Exception):
    """This replica has stepped down: its memory is ahead of the confirmed log."""


@final
class ReplicaShell:
    """This replica, with its streams, probes and replication machine.

    It is one class, because all its parts act on one state of the replica, in one order.
    """

    def __init__(
        self,
        me: ReplicaRun,
        group: str,
        replica_engine: ReplicaEngine,
        durability: Durability,
        config: ReplicationConfig,
        *,
        connect: Connector,
        controllers: ControllerPort,
        clock: Clock,
    ) -> None:
        self._group = group
        self._replica_engine = replica_engine
        self._durability = durability
        self._controllers = controllers
        self._clock = clock
        self._machine = Replication(
            me,
            group=group,
            store_uuid=replica_engine.files.store_uuid.hex(),
            log=replica_engine,
            config=config,
        )
        self.hold = RoundHold(replica_engine.engine.commands)
        self._lags = ReplicaLags()
        self.address = ""  # of this replica for the others; known once it is served
        self._blocked_since_ms = clock.monotonic_ms()
        self._was_full = False  # by the last status
        self._streams = ReplicaStreams(self, connect)
        self.probes = Probes(group, self, connect=connect, clock=clock)
        self._saved_addresses: tuple[tuple[ReplicaId, str], ...] = ()
        self._deferred: ReplicationView | None = None  # until the current round is written
        self._logged_damage = ""
        self._is_carrying_out = False
        self.sent_bytes = self.received_bytes = 0  # of the log
        self._wake: Callable[[], None] = lambda: None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        durability.on_moved = self.handle_progress
        durability.beside = replica_engine.begin_sync
        durability.is_held, durability.has_replicas = self.is_held, True
        replica_engine.on_confirmed = self._confirmed

    @property
    def me(self) -> ReplicaRun:
        """The name of this run of the replica."""
        return self._machine.me

    @property
    def is_master(self) -> bool:
        """Whether this replica is the master, as far as it knows."""
        return self._machine.master is not None

    @property
    def view(self) -> ReplicationView | None:
        """The newest view; None before the first one."""
        return self._machine.view

    def lacks(self) -> str:
        """Return the reason why this replica does not count as ready; empty if it does.

        An upgrade restarts the next replica once this one is ready. While all controllers are down,
        the answer does not change.
        """
        view = self._machine.view
        if view is None:
            return "no controller has named the master yet"
        if self.me not in view.sss:
            return "not in the sync state set: the replica catches up or is not registered yet"
        return ""

    def is_held(self) -> bool:
        """Whether no round may begin now; see `RoundHold`."""
        return self.hold.update(self._machine.master, self._clock.monotonic_ms())

    def peer_silence_ms(self) -> dict[ReplicaId, int]:
        """Return the silence of each peer, on replication streams and probes."""
        now_ms = self._clock.monotonic_ms()
        found, view = self._machine.peer_silence_ms(now_ms), self._machine.view
        master = None if view is None or view.master is None else view.master.replica_id
        for number, silent_ms in self.probes.silence_ms(now_ms).items():
            # The master must send frames of the log: an answer to a probe does not count.
            if number != master and not self.is_master:
                found.setdefault(number, silent_ms)
        return found

    def introduction(self) -> ReplicaIntroduction:
        """Return the identity of this replica, for controllers."""
        log = self._replica_engine
        return ReplicaIntroduction(
            self.me,
            log.files.store_uuid.hex(),
            self.address,
            is_clean=not log.files.known_end.is_doubtful,
        )

    def status(self) -> ReplicaStatus:
        """Return the state of this replica, for controllers."""
        view, replica_engine, now_ms = (
            self._machine.view,
            self._replica_engine,
            self._clock.monotonic_ms(),
        )
        master = self._machine.master
        if master is None or not master.sync_state.is_short:
            self._blocked_since_ms = now_ms
        return ReplicaStatus(
            is_master=self.is_master,
            epoch_seen=replica_engine.epoch_seen,
            version_seen=0 if view is None else view.version,
            log_epoch=max(
                last_epoch(cut_at(replica_engine.journal, replica_engine.log_end)),
                replica_engine.epoch_alone,
            ),
            log_end=replica_engine.log_end,
            durable_end=replica_engine.durable_offset,
            confirm=replica_engine.confirm_offset,
            blocked_ms=now_ms - self._blocked_since_ms,
            peer_silence_ms=self.peer_silence_ms(),
            is_slow=self._durability.is_slow,
            is_full=self._is_full(),
            writable_epoch=self._writable_epoch(),
            cut=replica_engine.cut,
            diverged=self._machine.diverged_replicas,
        )

    def _is_full(self) -> bool:
        """Return whether the disk is full, with hysteresis.

        A master counts as full when it rejects sends. It remains so, and another replica counts so,
        until a segment fits: the next master should not be full soon after it took over.
        """
        room = self._replica_engine.engine.room
        was_full = self._was_full or not self.is_master
        self._was_full = room.is_full or (was_full and room.is_nearly_full)
        return self._was_full

    def _writable_epoch(self) -> int:
        master = self._machine.master
        return master.epoch if master is not None and master.has_confirmed else 0

    def lags(self) -> dict[ReplicaId, ReplicaLag]:
        """Return the lag of each replica; empty if this replica is not the master."""
        log_end, now_ms = self._replica_engine.durable_offset, self._clock.monotonic_ms()
        return self._lags.measure(self._machine.master, log_end, now_ms)

    async def run(self, wake: Callable[[], None]) -> None:
        """Drive the machine until cancelled; call `wake` when the round loop has work.

        Raises SteppedDown, or the error with which an event has failed.
        """
        self._wake = wake
        try:
            self._controllers.attach(self)
            for ticks in count():
                if self._failure.done():
                    break
                self._machine.is_disk_slow = self._durability.is_slow
                if self._streams.take_part():
                    self._do(self._machine.handle_part)
                self._do(self._machine.tick)
                self._log_damage()
                if self.hold.take_end(self._machine.master, self._clock.monotonic_ms()):
                    self._wake()
                if ticks % FLOOR_TICKS == 0:
                    self._send_floor()
                    self.lags()  # Measured regularly, because a lag has a duration.
                    if self._replica_engine.files.request_mark(self._replica_engine.durable_offset):
                        self._durability.sync_again()
                if ticks % SAVE_TICKS == 0 and self._replica_engine.files.request_confirm(
                    self._replica_engine.confirm_offset
                ):
                    self._durability.sync_again()
                await self._pass_tick()
            self._failure.result()
        finally:
            self._disconnect()

    async def _pass_tick(self) -> None:
        """Wait for the next tick, and send old records to replicas that are far behind.

        If the sync state set is too small, these replicas get the records as fast as possible.
        """
        loop, replica_engine = asyncio.get_running_loop(), self._replica_engine
        end_s = loop.time() + TICK_S
        while (left_s := end_s - loop.time()) > 0 and not self._failure.done():
            master, replica_engine.frames.is_waiting = self._machine.master, False
            if master is not None:
                replica_engine.frames.old_bytes_left = OLD_BYTES_A_STEP
                self._do(self._machine.handle_progress)
            if replica_engine.frames.is_waiting and master is not None:
                left_s = 0 if master.sync_state.is_short else min(left_s, OLD_STEP_S)
            await asyncio.wait({self._failure}, timeout=left_s)

    def _log_damage(self) -> None:
        if self._replica_engine.frames.damage != self._logged_damage:
            self._logged_damage = self._replica_engine.frames.damage
            log.error("damaged records cannot be sent to a replica", reason=self._logged_damage)

    def _send_floor(self) -> None:
        """Send the begin of the log, before which replicas drop segments."""
        if not self.is_master:
            return
        mine = self._replica_engine
        floor = LogFloor(mine.log_min, mine.confirm_offset, mine.state_floor)
        self._streams.write_to_all(encode_to_replica(floor))

    def _disconnect(self) -> None:
        self._durability.on_moved = lambda: None
        self._durability.beside = tuple
        self._durability.is_held = lambda: False
        self._replica_engine.on_confirmed = lambda: None
        if not self._failure.done():
            self._failure.cancel()
        self._streams.close_all()

    # ------------------------------------------------------------ events

    def learn(self, view: ReplicationView) -> None:
        """Apply a decision of the controllers.

        A master that is elected again begins its new epoch between two rounds.
        """
        engine = self._replica_engine.engine
        # The record may be older than the log: an operator restored it, or 0.1.0 wrote it.
        log_level = engine.catalog.feature_level
        view = view._replace(feature_level=max(view.feature_level, log_level))
        master = self._machine.master
        is_new = master is not None and view.epoch != master.epoch
        if is_new and not self._replica_engine.is_between_rounds:
            self._deferred = view
            return
        self._do(functools.partial(self._machine.learn, view))
        known = self._machine.view
        is_current = known is not None and view.version == known.version
        if is_of_group(view, self._group) and is_current:
            engine.allowed_level = max(engine.allowed_level, min(view.feature_level, FEATURE_LEVEL))
            self._wake()  # A master records it.
        if self.me in view.sss:
            # The master has seen this run catch up, or this run was elected.
            self._do(lambda _now_ms: self._replica_engine.files.known_end.clear_doubt())
        if view.addresses != self._saved_addresses:
            self._saved_addresses = view.addresses
            self._do(
                lambda _now_ms: save_addresses(self._replica_engine.engine.disk, view.addresses)
            )

    def note_acceptance(self, version: int) -> None:
        """Note that the controllers accepted the last proposal, against `version`."""
        self._do(functools.partial(self._machine.handle_acceptance, version))

    def note_rejection(self, version: int) -> None:
        """Note that the controllers rejected a proposal against `version`."""
        self._do(functools.partial(self._machine.handle_rejection, version))

    def hand_over(self, target: ReplicaId | None) -> bool:
        """Begin a planned transfer; return False if there is no target."""
        begun: list[bool] = []
        self._do(lambda now_ms: begun.append(self._machine.hand_over(target, now_ms)))
        return any(begun)

    def handle_progress(self) -> None:
        """Replicate more of the log: it is written or durable."""
        self._do(self._machine.handle_progress)
        if self._deferred is not None and self._replica_engine.is_between_rounds:
            view, self._deferred = self._deferred, None
            self.learn(view)

    def _do(self, event: Callable[[int], object]) -> None:
        """Handle one event and carry out its actions."""
        if self._failure.done():
            return
        try:
            self._replica_engine.now_ms = self._clock.wall_ms()
            event(self._clock.monotonic_ms())
            self._carry_out()
        except Exception as error:  # noqa: BLE001  # `run` raises it, in its own task.
            if not self._failure.done():
                self._failure.set_exception(error)
            self._wake()

    def _carry_out(self) -> None:
        if self._is_carrying_out:
            return  # An action caused this event; the loop of the outer call does its actions.
        self._is_carrying_out = True
        try:
            while actions := self._machine.take_actions():
                for action in actions:
                    self._act(action)
        finally:
            self._is_carrying_out = False
        self._durability.note_written()

    def _act(self, action: Action) -> None:
        match action:
            case StreamSend(number, message):
                if isinstance(message, Hello | Ack):
                    self._streams.write(number, encode_to_master(message))
                else:
                    if isinstance(message, Data):
                        self.sent_bytes += len(message.data)
                    self._streams.write(number, encode_to_replica(message))
            case StreamClose(number, why):
                self._streams.close(number, why)
            case StreamDial(master, address):
                self._streams.dial(master, address)
            case SetProposal(proposal):
                self._controllers.propose(proposal)
            case MastershipRelease():
                self._controllers.release(action)
            case Promotion(view):
                log.info("replica promoted to master", epoch=view.epoch, version=view.version)
                self._wake()
            case StepDown(why):
                log.warning("replica stepped down", reason=why)
                raise SteppedDown(why)
            case DivergenceAlarm(why):
                log.error("log diverged, it must not be cut", reason=why)
            case _:
                assert_never(action)

    def _confirmed(self) -> None:
        if self._replica_engine.is_master:
            self._durability.release()
        else:
            self._wake()

    # ------------------------------------------------------------ streams

    async def stream(self, call: RpcCall) -> None:
        """Serve a following replica."""
        await self._streams.serve(call)

    async def probe(self, call: RpcCall) -> None:
        """Answer the probes of another replica."""
        await serve_probes(self._group, self, call)

    async def fetch_range(self, call: RpcCall) -> None:
        """Serve a replica with a damaged log; the master does so, too."""
        await serve_range(self._group, self._replica_engine, call)

    def handle_hello(self, number: int, message: Hello) -> None:
        """See StreamReceiver."""
        self._do(functools.partial(self._machine.handle_hello, number, message))

    def handle_ack(self, number: int, message: Ack) -> None:
        """See StreamReceiver."""
        self._do(functools.partial(self._machine.handle_ack, number, message))

    def handle_connected(self, number: int) -> None:
        """See StreamReceiver."""
        self._do(functools.partial(self._machine.handle_connected, number))

    def handle_message(self, number: int, message: ToReplica | LogFloor) -> None:
        """See StreamReceiver."""
        if isinstance(message, LogFloor):
            self._replica_engine.follow_floor(*message)
            return
        if isinstance(message, Data):
            self.received_bytes += len(message.data)
        if isinstance(message, Welcome):
            self._replica_engine.catch_up_at_latest(message.extent.log_end)
        self._do(functools.partial(self._machine.handle_message, number, message))

    def handle_closed(self, number: int | None) -> None:
        """See StreamReceiver."""
        self._do(functools.partial(self._machine.handle_closed, number))
