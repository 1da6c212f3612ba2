"""What a connection has to send, written to its transport once a turn of the loop.

flush_soon    answers of calls, and all that becomes ready in the same turn
flush_now     a frame of the link, a batch by itself
hold, release around the events of what was received: what answers them leaves together, at once
flush_last    before the transport is closed
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast, final

if TYPE_CHECKING:
    from tidemill.transport.http2.connection import Connection

# In the transport, before those who send wait.
BUFFER_BYTES: Final = 1 << 20


@final
class Writer:
    """The way from a connection's output to its transport."""

    def __init__(self, http: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.is_paused = False  # the transport holds as much as it should
        self._http = http
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._is_scheduled = False
        self._is_held = False

    def attach(self, transport: asyncio.BaseTransport) -> None:
        """Write to `transport`, beginning with what is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self.flush()

    @property
    def buffered_bytes(self) -> int:
        """What the transport holds and the peer has not read."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop, with all that becomes ready until then."""
        if not self._is_scheduled and not self._is_held:
            self._is_scheduled = True
            self._loop.call_soon(self._flush_scheduled)

    def flush_now(self) -> None:
        """Write at once what is a batch by itself; only a `hold` keeps it back."""
        if not self._is_held:
            self.flush()

    def flush_last(self) -> None:
        """Write the last words, also to a transport that is full; it closes when it has them."""
        self.is_paused = False
        self.flush()

    def hold(self) -> None:
        """Let `flush_soon` leave it to the `release` that follows in this turn of the loop."""
        self._is_held = True

    def release(self) -> None:
        """Write at once: a turn of the loop more would cost a system call."""
        self._is_held = False
        self.flush()

    def _flush_scheduled(self) -> None:
        self._is_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write what there is, unless the transport is full or closed."""
        transport = self._transport
        if transport is None or self.is_paused or transport.is_closing():
            return
        output = self._http.take_output()
        if output:
            transport.write(output)
