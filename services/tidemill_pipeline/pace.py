"""Holding a task to a rate, so that whoever shares the machine is not pushed aside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

# What is made up for of time that was missed: more would be a burst, which a rate is to prevent.
BURST_S: Final = 0.1


@final
class Pace:
    """So many a second, evenly, whatever took long between; without one it holds nothing up."""

    def __init__(
        self,
        rate_max: float | None,
        *,
        sleep_s: Callable[[float], None] = time.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_max, self._sleep_s, self._monotonic_s = rate_max, sleep_s, monotonic_s
        self._begin_s = monotonic_s()

    def keep(self, count: int) -> None:
        """Wait until `count`, of all so far, are not more than the rate allows."""
        if self._rate_max is None:
            return
        ahead_s = count / self._rate_max - (self._monotonic_s() - self._begin_s)
        if ahead_s > 0:
            self._sleep_s(ahead_s)
        elif ahead_s < -BURST_S:
            self._begin_s -= ahead_s + BURST_S
