"""Confirmations that a client has read responses of one connection (ADR 0031)."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from tidemill.transport.aio.misuse_log import MisuseLog
    from tidemill.transport.aio.writer import Writer
    from tidemill.transport.http2.connection import Connection

# Responses that wait for one ping, and for the next one, which covers those sent meanwhile. A busy
# proxy sends 8,000 responses per second to a connection; a round trip takes up to a second. At 300
# bytes each, they take under 3 MiB for a client that reads and does not answer pings.
UNCONFIRMED_MAX: Final = 8_192
# After this time a confirmation is not needed: the messages of the response are available to other
# consumers again. A client may send data for ever and never answer a ping.
EXPIRY_S: Final = 75.0


@final
class ReadConfirmations:
    """The unconfirmed responses of one connection, in order, with their callbacks."""

    def __init__(
        self, http: Connection, writer: Writer, loop: asyncio.AbstractEventLoop, misuse: MisuseLog
    ) -> None:
        self._http = http
        self._writer = writer
        self._loop = loop
        self._misuse = misuse
        # Mark, time and callback.
        self._unconfirmed: deque[tuple[int, float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None  # until the next ping may be sent

    def __len__(self) -> int:
        """Return the number of unconfirmed responses."""
        return len(self._unconfirmed)

    def add(self, notify: Callable[[], None]) -> None:
        """Call `notify` after the client has read all data sent so far.

        If too many responses wait, the new one is counted and dropped. The older ones are confirmed
        sooner.
        """
        if len(self._unconfirmed) >= UNCONFIRMED_MAX:
            self._misuse.unconfirmed_count += 1
            return
        self._unconfirmed.append((self._http.mark_output(), time.monotonic(), notify))
        self._request()

    def confirm(self, mark: int) -> None:
        """Record that the client has read up to a mark; request the later marks."""
        while self._unconfirmed and self._unconfirmed[0][0] <= mark:
            self._unconfirmed.popleft()[2]()
        if self._unconfirmed:
            self._request()

    def expire(self, now_s: float) -> None:
        """Drop responses that have waited too long."""
        while self._unconfirmed and now_s - self._unconfirmed[0][1] > EXPIRY_S:
            self._unconfirmed.popleft()
            self._misuse.unconfirmed_count += 1

    def clear(self) -> None:
        """Drop all responses of a lost connection; it is unknown if they were read."""
        self._unconfirmed.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _request(self) -> None:
        """Ask the client how much it has read, now or when the next ping may be sent."""
        # Many waiting responses cannot wait for the period between two pings.
        is_pressing = len(self._unconfirmed) > UNCONFIRMED_MAX // 2
        if self._timer is not None:
            if not is_pressing:
                return
            self._timer.cancel()
            self._timer = None
        wait_s = self._http.request_marks(time.monotonic(), is_pressing=is_pressing)
        if wait_s is not None:
            self._timer = self._loop.call_later(wait_s, self._request_again)
        self._writer.flush_soon()

    def _request_again(self) -> None:
        self._timer = None
        self._request()
