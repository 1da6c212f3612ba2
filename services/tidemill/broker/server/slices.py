"""Work in slices: none keeps the event loop from others for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

TURN_NS = 2_000_000  # 2 ms: longer nobody keeps the loop from others


async def in_turns(slices: Iterator[None]) -> None:
    """Run `slices` to their end, giving way to the event loop after each 2 ms."""
    while True:
        if run_turn(slices):
            return
        await asyncio.sleep(0)


def run_turn(slices: Iterator[None]) -> bool:
    """Run `slices` for 2 ms at most; True: they have ended."""
    end_ns = time.monotonic_ns() + TURN_NS
    return all(time.monotonic_ns() <= end_ns for _ in slices)
