"""Addresses of recent floods: new connections from there start with smaller allowances."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from tidemill.transport.http2.limits import Limits

REMEMBERED_S: Final = 60.0
ADDRESSES_MAX: Final = 1_024  # about 100 bytes each; above it the oldest is removed
# The factor of smaller bursts. Earned tokens stay, so that other clients of the address can work.
_PART: Final = 8
FLOODS: Final = frozenset(
    {
        Limit.RESETS,
        Limit.SETTINGS,
        Limit.PINGS,
        Limit.EMPTY_DATA,
        Limit.CONTROL,
        Limit.CONTINUATIONS,
        Limit.HEADER_BYTES,
        Limit.UNREAD,
    }
)


@final
class Offenders:
    """The addresses whose connections ended because of a flood."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lowered = replace(
            limits,
            resets_burst=max(limits.resets_burst // _PART, 1),
            settings_burst=max(limits.settings_burst // _PART, 1),
            pings_burst=max(limits.pings_burst // _PART, 1),
            empty_data_burst=max(limits.empty_data_burst // _PART, 1),
            control_burst=max(limits.control_burst // _PART, 1),
        )
        self._until_s: dict[str, float] = {}  # monotonic seconds, the oldest first

    def add(self, address: str, now_s: float) -> None:
        """Add an address."""
        self._until_s.pop(address, None)
        if len(self._until_s) >= ADDRESSES_MAX:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[address] = now_s + REMEMBERED_S

    def limits_of(self, address: str, now_s: float) -> Limits:
        """Return the limits for a new connection from an address."""
        until_s = self._until_s.get(address)
        if until_s is None:
            return self._limits
        if now_s < until_s:
            return self._lowered
        del self._until_s[address]
        return self._limits
