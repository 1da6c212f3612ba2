"""Limits of topics of type PRIORITY and of the factor of consumer groups (ADR 0086)."""

from __future__ import annotations

from typing import Final

from tidemill.common.errors import BadRequest

PRIORITY_LEVEL: Final = 4  # feature level of PRIORITY topics and of `priorityFactor`
LEVELS_MAX: Final = 32  # queues of a PRIORITY topic: a pop looks at each level and its retries
LEVELS_DEFAULT: Final = 8

FACTOR_MAX: Final = 100  # strict: low levels can starve
FACTOR_DEFAULT: Final = 90  # of ten messages, one is the oldest of a lower level


def check_factor(factor: int) -> None:
    """Raise BadRequest if a priority factor is outside of its bounds."""
    if not 0 <= factor <= FACTOR_MAX:
        raise BadRequest(f"a priority factor is 0 to {FACTOR_MAX}, not {factor}")
