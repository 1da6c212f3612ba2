"""The adaptive switch: notifications for a few polls, parked pops for many.

If c polls of a pair are parked at B brokers, a broker has no parked poll with a probability of
about exp(-c / B). From c = B ln 100 on, that is below 1 %, and a notification is not worth its
round trip.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias, final

WINDOW_MS: Final = 10_000  # window of the average: half of a long poll
BUCKET_MS: Final = 1_000
UNCOVERED_RATIO: Final = 0.01  # share of time without a parked poll at a broker
BACK_RATIO: Final = 0.7  # below this part of the threshold, notifications return; avoids flapping
DWELL_MS: Final = 10_000  # shortest time in a mode: the effect of the mode fills the window

WaitModeName: TypeAlias = Literal["notify", "direct"]


def threshold(brokers: int) -> float:
    """Return the smallest number of polls whose pops are parked."""
    return brokers * math.log(1 / UNCOVERED_RATIO)


@final
class WaitMode:
    """The wait mode of the polls of one (topic, group).

    It depends on the average number of waiting polls: receives per second times seconds waited per
    receive (Little's law).
    """

    __slots__ = ("_at_ms", "_begun", "_buckets", "_changed_at_ms", "is_direct", "key", "waiting")

    def __init__(self, key: tuple[str, str], now_ms: int) -> None:
        self.key = key
        self.waiting = 0
        self.is_direct = False
        self._at_ms = now_ms
        # Poll-milliseconds per second of the window.
        self._buckets: dict[int, int] = {}
        self._begun: dict[int, int] = {}  # polls by second
        self._changed_at_ms = now_ms - DWELL_MS

    @property
    def name(self) -> WaitModeName:
        """Label of the mode in metrics."""
        return "direct" if self.is_direct else "notify"

    def began(self, now_ms: int) -> None:
        """Count a poll that begins to wait."""
        self._advance(now_ms)
        self.waiting += 1
        number = now_ms // BUCKET_MS
        self._begun[number] = self._begun.get(number, 0) + 1

    def ended(self, now_ms: int) -> None:
        """Count a poll that has ended."""
        self._advance(now_ms)
        self.waiting -= 1

    def choose(self, brokers: int, now_ms: int) -> bool:
        """Choose the mode of the next poll. Return whether the mode has changed."""
        if now_ms - self._changed_at_ms < DWELL_MS:
            return False
        limit = threshold(brokers)
        if self.is_direct:
            is_direct = self.concurrency(now_ms) >= limit * BACK_RATIO
        else:
            is_direct = self.concurrency(now_ms) >= limit
        if is_direct == self.is_direct:
            return False
        self.is_direct, self._changed_at_ms = is_direct, now_ms
        return True

    def concurrency(self, now_ms: int) -> float:
        """Return the average number of waiting polls in the window."""
        self._advance(now_ms)
        return sum(self._buckets.values()) / _span_ms(now_ms)

    def rate(self, now_ms: int) -> float:
        """Return the polls per second that began in the window."""
        self._advance(now_ms)
        return sum(self._begun.values()) * 1000 / _span_ms(now_ms)

    def _advance(self, now_ms: int) -> None:
        buckets, first = self._buckets, _first_bucket(now_ms)
        for of_second in (buckets, self._begun):
            for number in [number for number in of_second if number < first]:
                del of_second[number]
        if self.waiting:
            at_ms = max(self._at_ms, first * BUCKET_MS)
            while at_ms < now_ms:
                number = at_ms // BUCKET_MS
                end_ms = min((number + 1) * BUCKET_MS, now_ms)
                buckets[number] = buckets.get(number, 0) + self.waiting * (end_ms - at_ms)
                at_ms = end_ms
        self._at_ms = now_ms


def _first_bucket(now_ms: int) -> int:
    """Return the first second of the window."""
    return now_ms // BUCKET_MS - WINDOW_MS // BUCKET_MS + 1


def _span_ms(now_ms: int) -> int:
    """Return the length of the window. Its last second is incomplete."""
    return now_ms - _first_bucket(now_ms) * BUCKET_MS
