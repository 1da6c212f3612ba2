"""Token buckets of failures by the network of the caller. This module has no I/O and no clock."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias, final

from tidemill.common.errors import Overloaded

BUCKETS_MAX: Final = 10_000  # beyond it the oldest one is forgotten
IPV6_PREFIX: Final = 64  # one household or machine has all addresses of such a network
# Failed checks of Kubernetes tokens from one network: 100 at once, and 50 per second. Malformed
# tokens and those with an unknown key count, too.
# A check takes at most 0.16 ms, so a network uses at most 0.8 % of a core.
CHECKS_MAX: Final = 100
CHECKS_REFILL_MS: Final = 20

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


@final
class SignatureChecks:
    """The limit of failed checks of Kubernetes tokens at the port for clients."""

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._buckets = FailureBuckets(monotonic_ms)

    def is_used_up(self, address: str) -> bool:
        """Whether too many checks have failed."""
        key = network_of(address), ""
        return self._buckets.wait_ms(key, CHECKS_MAX, CHECKS_REFILL_MS) > 0

    def check(self, address: str) -> None:
        """Raise Overloaded if too many checks have failed. Tokens that are known still pass."""
        if self.is_used_up(address):
            raise Overloaded(f"too many wrong Kubernetes tokens from {address}; retry in 1 s")

    def note_failure(self, address: str) -> None:
        """Count a failed check."""
        self._buckets.add((network_of(address), ""), CHECKS_REFILL_MS)


def network_of(address: str) -> str:
    """Return the address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((int(parsed), IPV6_PREFIX), strict=False))
