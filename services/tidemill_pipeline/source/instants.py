"""Instants of Spark's predicates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


def whole_ms(instant: datetime) -> int:
    """Return the whole milliseconds since the epoch, rounded down.

    An instant without a zone is in the zone of this process, as Spark creates it.
    """
    return (instant.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
