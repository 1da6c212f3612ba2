"""The limit of failed logins, per user and address and per address.

This module has no I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, final

from tidemill.security.failure_buckets import FailureBuckets, network_of

LOGINS_MAX: Final = 10  # failed logins of one user from one address at once
REFILL_MS: Final = 6_000  # for one more
OF_AN_ADDRESS: Final = 10  # times as many, for all users together


@final
class FailedLogins:
    """Token buckets of failed logins."""

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._buckets = FailureBuckets(monotonic_ms)

    def wait_s(self, user: str, address: str) -> int:
        """Return the seconds until a login may be checked again; 0: now."""
        network, wait_ms = network_of(address), self._buckets.wait_ms
        of_user = wait_ms((network, f"user {user}"), LOGINS_MAX, REFILL_MS)
        of_all = wait_ms((network, ""), LOGINS_MAX * OF_AN_ADDRESS, REFILL_MS // OF_AN_ADDRESS)
        return math.ceil(max(of_user, of_all) / 1_000)

    def note(self, user: str, address: str) -> None:
        """Count a failed login."""
        network = network_of(address)
        self._buckets.add((network, f"user {user}"), REFILL_MS)
        self._buckets.add((network, ""), REFILL_MS // OF_AN_ADDRESS)
