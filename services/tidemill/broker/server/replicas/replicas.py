"""This replica among those of its group: what happens, around the pure machines.

    controllers ── learn(view) ──▶  Replication ── Dial, Send, Close ──▶  streams
    round loop  ── moved() ──────▶      │       ── Propose, Release ───▶  controllers
    streams     ── frames, ends ─▶      └────── Promoted, StepDown ────▶  this process

Everything happens in the turn of the event loop in which it is heard of. Between two events the
actions of the first are carried out. An event that fails ends the life of the store: what it was
about to do is done again, or not, by the next one.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never, final

import structlog

from tidemill.broker.controller_link.port import Introduction, Status
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
from tidemill.broker.engine.replication.messages import Ack, Data, Hello, Welcome
from tidemill.broker.engine.replication.replication import Replication
from tidemill.broker.engine.replication.store_log import save_addresses
from tidemill.broker.server.replicas.frames import LogFloor, encode_to_master, encode_to_replica
from tidemill.broker.server.replicas.mending import serve_range
from tidemill.broker.server.replicas.probes import Probes, serve_probes
from tidemill.broker.server.replicas.streams import ReplicaStreams

if TYPE_CHECKING:
    from tidemill.broker.engine.replica.group_log import GroupLog
    from tidemill.broker.engine.replication.actions import Action
    from tidemill.broker.engine.replication.config import ReplicationConfig
    from tidemill.broker.engine.replication.messages import ToReplica
    from tidemill.broker.server.replicas.ports import ControllerPort
    from tidemill.broker.server.round.durability import Durability
    from tidemill.common.clock import Clock
    from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView
    from tidemill.transport.aio.call import RpcCall
    from tidemill.transport.aio.connect import Connector

log = structlog.get_logger()

TICK_S: Final = 0.05  # the shortest time of the machines, which is how long a first dial waits
# To replicas that are far behind, 64 MiB/s: what is new must not wait for what is old. In steps,
# since each record of it is checked, 5 us each: of a kilobyte they take two milliseconds.
OLD_STEP_S: Final = 0.005
OLD_BYTES_A_STEP: Final = (64 << 20) // 200
# As long as a replica takes to come back that was killed; clients wait for three seconds or more.
SHORT_HOLD_MS: Final = 2_000
SAVE_TICKS: Final = 100  # every five seconds
# Each second: a segment is dropped by replicas, and what is durable is noted, so much later.
FLOOR_TICKS: Final = 20


class SteppedDown(Exception):
    """This replica is the master no more: its memory is ahead of what is confirmed."""


class LagBehind(NamedTuple):
    """How far a replica is behind."""

    behind_bytes: int
    behind_ms: int  # since it was last seen to have all


@final
class Replicas:
    """This replica among the others."""

    def __init__(
        self,
        me: ReplicaRun,
        group: str,
        group_log: GroupLog,
        durability: Durability,
        config: ReplicationConfig,
        *,
        connect: Connector,
        controllers: ControllerPort,
        clock: Clock,
    ) -> None:
        self._group = group
        self._group_log = group_log
        self._durability = durability
        self._controllers = controllers
        self._clock = clock
        self._machine = Replication(
            me, group=group, store_uuid=group_log.store_uuid.hex(), log=group_log, config=config
        )
        self._short_since_ms: int | None = None
        self._was_held = False
        self.address = ""  # at which others reach this replica, from when it is served
        self._blocked_since_ms = clock.monotonic_ms()
        self._streams = ReplicaStreams(self, connect)
        self.probes = Probes(group, self, connect=connect, clock=clock)
        self._saved_addresses: tuple[tuple[ReplicaId, str], ...] = ()
        self._deferred: ReplicationView | None = None  # until the round under way is written
        self._told_damage = ""
        self._is_carrying_out = False
        self.sent_bytes = self.received_bytes = 0  # of the log
        self._caught_up_ms: dict[ReplicaRun, int] = {}  # when a replica was seen to have all
        self._wake: Callable[[], None] = lambda: None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        durability.on_moved = self.moved
        durability.beside = group_log.files_beside
        durability.is_held = self.is_held
        group_log.on_confirmed = self._confirmed

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
        """The newest view."""
        return self._machine.view

    def lacks(self) -> str:
        """Return what this replica lacks to be counted upon; empty: nothing.

        An upgrade goes on to the next replica when it lacks nothing. While all controllers are away
        it stays what it was.
        """
        view = self._machine.view
        if view is None:
            return "no controller has said who is master"
        if self.me not in view.sss:
            return "it has not all that its master has, or has not registered yet"
        return ""

    def is_held(self) -> bool:
        """Whether no round is to be begun: what comes waits, and links ask again elsewhere.

        While this master hands over: its target is to have all. And for SHORT_HOLD_MS where nothing
        can be confirmed, since that ends by itself when replicas come; then messages are refused.
        """
        master = self._machine.master
        if master is None or not master.sync_state.is_short:
            self._short_since_ms = None
            self._group_log.engine.commands.lacks_replicas = False
            is_moving = master is not None and not master.accepts_sends
            self._was_held |= is_moving
            return is_moving
        now_ms = self._clock.monotonic_ms()
        if self._short_since_ms is None:
            self._short_since_ms = now_ms
        is_held = now_ms - self._short_since_ms < SHORT_HOLD_MS
        self._group_log.engine.commands.lacks_replicas = not is_held
        is_held |= not master.accepts_sends
        self._was_held |= is_held
        return is_held

    def peer_silence_ms(self) -> dict[ReplicaId, int]:
        """Return how long nothing was heard of each peer, over streams of the log or probes."""
        now_ms = self._clock.monotonic_ms()
        found, view = self._machine.peer_silence_ms(now_ms), self._machine.view
        master = None if view is None or view.master is None else view.master.replica_id
        for number, silent_ms in self.probes.silence_ms(now_ms).items():
            # Of the master's only frames of the log count: that it answers is not enough.
            if number != master and not self.is_master:
                found.setdefault(number, silent_ms)
        return found

    def introduction(self) -> Introduction:
        """Return who this is, for controllers."""
        log = self._group_log
        return Introduction(self.me, log.store_uuid.hex(), self.address, is_clean=log.is_clean)

    def status(self) -> Status:
        """Return how this replica is, for controllers."""
        view, group_log, now_ms = self._machine.view, self._group_log, self._clock.monotonic_ms()
        is_blocked = self.is_master and view is not None and len(view.sss) < view.min_in_sync
        if not is_blocked:
            self._blocked_since_ms = now_ms
        return Status(
            is_master=self.is_master,
            epoch_seen=group_log.epoch_seen,
            version_seen=0 if view is None else view.version,
            log_epoch=max(
                last_epoch(cut_at(group_log.journal, group_log.log_end)), group_log.epoch_alone
            ),
            log_end=group_log.log_end,
            durable_end=group_log.durable_offset,
            confirm=group_log.confirm_offset,
            blocked_ms=now_ms - self._blocked_since_ms,
            peer_silence_ms=self.peer_silence_ms(),
            is_slow=self._durability.is_slow,
            writable_epoch=self._writable_epoch(),
            cut=group_log.cut,
            diverged=self._machine.diverged_replicas,
        )

    def _writable_epoch(self) -> int:
        master = self._machine.master
        return master.epoch if master is not None and master.has_confirmed else 0

    def lags(self) -> dict[ReplicaId, LagBehind]:
        """Return how far each replica is behind; nothing where this is not the master."""
        master, log_end = self._machine.master, self._group_log.durable_offset
        if master is None:
            self._caught_up_ms.clear()
            return {}
        now_ms, found = self._clock.monotonic_ms(), {}
        # Runs that have ended are forgotten: an epoch may last for months, with many of them.
        peers = master.sync_state.peers
        self._caught_up_ms = {run: at for run, at in self._caught_up_ms.items() if run in peers}
        for member in peers:
            acked = master.sync_state.acked(member)
            if acked >= log_end:
                self._caught_up_ms[member] = now_ms
            behind_ms = now_ms - self._caught_up_ms.setdefault(member, now_ms)
            found[member.replica_id] = LagBehind(max(log_end - acked, 0), behind_ms)
        return found

    async def run(self, wake: Callable[[], None]) -> None:
        """Let time pass until cancelled; `wake` is called when the round loop has something to do.

        Raises SteppedDown, and whatever an event has failed with.
        """
        self._wake = wake
        try:
            self._controllers.attach(self)
            for ticks in count():
                if self._failure.done():
                    break
                self._machine.is_disk_slow = self._durability.is_slow
                self._do(self._machine.tick)
                self._tell_damage()
                self._end_hold()
                if ticks % FLOOR_TICKS == 0:
                    self._tell_floor()
                    self.lags()
                    if self._group_log.note_durable():
                        self._durability.sync_again()
                if ticks % SAVE_TICKS == 0 and self._group_log.note_confirm():
                    self._durability.sync_again()
                await self._pass_tick()
            self._failure.result()
        finally:
            self._leave()

    async def _pass_tick(self) -> None:
        """Wait for the next tick; let replicas that are far behind have a little more meanwhile.

        Where they are needed they get it as fast as they take it.
        """
        loop, group_log = asyncio.get_running_loop(), self._group_log
        end_s = loop.time() + TICK_S
        while (left_s := end_s - loop.time()) > 0 and not self._failure.done():
            master, group_log.is_old_held = self._machine.master, False
            if master is not None:
                group_log.old_bytes_left = OLD_BYTES_A_STEP
                self._do(self._machine.handle_progress)
            if group_log.is_old_held and master is not None:
                left_s = 0 if master.sync_state.is_short else min(left_s, OLD_STEP_S)
            await asyncio.wait({self._failure}, timeout=left_s)

    def _end_hold(self) -> None:
        """Let rounds go on that were held."""
        if not self.is_held() and self._was_held:
            self._was_held = False
            self._wake()

    def _tell_damage(self) -> None:
        if self._group_log.damage != self._told_damage:
            self._told_damage = self._group_log.damage
            log.error("a replica cannot be sent what is damaged here", reason=self._told_damage)

    def _tell_floor(self) -> None:
        """Tell replicas what they may drop; who has taken over meanwhile says the same."""
        if not self.is_master:
            return
        log_min, confirm = self._group_log.log_min, self._group_log.confirm_offset
        self._streams.write_to_all(encode_to_replica(LogFloor(log_min, confirm)))

    def _leave(self) -> None:
        self._durability.on_moved = lambda: None
        self._durability.beside = tuple
        self._durability.is_held = lambda: False
        self._group_log.on_confirmed = lambda: None
        if not self._failure.done():
            self._failure.cancel()
        self._streams.close_all()

    # ------------------------------------------------------------ events

    def learn(self, view: ReplicationView) -> None:
        """Hear what the controllers have decided.

        A master that is elected again begins its epoch between two rounds.
        """
        master = self._machine.master
        is_new = master is not None and view.epoch != master.epoch
        if is_new and not self._group_log.is_between_rounds:
            self._deferred = view
            return
        self._do(functools.partial(self._machine.learn, view))
        if self.me in view.sss:
            # Its master has seen this run of it catch up, or it was elected as it is.
            self._do(lambda _now_ms: self._group_log.known_end.clear_doubt())
        if view.addresses != self._saved_addresses:
            self._saved_addresses = view.addresses
            self._do(lambda _now_ms: save_addresses(self._group_log.engine.disk, view.addresses))

    def refused(self, version: int) -> None:
        """Hear that a proposal against `version` was refused."""
        self._do(functools.partial(self._machine.handle_rejection, version))

    def hand_over(self, target: ReplicaId | None) -> bool:
        """Begin a planned transfer; whether there is anybody to hand over to."""
        begun: list[bool] = []
        self._do(lambda now_ms: begun.append(self._machine.hand_over(target, now_ms)))
        return any(begun)

    def moved(self) -> None:
        """Hear that more of the log is written, or durable."""
        self._do(self._machine.handle_progress)
        if self._deferred is not None and self._group_log.is_between_rounds:
            view, self._deferred = self._deferred, None
            self.learn(view)

    def _do(self, event: Callable[[int], object]) -> None:
        """Let something happen, and do what follows."""
        if self._failure.done():
            return
        try:
            self._group_log.now_ms = self._clock.wall_ms()
            event(self._clock.monotonic_ms())
            self._carry_out()
        except Exception as error:  # noqa: BLE001  # Raised by `run`, in whose task it can be.
            if not self._failure.done():
                self._failure.set_exception(error)
            self._wake()

    def _carry_out(self) -> None:
        if self._is_carrying_out:
            return  # An action has made something happen; the loop below comes to what follows.
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
                log.info("this replica is the master", epoch=view.epoch, version=view.version)
                self._wake()
            case StepDown(why):
                log.warning("this replica is the master no more", reason=why)
                raise SteppedDown(why)
            case DivergenceAlarm(why):
                log.error("the log is not the master's, and nobody may cut it", reason=why)
            case _:
                assert_never(action)

    def _confirmed(self) -> None:
        if self._group_log.is_master:
            self._durability.release()
        else:
            self._wake()

    # ------------------------------------------------------------ what streams bring

    async def stream(self, call: RpcCall) -> None:
        """Serve a replica that follows."""
        await self._streams.serve(call)

    async def probe(self, call: RpcCall) -> None:
        """Tell another replica that this one is there."""
        await serve_probes(self._group, self, call)

    async def fetch_range(self, call: RpcCall) -> None:
        """Serve a replica whose own log is damaged, master or not."""
        await serve_range(self._group, self._group_log, call)

    def receive_hello(self, number: int, message: Hello) -> None:
        """See StreamReceiver."""
        self._do(functools.partial(self._machine.handle_hello, number, message))

    def receive_ack(self, number: int, message: Ack) -> None:
        """See StreamReceiver."""
        self._do(functools.partial(self._machine.handle_ack, number, message))

    def note_dialled(self, number: int) -> None:
        """See StreamReceiver."""
        self._do(functools.partial(self._machine.handle_connected, number))

    def receive(self, number: int, message: ToReplica | LogFloor) -> None:
        """See StreamReceiver."""
        if isinstance(message, LogFloor):
            self._group_log.follow_floor(message.log_min, message.confirm)
            return
        if isinstance(message, Data):
            self.received_bytes += len(message.data)
        if isinstance(message, Welcome):
            self._group_log.catch_up_at_latest(message.extent.log_end)
        self._do(functools.partial(self._machine.handle_message, number, message))

    def note_closed(self, number: int | None) -> None:
        """See StreamReceiver."""
        self._do(functools.partial(self._machine.handle_closed, number))
