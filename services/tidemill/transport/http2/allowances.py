"""Allowances of a peer for frames that cost it nothing and us a little.

A peer has a burst and a rate for each kind. Real work earns allowances, because busy peers send
pings and window updates with every response that they read.
"""

from __future__ import annotations

from typing import Final, final

from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit, Limits

# Bytes sent that earn one frame for the peer. With the smallest common window of 1 KiB, a peer
# updates the windows of stream and connection after 512 bytes each; some update both at each read.
BYTES_PER_CONTROL_FRAME: Final = 256
BYTES_PER_PING: Final = 16_384  # a frame of the usual size; clients ping once per round trip


@final
class RateBucket:
    """The frames of one kind that a peer may send now: a burst, which a rate refills."""

    __slots__ = ("_burst", "_per_s", "_refilled_at_s", "_unused")

    def __init__(self, *, burst: int, per_s: int, now_s: float) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._unused = float(burst)
        self._refilled_at_s = now_s

    def take(self, now_s: float) -> bool:
        """Use one frame; return False if there is none."""
        if self._unused < 1:
            elapsed_s = now_s - self._refilled_at_s
            self._unused = min(self._burst, self._unused + elapsed_s * self._per_s)
            self._refilled_at_s = now_s
            if self._unused < 1:
                return False
        self._unused -= 1
        return True

    def earn(self, count: int) -> int:
        """Add frames for work that the peer allowed; return how many of `count` fitted."""
        added = min(count, int(self._burst - self._unused))
        self._unused += added
        return added


@final
class Allowances:
    """The allowances of the peer of one connection, by the limit that protects them."""

    __slots__ = ("_by_limit", "_credits", "earned", "earned_bytes")

    def __init__(self, limits: Limits, now_s: float) -> None:
        # Pieces of sent data, and their bytes, that are not counted yet.
        self.earned = self.earned_bytes = 0
        # Earned and unused. A peer may read much at once and answer later.
        self._credits = {Limit.CONTROL: 0, Limit.PINGS: 0, Limit.RESETS: 0}

        def bucket(burst: int, per_s: int) -> RateBucket:
            return RateBucket(burst=burst, per_s=per_s, now_s=now_s)

        self._by_limit = {
            Limit.RESETS: bucket(limits.resets_burst, limits.resets_per_s),
            Limit.SETTINGS: bucket(limits.settings_burst, limits.settings_per_s),
            Limit.PINGS: bucket(limits.pings_burst, limits.pings_per_s),
            Limit.EMPTY_DATA: bucket(limits.empty_data_burst, limits.empty_data_per_s),
            Limit.CONTROL: bucket(limits.control_burst, limits.control_per_s),
        }

    def take(self, limit: Limit, now_s: float) -> None:
        """Use one frame; raise ConnectionFailure if there is none."""
        bucket = self._by_limit[limit]
        if bucket.take(now_s):
            return
        # Peers answer our data with frames, so sent data earns frames.
        earned = self._credits
        earned[Limit.CONTROL] += 2 * self.earned + self.earned_bytes // BYTES_PER_CONTROL_FRAME
        earned[Limit.PINGS] += self.earned + self.earned_bytes // BYTES_PER_PING
        earned[Limit.RESETS] += self.earned
        self.earned = self.earned_bytes = 0
        if limit in earned:
            earned[limit] -= bucket.earn(earned[limit])
        if not bucket.take(now_s):
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, f"too many frames: {limit}", limit=limit
            )
