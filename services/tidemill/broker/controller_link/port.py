"""The broker's end of its link to the controllers, through its supervisor.

A loop reports the state of the broker. If the event loop stands still, the reports stop, and the
supervisor sends their age. If the supervisor ends, the end of the socket stops the broker like a
signal.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from google.protobuf.message import DecodeError

from tidemill.broker.controller_link.frames import (
    LEAST_LAG_TARGET,
    FrameReader,
    InvalidSupervisorFrame,
    encode,
)
from tidemill.common.feature_level import FEATURE_LEVEL
from tidemill.common.replica_group import ReplicaId
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.replica_wire import from_view, to_member, to_proposal

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.truncate_intent import LogCut
    from tidemill.broker.engine.replication.actions import MastershipRelease
    from tidemill.common.replica_group import Proposal, ReplicaRun, ReplicationView

STATUS_PERIOD_S: Final = 0.05  # a thirtieth of the default stall_limit_ms
# Bytes that the supervisor has not read. It reads all the time, so beyond this it has failed.
UNSENT_BYTES_MAX: Final = 1 << 20


class ReplicaStatus(NamedTuple):
    """The state of a replica, for its heartbeats."""

    is_master: bool
    epoch_seen: int
    version_seen: int
    log_epoch: int
    log_end: int
    durable_end: int
    confirm: int
    blocked_ms: int
    peer_silence_ms: dict[ReplicaId, int]
    is_slow: bool = False
    is_full: bool = False
    writable_epoch: int = 0  # a master's epoch, from its first commit on
    cut: LogCut | None = None  # the last cut of its log
    diverged: frozenset[ReplicaId] = frozenset()  # replicas whose log differs from the master's


class ReplicaIntroduction(NamedTuple):
    """The identity of a replica, for its registration."""

    me: ReplicaRun
    store_uuid: str
    address: str  # for the other replicas
    is_clean: bool


class ControlledReplica(Protocol):
    """The replica of this broker, as the controllers control it."""

    def introduction(self) -> ReplicaIntroduction:
        """Return the identity of this replica."""

    def learn(self, view: ReplicationView) -> None:
        """Take a view from the controllers."""

    def note_acceptance(self, version: int) -> None:
        """Note that the controllers accepted the last proposal, against `version`."""

    def note_rejection(self, version: int) -> None:
        """Note that the controllers rejected a proposal against `version`."""

    def hand_over(self, target: ReplicaId | None) -> bool:
        """Begin a planned transfer; return whether a replica can take over."""

    def status(self) -> ReplicaStatus:
        """Return the state of this replica."""


@final
class SupervisorPort:
    """The broker's connection to its supervisor, and so to the controllers."""

    def __init__(self, fd: int) -> None:
        """Use the socket `fd`, and close it at the end."""
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._register: wire.Register | None = None
        self._replica: ControlledReplica | None = None
        self._view: ReplicationView | None = None
        self._proposed: dict[int, int] = {}  # version of the last proposal, by message number
        self._numbers = 0
        self.is_lost = asyncio.Event()  # The supervisor has ended.

    # ------------------------------------------------------------ for the replica

    def attach(self, replica: ControlledReplica) -> None:
        """Register `replica`, and pass views to it, the current one at once."""
        self._replica = replica
        me, store_uuid, address, is_clean = replica.introduction()
        if self._register is None or self._register.member != to_member(me):
            self._register = wire.Register(
                member=to_member(me),
                store_uuid=store_uuid,
                address=address,
                is_clean=is_clean,
                feature_level=FEATURE_LEVEL,
            )
            self._send(wire.SessionUp(register=self._register))
        if self._view is not None:
            replica.learn(self._view)
        # A controller elects a registered replica after its first heartbeat.
        self._send_heartbeat()

    def propose(self, proposal: Proposal) -> None:
        """Propose a sync state set."""
        # The answer matters only for the last proposal.
        self._proposed = {self._numbers + 1: proposal.version}
        self._send(wire.SessionUp(proposal=to_proposal(proposal)))

    def release(self, release: MastershipRelease) -> None:
        """Ask the controllers for another master."""
        request = wire.Release(
            epoch=release.epoch,
            master=to_member(release.master),
            target=release.target,
            paused_ms=release.paused_ms,
        )
        self._send(wire.SessionUp(release=request))

    # ------------------------------------------------------------ the socket

    async def run(self) -> None:
        """Read from the supervisor and report the state, until cancelled or the supervisor ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._read)
        try:
            while not self.is_lost.is_set():
                self._send_heartbeat()
                await asyncio.sleep(STATUS_PERIOD_S)
        finally:
            loop.remove_reader(self._socket)
            self._socket.close()

    def _send_heartbeat(self) -> None:
        if self._replica is None or self._register is None:
            return
        status = self._replica.status()
        beat = wire.Heartbeat(
            member=self._register.member,
            is_master=status.is_master,
            epoch_seen=status.epoch_seen,
            version_seen=max(status.version_seen, 0),
            log_epoch=status.log_epoch,
            log_end=status.log_end,
            durable_end=status.durable_end,
            confirm=status.confirm,
            # A broker with a failed disk ends, and its supervisor reports its death.
            health=_health_of(status),
            blocked_ms=status.blocked_ms,
            peer_silence_ms={int(one): ms for one, ms in status.peer_silence_ms.items()},
            writable_epoch=status.writable_epoch,
            diverged=sorted(status.diverged),
        )
        if status.cut is not None:
            cut = wire.Cut(replica_id=beat.member.replica_id, **status.cut._asdict())
            beat.cut.CopyFrom(cut)
        self._send(wire.SessionUp(heartbeat=beat))

    def _send(self, up: wire.SessionUp) -> None:
        self._numbers += 1
        up.number = self._numbers
        if up.WhichOneof("message") == "heartbeat" and self._unsent:
            return  # The next heartbeat replaces it.
        if len(self._unsent) > UNSENT_BYTES_MAX:
            self.is_lost.set()
            return
        self._unsent += encode(up.SerializeToString())
        self._flush()

    def _flush(self) -> None:
        if self.is_lost.is_set():
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass  # The next message sends the rest, at the latest in STATUS_PERIOD_S.
        except OSError:
            self.is_lost.set()

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for message in self._frames.receive(data):
                self._receive(wire.SessionDown.FromString(message))
        except (InvalidSupervisorFrame, DecodeError):
            data = b""
        if not data:
            self.is_lost.set()
            asyncio.get_running_loop().remove_reader(self._socket)

    def _receive(self, down: wire.SessionDown) -> None:
        match down.WhichOneof("message"):
            case "view":
                self._view = from_view(down.view)
                if self._replica is not None:
                    self._replica.learn(self._view)
            case "hand_over":
                target = down.hand_over.target
                if self._replica is not None:
                    is_any = target == LEAST_LAG_TARGET
                    self._replica.hand_over(None if is_any else ReplicaId(target))
            case "answer" if down.answer.WhichOneof("result") in ("done", "refused"):
                version = self._proposed.pop(down.answer.number, None)
                if self._replica is None or version is None:
                    return
                if down.answer.HasField("done"):
                    self._replica.note_acceptance(version)
                else:
                    self._replica.note_rejection(version)
            case _:
                pass


def _health_of(status: ReplicaStatus) -> wire.Health.ValueType:
    if status.is_full:
        return wire.HEALTH_FULL  # It rejects sends, which is worse than slow ones.
    return wire.HEALTH_SLOW if status.is_slow else wire.HEALTH_OK
