"""Token buckets of failures by the network of the caller. This module has no I/O and no clock."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias, final

BUCKETS_MAX: Final = 10_000  # beyond it the oldest one is forgotten
IPV6_PREFIX: Final = 64  # one household or machine has all addresses of such a network

BucketKey: TypeAlias = tuple[str, str]  # a network and a purpose


@final
class FailureBuckets:
    """The failures that have not been refilled yet. A full bucket is not stored."""

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        # The failures, and the time of this number.
        self._buckets: OrderedDict[BucketKey, tuple[float, int]] = OrderedDict()

    def wait_ms(self, key: BucketKey, limit: int, refill_ms: int) -> int:
        """Return the time until one more failure is allowed; 0: now."""
        used = self._used(key, refill_ms)
        return math.ceil((used - limit + 1) * refill_ms) if used > limit - 1 else 0

    def add(self, key: BucketKey, refill_ms: int) -> None:
        """Count a failure."""
        used = self._used(key, refill_ms) + 1
        self._buckets[key] = used, self._monotonic_ms()
        self._buckets.move_to_end(key)
        if len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)

    def _used(self, key: BucketKey, refill_ms: int) -> float:
        used, at_ms = self._buckets.get(key, (0.0, 0))
        return max(0.0, used - (self._monotonic_ms() - at_ms) / refill_ms)


def network_of(address: str) -> str:
    """Return the address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((int(parsed), IPV6_PREFIX), strict=False))
