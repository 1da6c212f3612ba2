"""How long a connection to the REST API may keep us waiting, and how many there may be.

Of the server's own limits one is missing for each way to stay: saying nothing, sending a head byte
by byte, and not reading the answer. How long a body may take is the door's to say.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

from uvicorn.protocols.http.h11_impl import H11Protocol

# People, dashboards and scripts; beyond it the one that has waited longest without a request is
# closed, and if there is none the newcomer. Each holds 64 KiB of what comes at most.
CONNECTIONS_MAX: Final = 1_024
HEAD_TIMEOUT_S: Final = 10.0  # from the connection, or the last answer, to the end of a head
# For an answer that is larger than the buffers to be read: the largest of them, at a megabit/s.
ANSWER_TIMEOUT_S: Final = 60.0


@final
class Connection(H11Protocol):
    """uvicorn's connection, ended when its client does not get on with it."""

    transport: asyncio.Transport
    _head_watch: asyncio.TimerHandle | None = None
    _answer_watch: asyncio.TimerHandle | None = None
    waits_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it so too.
        """Begin, or make room, or refuse."""
        super().connection_made(transport)
        self._watch_head()
        if len(self.connections) > CONNECTIONS_MAX:
            others = (each for each in self.connections if isinstance(each, Connection))
            waiting = [each for each in others if each is not self and each.waits]
            longest = min(waiting, key=lambda each: each.waits_since_s, default=self)
            longest.transport.abort()

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
