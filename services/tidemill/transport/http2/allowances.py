"""How many cheap things a peer may do: frames that cost it nothing and us a little.

Some at once, and then some a second. Real work earns them back, because busy peers ping and update
windows with every response that they read, the more the larger it is.
"""

from __future__ import annotations

from typing import Final, final

from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit, Limits

# Bytes sent that earn a frame of the peer's: with the smallest window that anybody uses, 1 KiB, a
# stream's and the connection's window are updated for each 512, and some send both for each read.
BYTES_A_CONTROL_FRAME: Final = 256
BYTES_A_PING: Final = 16_384  # a frame of the usual size; clients ping once a round trip


@final
class TokenBucket:
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

    def earn(self, count: int) -> int:
        """Give back for work that the peer let us do; return how much of `count` had room."""
        taken = min(count, int(self._burst - self._left))
        self._left += taken
        return taken


@final
class Allowances:
    """What is left to the peer of one connection, by the limit that it would overstep."""

    __slots__ = ("_by_limit", "_credits", "earned", "earned_bytes")

    def __init__(self, limits: Limits, now_s: float) -> None:
        # Pieces of data that were sent, and their bytes, that are not accounted for yet.
        self.earned = self.earned_bytes = 0
        # Earned and not used. A peer may read much at once, and answer later.
        self._credits = {Limit.CONTROL: 0, Limit.PINGS: 0, Limit.RESETS: 0}

        def allowance(burst: int, per_s: int) -> TokenBucket:
            return TokenBucket(burst=burst, per_s=per_s, now_s=now_s)

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
        earned = self._credits
        earned[Limit.CONTROL] += 2 * self.earned + self.earned_bytes // BYTES_A_CONTROL_FRAME
        earned[Limit.PINGS] += self.earned + self.earned_bytes // BYTES_A_PING
        earned[Limit.RESETS] += self.earned
        self.earned = self.earned_bytes = 0
        if limit in earned:
            earned[limit] -= allowance.earn(earned[limit])
        if not allowance.take(now_s):
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, f"too many frames: {limit}", limit=limit
            )
