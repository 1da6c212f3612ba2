"""Unary calls to brokers, for those who read: a connection beside the link (ADR 0046).

What is read is large, and nobody's acks and sends should stand behind it: another connection has
windows of its own. One to each broker, opened by the first call and closed when none was made for a
while, or when it breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, final

from tidemill.common.errors import (
    BY_NAME,
    BrokerTimeout,
    BrokerUnreachable,
    Overloaded,
    ServiceError,
    from_wire,
)
from tidemill.transport.aio.channel import connected
from tidemill.transport.aio.unary_call import call_unary
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.proxy.cluster.linked_group import LinkedGroup
    from tidemill.transport.aio.connect import Connector, OpenChannel

ERROR_KEY: Final = "tidemill-error"  # trailing metadata that names an error by its class
# To one broker at once, most of them pulls that wait: about as many as a connection has streams.
CALLS_MAX: Final = 1_000
CONNECT_TIMEOUT_S: Final = 2.0
IDLE_S: Final = 60.0  # without a call; then the connection is closed
REPLY_BYTES_MAX: Final = 8 << 20  # a message of 4 MiB with its properties, behind a megabyte
LIMITS: Final = Limits(
    stream_window_bytes=1 << 20,
    frame_bytes=1 << 20,
    large_messages_bytes=72 << 20,
    keepalive_period_s=5.0,
    keepalive_timeout_s=15.0,
)


@final
class _Connection:
    """A connection that is kept up, and how many calls are under way on it."""

    def __init__(self) -> None:
        self.channel: asyncio.Future[OpenChannel] = asyncio.get_running_loop().create_future()
        self.call_count = 0
        self.is_over = asyncio.Event()
        self.idle: asyncio.TimerHandle | None = None


@final
class BrokerCalls:
    """The connections to all brokers that were asked of late."""

    def __init__(self, connect: Connector = connected) -> None:
        self._connect = connect
        self._connections: dict[str, _Connection] = {}  # by address
        self._tasks: asyncio.TaskGroup

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take calls until the block ends."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                for connection in self._connections.values():
                    connection.is_over.set()

    async def call(
        self, broker: LinkedGroup, path: str, request: bytes, *, timeout_ms: int
    ) -> bytes:
        """Call a method of a broker's, and return its response.

        Raises what the broker has refused it for, BrokerTimeout, BrokerUnreachable, Overloaded.
        """
        connection = self._connection(broker.link.dialled)
        if connection.call_count >= CALLS_MAX:
            raise Overloaded("too many read from this broker at once; repeat after a pause")
        connection.call_count += 1
        if connection.idle is not None:
            connection.idle.cancel()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                # Who waits may be cancelled; the connection is everybody's.
                channel = await asyncio.shield(connection.channel)
                return await call_unary(channel, path, request)
        except TimeoutError:
            raise BrokerTimeout("the broker did not answer in time") from None
        except RpcError as error:
            refusal = _refusal(error)
            if refusal is None:
                connection.is_over.set()
                refusal = BrokerUnreachable(f"the broker cannot be asked: {error.message}")
            raise refusal from None
        finally:
            connection.call_count -= 1
            if not connection.call_count:
                loop = asyncio.get_running_loop()
                connection.idle = loop.call_later(IDLE_S, connection.is_over.set)

    def _connection(self, address: str) -> _Connection:
        connection = self._connections.get(address)
        if connection is None or connection.is_over.is_set():
            connection = self._connections[address] = _Connection()
            self._tasks.create_task(self._keep(address, connection), name=f"calls to {address}")
        return connection

    async def _keep(self, address: str, connection: _Connection) -> None:
        try:
            async with self._connect(
                address, LIMITS, message_bytes_max=REPLY_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S
            ) as channel:
                connection.channel.set_result(channel)
                await connection.is_over.wait()
        except RpcError as error:
            connection.channel.set_exception(error)
            connection.channel.exception()  # Nobody may be waiting for it.
        finally:
            connection.is_over.set()
            if connection.idle is not None:
                connection.idle.cancel()
            if self._connections.get(address) is connection:
                del self._connections[address]


def _refusal(error: RpcError) -> ServiceError | None:
    """Return what a broker has said of itself; None: nobody has said anything."""
    name = dict(error.trailers).get(ERROR_KEY, "")
    if name in BY_NAME:
        return from_wire(name, error.message)
    if error.code in {RpcCode.UNAVAILABLE, RpcCode.CANCELLED}:
        return None
    return BrokerUnreachable(f"the broker refused: {error.message}")
