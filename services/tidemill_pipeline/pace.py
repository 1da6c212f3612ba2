"""Rate limit of a task, so that it leaves capacity for others on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

# Missed time that a task may catch up. More would be a burst, which the limit must prevent.
BURST_S: Final = 0.1


@final
class Pace:
    """An even rate limit per second; None: no limit."""

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
        """Wait until the rate allows `count` items in total."""
        if self._rate_max is None:
            return
        ahead_s = count / self._rate_max - (self._monotonic_s() - self._begin_s)
        if ahead_s > 0:
            self._sleep_s(ahead_s)
        elif ahead_s < -BURST_S:
            self._begin_s -= ahead_s + BURST_S
