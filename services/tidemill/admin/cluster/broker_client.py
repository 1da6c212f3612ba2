"""A typed client of BrokerAdmin. It raises the error that the broker raised."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
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

ERROR_KEY = "tidemill-error"  # trailing metadata with the class name of the error of the broker
RECONNECT_MS_MIN = 100  # a local broker restarts quickly; the default of gRPC is a second
RECONNECT_MS_MAX = 5_000
# A replaced pod has another address. By default gRPC looks for it every 30 s.
RESOLVE_PERIOD_MS_MIN = 500
CONNECT_MS_MAX = 2_000  # for a distant or busy broker; a broker that is down refuses at once
CONNECT_WAIT_S_MAX = 2.0  # gRPC waits up to a second between its first attempts
# With replicas: a failover takes two seconds, and controllers report it half a second later.
FAILOVER_WAIT_S_MAX = 3.5
RETRY_PERIOD_S = 0.1  # between attempts during a failover: the new master may not be known yet
HEALTH_TIMEOUT_S = 1.5  # of a health check; a broker that hangs sends no reply
START_WARNING_AFTER_S = 5.0  # a standalone starts its broker at the same time
FIRST_WARNING_AFTER_S = 1.0  # after the loss of a broker
WARNING_PERIOD_S = 10.0
MESSAGE_BYTES_MAX = 64 << 20  # a search may find many messages of 4 MiB

if TYPE_CHECKING:
    from tidemill.admin.cluster.master_addresses import MasterAddresses
    from tidemill.transport.aio.tls import ReloadableCredentials

log = structlog.get_logger()

Q = TypeVar("Q")
A = TypeVar("A")


class BrokerClient:
    """The client of one broker."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        timeout_ms: int,
        address: str = "",
        may_move: bool = False,
    ) -> None:
        """Call over `channel`. `may_move`: the broker group has replicas that can take over."""
        self._address = address
        self._may_move = may_move
        self._moved = asyncio.Event()
        self._timeout_s = timeout_ms / 1000
        self._recall_signer: RecallSigner | None = None
        self._stubs: BrokerStubs
        self.use(channel)

    def use(self, channel: grpc.aio.Channel) -> None:
        """Use another channel for the next calls."""
        self._channel = channel
        self._stubs = BrokerStubs(
            broker_pb2_grpc.BrokerAdminStub(channel),
            broker_pb2_grpc.BrokerReaderStub(channel),
            broker_pb2_grpc.BrokerQuotasStub(channel),
        )
        self._recall_signer = None
        # Calls that wait for the previous channel now wait for this one.
        self._moved.set()
        self._moved = asyncio.Event()

    async def is_serving(self) -> bool:
        """Check the health of the broker without a retry.

        Raises AioRpcError without a reply, and BrokerUnreachable on a closed connection.
        """
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        check = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        # An empty request asks for the health of the whole process.
        with _unreachable_if_closed():
            reply = await check(b"", timeout=HEALTH_TIMEOUT_S)
        answer = health_pb2.HealthCheckResponse.FromString(reply)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def call(
        self, call: BrokerCall[Q, A], request: Q, *, timeout_s: float | None = None
    ) -> A:
        """Call the broker and return its reply.

        During a failover, repeat the call until a replica replies or the time is up. A change that
        may have been applied is repeated only if that changes nothing more. Raises the ServiceError
        that the broker raised.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (FAILOVER_WAIT_S_MAX if self._may_move else CONNECT_WAIT_S_MAX)
        while True:
            moved = self._moved
            with _unreachable_if_closed():
                await self._wait_until_connected(end_s)
            try:
                method = call.method(self._stubs)
                limit_s = timeout_s or call.timeout_s or self._timeout_s
                return await self._call_once(method, request, limit_s)
            except errors.UnavailableError as error:
                is_time_up = loop.time() + RETRY_PERIOD_S >= end_s
                if is_time_up or not self._may_repeat(
                    error, may_apply_twice=call.may_repeat(request)
                ):
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_PERIOD_S):
                    await moved.wait()

    async def ask_proxy(self, request: pb.AskProxyRequest) -> pb.ProxyAnswer:
        """Ask a proxy through the broker. The proxy has the timeout of the request to reply."""
        timeout_s = request.timeout_ms / 1000 + self._timeout_s
        answer = await self.call(calls.ASK_PROXY, request, timeout_s=timeout_s)
        if answer.error:
            raise errors.from_wire(answer.error, answer.message)
        return answer

    async def recall_signer(self) -> RecallSigner:
        """Return the signer of recall handles. It is read once per connection."""
        if self._recall_signer is None:
            config = await self.call(calls.GET_CONFIG, pb.GetConfigRequest())
            self._recall_signer = RecallSigner(config.handle_secret, config.broker_name)
        return self._recall_signer

    def reset_after_reconnect(self) -> None:
        """Drop cached values: another broker may use this address now."""
        self._recall_signer = None

    def _may_repeat(self, error: errors.UnavailableError, *, may_apply_twice: bool) -> bool:
        """Return whether another replica may execute the call."""
        if not self._may_move:
            return False
        is_refused = isinstance(error, errors.NotMaster | errors.Draining)
        return is_refused or (may_apply_twice and isinstance(error, errors.BrokerUnreachable))

    async def _wait_until_connected(self, end_s: float) -> None:
        """Wait until the current master is connected, at most until `end_s`.

        Between two connection attempts, gRPC fails calls at once even if the broker is up again.
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

    async def _call_once(self, method: UnaryMethod[Q, A], request: Q, timeout_s: float) -> A:
        try:
            with _unreachable_if_closed():
                return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, self._address) from error


@contextlib.asynccontextmanager
async def broker_client(
    address: str,
    *,
    timeout_ms: int,
    credentials: ReloadableCredentials[grpc.ChannelCredentials] | None = None,
    masters: MasterAddresses | None = None,
) -> AsyncIterator[BrokerClient]:
    """Connect to a broker, and reconnect after each loss of the connection.

    Open a new channel after new credentials, and for a new master if `masters` is given.
    """
    is_outdated = asyncio.Event()

    def find() -> str:
        return address if masters is None else masters.find(address)

    if masters is not None:
        masters.add_listener(address, is_outdated.set)
    if credentials is not None:
        credentials.on_reload.add(is_outdated.set)
    channel = _channel(find(), credentials)
    may_move = masters is not None and masters.has_controllers
    client = BrokerClient(channel, timeout_ms=timeout_ms, address=address, may_move=may_move)

    async def replace_outdated() -> None:
        nonlocal channel
        while True:
            async with asyncio.TaskGroup() as reporting:
                report = reporting.create_task(_report(channel, find(), client))
                await is_outdated.wait()
                is_outdated.clear()
                report.cancel()
            old, channel = channel, _channel(find(), credentials)
            client.use(channel)
            # Calls in flight end on the old channel.
            await old.close(max(timeout_ms / 1000, HEALTH_TIMEOUT_S) + CONNECT_WAIT_S_MAX)

    try:
        async with asyncio.TaskGroup() as tasks:
            replacing = tasks.create_task(replace_outdated(), name="broker connection")
            try:
                yield client
            finally:
                replacing.cancel()
    finally:
        if credentials is not None:
            credentials.on_reload.discard(is_outdated.set)
        if masters is not None:
            masters.remove_listener(address, is_outdated.set)
        # Close after the report task has ended: it must not use a closed channel.
        await channel.close()


@contextlib.contextmanager
def _unreachable_if_closed() -> Iterator[None]:
    """Raise BrokerUnreachable if the channel is closed meanwhile: the broker moved or was removed.

    A closed channel cancels its calls and rejects further ones with UsageError.
    """
    try:
        yield
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise errors.BrokerUnreachable(
            "the connection to the broker was closed; try again"
        ) from error


def _channel(
    address: str, credentials: ReloadableCredentials[grpc.ChannelCredentials] | None
) -> grpc.aio.Channel:
    options = (
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS_MIN),
        # Despite its name, this is the timeout of a connection attempt with its TLS handshake.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS_MAX),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
        ("grpc.dns_min_time_between_resolutions_ms", RESOLVE_PERIOD_MS_MIN),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    )
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials.newest, options=options)


async def _report(channel: grpc.aio.Channel, address: str, client: BrokerClient) -> None:
    """Log while the broker is unreachable, and when it is connected again."""
    is_logged, wait_s = False, START_WARNING_AFTER_S
    while True:
        try:
            async with asyncio.timeout(wait_s):
                await channel.channel_ready()
        except TimeoutError:
            log.warning("waiting for the broker", address=address)
            is_logged, wait_s = False, WARNING_PERIOD_S
            continue
        if not is_logged:
            log.info("broker connected", address=address)
        is_logged, wait_s = True, FIRST_WARNING_AFTER_S
        # An idle channel leaves this state too, so log only if it does not become ready again.
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        client.reset_after_reconnect()


def _error_of(error: grpc.aio.AioRpcError, address: str) -> Exception:
    broker = f"the broker at {address}" if address else "the broker"
    for key, value in error.trailing_metadata():
        if key == ERROR_KEY and str(value) in errors.BY_NAME:
            return errors.from_wire(str(value), error.details() or "")
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return errors.BrokerUnreachable(f"{broker} cannot be reached; try again later")
        case grpc.StatusCode.UNIMPLEMENTED:
            return errors.Conflict(
                f"{broker} has an older version, which does not serve this; upgrade it first"
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.BrokerTimeout(
                f"{broker} did not answer in time; the change may or may not have been applied, so"
                " check before you retry"
            )
        case _:
            return error
