"""What a connection has to send, written to its transport once a turn of the loop.

flush_soon    answers of calls, and all that becomes ready in the same turn
flush_now     a frame of the link, a batch by itself
hold, release around the events of what was received: what answers them leaves together, at once
flush_last    before the transport is closed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast, final

if TYPE_CHECKING:
    from tidemill.transport.http2.connection import Connection

# In the transport, before those who send wait.
BUFFER_BYTES: Final = 1 << 20
# The same, where what is unread by all peers leaves no room.
TIGHT_BUFFER_BYTES: Final = 64 << 10
# Less of it is not told of: nearly all writes are smaller, and are gone in the same turn.
TOLD_BYTES: Final = 4 << 10


@final
class Writer:
    """The way from a connection's output to its transport."""

    def __init__(
        self,
        http: Connection,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[int], bool] = lambda _count: True,
    ) -> None:
        """Write to a transport; `tell` hears what it was given, and has not written yet.

        It returns whether there is room for more of that.
        """
        self.is_paused = False  # the transport holds as much as it should
        self._http = http
        self._loop = loop
        self._tell = tell
        self._told_bytes = 0
        self._is_tight = False
        self._transport: asyncio.Transport | None = None
        self._is_scheduled = False
        self._is_held = False

    def attach(self, transport: asyncio.BaseTransport) -> None:
        """Write to `transport`, beginning with what is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self.flush()

    def detach(self) -> None:
        """Let go of a transport that is lost, and of what was to be written."""
        self._transport = None
        self._http.take_output()
        self.count()

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
        if self._http.has_output or self._told_bytes or self.is_paused:
            self.flush()

    def _flush_scheduled(self) -> None:
        self._is_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write what there is, unless the transport is full or closed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self.is_paused:
            self.count()
            return
        if self._http.has_output:
            output = self._http.take_output()
            unwritten_bytes = transport.get_write_buffer_size() + len(output)
            if unwritten_bytes >= TOLD_BYTES or self._told_bytes:
                # Before it is written, which may tell that the transport is full.
                self._count(unwritten_bytes)
                self._loop.call_soon(self.count)
            transport.write(output)
        else:
            self.recount()

    def recount(self) -> None:
        """Tell how much of what was told of is written by now; nobody else says when it is."""
        if self._told_bytes:
            self.count()

    def count(self) -> None:
        """Tell what the transport holds now; it writes at the end of a turn, and later."""
        self._count(self.buffered_bytes)

    def _count(self, unwritten_bytes: int) -> None:
        if unwritten_bytes < TOLD_BYTES:
            unwritten_bytes = 0
        # Also where it is as before: part of it was output, and is not any more.
        self._told_bytes = unwritten_bytes
        is_tight = not self._tell(unwritten_bytes)
        if is_tight != self._is_tight and self._transport is not None:
            self._is_tight = is_tight
            # Who is over it is paused at once, and nothing more is begun for it.
            most = TIGHT_BUFFER_BYTES if is_tight else BUFFER_BYTES
            self._transport.set_write_buffer_limits(high=most)
