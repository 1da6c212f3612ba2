"""What of our output the peer has read, told by itself: it answers a PING behind all before it.

A mark is a place in the output. One ping at a time asks for all marks so far, so what is asked for
meanwhile is asked for together, and a peer is not asked more often than `PERIOD_S` says, unless it
presses.
"""

from __future__ import annotations

import math
from typing import Final, final

# Between two pings: a peer that gets thousands of answers a second answers four of these.
PERIOD_S: Final = 0.25


@final
class ReadMarks:
    """The marks of one connection, counted from 1."""

    __slots__ = ("_answered", "_asked", "_asked_at_s", "_newest")

    def __init__(self) -> None:
        self._newest = self._asked = self._answered = 0
        self._asked_at_s = -math.inf

    def add(self) -> int:
        """Mark the end of the output so far."""
        self._newest += 1
        return self._newest

    def wait_s(self, now_s: float, *, is_pressing: bool = False) -> float | None:
        """Return after how many seconds a ping may ask; None: nothing is to be asked now."""
        if self._asked > self._answered or self._newest == self._asked:
            return None
        return 0.0 if is_pressing else max(self._asked_at_s + PERIOD_S - now_s, 0.0)

    def asked(self, now_s: float) -> None:
        """Know that a ping is behind all marks so far."""
        self._asked, self._asked_at_s = self._newest, now_s

    def answered(self) -> int:
        """Return up to which mark the peer has read, now that it has answered our ping."""
        self._answered = self._asked
        return self._answered
