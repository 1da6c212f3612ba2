"""Calls of the methods of a proxy without a transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tidemill.proxy.server.boundary import Boundary
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.methods import Methods


class FutureReply:
    """The response of a plain call, which a test awaits as a client does."""

    def __init__(self) -> None:
        self.on_cancel: Callable[[], None] | None = None
        self._response: asyncio.Future[bytes | Coroutine[Any, Any, bytes]] = (
            asyncio.get_running_loop().create_future()
        )

    def respond(self, response: bytes) -> None:
        self.on_cancel = None
        self._response.set_result(response)

    def answer_in_task(self, answering: Coroutine[Any, Any, bytes]) -> None:
        self.on_cancel = None
        self._response.set_result(answering)

    async def read(self) -> bytes:
        """Return the response. If the reader is cancelled, so is the call."""
        try:
            response = await self._response
        except asyncio.CancelledError:
            if self.on_cancel is not None:
                self.on_cancel()
            raise
        return response if isinstance(response, bytes) else await response


async def answer_of(
    boundary: Boundary, methods: Methods, name: str, call: Call, request: bytes, label: str = ""
) -> bytes:
    """Call a unary or plain method; `label` names it in metrics."""
    label = label or name
    if name in methods.unary:
        return await boundary.unary(label, methods.unary[name], call, request)
    call.reply = reply = FutureReply()
    answering = boundary.begin(label, methods.plain[name], call, request)
    return await (reply.read() if answering is None else answering)
