"""The limit of failed logins, per user and address and per address.

This module has no I/O and no clock.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias, final

LOGINS_MAX: Final = 10  # failed logins of one user from one address at once
REFILL_MS: Final = 6_000  # for one more
OF_AN_ADDRESS: Final = 10  # times as many, for all users together
BUCKETS_MAX: Final = 10_000  # beyond it the oldest one is forgotten
IPV6_PREFIX: Final = 64  # one household or machine has all addresses of such a network

BucketKey: TypeAlias = tuple[str, str]  # network and user; "": all users of the network


@final
class FailedLogins:
    """Token buckets of failed logins. A full bucket is not stored."""

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        # Failed logins that have not been refilled yet, and the time of this number.
        self._buckets: OrderedDict[BucketKey, tuple[float, int]] = OrderedDict()

    def wait_s(self, user: str, address: str) -> int:
        """Return the seconds until a login may be checked again; 0: now."""
        network = network_of(address)
        return max(
            self._wait_s((network, f"user {user}"), LOGINS_MAX, REFILL_MS),
            self._wait_s((network, ""), LOGINS_MAX * OF_AN_ADDRESS, REFILL_MS // OF_AN_ADDRESS),
        )

    def note(self, user: str, address: str) -> None:
        """Count a failed login."""
        network = network_of(address)
        self._add((network, f"user {user}"), REFILL_MS)
        self._add((network, ""), REFILL_MS // OF_AN_ADDRESS)

    def _wait_s(self, key: BucketKey, limit: int, refill_ms: int) -> int:
        used = self._used(key, refill_ms)
        return math.ceil((used - limit + 1) * refill_ms / 1000) if used > limit - 1 else 0

    def _used(self, key: BucketKey, refill_ms: int) -> float:
        used, at_ms = self._buckets.get(key, (0.0, 0))
        return max(0.0, used - (self._monotonic_ms() - at_ms) / refill_ms)

    def _add(self, key: BucketKey, refill_ms: int) -> None:
        used = self._used(key, refill_ms) + 1
        self._buckets[key] = used, self._monotonic_ms()
        self._buckets.move_to_end(key)
        if len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)


def network_of(address: str) -> str:
    """Return the address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((int(parsed), IPV6_PREFIX), strict=False))
