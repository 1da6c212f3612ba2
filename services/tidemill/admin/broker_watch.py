"""Whether the broker answers: asked for its health every second, also when nobody calls us.

A process that hangs keeps its connections, so that a connection alone proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final, final

import grpc
from grpc_health.v1 import health_pb2

from tidemill.common.readiness import Peer

PERIOD_S: Final = 1.0
TIMEOUT_S: Final = 1.5  # with the period: one that hangs is known within 2.5 s
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING


@final
class BrokerWatch:
    """What the last questions have told."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        self._check = channel.unary_unary("/grpc.health.v1.Health/Check")
        self._address = address
        self._answered_at_s = time.monotonic()
        self._reason = "it was not asked yet"

    def peers(self) -> list[Peer]:
        """Return the broker, and whether it can be reached."""
        if not self._reason:
            return [Peer("", self._address, "up", 0.0, "")]
        since_s = time.monotonic() - self._answered_at_s
        return [Peer("", self._address, "down", since_s, self._reason)]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._ask_again(), name="broker watch")
            yield
            asking.cancel()

    async def _ask_again(self) -> None:
        while True:
            self._reason = await self._ask()
            if not self._reason:
                self._answered_at_s = time.monotonic()
            await asyncio.sleep(PERIOD_S)

    async def _ask(self) -> str:
        """Ask once; return what is wrong, "" for nothing."""
        try:
            # An empty question: after the process as a whole.
            answer = await self._check(b"", timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "it does not answer"
            return error.details() or error.code().name.lower()
        status = health_pb2.HealthCheckResponse.FromString(answer).status
        return "" if status == _SERVING else "it is about to stop"
