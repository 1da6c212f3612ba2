"""Answers of one connection of which it is to be known that they were read (ADR 0031)."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from tidemill.transport.aio.notices import MisuseLog
    from tidemill.transport.aio.writer import Writer
    from tidemill.transport.http2.connection import Connection

# That wait for one ping, and for the next one, which asks for what comes while that one is out:
# what a connection may get from a busy proxy, 8,000 answers a second, in a round trip of a second.
# At some 300 bytes each it is below 3 MiB of a client that reads, and answers no ping.
UNREAD_ANSWERS_MAX: Final = 8_192
# Then nobody asks for it any more: what an answer held that was not known to be read by then is
# others' again. A client may speak on for ever, and answer no ping.
FORGOTTEN_S: Final = 75.0


@final
class ReadConfirmations:
    """Which they are, in their order, and who is told."""

    def __init__(
        self, http: Connection, writer: Writer, loop: asyncio.AbstractEventLoop, notices: MisuseLog
    ) -> None:
        self._http = http
        self._writer = writer
        self._loop = loop
        self._notices = notices
        # With their marks, and since when they wait.
        self._unread: deque[tuple[int, float, Callable[[], None]]] = deque()
        self._asking: asyncio.TimerHandle | None = None  # when that may be asked again

    def __len__(self) -> int:
        """Return of how many it is to be known, and is not yet."""
        return len(self._unread)

    def add(self, tell: Callable[[], None]) -> None:
        """Call `tell` once the client has read what was sent so far.

        Never where as many wait already as there may be: that is counted, and the older ones, of
        which it is known sooner, are kept.
        """
        if len(self._unread) >= UNREAD_ANSWERS_MAX:
            self._notices.unheard_answers += 1
            return
        self._unread.append((self._http.mark_output(), time.monotonic(), tell))
        self._ask()

    def read(self, mark: int) -> None:
        """Know that the client has read up to a mark, and ask for what has come since."""
        while self._unread and self._unread[0][0] <= mark:
            self._unread.popleft()[2]()
        if self._unread:
            self._ask()

    def forget_old(self, now_s: float) -> None:
        """Let those go that have waited for so long that it does not matter any more."""
        while self._unread and now_s - self._unread[0][1] > FORGOTTEN_S:
            self._unread.popleft()
            self._notices.unheard_answers += 1

    def clear(self) -> None:
        """Know that the connection is lost: perhaps they were read, and nobody can tell."""
        self._unread.clear()
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self) -> None:
        """Ask the client how far it has read, or do so later where that was asked just now."""
        # Where there are many of them they cannot wait for the period between two pings.
        is_pressing = len(self._unread) > UNREAD_ANSWERS_MAX // 2
        if self._asking is not None:
            if not is_pressing:
                return
            self._asking.cancel()
            self._asking = None
        wait_s = self._http.request_marks(time.monotonic(), is_pressing=is_pressing)
        if wait_s is not None:
            self._asking = self._loop.call_later(wait_s, self._ask_later)
        self._writer.flush_soon()

    def _ask_later(self) -> None:
        self._asking = None
        self._ask()
