"""One session: the supervisor of a replica, as long as its stream lasts.

Heartbeats and death certificates are taken at once. What changes the record waits for the store, so
a task of its own does that, one request after the other: a store that is slow makes nobody silent.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.common.errors import ServiceError
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView
from tidemill.controller.election.decide import FOUNDER, live_of, release
from tidemill.controller.election.membership import ChangeRejection, change_sync_state_set
from tidemill.controller.election.registration import FencedRun, presence_of, register
from tidemill.controller.meta_store import StoreUnreachable
from tidemill.controller.server.wire import from_heartbeat, from_register, host_of
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.replica_wire import from_member, from_proposal, to_view

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.controller.election.record import GroupRecord
    from tidemill.controller.election.sessions import ElectionTiming, Sight
    from tidemill.controller.group import BrokerGroupControl, ChangeRequest, Denial
    from tidemill.controller.groups import BrokerGroupControls
    from tidemill.controller.metrics import ControllerMetrics
    from tidemill.transport.aio.call import RpcCall

# Of one session: a supervisor waits for the answer to each before it asks the next, and a master
# repeats a proposal. Beyond it a request is refused as unavailable.
REQUESTS_WAITING_MAX: Final = 16
UNSENT_BYTES_MAX: Final = 1 << 20  # of a peer that does not read; beyond it the session ends
# A view that was sent on this session and is not echoed by heartbeats is sent again.
NEWS_AGAIN_MS: Final = 1_000

# A supervisor attaches when its broker has opened its store: one that takes longer comes back. Who
# never does would hold a stream for ever.
ATTACH_WITHIN_S: Final = 300.0

log = structlog.get_logger()


@final
class SessionCall:
    """A listener of its group, and the voice of its replica."""

    def __init__(
        self,
        call: RpcCall,
        groups: BrokerGroupControls,
        *,
        clock: Clock,
        timing: ElectionTiming,
        metrics: ControllerMetrics,
        is_leading: bool,
    ) -> None:
        self._call = call
        self._groups = groups
        self._clock = clock
        self._timing = timing
        self._metrics = metrics
        self._is_leading = is_leading
        self._group: BrokerGroupControl | None = None
        self._registered: ReplicaRun | None = None  # as the record says, whoever was asked for it
        self._told_at_ms = 0  # when a view was sent last
        self._requests: asyncio.Queue[wire.SessionUp] = asyncio.Queue(REQUESTS_WAITING_MAX)

    async def serve(self) -> None:
        """Serve the stream to its end. Raises RpcError."""
        waiting = asyncio.get_running_loop().call_later(ATTACH_WITHIN_S, self._end_unattached)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._serve_requests(), name="requests of a session")
            try:
                await self._take_all()
            finally:
                waiting.cancel()
                asking.cancel()
                if self._group is not None:
                    self._group.listeners.discard(self)

    def _end_unattached(self) -> None:
        if self._group is None:
            self._call.expire()

    # ------------------------------------------------------------ what the group tells

    def send_view(self, view: ReplicationView) -> None:
        """Send a view that is new."""
        self._told_at_ms = self._clock.monotonic_ms()
        self._send(wire.SessionDown(view=to_view(view)))

    def hand_over(self, *, epoch: int, target: ReplicaId) -> None:
        """Ask the master that this session is of for a planned transfer."""
        view = None if self._group is None else self._group.view()
        if view is not None and view.master == self._registered:
            self._send(wire.SessionDown(hand_over=wire.HandOver(epoch=epoch, target=target)))

    def end_session(self) -> None:
        """End the session: its supervisor comes back, and registers with what there is then."""
        self._call.expire()

    def _send(self, message: wire.SessionDown) -> None:
        if self._call.unsent_bytes > UNSENT_BYTES_MAX:
            self._call.expire()  # Its supervisor comes back on a stream that works.
            return
        self._call.write(message.SerializeToString())

    # ------------------------------------------------------------ what the replica says

    async def _take_all(self) -> None:
        async for request in self._call:
            try:
                up = wire.SessionUp.FromString(request)
            except DecodeError:
                raise RpcError(RpcCode.INVALID_ARGUMENT, "no message of a session") from None
            if self._group is None and up.WhichOneof("message") != "attach":
                raise RpcError(RpcCode.FAILED_PRECONDITION, "a session begins with Attach")
            await self._take(up)

    async def _take(self, up: wire.SessionUp) -> None:
        kind = up.WhichOneof("message")
        if kind == "attach":
            await self._attach(up.attach)
        elif kind == "heartbeat":
            self._hear(up)
        elif kind == "death":
            assert self._group is not None, "it has attached"
            log.warning(
                "a replica's process has ended",
                group=self._group.name,
                replica=up.death.member.replica_id,
                how=up.death.how,
            )
            self._metrics.count_request("broker_death", "success")
            self._group.note_death(from_member(up.death.member))
        elif kind in ("register", "proposal", "release"):
            try:
                self._requests.put_nowait(up)
            except asyncio.QueueFull:
                self._answer(up, wire.Answer(unavailable="too many requests wait"))
        else:
            raise RpcError(RpcCode.INVALID_ARGUMENT, "a message of a kind that nobody knows")

    async def _attach(self, attach: wire.Attach) -> None:
        try:
            # Who has seen an epoch is of a group whose record is lost: somebody must hear of it.
            is_founder = attach.member.replica_id == FOUNDER or attach.epoch_seen > 0
            group = await self._groups.of(
                attach.group, is_founder=is_founder, address=host_of(self._call.peer())
            )
        except ServiceError as error:
            raise RpcError(RpcCode.NOT_FOUND, error.message) from None
        except StoreUnreachable as error:
            raise RpcError(RpcCode.UNAVAILABLE, f"the store: {error}") from None
        # A run that has registered over another controller is to be named, or the next is fenced.
        await group.refresh()
        if group.is_removed:
            raise RpcError(RpcCode.UNAVAILABLE, f"the broker group {group.name} was forgotten")
        self._group = group
        assert group.stored is not None, "a group that was found has a record"
        registered = group.stored.record.find_member(ReplicaId(attach.member.replica_id))
        if registered == from_member(attach.member):
            self._registered = registered
        welcome = wire.Welcome(
            registered_incarnation="" if registered is None else registered.incarnation,
            is_leading=self._is_leading,
        )
        self._send(wire.SessionDown(welcome=welcome))
        group.listeners.add(self)
        view = group.view()
        if view is not None:
            self.send_view(view)

    def _hear(self, up: wire.SessionUp) -> None:
        group, beat = self._group, up.heartbeat
        assert group is not None, "it has attached"
        assert group.stored is not None, "a group that was found has a record"
        member = from_member(beat.member)
        group.note_heartbeat(member, from_heartbeat(beat))
        record = group.stored.record
        registered = record.find_member(member.replica_id)
        if registered == member:
            self._registered = member
        elif self._registered == member:
            self._answer(
                up, wire.Answer(fenced=f"another run of replica {member.replica_id} has registered")
            )
            return
        grant_ms = group.grant_ms(member)
        reply = wire.HeartbeatReply(
            number=up.number, is_leading=grant_ms > 0, epoch=record.epoch, grant_ms=grant_ms
        )
        self._send(wire.SessionDown(beat=reply))
        is_due = self._clock.monotonic_ms() - self._told_at_ms >= NEWS_AGAIN_MS
        view = group.view()
        if is_due and view is not None and beat.version_seen < view.version:
            self.send_view(view)

    # ------------------------------------------------------------ what it asks

    async def _serve_requests(self) -> None:
        while True:
            up = await self._requests.get()
            began_ns = time.monotonic_ns()
            kind, ask = self._asked(up)
            status = "failed"
            try:
                assert self._group is not None, "it has attached"
                refusal = await self._group.change(ask)
                status = "success" if refusal is None else "failed"
                self._tell(up, refusal)
            except StoreUnreachable as error:
                status = "timeout"
                self._answer(up, wire.Answer(unavailable=str(error)))
            self._metrics.count_request(kind, status, time.monotonic_ns() - began_ns)

    def _asked(self, up: wire.SessionUp) -> tuple[str, ChangeRequest]:
        """Return a request as what judges a record, and its name among the metrics."""
        match up.WhichOneof("message"):
            case "register":
                registration = from_register(up.register)

                def come(record: GroupRecord, sight: Sight) -> GroupRecord | Denial:
                    before = presence_of(
                        record, registration.member.replica_id, sight, self._timing
                    )
                    return register(record, registration, before)

                return "register_broker", come
            case "proposal":
                proposal = from_proposal(up.proposal)

                def propose(record: GroupRecord, sight: Sight) -> GroupRecord | Denial:
                    live = {one.member for one in live_of(record, sight, self._timing)}
                    return change_sync_state_set(record, proposal, live)

                return "alter_sync_state_set", propose
            case _:
                asked = up.release

                def hand_over(record: GroupRecord, sight: Sight) -> GroupRecord | Denial:
                    after = release(
                        record,
                        epoch=asked.epoch,
                        master=from_member(asked.master),
                        target=ReplicaId(asked.target),
                        live=live_of(record, sight, self._timing),
                    )
                    if after is None:
                        return ChangeRejection(f"replica {asked.target} cannot be master now")
                    last = after.history[-1]._replace(detected_ms=asked.paused_ms)
                    return after._replace(history=(*after.history[:-1], last))

                return "elect_master", hand_over

    def _tell(self, up: wire.SessionUp, refusal: Denial | None) -> None:
        if isinstance(refusal, FencedRun):
            self._answer(up, wire.Answer(fenced=refusal.why))
            return
        if isinstance(refusal, ChangeRejection):
            if up.WhichOneof("message") == "register":
                log.warning("a replica waits for its place", reason=refusal.why)
            self._answer(up, wire.Answer(refused=refusal.why))
            return
        if up.WhichOneof("message") == "register":
            self._registered = from_member(up.register.member)
        view = None if self._group is None else self._group.view()
        if view is not None:
            self.send_view(view)  # Before the answer: who reads it knows what has come of it.
        self._answer(up, wire.Answer(done=wire.Done()))

    def _answer(self, up: wire.SessionUp, answer: wire.Answer) -> None:
        answer.number = up.number
        self._send(wire.SessionDown(answer=answer))
