"""Long work in slices, so that one task does not block the event loop for long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Iterator
from typing import Final, TypeVar

TURN_NS: Final = 2_000_000  # 2 ms: the longest time that one task may block the event loop

T = TypeVar("T")


async def run_slices(
    slices: Generator[None, None, T], *, one_by_one: asyncio.Lock | None = None
) -> T:
    """Run `slices` to their end, one per turn of the event loop; return their result.

    Tasks that share the lock `one_by_one` run one slice per turn together.
    """
    turn = contextlib.nullcontext() if one_by_one is None else one_by_one
    while True:
        async with turn:
            try:
                next(slices)
            except StopIteration as ended:
                result: T = ended.value
                return result
            await asyncio.sleep(0)


async def run_in_turns(slices: Iterator[None]) -> None:
    """Run `slices` to their end, and yield to the event loop every 2 ms."""
    while True:
        if run_turn(slices):
            return
        await asyncio.sleep(0)


def run_turn(slices: Iterator[None]) -> bool:
    """Run `slices` for at most 2 ms; return True if they have ended."""
    end_ns = time.monotonic_ns() + TURN_NS
    return all(time.monotonic_ns() <= end_ns for _ in slices)
