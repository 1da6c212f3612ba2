"""How long a connection to the REST API may keep us waiting, and how many there may be.

Of the server's own limits one is missing for each way to stay: saying nothing, sending a head byte
by byte, and not reading the answer. How long a body may take is the door's to say.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidemill.transport.aio.misuse_log import MisuseLog

# People, dashboards and scripts. Beyond it the one that has waited longest without a request is
# closed, or else the one that has taken longest for a body, or else the newcomer: who holds all
# others by bodies that never end locks nobody out. Each holds 64 KiB of what comes at most.
CONNECTIONS_MAX: Final = 1_024
# The same among those of one address, so that no address has them all.
CONNECTIONS_PER_ADDRESS_MAX: Final = 512
HEAD_TIMEOUT_S: Final = 10.0  # from the connection, or the last answer, to the end of a head
# For an answer that is larger than the buffers to be read: the largest of them, at a megabit/s.
ANSWER_TIMEOUT_S: Final = 60.0


# What uvicorn writes for each request that is none; here it is a notice, a line a minute.
_INVALID: Final = "Invalid HTTP request received."


class InvalidRequestFilter(logging.Filter):
    """Leaves out of uvicorn's log what is told by misuse."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        return record.msg != _INVALID


@final
class HttpConnection(H11Protocol):
    """uvicorn's connection, ended when its client does not get on with it."""

    transport: asyncio.Transport
    _begun: object = None  # the request whose beginning is known
    begun_at_s = 0.0
    _head_watch: asyncio.TimerHandle | None = None
    _answer_watch: asyncio.TimerHandle | None = None
    waits_since_s = 0.0

    def __init__(self, *, misuse: MisuseLog, **arguments: Any) -> None:
        """Be one of the connections that share `misuse`; the rest is uvicorn's."""
        super().__init__(**arguments)
        self._misuse = misuse

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it so too.
        """Begin, or make room, or refuse."""
        super().connection_made(transport)
        self._watch_head()
        others = [
            each
            for each in self.connections
            if isinstance(each, HttpConnection) and each is not self
        ]
        of_address = [each for each in others if each.address == self.address]
        if len(of_address) >= CONNECTIONS_PER_ADDRESS_MAX:
            self._make_room(of_address)
        elif len(others) >= CONNECTIONS_MAX:
            self._make_room(others)

    def _make_room(self, others: list[HttpConnection]) -> None:
        """Close one of the others, or this one where all are being served."""
        waiting = [each for each in others if each.waits]
        sending = [each for each in others if each.is_sending]
        if waiting:
            closed = min(waiting, key=lambda each: each.waits_since_s)
        else:
            closed = min(sending, key=lambda each: each.begun_at_s, default=self)
        self._misuse.report(
            "connections", peer=closed.address, reason=f"{len(others)} connections beside it"
        )
        closed.transport.abort()

    def handle_events(self) -> None:
        """Take what has come, and note when a request has begun."""
        super().handle_events()
        if self.cycle is not self._begun:
            self._begun, self.begun_at_s = self.cycle, self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or, where an answer has begun, end the connection."""
        self._misuse.report("http_request", peer=self.address, reason=msg)
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        for watch in (self._head_watch, self._answer_watch):
            if watch is not None:
                watch.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._watch_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client reads."""
        self._answer_watch = self.loop.call_later(ANSWER_TIMEOUT_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        if self._answer_watch is not None:
            self._answer_watch.cancel()
            self._answer_watch = None
        self._watch_head()
        super().resume_writing()

    @property
    def address(self) -> str:
        """Where the client is."""
        return self.client[0] if self.client else "an unknown address"

    @property
    def is_sending(self) -> bool:
        """Whether the body of a request is on its way."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_complete

    @property
    def waits(self) -> bool:
        """Whether neither a request nor what is left of an answer is under way."""
        is_served = self.cycle is not None and not self.cycle.response_complete
        return not is_served and self._answer_watch is None

    def _watch_head(self) -> None:
        if self._head_watch is not None:
            self._head_watch.cancel()
        self.waits_since_s = self.loop.time()
        self._head_watch = self.loop.call_later(HEAD_TIMEOUT_S, self._end_if_waiting)

    def _end_if_waiting(self) -> None:
        if self.waits:
            self.transport.abort()
