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
import structlog

from tidemill.admin.cluster.broker_client import BrokerClient, raise_own
from tidemill.common.readiness import PeerStatus

log = structlog.get_logger()

PERIOD_S: Final = 1.0  # with the time for an answer: one that hangs is known within 2.5 s


@final
class BrokerHealth:
    """What the last questions have told."""

    def __init__(self, client: BrokerClient, address: str) -> None:
        self._client = client
        self._address = address
        self._answered_at_s = time.monotonic()
        self._reason = "it was not asked yet"

    def peers(self) -> list[PeerStatus]:
        """Return the broker, and whether it can be reached."""
        if not self._reason:
            return [PeerStatus("", self._address, "up", 0.0, "")]
        since_s = time.monotonic() - self._answered_at_s
        return [PeerStatus("", self._address, "down", since_s, self._reason)]

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
        """Ask once; return what is wrong, "" for nothing.

        Whatever becomes of it is an answer: a watch that has ended would say the last one for ever.
        """
        try:
            is_serving = await self._client.is_serving()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "it does not answer"
            return error.details() or error.code().name.lower()
        except asyncio.CancelledError as error:
            raise_own(error)
            return "its connection was closed"
        except Exception as error:  # As said above.
            log.debug("a question after the broker's health failed", exc_info=error)
            return f"its answer cannot be understood: {error}"
        return "" if is_serving else "it is about to stop"
