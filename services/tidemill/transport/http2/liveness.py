"""Liveness of a peer: timeouts of the handshake, of silence and of idle connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from tidemill.transport.http2.limits import Limits


@final
class Liveness:
    """The times of the last input and of the last ping; monotonic seconds."""

    __slots__ = ("_limits", "_opened_at_s", "_ping_sent_at_s", "heard_at_s")

    def __init__(self, limits: Limits, now_s: float) -> None:
        self._limits = limits
        self._opened_at_s = self.heard_at_s = now_s
        self._ping_sent_at_s: float | None = None

    def record_answer(self) -> None:
        """Record the answer to our ping."""
        self._ping_sent_at_s = None

    def check_handshake(self, now_s: float) -> None:
        """Raise ConnectionFailure if the handshake takes too long."""
        if now_s - self._opened_at_s > self._limits.handshake_timeout_s:
            raise ConnectionFailure(
                ErrorCode.SETTINGS_TIMEOUT, "no preface arrived in time", limit=Limit.HANDSHAKE
            )

    def needs_ping(self, now_s: float, *, is_within_frame: bool) -> bool:
        """Return whether to send a ping; raise ConnectionFailure if the peer is silent."""
        silent_s = now_s - self.heard_at_s
        if is_within_frame and silent_s > self._limits.stall_timeout_s:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM,
                "a frame is incomplete for too long",
                limit=Limit.REQUEST,
            )
        if self._ping_sent_at_s is not None:
            if self.heard_at_s > self._ping_sent_at_s:
                self._ping_sent_at_s = None
            elif now_s - self._ping_sent_at_s > self._limits.keepalive_timeout_s:
                raise ConnectionFailure(
                    ErrorCode.NO_ERROR, "the peer does not answer", limit=Limit.KEEPALIVE
                )
        elif silent_s > self._limits.keepalive_period_s:
            self._ping_sent_at_s = now_s
            return True
        return False

    def is_idle(self, now_s: float, busy_at_s: float) -> bool:
        """Return whether there has been no stream for too long."""
        return now_s - busy_at_s > self._limits.idle_timeout_s
