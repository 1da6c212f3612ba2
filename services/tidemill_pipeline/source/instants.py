"""Instants of predicates, as Spark hands them over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


def whole_ms(instant: datetime) -> int:
    """Return the milliseconds from the epoch that had passed by then, without what is rounded.

    One without a zone is in that of this process, as Spark makes it.
    """
    return (instant.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
