"""Addresses of floods are remembered for a while."""

from __future__ import annotations

from tidemill.transport.aio.offenders import ADDRESSES_MAX, REMEMBERED_S, Offenders
from tidemill.transport.http2.limits import Limits


def test_a_new_connection_from_a_flooding_address_has_smaller_bursts_for_a_while() -> None:
    limits = Limits()
    offenders = Offenders(limits)
    offenders.add("10.0.0.1", 0.0)
    lowered = offenders.limits_of("10.0.0.1", REMEMBERED_S - 1)
    assert lowered.resets_burst < limits.resets_burst
    assert lowered.control_per_s == limits.control_per_s
    assert offenders.limits_of("10.0.0.2", 0.0) is limits
    assert offenders.limits_of("10.0.0.1", REMEMBERED_S) is limits


def test_the_number_of_addresses_is_limited_and_the_oldest_are_removed() -> None:
    offenders = Offenders(Limits())
    for n in range(ADDRESSES_MAX + 1):
        offenders.add(f"host{n}", 0.0)
    assert len(offenders._until_s) == ADDRESSES_MAX
    assert offenders.limits_of("host0", 0.0) is offenders._limits
    assert offenders.limits_of(f"host{ADDRESSES_MAX}", 0.0) is not offenders._limits
