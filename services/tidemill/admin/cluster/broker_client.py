"""A typed client of BrokerAdmin; a refusal is raised again as the error that the broker raised."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2

from tidemill.common import errors
from tidemill.message.recall_handle import RecallSigner
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pipeline

ERROR_KEY = "tidemill-error"  # trailing metadata in which the broker names an error by its class
RECONNECT_MS_MIN = 100  # a local broker is back soon; gRPC would wait a second
RECONNECT_MS_MAX = 5_000
CONNECT_MS_MAX = 2_000  # far away, and of a broker that is busy; one that is down refuses at once
CONNECT_PATIENCE_S = 2.0  # gRPC waits up to a second between its first attempts
# Where a broker group has replicas: a failover takes two seconds, and is known half a second later.
FAILOVER_PATIENCE_S = 3.5
AGAIN_S = 0.1  # between two tries within it: who refuses may have heard of nobody else yet
HEALTH_TIMEOUT_S = 1.5  # for an answer after its health; a broker that hangs gives none
WAITING_WARN_FIRST_S = 1.0  # until then a missing broker is one that starts beside us
WAITING_WARN_EVERY_S = 10.0
MESSAGE_BYTES_MAX = 64 << 20  # a search may find many messages of 4 MiB

if TYPE_CHECKING:
    from tidemill.admin.cluster.master_addresses import MasterAddresses
    from tidemill.transport.aio.tls import ReloadableCredentials

log = structlog.get_logger()

Q = TypeVar("Q")
A = TypeVar("A")
Unary: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Q, A]"


class BrokerClient:
    """The admin calls of one broker."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        timeout_ms: int,
        address: str = "",
        may_move: bool = False,
    ) -> None:
        """Ask over `channel`; `may_move`: the broker group has replicas, and others may lead it."""
        self._address = address
        self._may_move = may_move
        self._moved = asyncio.Event()
        self._timeout_s = timeout_ms / 1000
        self._recall_signer: RecallSigner | None = None
        self._stub: broker_pb2_grpc.BrokerAdminAsyncStub
        self._reader: broker_pb2_grpc.BrokerReaderAsyncStub
        self.use(channel)

    def use(self, channel: grpc.aio.Channel) -> None:
        """Make the calls that follow on another channel."""
        self._channel = channel
        self._stub = broker_pb2_grpc.BrokerAdminStub(channel)
        self._reader = broker_pb2_grpc.BrokerReaderStub(channel)
        self._recall_signer = None
        # Who waits for the channel of before waits for this one now.
        self._moved.set()
        self._moved = asyncio.Event()

    async def is_serving(self) -> bool:
        """Ask the broker for its health, at once. Raises AioRpcError where it does not answer."""
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        check = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        # An empty question: after the process as a whole.
        answer = health_pb2.HealthCheckResponse.FromString(
            await check(b"", timeout=HEALTH_TIMEOUT_S)
        )
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def put_topic(self, request: pb.PutTopicRequest) -> pb.PutTopicReply:
        """Create or change a topic."""
        return await self._call(lambda stub: stub.PutTopic, request)

    async def delete_topic(self, request: pb.DeleteTopicRequest) -> pb.DeleteTopicReply:
        """Delete a topic with its messages."""
        return await self._call(lambda stub: stub.DeleteTopic, request)

    async def topic_status(self, name: str) -> pb.TopicStatus:
        """Return a topic and what its queues hold."""
        request = pb.GetTopicStatusRequest(name=name)
        return await self._call(lambda stub: stub.GetTopicStatus, request, reads=True)

    async def put_group(self, request: pb.PutGroupRequest) -> pb.PutGroupReply:
        """Create or change a consumer group."""
        return await self._call(lambda stub: stub.PutGroup, request)

    async def delete_group(self, request: pb.DeleteGroupRequest) -> pb.DeleteGroupReply:
        """Delete a consumer group with its progress."""
        return await self._call(lambda stub: stub.DeleteGroup, request)

    async def group_progress(self, name: str) -> pb.GroupProgress:
        """Return a group and how far it is, by queue."""
        request = pb.GetGroupProgressRequest(name=name)
        return await self._call(lambda stub: stub.GetGroupProgress, request, reads=True)

    async def config(self) -> pb.ConfigUpdate:
        """Return all topics and groups."""
        return await self._call(lambda stub: stub.GetConfig, pb.GetConfigRequest(), reads=True)

    async def release_lock(self, request: pb.ReleaseLockRequest) -> pb.QueueLock:
        """Let the next consumer have what locks a queue of an ordered group."""
        return await self._call(lambda stub: stub.ReleaseLock, request)

    async def deliveries(self, request: pb.GetDeliveriesRequest) -> pb.GetDeliveriesReply:
        """Return some of what a group has in flight, those that are out longest first."""
        return await self._call(lambda stub: stub.GetDeliveries, request, reads=True)

    async def release_deliveries(
        self, request: pb.ReleaseDeliveriesRequest
    ) -> pb.ReleaseDeliveriesReply:
        """Give some of what a group has in flight back at once."""
        return await self._call(lambda stub: stub.ReleaseDeliveries, request)

    async def forget_pull_offsets(
        self, request: pb.ForgetPullOffsetsRequest
    ) -> pb.ForgetPullOffsetsReply:
        """Forget how far a group has pulled a topic."""
        return await self._call(lambda stub: stub.ForgetPullOffsets, request)

    async def reset_offset(self, request: pb.ResetOffsetRequest) -> pb.ResetOffsetReply:
        """Let a group go on from another place of a topic."""
        return await self._call(lambda stub: stub.ResetOffset, request)

    async def find_messages(self, request: pb.FindMessagesRequest) -> pb.FindMessagesReply:
        """Find messages by id or by key."""
        return await self._call(lambda stub: stub.FindMessages, request, reads=True)

    async def read_messages(self, request: pb.ReadMessagesRequest) -> pb.ReadMessagesReply:
        """Return messages of one queue in their order."""
        return await self._call(lambda stub: stub.ReadMessages, request, reads=True)

    async def read_events(self, request: pipeline.ReadEventsRequest) -> pipeline.ReadEventsReply:
        """Return a page of what happened to messages."""
        return await self._call(lambda _: self._reader.ReadEvents, request, reads=True)

    async def list_broker_groups(self, *, with_left: bool) -> pb.BrokerGroupList:
        """Return the members of the cluster, of those that drain also what is left."""
        request = pb.ListBrokerGroupsRequest(with_left=with_left)
        return await self._call(lambda stub: stub.ListBrokerGroups, request, reads=True)

    async def broker_status(self) -> pb.BrokerStatus:
        """Return what the broker says of itself."""
        return await self._call(
            lambda stub: stub.GetBrokerStatus, pb.GetBrokerStatusRequest(), reads=True
        )

    async def add_broker_group(self, request: pb.AddBrokerGroupRequest) -> pb.BrokerGroup:
        """Add a member, or take one back that drains."""
        return await self._call(lambda stub: stub.AddBrokerGroup, request)

    async def drain_broker_group(self, request: pb.DrainBrokerGroupRequest) -> pb.BrokerGroup:
        """Let a member have no more messages."""
        return await self._call(lambda stub: stub.DrainBrokerGroup, request)

    async def remove_broker_group(self, request: pb.RemoveBrokerGroupRequest) -> pb.BrokerGroup:
        """Remove a member that drains and is empty."""
        return await self._call(lambda stub: stub.RemoveBrokerGroup, request)

    async def list_proxies(self) -> pb.ProxyList:
        """Return the proxies that can be asked through this broker."""
        return await self._call(lambda stub: stub.ListProxies, pb.ListProxiesRequest(), reads=True)

    async def ask_proxy(self, request: pb.AskProxyRequest) -> pb.ProxyAnswer:
        """Ask a proxy, which has the time that the request says."""
        timeout_s = request.timeout_ms / 1000 + self._timeout_s
        answer = await self._call(lambda stub: stub.AskProxy, request, timeout_s=timeout_s)
        if answer.error:
            raise errors.from_wire(answer.error, answer.message)
        return answer

    async def held(self, client_id: str) -> pb.Held:
        """Return what the broker has in flight at a client."""
        return await self._call(
            lambda stub: stub.GetHeld, pb.GetHeldRequest(client_id=client_id), reads=True
        )

    async def store_message(self, request: pb.StoreMessageRequest) -> pb.StoreMessageReply:
        """Store or schedule a message."""
        return await self._call(lambda stub: stub.StoreMessage, request)

    async def list_timers(self, request: pb.ListTimersRequest) -> pb.ListTimersReply:
        """Return some pending timers, those due first first."""
        return await self._call(lambda stub: stub.ListTimers, request, reads=True)

    async def count_timers(self, within_ms: Sequence[int]) -> pb.CountTimersReply:
        """Count the pending timers of each topic that are due within each of some durations."""
        return await self._call(
            lambda stub: stub.CountTimers, pb.CountTimersRequest(within_ms=within_ms), reads=True
        )

    async def timer(self, timer_id: int) -> pb.Timer:
        """Return a timer in any state."""
        return await self._call(
            lambda stub: stub.GetTimer, pb.GetTimerRequest(timer_id=timer_id), reads=True
        )

    async def cancel_timer(self, request: pb.CancelTimerRequest) -> pb.Timer:
        """Cancel a pending timer."""
        return await self._call(lambda stub: stub.CancelTimer, request)

    async def reschedule_timer(self, request: pb.RescheduleTimerRequest) -> pb.Timer:
        """Let a pending timer be due at another time."""
        return await self._call(lambda stub: stub.RescheduleTimer, request)

    async def fire_timer(self, request: pb.FireTimerRequest) -> pb.Timer:
        """Deliver the message of a pending timer now."""
        return await self._call(lambda stub: stub.FireTimer, request)

    async def recall_signer(self) -> RecallSigner:
        """Return what signs recall handles; asked for once a connection."""
        if self._recall_signer is None:
            config = await self.config()
            self._recall_signer = RecallSigner(config.handle_secret, config.broker_name)
        return self._recall_signer

    def reconnected(self) -> None:
        """Forget what another broker at this address would tell otherwise."""
        self._recall_signer = None

    async def _call(
        self,
        method: Callable[[broker_pb2_grpc.BrokerAdminAsyncStub], Unary[Q, A]],
        request: Q,
        *,
        timeout_s: float | None = None,
        reads: bool = False,
    ) -> A:
        """Ask once, or while another replica takes over, until one answers or patience ends.

        What may have been done is not asked again, unless it `reads` alone.
        """
        loop = asyncio.get_running_loop()
        patience_s = FAILOVER_PATIENCE_S if self._may_move else CONNECT_PATIENCE_S
        end_s = loop.time() + patience_s
        while True:
            moved = self._moved
            await self._connected(end_s)
            try:
                return await self._once(method(self._stub), request, timeout_s or self._timeout_s)
            except errors.UnavailableError as error:
                is_over = loop.time() + AGAIN_S >= end_s
                if is_over or not self._is_worth_another(error, reads=reads):
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await moved.wait()

    def _is_worth_another(self, error: errors.UnavailableError, *, reads: bool) -> bool:
        """Whether another replica may do what this one has not done, or not for certain."""
        if not self._may_move:
            return False
        is_refused = isinstance(error, errors.NotMaster | errors.Draining)
        return is_refused or (reads and isinstance(error, errors.BrokerUnreachable))

    async def _connected(self, end_s: float) -> None:
        """Wait until there is a connection, to whoever is the master by then, or patience ends.

        Between two attempts to connect gRPC refuses at once, even when the broker is back.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                while True:
                    moved, ready = self._moved, self._channel.channel_ready()
                    waits = [asyncio.ensure_future(ready), asyncio.ensure_future(moved.wait())]
                    try:
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                        if not moved.is_set():
                            await waits[0]
                            return
                    finally:
                        for wait in waits:
                            wait.cancel()
                        await asyncio.gather(*waits, return_exceptions=True)

    async def _once(self, method: Unary[Q, A], request: Q, timeout_s: float) -> A:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, self._address) from error
        except grpc.aio.UsageError as error:
            # The channel was changed for another one while the call waited for it to be ready.
            raise errors.BrokerUnreachable("the connection was closed; try again") from error
        except asyncio.CancelledError as error:
            raise_own(error)
            raise errors.BrokerUnreachable("the connection was closed; try again") from error


@contextlib.asynccontextmanager
async def broker_client(
    address: str,
    *,
    timeout_ms: int,
    credentials: ReloadableCredentials[grpc.ChannelCredentials] | None = None,
    masters: MasterAddresses | None = None,
) -> AsyncIterator[BrokerClient]:
    """Connect, and again whenever the connection is lost; renewed credentials get a new channel.

    So does another master of the broker group, where `masters` say who that is.
    """
    renewed = asyncio.Event()

    def find() -> str:
        return address if masters is None else masters.find(address)

    if masters is not None:
        masters.listen(address, renewed.set)
    if credentials is not None:
        credentials.on_reload.add(renewed.set)
    channel = _channel(find(), credentials)
    may_move = masters is not None and masters.are_told
    client = BrokerClient(channel, timeout_ms=timeout_ms, address=address, may_move=may_move)

    async def keep() -> None:
        """Watch the channel, and change it for a new one each time the credentials are renewed."""
        nonlocal channel
        while True:
            async with asyncio.TaskGroup() as watching:
                watch = watching.create_task(_report(channel, find(), client))
                await renewed.wait()
                renewed.clear()
                watch.cancel()
            old, channel = channel, _channel(find(), credentials)
            client.use(channel)
            # Calls under way end on the old one.
            await old.close(max(timeout_ms / 1000, HEALTH_TIMEOUT_S) + CONNECT_PATIENCE_S)

    try:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(keep(), name="broker connection")
            try:
                yield client
            finally:
                keeping.cancel()
    finally:
        if credentials is not None:
            credentials.on_reload.discard(renewed.set)
        if masters is not None:
            masters.leave(address, renewed.set)
        # After who watches it is gone: of a closed channel it may ask nothing more.
        await channel.close()


def raise_own(cancelled: asyncio.CancelledError) -> None:
    """Raise what ends this task; gRPC says the same of a call whose channel was closed."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise cancelled


def _channel(
    address: str, credentials: ReloadableCredentials[grpc.ChannelCredentials] | None
) -> grpc.aio.Channel:
    options = (
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS_MIN),
        # In truth how long an attempt to connect may take, with its TLS handshake.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS_MAX),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    )
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials.newest, options=options)


async def _report(channel: grpc.aio.Channel, address: str, client: BrokerClient) -> None:
    """Say in the log while the broker cannot be reached, and when it can again."""
    is_told, patience_s = False, WAITING_WARN_FIRST_S
    while True:
        try:
            async with asyncio.timeout(patience_s):
                await channel.channel_ready()
        except TimeoutError:
            log.warning("waiting for the broker", address=address)
            is_told, patience_s = False, WAITING_WARN_EVERY_S
            continue
        if not is_told:
            log.info("broker connected", address=address)
        is_told, patience_s = True, WAITING_WARN_FIRST_S
        # An idle channel leaves this state too, so leaving it is no news by itself.
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        client.reconnected()


def _error_of(error: grpc.aio.AioRpcError, address: str) -> Exception:
    broker = f"the broker at {address}" if address else "the broker"
    for key, value in error.trailing_metadata():
        if key == ERROR_KEY and str(value) in errors.BY_NAME:
            return errors.from_wire(str(value), error.details() or "")
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return errors.BrokerUnreachable(f"{broker} cannot be reached; try again later")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.BrokerTimeout(
                f"{broker} did not answer in time; what it was asked to change, it may have"
            )
        case _:
            return error
