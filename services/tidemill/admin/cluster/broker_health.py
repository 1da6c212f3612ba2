"""The health of a broker, checked every second even without requests.

A process that hangs keeps its connections, so a connection alone proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final, final

import grpc
import structlog

from tidemill.admin.cluster.broker_client import BrokerClient
from tidemill.common.errors import BrokerUnreachable
from tidemill.common.readiness import PeerStatus

log = structlog.get_logger()

PERIOD_S: Final = 1.0  # with the timeout of a check, a hang is detected within 2.5 s


@final
class BrokerHealth:
    """The result of the last health check."""

    def __init__(self, client: BrokerClient, address: str) -> None:
        self._client = client
        self._address = address
        self._answered_at_s = time.monotonic()
        self._reason = "not checked yet"

    def peers(self) -> list[PeerStatus]:
        """Return the broker and whether it is reachable."""
        if not self._reason:
            return [PeerStatus("", self._address, "up", 0.0, "")]
        since_s = time.monotonic() - self._answered_at_s
        return [PeerStatus("", self._address, "down", since_s, self._reason)]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check the health periodically until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            checking = tasks.create_task(self._check_periodically(), name="broker health")
            yield
            checking.cancel()

    async def _check_periodically(self) -> None:
        while True:
            self._reason = await self._check()
            if not self._reason:
                self._answered_at_s = time.monotonic()
            await asyncio.sleep(PERIOD_S)

    async def _check(self) -> str:
        """Check once; return the problem, or "" without one.

        Every error is a result: if this task ended, the last result would stay forever.
        """
        try:
            is_serving = await self._client.is_serving()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "it does not answer"
            return error.details() or error.code().name.lower()
        except BrokerUnreachable:
            return "its connection was closed"
        except Exception as error:  # See the docstring.
            log.debug("health check failed", exc_info=error)
            return f"its reply cannot be parsed: {error}"
        return "" if is_serving else "it is stopping"
