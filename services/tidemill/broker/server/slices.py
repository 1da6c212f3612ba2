"""Work in slices: none keeps the event loop from others for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

TURN_NS = 2_000_000  # 2 ms: longer nobody keeps the loop from others


async def in_turns(slices: Iterator[None]) -> None:
    """Run `slices` to their end, giving way to the event loop after each 2 ms."""
    begin_ns = time.monotonic_ns()
    for _ in slices:
        if time.monotonic_ns() - begin_ns > TURN_NS:
            await asyncio.sleep(0)
            begin_ns = time.monotonic_ns()
