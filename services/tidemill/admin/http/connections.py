"""Limits of the connections to the REST API: their number and their timeouts.

uvicorn has no timeout for a silent client, for a slow request head and for an unread answer.
`access.py` has the timeout of a request body.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidemill.transport.aio.misuse_log import MisuseLog

# Enough for people, dashboards and scripts. Above the limit, the server closes the connection that
# has been idle longest, else the one with the slowest body, else the new one. So endless bodies do
# not lock out other clients. Each connection buffers at most 64 KiB of input.
CONNECTIONS_MAX: Final = 1_024
# The same for one address, so that one address cannot use all connections.
CONNECTIONS_PER_ADDRESS_MAX: Final = 512
HEAD_TIMEOUT_S: Final = 10.0  # from the connection or the last answer to the end of a head
# For a client to read an answer that exceeds the buffers: the largest answer at 1 Mbit/s.
ANSWER_TIMEOUT_S: Final = 60.0
# The same for a stream of events. The client can open it again, and gets the newest state.
STREAM_TIMEOUT_S: Final = 10.0
STREAMS: Final = frozenset({"/ui/events", "/api/v1/events"})
# Unread answers of all connections. Above it, the server closes the connection whose client has not
# read for the longest time. The largest answer has 10 MB.
UNREAD_BYTES_MAX: Final = 64 << 20


# uvicorn logs this for each invalid request. `MisuseLog` replaces it with one line per minute.
_INVALID: Final = "Invalid HTTP request received."


class InvalidRequestFilter(logging.Filter):
    """Filter that drops the lines of uvicorn which `MisuseLog` replaces."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record."""
        return record.msg != _INVALID


@final
class HttpConnection(H11Protocol):
    """The connection of uvicorn with timeouts for idle and slow clients."""

    transport: asyncio.Transport
    _current_cycle: object = None  # the request of `begun_at_s`
    begun_at_s = 0.0
    unread_since_s = 0.0  # valid while `_answer_timer` runs
    _head_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None
    idle_since_s = 0.0

    def __init__(self, *, misuse: MisuseLog, **arguments: Any) -> None:
        """Pass `arguments` to uvicorn. All connections share `misuse`."""
        super().__init__(**arguments)
        self._misuse = misuse

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows the type too.
        """Accept the connection. Above the limits, close this or another one."""
        super().connection_made(transport)
        self._start_head_timer()
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
        """Close one of the others, or this one if the server is answering all others."""
        idle = [each for each in others if each.is_idle]
        sending = [each for each in others if each.is_sending]
        if idle:
            closed = min(idle, key=lambda each: each.idle_since_s)
        else:
            closed = min(sending, key=lambda each: each.begun_at_s, default=self)
        self._misuse.report(
            "connections", peer=closed.address, reason=f"{len(others)} other connections"
        )
        closed.transport.abort()

    def handle_events(self) -> None:
        """Handle received data, and record when a request begins."""
        super().handle_events()
        if self.cycle is not self._current_cycle:
            self._current_cycle, self.begun_at_s = self.cycle, self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """Reject an invalid request. If an answer has begun, close the connection."""
        self._misuse.report("http_request", peer=self.address, reason=msg)
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for timer in (self._head_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._start_head_timer()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client reads."""
        self.unread_since_s = self.loop.time()
        is_stream = self.scope is not None and self.scope["path"] in STREAMS
        timeout_s = STREAM_TIMEOUT_S if is_stream else ANSWER_TIMEOUT_S
        self._answer_timer = self.loop.call_later(timeout_s, self.transport.abort)
        super().pause_writing()
        # The transport has the whole write only after this call.
        self.loop.call_soon(self._close_slow_readers)

    def _close_slow_readers(self) -> None:
        """Close the connections with the oldest unread answers, until all of them have room."""
        readers = [
            each for each in self.connections if isinstance(each, HttpConnection) and each.is_unread
        ]
        readers.sort(key=lambda each: each.unread_since_s)
        unread_bytes = sum(each.transport.get_write_buffer_size() for each in readers)
        for slowest in readers[:-1]:
            if unread_bytes <= UNREAD_BYTES_MAX:
                break
            unread_bytes -= slowest.transport.get_write_buffer_size()
            self._misuse.report(
                "answers", peer=slowest.address, reason=f"{unread_bytes} other unread bytes"
            )
            slowest.transport.abort()

    def resume_writing(self) -> None:
        """Continue after the client has read."""
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None
        self._start_head_timer()
        super().resume_writing()

    @property
    def address(self) -> str:
        """The address of the client."""
        return self.client[0] if self.client else "an unknown address"

    @property
    def is_sending(self) -> bool:
        """Whether the client is sending the body of a request."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_complete

    @property
    def is_unread(self) -> bool:
        """Whether the client has not read an answer yet."""
        return self._answer_timer is not None and not self.transport.is_closing()

    @property
    def is_idle(self) -> bool:
        """Whether no request and no answer is in progress."""
        is_served = self.cycle is not None and not self.cycle.response_complete
        return not is_served and self._answer_timer is None

    def _start_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self.idle_since_s = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.is_idle:
            self.transport.abort()
