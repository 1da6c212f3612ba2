"""How many cheap things a peer may do: frames that cost it nothing and us a little.

Some at once, and then some a second. Real work earns them back, because busy peers ping and update
windows with every response that they read.
"""

from __future__ import annotations

from typing import final

from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit, Limits


@final
class Allowance:
    """A token bucket."""

    __slots__ = ("_burst", "_left", "_per_s", "_refilled_at_s")

    def __init__(self, *, burst: int, per_s: int, now_s: float) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._left = float(burst)
        self._refilled_at_s = now_s

    def take(self, now_s: float) -> bool:
        """Take one; False when none is left."""
        if self._left < 1:
            elapsed_s = now_s - self._refilled_at_s
            self._left = min(self._burst, self._left + elapsed_s * self._per_s)
            self._refilled_at_s = now_s
            if self._left < 1:
                return False
        self._left -= 1
        return True

    def earn(self, count: int) -> None:
        """Give back for work that the peer let us do."""
        self._left = min(self._burst, self._left + count)


@final
class Allowances:
    """What is left to the peer of one connection, by the limit that it would overstep."""

    __slots__ = ("_by_limit", "earned")

    def __init__(self, limits: Limits, now_s: float) -> None:
        self.earned = 0  # pieces of data that were sent, and are not accounted for yet

        def allowance(burst: int, per_s: int) -> Allowance:
            return Allowance(burst=burst, per_s=per_s, now_s=now_s)

        self._by_limit = {
            Limit.RESETS: allowance(limits.resets_burst, limits.resets_per_s),
            Limit.SETTINGS: allowance(limits.settings_burst, limits.settings_per_s),
            Limit.PINGS: allowance(limits.pings_burst, limits.pings_per_s),
            Limit.EMPTY_DATA: allowance(limits.empty_data_burst, limits.empty_data_per_s),
            Limit.CONTROL: allowance(limits.control_burst, limits.control_per_s),
        }

    def take(self, limit: Limit, now_s: float) -> None:
        """Take one; raise ConnectionFailure when none is left."""
        allowance = self._by_limit[limit]
        if allowance.take(now_s):
            return
        # Peers answer our data with frames: they are allowed those.
        self._by_limit[Limit.CONTROL].earn(2 * self.earned)
        self._by_limit[Limit.PINGS].earn(self.earned)
        self._by_limit[Limit.RESETS].earn(self.earned)
        self.earned = 0
        if not allowance.take(now_s):
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, f"too many frames: {limit}", limit=limit
            )
