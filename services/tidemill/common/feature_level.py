"""The feature level of this program (ADR 0065).

A level is a set of records, flags and requests. A program of one level understands all levels
below it. The level of a broker group is the lowest one of its replicas, and it never falls.
"""

from __future__ import annotations

from typing import Final

FIRST_LEVEL: Final = 1  # of version 0.1.0, which reports no level to controllers
FEATURE_LEVEL: Final = 5  # of this program


def read_level(reported: int) -> int:
    """Return the level that another process has reported; 0 on the wire means none."""
    return max(reported, FIRST_LEVEL)


def cap_level(level: int, cap: int) -> int:
    """Return a level below a cap of the settings; 0: no cap."""
    return min(level, cap) if cap else level
