"""Invisible durations in requests of consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.common.errors import IllegalInvisibleDuration

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

INVISIBLE_MAX_MS = 12 * 3_600_000


def check_invisible(invisible_ms: int, *, min_ms: int) -> None:
    """Raise IllegalInvisibleDuration if a duration is outside its limits."""
    limits_text = f"{min_ms} ms to 12 hours are allowed"
    # Applications of the reference match on `invisibleTime is too small|large`.
    if invisible_ms < min_ms:
        raise IllegalInvisibleDuration(f"the invisibleTime is too small: {limits_text}")
    if invisible_ms > INVISIBLE_MAX_MS:
        raise IllegalInvisibleDuration(f"the invisibleTime is too large: {limits_text}")


def duration_ms(duration: Duration) -> int:
    """Return a duration in milliseconds, rounded down."""
    return duration.seconds * 1000 + duration.nanos // 1_000_000
