"""The output of a connection, written to its transport once per turn of the event loop.

flush_soon    responses of calls, and all output of the same turn flush_now     a frame of the link:
a batch of its own hold, release around the events of received data, so that their responses are
written together flush_last    before the transport is closed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast, final

if TYPE_CHECKING:
    from tidemill.transport.http2.connection import Connection

# In the transport, before senders wait.
BUFFER_BYTES: Final = 1 << 20
# The same, when the unread data of all clients uses the memory.
TIGHT_BUFFER_BYTES: Final = 64 << 10
# Smaller amounts are not reported: nearly all writes are smaller and complete in the same turn.
REPORTED_BYTES_MIN: Final = 4 << 10


@final
class Writer:
    """The path from a connection's output to its transport."""

    def __init__(
        self,
        http: Connection,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[int], bool] = lambda _count: True,
    ) -> None:
        """Write to a transport; `report` receives the number of unwritten bytes in it.

        It returns whether there is room for more.
        """
        self.is_paused = False  # the transport's buffer is full
        self._http = http
        self._loop = loop
        self._report = report
        self._reported_bytes = 0
        self._is_tight = False
        self._transport: asyncio.Transport | None = None
        self._is_scheduled = False
        self._is_held = False

    def attach(self, transport: asyncio.BaseTransport) -> None:
        """Write to `transport`, starting with the existing output."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self.flush()

    def detach(self) -> None:
        """Drop a lost transport and the output."""
        self._transport = None
        self._http.take_output()
        self.count()

    @property
    def buffered_bytes(self) -> int:
        """The bytes in the transport that the peer has not read."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def flush_soon(self) -> None:
        """Write at the end of this turn, together with the other output of the turn."""
        if not self._is_scheduled and not self._is_held:
            self._is_scheduled = True
            self._loop.call_soon(self._flush_scheduled)

    def flush_now(self) -> None:
        """Write at once, unless the writer is held."""
        if not self._is_held:
            self.flush()

    def flush_last(self) -> None:
        """Write the last frames, even to a full transport."""
        self.is_paused = False
        self.flush()

    def hold(self) -> None:
        """Hold output until the `release` that follows in this turn."""
        self._is_held = True

    def release(self) -> None:
        """Write at once, because a later write would cost one more system call."""
        self._is_held = False
        if self._http.has_output or self._reported_bytes or self.is_paused:
            self.flush()

    def _flush_scheduled(self) -> None:
        self._is_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write the output, unless the transport is full or closed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self.is_paused:
            self.count()
            return
        if self._http.has_output:
            output = self._http.take_output()
            unwritten_bytes = transport.get_write_buffer_size() + len(output)
            if unwritten_bytes >= REPORTED_BYTES_MIN or self._reported_bytes:
                # Before the write, which may call `pause_writing`.
                self._count(unwritten_bytes)
                self._loop.call_soon(self.count)
            transport.write(output)
        else:
            self.recount()

    def recount(self) -> None:
        """Report again if the last report was not 0; no event announces the end of writing."""
        if self._reported_bytes:
            self.count()

    def count(self) -> None:
        """Report the bytes in the transport; it writes at the end of a turn and later."""
        self._count(self.buffered_bytes)

    def _count(self, unwritten_bytes: int) -> None:
        if unwritten_bytes < REPORTED_BYTES_MIN:
            unwritten_bytes = 0
        # Reported even if unchanged, because a part of it was output before.
        self._reported_bytes = unwritten_bytes
        is_tight = not self._report(unwritten_bytes)
        if is_tight != self._is_tight and self._transport is not None:
            self._is_tight = is_tight
            # A lower limit pauses a full transport at once, so that its calls wait.
            limit = TIGHT_BUFFER_BYTES if is_tight else BUFFER_BYTES
            self._transport.set_write_buffer_limits(high=limit)
