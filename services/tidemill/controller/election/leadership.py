"""The lease of the leading controller, judged by the changes that were seen.

It avoids competing writes. Safety does not depend on it, since each write is a compare-and-swap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTiming:
    """The duration of a lease, and the times of its renewal."""

    duration_ms: int = 4_000
    renew_every_ms: int = 1_000
    renew_deadline_ms: int = 2_500
    retry_ms: int = 500


class LeaseSeen(NamedTuple):
    """A lease in the store."""

    holder: str  # empty: released
    renewals: int  # grows with each write


@final
class Leadership:
    """One controller's view of the lease."""

    def __init__(self, name: str, timing: LeaseTiming) -> None:
        self._name = name
        self._timing = timing
        self._seen: LeaseSeen | None = None
        self._changed_at_ms = 0
        self._renewed_at_ms: int | None = None

    def note_lease(self, lease: LeaseSeen, now_ms: int) -> None:
        """Record a read of the lease. Its time runs from the first sight of a change."""
        if lease != self._seen:
            self._seen, self._changed_at_ms = lease, now_ms

    def note_renewal(self, lease: LeaseSeen, sent_at_ms: int) -> None:
        """Record a confirmed write of this controller. Its time runs from the send."""
        self._seen, self._changed_at_ms = lease, sent_at_ms
        self._renewed_at_ms = sent_at_ms

    def note_loss(self) -> None:
        """Record that another controller has the lease."""
        self._renewed_at_ms = None

    def is_leading(self, now_ms: int) -> bool:
        """Return whether this controller leads."""
        renewed_at_ms = self._renewed_at_ms
        return renewed_at_ms is not None and now_ms - renewed_at_ms < self._timing.renew_deadline_ms

    def may_take(self, now_ms: int) -> bool:
        """Return whether the lease is free: released, or without a change for its duration."""
        if self._seen is None or not self._seen.holder or self._seen.holder == self._name:
            return True
        return now_ms - self._changed_at_ms >= self._timing.duration_ms

    def next_try_ms(self, now_ms: int) -> int:
        """Return the time of the next read, renewal or take-over."""
        wait_ms = self._timing.renew_every_ms if self.is_leading(now_ms) else self._timing.retry_ms
        return now_ms + wait_ms
