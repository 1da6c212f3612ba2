"""Waiting for what a real process does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK_EVERY_S = (
    0.02  # often enough to cost a test nothing, seldom enough to cost the machine nothing
)
WITHIN_MS = 60_000  # what takes a second of a machine may take a minute of one that others keep


def eventually(
    check: Callable[[], T], *, within_ms: int = WITHIN_MS, every_s: float = LOOK_EVERY_S
) -> T:
    """Return what `check` returns once it neither raises nor is false; fail after `within_ms`."""
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
