"""Unary calls to brokers, for reads: a connection beside the link (ADR 0046).

Replies of reads are large. A separate connection has its own windows, so that acks and sends do not
wait for these replies. There is one connection per broker. The first call opens it; it is closed
after some time without calls, or when it breaks.
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

ERROR_KEY: Final = "tidemill-error"  # trailing metadata with the class name of an error
# In flight to one broker, mostly pulls that wait: about the number of streams of a connection.
CALLS_MAX: Final = 1_000
CONNECT_TIMEOUT_S: Final = 2.0
IDLE_S: Final = 60.0  # without a call, until the connection is closed
REPLY_BYTES_MAX: Final = 8 << 20  # one megabyte, then a message of 4 MiB with its properties
LIMITS: Final = Limits(
    stream_window_bytes=1 << 20,
    frame_bytes=1 << 20,
    large_messages_bytes=72 << 20,
    keepalive_period_s=5.0,
    keepalive_timeout_s=15.0,
)


@final
class _CallConnection:
    """A connection to one broker, with its calls in flight."""

    def __init__(self) -> None:
        self.channel: asyncio.Future[OpenChannel] = asyncio.get_running_loop().create_future()
        self.call_count = 0
        self.is_closing = asyncio.Event()
        self.idle: asyncio.TimerHandle | None = None


@final
class BrokerCalls:
    """The connections to all brokers with recent calls."""

    def __init__(self, connect: Connector = connected) -> None:
        self._connect = connect
        self._connections: dict[str, _CallConnection] = {}  # by address
        self._tasks: asyncio.TaskGroup

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept calls until the block ends."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                for connection in self._connections.values():
                    connection.is_closing.set()

    async def call(
        self, broker: LinkedGroup, path: str, request: bytes, *, timeout_ms: int
    ) -> bytes:
        """Call a method of a broker; return its response.

        Raises the error that the broker returns, BrokerTimeout, BrokerUnreachable or Overloaded.
        """
        connection = self._connection(broker.link.dialled)
        if connection.call_count >= CALLS_MAX:
            raise Overloaded(
                f"{CALLS_MAX} reads from this broker are in flight; retry after a pause"
            )
        connection.call_count += 1
        if connection.idle is not None:
            connection.idle.cancel()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                # A cancelled caller must not close the connection, which other calls use.
                channel = await asyncio.shield(connection.channel)
                return await call_unary(channel, path, request)
        except TimeoutError:
            raise BrokerTimeout("the broker did not answer in time; retry") from None
        except RpcError as error:
            failure = _broker_error(error)
            if failure is None:
                connection.is_closing.set()
                failure = BrokerUnreachable(f"cannot call the broker: {error.message}")
            raise failure from None
        finally:
            connection.call_count -= 1
            if not connection.call_count:
                loop = asyncio.get_running_loop()
                connection.idle = loop.call_later(IDLE_S, connection.is_closing.set)

    def _connection(self, address: str) -> _CallConnection:
        connection = self._connections.get(address)
        if connection is None or connection.is_closing.is_set():
            connection = self._connections[address] = _CallConnection()
            self._tasks.create_task(self._keep(address, connection), name=f"calls to {address}")
        return connection

    async def _keep(self, address: str, connection: _CallConnection) -> None:
        try:
            async with self._connect(
                address, LIMITS, message_bytes_max=REPLY_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S
            ) as channel:
                connection.channel.set_result(channel)
                await connection.is_closing.wait()
        except RpcError as error:
            connection.channel.set_exception(error)
            connection.channel.exception()  # Retrieved here, since no call may wait for it.
        finally:
            connection.is_closing.set()
            if connection.idle is not None:
                connection.idle.cancel()
            if self._connections.get(address) is connection:
                del self._connections[address]


def _broker_error(error: RpcError) -> ServiceError | None:
    """Return the error that the broker sent; None if the call did not reach it."""
    name = dict(error.trailers).get(ERROR_KEY, "")
    if name in BY_NAME:
        return from_wire(name, error.message)
    if error.code in {RpcCode.UNAVAILABLE, RpcCode.CANCELLED}:
        return None
    return BrokerUnreachable(f"the broker rejected the call: {error.message}")
