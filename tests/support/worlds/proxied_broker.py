"""A broker with chosen methods, for the calls from a proxy to brokers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.server.broker_queue import READER
from tidemill.transport.aio.call import unary
from tidemill.transport.aio.channel import connected
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.server import RpcServer
from tidemill.transport.http2.limits import Limits


@contextlib.asynccontextmanager
async def calls_of(**methods: Any) -> AsyncIterator[BrokerCalls]:
    """Yield calls to a broker with `methods`, for any address."""
    server = RpcServer(
        {READER + name: unary(method) for name, method in methods.items()},
        Limits(),
        ListenSettings(host="127.0.0.1", port=0),
        message_bytes_max=1 << 20,
    )
    async with server.serving():
        calls = BrokerCalls(
            lambda _address, *rest, **named: connected(server.address, *rest, **named)
        )
        async with calls.running():
            yield calls
