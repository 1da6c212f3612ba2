"""Signs of life of a peer, and what becomes of one that gives none."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from tidemill.transport.http2.limits import Limits


@final
class Liveness:
    """When something was heard last, and when the peer was asked for it; monotonic seconds."""

    __slots__ = ("_limits", "_opened_at_s", "_ping_sent_at_s", "heard_at_s")

    def __init__(self, limits: Limits, now_s: float) -> None:
        self._limits = limits
        self._opened_at_s = self.heard_at_s = now_s
        self._ping_sent_at_s: float | None = None

    def answered(self) -> None:
        """Know that the peer has answered our ping."""
        self._ping_sent_at_s = None

    def check_handshake(self, now_s: float) -> None:
        """Raise ConnectionFailure for a peer that does not begin."""
        if now_s - self._opened_at_s > self._limits.handshake_timeout_s:
            raise ConnectionFailure(
                ErrorCode.SETTINGS_TIMEOUT, "no preface came", limit=Limit.HANDSHAKE
            )

    def wants_ping(self, now_s: float, *, is_within_frame: bool) -> bool:
        """Return whether to ask the peer for a sign of life; raise ConnectionFailure for none."""
        silent_s = now_s - self.heard_at_s
        if is_within_frame and silent_s > self._limits.stall_timeout_s:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, "a frame stays away", limit=Limit.REQUEST
            )
        if self._ping_sent_at_s is not None:
            if self.heard_at_s > self._ping_sent_at_s:
                self._ping_sent_at_s = None
            elif now_s - self._ping_sent_at_s > self._limits.keepalive_timeout_s:
                raise ConnectionFailure(
                    ErrorCode.NO_ERROR, "the peer is silent", limit=Limit.KEEPALIVE
                )
        elif silent_s > self._limits.keepalive_period_s:
            self._ping_sent_at_s = now_s
            return True
        return False

    def is_idle(self, now_s: float, busy_at_s: float) -> bool:
        """Return whether there was no stream for too long, the last having ended then."""
        return now_s - busy_at_s > self._limits.idle_timeout_s
