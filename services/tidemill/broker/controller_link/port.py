"""The broker's end of its tie to the controllers, through its supervisor.

It says how the broker is in each turn of a loop of its own: a broker that does not turn says
nothing, and its supervisor tells for how long. A supervisor that is gone takes the broker with it:
the end of the socket stops the process as a signal does.
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
from tidemill.common.replica_group import ReplicaId
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.replica_wire import from_view, to_member, to_proposal

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.truncate_intent import LogCut
    from tidemill.broker.engine.replication.actions import MastershipRelease
    from tidemill.common.replica_group import Proposal, ReplicaRun, ReplicationView

STATUS_PERIOD_S: Final = 0.05  # a fortieth of what a standstill may last
# Of what the supervisor has not read, which does nothing else: it is stopped, or gone.
UNSENT_BYTES_MAX: Final = 1 << 20


class ReplicaStatus(NamedTuple):
    """How a replica is."""

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
    writable_epoch: int = 0  # the epoch that it leads, when that has its first commit
    cut: LogCut | None = None  # of its log, the last one
    diverged: frozenset[ReplicaId] = frozenset()  # whose log is not their master's


class ReplicaIntroduction(NamedTuple):
    """Who a replica is, and what its store is."""

    me: ReplicaRun
    store_uuid: str
    address: str  # at which others reach it
    is_clean: bool


class ControlledReplica(Protocol):
    """This replica among the others: hears what was decided, and says how it is."""

    def introduction(self) -> ReplicaIntroduction:
        """Return who this is."""

    def learn(self, view: ReplicationView) -> None:
        """Hear what the controllers have decided."""

    def refused(self, version: int) -> None:
        """Hear that a proposal against `version` was refused."""

    def hand_over(self, target: ReplicaId | None) -> bool:
        """Begin a planned transfer; whether there is anybody to hand over to."""

    def status(self) -> ReplicaStatus:
        """Return how this replica is."""


@final
class SupervisorPort:
    """The controllers, as a broker sees them."""

    def __init__(self, fd: int) -> None:
        """Speak over the socket `fd`, which becomes this port's own."""
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._register: wire.Register | None = None
        self._hearer: ControlledReplica | None = None
        self._view: ReplicationView | None = None
        self._proposed: dict[int, int] = {}  # version by number, of the last proposals
        self._numbers = 0
        self.is_lost = asyncio.Event()  # the supervisor is gone

    # ------------------------------------------------------------ for the replica

    def attach(self, replicas: ControlledReplica) -> None:
        """Tell `replicas` what is decided from now on, and the newest of it at once."""
        self._hearer = replicas
        me, store_uuid, address, is_clean = replicas.introduction()
        if self._register is None or self._register.member != to_member(me):
            self._register = wire.Register(
                member=to_member(me), store_uuid=store_uuid, address=address, is_clean=is_clean
            )
            self._say(wire.SessionUp(register=self._register))
        if self._view is not None:
            replicas.learn(self._view)

    def propose(self, proposal: Proposal) -> None:
        """Say what the sync state set should be."""
        # The last is enough: it is the one that a refusal matters for.
        self._proposed = {self._numbers + 1: proposal.version}
        self._say(wire.SessionUp(proposal=to_proposal(proposal)))

    def release(self, release: MastershipRelease) -> None:
        """Ask for another master."""
        asked = wire.Release(
            epoch=release.epoch,
            master=to_member(release.master),
            target=release.target,
            paused_ms=release.paused_ms,
        )
        self._say(wire.SessionUp(release=asked))

    # ------------------------------------------------------------ the socket

    async def run(self) -> None:
        """Hear the supervisor, and say how this replica is, until cancelled or it is gone."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._read)
        try:
            while not self.is_lost.is_set():
                self._say_status()
                await asyncio.sleep(STATUS_PERIOD_S)
        finally:
            loop.remove_reader(self._socket)
            self._socket.close()

    def _say_status(self) -> None:
        if self._hearer is None or self._register is None:
            return
        status = self._hearer.status()
        beat = wire.Heartbeat(
            member=self._register.member,
            is_master=status.is_master,
            epoch_seen=status.epoch_seen,
            version_seen=max(status.version_seen, 0),
            log_epoch=status.log_epoch,
            log_end=status.log_end,
            durable_end=status.durable_end,
            confirm=status.confirm,
            # One whose disk fails ends, and its supervisor says so.
            health=wire.HEALTH_SLOW if status.is_slow else wire.HEALTH_OK,
            blocked_ms=status.blocked_ms,
            peer_silence_ms={int(one): ms for one, ms in status.peer_silence_ms.items()},
            writable_epoch=status.writable_epoch,
            diverged=sorted(status.diverged),
        )
        if status.cut is not None:
            cut = wire.Cut(replica_id=beat.member.replica_id, **status.cut._asdict())
            beat.cut.CopyFrom(cut)
        self._say(wire.SessionUp(heartbeat=beat))

    def _say(self, up: wire.SessionUp) -> None:
        self._numbers += 1
        up.number = self._numbers
        is_passing = up.WhichOneof("message") == "heartbeat"
        if is_passing and self._unsent:
            return  # The next one says more.
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
            pass  # With the next message, at the latest in STATUS_PERIOD_S.
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
                self._hear(wire.SessionDown.FromString(message))
        except (InvalidSupervisorFrame, DecodeError):
            data = b""
        if not data:
            self.is_lost.set()
            asyncio.get_running_loop().remove_reader(self._socket)

    def _hear(self, down: wire.SessionDown) -> None:
        match down.WhichOneof("message"):
            case "view":
                self._view = from_view(down.view)
                if self._hearer is not None:
                    self._hearer.learn(self._view)
            case "hand_over":
                target = down.hand_over.target
                if self._hearer is not None:
                    is_any = target == LEAST_LAG_TARGET
                    self._hearer.hand_over(None if is_any else ReplicaId(target))
            case "answer" if down.answer.WhichOneof("result") == "refused":
                version = self._proposed.pop(down.answer.number, None)
                if self._hearer is not None and version is not None:
                    self._hearer.refused(version)
            case _:
                pass
