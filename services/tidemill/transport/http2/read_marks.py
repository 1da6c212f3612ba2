"""Marks in our output, and the proof that the peer has read up to a mark: its answer to a PING.

A mark is a position in the output. One ping at a time asks for all marks so far. Requests during a
ping are combined in the next one. There is at most one ping per `PERIOD_S`, unless a request is
pressing.
"""

from __future__ import annotations

import math
from typing import Final, final

# Between two pings. A peer that gets thousands of answers per second answers four of these.
PERIOD_S: Final = 0.25


@final
class ReadMarks:
    """The marks of one connection, counted from 1."""

    __slots__ = ("_answered", "_asked", "_asked_at_s", "_newest")

    def __init__(self) -> None:
        self._newest = self._asked = self._answered = 0
        self._asked_at_s = -math.inf

    def add(self) -> int:
        """Mark the current end of the output."""
        self._newest += 1
        return self._newest

    def wait_s(self, now_s: float, *, is_pressing: bool = False) -> float | None:
        """Return the seconds until the next ping may be sent; None if no ping is needed now."""
        if self._asked > self._answered or self._newest == self._asked:
            return None
        return 0.0 if is_pressing else max(self._asked_at_s + PERIOD_S - now_s, 0.0)

    def record_ping(self, now_s: float) -> None:
        """Record that a ping was sent after all marks so far."""
        self._asked, self._asked_at_s = self._newest, now_s

    def record_answer(self) -> int:
        """Record the answer to our ping; return the mark that the peer has reached."""
        self._answered = self._asked
        return self._answered
