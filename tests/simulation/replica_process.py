"""A simulated replica: the production machines over a log whose disk may lose power."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, final
from zlib import crc32

from tests.support.claims import LastRun, after_registration, claims_clean
from tidemill.broker.engine.replication.actions import (
    Action,
    Close,
    Dial,
    Diverging,
    Promoted,
    Propose,
    Release,
    Send,
    StepDown,
)
from tidemill.broker.engine.replication.config import AckMode, ReplicationConfig
from tidemill.broker.engine.replication.epoch_journal import Journal, cut_at, last_epoch
from tidemill.broker.engine.replication.messages import Ack, Data, Digest, Hello
from tidemill.broker.engine.replication.replication import Replication
from tidemill.common.replica_group import GroupView, Member, ReplicaId
from tidemill.controller.election.registration import Registration
from tidemill.controller.election.sessions import Health, Heartbeat

if TYPE_CHECKING:
    from tests.simulation.replica_group import World

RECORD = struct.Struct(">IQI")  # epoch, value (0: the epoch begins), checksum
TICK_S = 0.05
HEARTBEAT_S = 0.2
SYNC_S_MAX = 0.004
STALL_PART = 0.005
STALL_S_MAX = 2.0
REOPEN_S = 0.1


@final
class Volume:
    """What of a replica survives its process, and what of that a power cut."""

    def __init__(self, store_uuid: str) -> None:
        self.store_uuid = store_uuid
        self.written = bytearray()
        self.durable = 0
        self.epoch_seen = 0
        self.journal: Journal = ()
        self.confirm = 0  # saved now and then: never above what is confirmed
        self.last = LastRun("")
        self.is_stuck = False  # no sync of it ends
        self.is_full = False  # nothing that a master sends has room

    def cut_power(self, random: Random) -> None:
        """Keep what is durable, and any part of the rest; the last record may be torn."""
        kept = random.randint(self.durable, len(self.written))
        del self.written[kept - kept % RECORD.size :]
        self.durable = len(self.written)
        self.confirm = min(self.confirm, self.durable)

    def lose_memory(self, random: Random) -> None:
        """Lose what was acked and never synced."""
        kept = random.randint(0, len(self.written))
        del self.written[kept - kept % RECORD.size :]
        self.durable = len(self.written)
        self.confirm = min(self.confirm, self.durable)


@final
class ModelLog:
    """One life's log: `ReplicatedLog` over a volume."""

    def __init__(self, volume: Volume, confirmed: Callable[[int], None]) -> None:
        self._volume = volume
        self._confirmed = confirmed
        self.confirm_offset = min(volume.confirm, len(volume.written))

    @property
    def log_min(self) -> int:
        return 0

    @property
    def log_end(self) -> int:
        return len(self._volume.written)

    @property
    def durable_offset(self) -> int:
        return self._volume.durable

    @property
    def applied_offset(self) -> int:
        return self.confirm_offset

    @property
    def epoch_seen(self) -> int:
        return self._volume.epoch_seen

    @property
    def journal(self) -> Journal:
        return self._volume.journal

    def save_epoch_seen(self, epoch: int) -> None:
        assert epoch >= self._volume.epoch_seen, "an epoch is never unseen"
        self._volume.epoch_seen = epoch

    def save_journal(self, journal: Journal) -> None:
        self._volume.journal = journal

    def begin_epoch(self, epoch: int) -> int:
        self.append_value(epoch, 0)
        return self.log_end

    def append_value(self, epoch: int, value: int) -> int:
        """Append a record, and return where it begins."""
        begin = self.log_end
        self._volume.written += RECORD.pack(epoch, value, crc32(f"{epoch} {value}".encode()))
        return begin

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        del size_max  # Frames are small here, so that many are on their way.
        data = bytes(self._volume.written[offset : offset + 4 * RECORD.size])
        return Data(0, offset, data, crc32(data), 0, 0, 1 << 40) if data else None

    def has_room_for(self, size: int) -> bool:
        return size >= 0 and not self._volume.is_full

    def append(self, frame: Data) -> None:
        assert frame.offset == self.log_end, "frames follow each other"
        self._volume.written += frame.data

    def digest(self, begin: int, end: int) -> Digest:
        return Digest(begin, end, crc32(bytes(self._volume.written[begin:end])))

    def truncate(self, cut: int) -> None:
        assert cut >= self.confirm_offset, "F-5: what is confirmed is never cut"
        del self._volume.written[cut:]
        self._volume.durable = min(self._volume.durable, cut)

    def start_at(self, log_min: int) -> None:
        raise AssertionError(f"nobody is so far behind here that it begins at {log_min}")

    def confirm(self, offset: int) -> None:
        assert offset <= self.log_end, "what is confirmed is there"
        self.confirm_offset = offset
        self._confirmed(offset)


@final
class ReplicaProcess:
    """One replica: its volume, and the process that runs on it, if any."""

    def __init__(self, world: World, replica_id: int, config: ReplicationConfig) -> None:
        self.id = ReplicaId(replica_id)
        self.name = f"replica-{replica_id}"
        self.volume = Volume(f"store {replica_id}.0")
        self.boot = 0
        self.lives = 0
        self.is_alive = False
        self.is_paused = False
        self.member = Member(self.id, "")
        self.machine: Replication | None = None
        self.log: ModelLog
        self.is_registered = False
        self._world = world
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: list[tuple[int, int]] = []  # (end, value) of sends without an answer
        self._written = asyncio.Event()
        self._blocked_since_s: float | None = None
        self.asleep: list[Callable[[], object]] = []  # what came while it stood still

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """Begin a run."""
        self.lives += 1
        self.is_alive, self.is_paused, self.is_registered = True, False, False
        self.member = Member(self.id, f"{self.id}.{self.lives}")
        self._written = asyncio.Event()
        self._open()
        for work in (self._tick, self._sync, self._beat, self._register):
            self._tasks.append(asyncio.ensure_future(work()))

    def stop(self) -> None:
        """Kill the process; its supervisor says so, if it lives."""
        self.is_alive = self.is_paused = False
        for task in self._tasks:
            task.cancel()
        self.asleep, self._waiting, self.machine = [], [], None
        self._world.network.end_streams_of(self.name)

    def check(self) -> None:
        """Raise what has ended one of its tasks."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def _open(self) -> None:
        self.log = ModelLog(self.volume, self._confirmed)
        self.machine = Replication(
            self.member, group="group", store_uuid=self.volume.store_uuid, log=self.log,
            config=self._config,
        )  # fmt: skip
        if self.volume.durable < len(self.volume.written):
            self._written.set()

    async def _reopen(self) -> None:
        await asyncio.sleep(REOPEN_S)
        self._open()
        if self._world.latest.get(self.name):
            self.learn(self._world.latest[self.name])

    async def _register(self) -> None:
        """Tell controllers of this run, until one of them has it in the record."""
        last, boot_id = self.volume.last, str(self.boot)
        is_clean = claims_clean(
            last, boot_id=boot_id, log_end=self.log.log_end,
            acks_are_durable=self._config.ack_mode is AckMode.SYNC_FSYNC,
        )  # fmt: skip
        self.volume.last = after_registration(last, boot_id=boot_id, is_accepted=False)
        while not self.is_registered:
            for controller in self._world.controllers:
                instead_of = await controller.registered_of(self)
                if instead_of is None:
                    continue
                asked = Registration(
                    self.member, instead_of, self.volume.store_uuid, self.name, is_clean=is_clean
                )
                self._world.network.send(self.name, controller.name, partial(controller.ask, asked))
            await asyncio.sleep(0.3)
        self.volume.last = after_registration(last, boot_id=boot_id, is_accepted=True)

    # ------------------------------------------------------------ what comes

    def learn(self, view: GroupView) -> None:
        """Take a view from a controller."""
        machine = self.machine
        if machine is not None and self.is_registered:
            self._world.latest[self.name] = view
            machine.learn(view, self._world.now_ms())
            self._act()

    def receive(self, stream: int, message: object) -> None:
        """Take a message of a stream."""
        machine, now_ms = self.machine, self._world.now_ms()
        if machine is None:
            return
        if isinstance(message, Hello):
            machine.hello(stream, message, now_ms)
        elif isinstance(message, Ack):
            machine.ack(stream, message, now_ms)
        else:
            machine.receive(stream, message, now_ms)  # type: ignore[arg-type]
            self._written.set()
        self._act()

    def stream_closed(self, stream: int | None) -> None:
        """Hear of the end of a stream."""
        if self.machine is not None:
            self.machine.closed(stream, self._world.now_ms())
            self._act()

    def stream_opened(self, stream: int) -> None:
        """Hear that a dial has come through."""
        if self.machine is not None:
            self.machine.dialled(stream, self._world.now_ms())
            self._act()

    def refused(self, version: int) -> None:
        """Hear that a proposal was refused."""
        if self.machine is not None:
            self.machine.refused(version, self._world.now_ms())

    def hand_over(self, target: ReplicaId | None) -> None:
        """Begin a planned transfer."""
        if self.machine is not None:
            self.machine.hand_over(target, self._world.now_ms())
            self._act()

    # ------------------------------------------------------------ sends

    @property
    def takes_sends(self) -> bool:
        """Whether clients may send here."""
        master = self.machine.master if self.machine is not None else None
        if master is None or self.is_paused:
            return False
        return master.accepts_sends and not master.sync_state.is_short

    def send(self, value: int) -> None:
        """Take a client's message; it is answered when it is confirmed."""
        assert self.machine is not None, "it is there"
        assert self.machine.master is not None, "and a master"
        self.log.append_value(self.machine.master.epoch, value)
        self._waiting.append((self.log.log_end, value))
        self.machine.moved(self._world.now_ms())
        self._written.set()
        self._act()

    def _confirmed(self, offset: int) -> None:
        if self._world.random.random() < 0.1:
            self.volume.confirm = offset
        if self.machine is not None and self.machine.master is not None:
            self._world.check_confirmed(self, offset)
            while self._waiting and self._waiting[0][0] <= offset:
                end, value = self._waiting.pop(0)
                self._world.answered(value, end - RECORD.size)

    # ------------------------------------------------------------ what is done

    def _act(self) -> None:
        if self.machine is None:
            return
        network, world = self._world.network, self._world
        for action in self.machine.take_actions():
            self._do(action, network, world)

    def _do(self, action: Action, network: object, world: World) -> None:
        match action:
            case Dial(master, _):
                world.network.dial(self, world.replicas[master.replica_id])
            case Send(stream, message):
                if isinstance(message, Ack):
                    world.check_ack(self, message)
                world.network.send_on(stream, self.name, message)
            case Close(stream, _):
                world.network.close(stream, self.name)
            case Propose(proposal):
                for controller in world.controllers:
                    world.network.send(
                        self.name, controller.name, partial(controller.ask, proposal)
                    )
            case Release():
                for controller in world.controllers:
                    world.network.send(self.name, controller.name, partial(controller.ask, action))
            case Promoted(view):
                world.promoted(self, view)
                self._written.set()
            case StepDown():
                self._waiting = []
                self.machine = None
                world.network.end_streams_of(self.name)
                self._tasks.append(asyncio.ensure_future(self._reopen()))
            case Diverging(why):
                world.findings.append(f"C2: {self.name} diverges: {why}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.machine is not None and not self.is_paused:
                self.machine.tick(self._world.now_ms())
                self._act()

    async def _sync(self) -> None:
        random = self._world.random
        while True:
            await self._written.wait()
            self._written.clear()
            end, machine = len(self.volume.written), self.machine
            is_stall = self._world.has_stalls and random.random() < STALL_PART
            await asyncio.sleep(random.uniform(0, STALL_S_MAX if is_stall else SYNC_S_MAX))
            while self.is_paused or self.volume.is_stuck:  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(TICK_S)
            # What was cut meanwhile is written anew, and synced by the next one.
            if machine is not None and machine is self.machine:
                self.volume.durable = max(
                    self.volume.durable, min(end, self._world.uncut_end(self, end))
                )
                machine.moved(self._world.now_ms())
                self._act()
            elif self.machine is not None:
                self._written.set()

    async def _beat(self) -> None:
        while True:
            if self.is_registered:
                for controller in self._world.controllers:
                    beat = self._heartbeat()
                    self._world.network.send(
                        self.name, controller.name,
                        partial(controller.heard, self.member, beat),
                    )  # fmt: skip
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self) -> Heartbeat:
        now_s, machine, log = self._world.loop.time(), self.machine, self.log
        master = machine.master if machine is not None else None
        if master is None or not master.sync_state.is_short:
            self._blocked_since_s = None
        elif self._blocked_since_s is None:
            self._blocked_since_s = now_s
        blocked_s = 0.0 if self._blocked_since_s is None else now_s - self._blocked_since_s
        paused_ms = round(1000 * self._world.paused_for_s(self)) if self.is_paused else 0
        return Heartbeat(
            is_master=master is not None, epoch_seen=log.epoch_seen,
            version_seen=0 if machine is None or machine.view is None else machine.view.version,
            log_epoch=last_epoch(cut_at(log.journal, log.log_end)), log_end=log.log_end,
            durable_end=log.durable_offset, confirm=log.confirm_offset, health=Health.OK,
            page_age_ms=paused_ms, blocked_ms=round(1000 * blocked_s),
            peer_silence_ms=self._world.network.silences(self),
        )  # fmt: skip
