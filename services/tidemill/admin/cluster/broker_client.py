"""A typed client of BrokerAdmin; a refusal is raised again as the error that the broker raised."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.calls import BrokerCall, BrokerStubs, UnaryMethod
from tidemill.common import errors
from tidemill.message.recall_handle import RecallSigner
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

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
        self._stubs: BrokerStubs
        self.use(channel)

    def use(self, channel: grpc.aio.Channel) -> None:
        """Make the calls that follow on another channel."""
        self._channel = channel
        self._stubs = BrokerStubs(
            broker_pb2_grpc.BrokerAdminStub(channel), broker_pb2_grpc.BrokerReaderStub(channel)
        )
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

    async def call(
        self, call: BrokerCall[Q, A], request: Q, *, timeout_s: float | None = None
    ) -> A:
        """Call the broker and return its reply.

        During a failover, repeat the call until a replica replies or the patience ends. A change
        that may have been applied is not repeated. Raises the ServiceError that the broker raised.
        """
        loop = asyncio.get_running_loop()
        patience_s = FAILOVER_PATIENCE_S if self._may_move else CONNECT_PATIENCE_S
        end_s = loop.time() + patience_s
        while True:
            moved = self._moved
            await self._connected(end_s)
            try:
                method = call.method(self._stubs)
                return await self._once(method, request, timeout_s or self._timeout_s)
            except errors.UnavailableError as error:
                is_over = loop.time() + AGAIN_S >= end_s
                if is_over or not self._is_worth_another(error, reads=call.is_read):
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await moved.wait()

    async def ask_proxy(self, request: pb.AskProxyRequest) -> pb.ProxyAnswer:
        """Send a question to a proxy, which has the time that the request allows."""
        timeout_s = request.timeout_ms / 1000 + self._timeout_s
        answer = await self.call(calls.ASK_PROXY, request, timeout_s=timeout_s)
        if answer.error:
            raise errors.from_wire(answer.error, answer.message)
        return answer

    async def recall_signer(self) -> RecallSigner:
        """Return what signs recall handles; asked for once a connection."""
        if self._recall_signer is None:
            config = await self.call(calls.GET_CONFIG, pb.GetConfigRequest())
            self._recall_signer = RecallSigner(config.handle_secret, config.broker_name)
        return self._recall_signer

    def reconnected(self) -> None:
        """Forget what another broker at this address would tell otherwise."""
        self._recall_signer = None

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

    async def _once(self, method: UnaryMethod[Q, A], request: Q, timeout_s: float) -> A:
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
