"""Polling for the effects of real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK_EVERY_S = 0.02  # short for a test, and cheap for the machine
WITHIN_MS = 60_000  # a busy machine may take a minute instead of a second


def eventually(
    check: Callable[[], T], *, within_ms: int = WITHIN_MS, every_s: float = LOOK_EVERY_S
) -> T:
    """Repeat `check` until it returns a true value; return it. Fail after `within_ms`."""
    deadline = time.monotonic() + within_ms / 1000
    while True:
        reason: object
        try:
            if value := check():
                return value
            reason = value
        except (AssertionError, OSError, LookupError) as error:
            reason = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_ms} ms: {reason!r}")
        time.sleep(every_s)
