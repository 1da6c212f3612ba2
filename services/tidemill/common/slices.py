"""Long work that stops after each slice of itself, so that others have their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


async def run_slices(
    slices: Generator[None, None, T], *, one_by_one: asyncio.Lock | None = None
) -> T:
    """Run work to its end, one slice in a turn of the loop; return what it returns.

    Of all that shares the lock `one_by_one` a turn has one slice.
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
