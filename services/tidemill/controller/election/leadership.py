"""Which controller leads: a lease in the store, judged by what was seen to change (failover.md 6).

It saves duels and is not needed for safety: whoever acts does so by compare-and-swap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTiming:
    """How long a lease lasts, and when it is renewed."""

    duration_ms: int = 4_000
    renew_every_ms: int = 1_000
    renew_deadline_ms: int = 2_500
    retry_ms: int = 500


class LeaseSeen(NamedTuple):
    """A lease as it stands in the store."""

    holder: str  # empty: it was released
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
        """Take a read of the lease: its time runs from when a change of it was first seen."""
        if lease != self._seen:
            self._seen, self._changed_at_ms = lease, now_ms

    def note_renewal(self, lease: LeaseSeen, sent_at_ms: int) -> None:
        """Take a write of our own that was confirmed: it counts from when it was sent."""
        self._seen, self._changed_at_ms = lease, sent_at_ms
        self._renewed_at_ms = sent_at_ms

    def note_loss(self) -> None:
        """Hear that the lease is another one's."""
        self._renewed_at_ms = None

    def is_leading(self, now_ms: int) -> bool:
        """Whether this controller may act first."""
        renewed_at_ms = self._renewed_at_ms
        return renewed_at_ms is not None and now_ms - renewed_at_ms < self._timing.renew_deadline_ms

    def may_take(self, now_ms: int) -> bool:
        """Whether the lease is free: released, or not changed for as long as it lasts."""
        if self._seen is None or not self._seen.holder or self._seen.holder == self._name:
            return True
        return now_ms - self._changed_at_ms >= self._timing.duration_ms

    def next_try_ms(self, now_ms: int) -> int:
        """Return when to read, renew or take it next."""
        wait_ms = self._timing.renew_every_ms if self.is_leading(now_ms) else self._timing.retry_ms
        return now_ms + wait_ms
