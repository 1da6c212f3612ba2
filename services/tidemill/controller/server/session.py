"""One session: the stream of a replica's supervisor.

Heartbeats and death certificates are processed at once. Changes of the record wait for the store,
so a task of its own makes them, one after the other. A slow store does not delay heartbeats.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.common.addresses import host_of_peer
from tidemill.common.errors import ServiceError
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView
from tidemill.controller.election.decide import FOUNDER, live_of, release
from tidemill.controller.election.feature_levels import too_low
from tidemill.controller.election.membership import ChangeRejection, change_sync_state_set
from tidemill.controller.election.registration import FencedRun, presence_of, register
from tidemill.controller.meta_store import StoreUnreachable
from tidemill.controller.server.wire import from_heartbeat, from_register
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.replica_wire import from_member, from_proposal, to_view

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.controller.election.record import GroupRecord
    from tidemill.controller.election.sessions import ElectionTiming, GroupObservation
    from tidemill.controller.group import BrokerGroupControl
    from tidemill.controller.groups import BrokerGroupControls
    from tidemill.controller.metrics import ControllerMetrics
    from tidemill.controller.operator_changes import ChangeRequest, Denial
    from tidemill.transport.aio.call import RpcCall

# Waiting requests of one session. A supervisor waits for each answer, and a master repeats a
# proposal. At the limit, the answer to a request is `unavailable`.
REQUESTS_WAITING_MAX: Final = 16
UNSENT_BYTES_MAX: Final = 1 << 20  # of a peer that does not read; beyond it the session ends
VIEW_REPEAT_MS: Final = 1_000  # A view is sent again until heartbeats report its version.

# A supervisor attaches when its broker has opened its store. If that takes longer, it reconnects.
# Without the limit, a peer could hold a stream forever.
ATTACH_WITHIN_S: Final = 300.0

log = structlog.get_logger()


@final
class SessionCall:
    """One session, which is a listener of its group."""

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
        self._registered: ReplicaRun | None = None  # this replica's run, if the record has it
        self._view_sent_at_ms = 0
        self._requests: asyncio.Queue[wire.SessionUp] = asyncio.Queue(REQUESTS_WAITING_MAX)

    async def serve(self) -> None:
        """Serve the stream to its end. Raises RpcError."""
        timer = asyncio.get_running_loop().call_later(ATTACH_WITHIN_S, self._end_unattached)
        async with asyncio.TaskGroup() as tasks:
            requests = tasks.create_task(self._serve_requests(), name="requests of a session")
            try:
                await self._receive_all()
            finally:
                timer.cancel()
                requests.cancel()
                if self._group is not None:
                    self._group.listeners.discard(self)

    def _end_unattached(self) -> None:
        if self._group is None:
            self._call.expire()

    # ------------------------------------------------------------ from the group

    def send_view(self, view: ReplicationView) -> None:
        """Send a new view."""
        self._view_sent_at_ms = self._clock.monotonic_ms()
        self._send(wire.SessionDown(view=to_view(view)))

    def hand_over(self, *, epoch: int, target: ReplicaId) -> None:
        """Ask this session's replica for a planned transfer, if it is the master."""
        view = None if self._group is None else self._group.view()
        if view is not None and view.master == self._registered:
            self._send(wire.SessionDown(hand_over=wire.HandOver(epoch=epoch, target=target)))

    def end_session(self) -> None:
        """End the session; its supervisor reconnects and registers again."""
        self._call.expire()

    def _send(self, message: wire.SessionDown) -> None:
        if self._call.unsent_bytes > UNSENT_BYTES_MAX:
            self._call.expire()  # The supervisor reconnects.
            return
        self._call.write(message.SerializeToString())

    # ------------------------------------------------------------ from the replica

    async def _receive_all(self) -> None:
        async for request in self._call:
            try:
                up = wire.SessionUp.FromString(request)
            except DecodeError:
                raise RpcError(RpcCode.INVALID_ARGUMENT, "not a message of a session") from None
            if self._group is None and up.WhichOneof("message") != "attach":
                raise RpcError(RpcCode.FAILED_PRECONDITION, "a session begins with Attach")
            await self._receive(up)

    async def _receive(self, up: wire.SessionUp) -> None:
        kind = up.WhichOneof("message")
        if kind == "attach":
            await self._attach(up.attach)
        elif kind == "heartbeat":
            self._receive_heartbeat(up)
        elif kind == "death":
            assert self._group is not None, "the session has attached"
            log.warning(
                "replica process ended",
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
                limit = f"{REQUESTS_WAITING_MAX} requests wait already; retry later"
                self._answer(up, wire.Answer(unavailable=limit))
        else:
            raise RpcError(RpcCode.INVALID_ARGUMENT, "a message of an unknown kind")

    async def _attach(self, attach: wire.Attach) -> None:
        try:
            # A replica that has seen an epoch also creates the record of its group: that record is
            # lost, and the new one raises an alarm.
            is_founder = attach.member.replica_id == FOUNDER or attach.epoch_seen > 0
            group = await self._groups.get_or_create(
                attach.group, is_founder=is_founder, address=host_of_peer(self._call.peer())
            )
        except ServiceError as error:
            raise RpcError(RpcCode.NOT_FOUND, error.message) from None
        except StoreUnreachable as error:
            raise RpcError(RpcCode.UNAVAILABLE, error.describe()) from None
        # The welcome must name a run that registered at another controller. Otherwise the next
        # registration is fenced.
        await group.refresh()
        if group.is_removed:
            raise RpcError(
                RpcCode.UNAVAILABLE, f"broker group {group.name} was just removed; attach again"
            )
        self._group = group
        assert group.stored is not None, "each group of the store has a record"
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

    def _receive_heartbeat(self, up: wire.SessionUp) -> None:
        group, beat = self._group, up.heartbeat
        assert group is not None, "the session has attached"
        assert group.stored is not None, "each group of the store has a record"
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
        is_due = self._clock.monotonic_ms() - self._view_sent_at_ms >= VIEW_REPEAT_MS
        view = group.view()
        if is_due and view is not None and beat.version_seen < view.version:
            self.send_view(view)

    # ------------------------------------------------------------ requests

    async def _serve_requests(self) -> None:
        while True:
            up = await self._requests.get()
            began_ns = time.monotonic_ns()
            kind, request = self._change_request(up)
            status = "failed"
            try:
                assert self._group is not None, "the session has attached"
                denial = await self._group.change(request)
                status = "success" if denial is None else "failed"
                self._answer_change(up, denial)
            except StoreUnreachable as error:
                status = "timeout"
                self._answer(up, wire.Answer(unavailable=str(error)))
            self._metrics.count_request(kind, status, time.monotonic_ns() - began_ns)

    def _change_request(self, up: wire.SessionUp) -> tuple[str, ChangeRequest]:
        """Return the name of a request in metrics, and its change of the record."""
        match up.WhichOneof("message"):
            case "register":
                registration, group = from_register(up.register), self._group
                assert group is not None, "the session has attached"

                def register_run(
                    record: GroupRecord, observation: GroupObservation
                ) -> GroupRecord | Denial:
                    refusal = too_low(
                        group.name,
                        registration.member.replica_id,
                        registration.feature_level,
                        record,
                    )
                    if refusal:
                        return FencedRun(refusal)
                    before = presence_of(
                        record, registration.member.replica_id, observation, self._timing
                    )
                    return register(record, registration, before)

                return "register_broker", register_run
            case "proposal":
                proposal = from_proposal(up.proposal)

                def propose(
                    record: GroupRecord, observation: GroupObservation
                ) -> GroupRecord | Denial:
                    live = {one.member for one in live_of(record, observation, self._timing)}
                    return change_sync_state_set(record, proposal, live)

                return "alter_sync_state_set", propose
            case _:
                message = up.release

                def hand_over(
                    record: GroupRecord, observation: GroupObservation
                ) -> GroupRecord | Denial:
                    after = release(
                        record,
                        epoch=message.epoch,
                        master=from_member(message.master),
                        target=ReplicaId(message.target),
                        live=live_of(record, observation, self._timing),
                    )
                    if after is None:
                        return ChangeRejection(
                            f"replica {message.target} is not a live member of the set, or the"
                            " epoch has changed"
                        )
                    last = after.history[-1]._replace(detected_ms=message.paused_ms)
                    return after._replace(history=(*after.history[:-1], last))

                return "elect_master", hand_over

    def _answer_change(self, up: wire.SessionUp, denial: Denial | None) -> None:
        if isinstance(denial, FencedRun):
            self._answer(up, wire.Answer(fenced=denial.why))
            return
        if isinstance(denial, ChangeRejection):
            if up.WhichOneof("message") == "register":
                log.warning("registration rejected", reason=denial.why)
            self._answer(up, wire.Answer(refused=denial.why))
            return
        if up.WhichOneof("message") == "register":
            self._registered = from_member(up.register.member)
        view = None if self._group is None else self._group.view()
        if view is not None:
            self.send_view(view)  # Before the answer, so that the replica knows the result.
        self._answer(up, wire.Answer(done=wire.Done()))

    def _answer(self, up: wire.SessionUp, answer: wire.Answer) -> None:
        answer.number = up.number
        self._send(wire.SessionDown(answer=answer))
