"""A function that is called periodically while a block runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


@contextlib.asynccontextmanager
async def repeating(function: Callable[[], None], *, period_s: float) -> AsyncIterator[None]:
    """Call a short function each period until the block ends. Its error ends the block."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(period_s)
            function()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(repeat(), name=f"repeat {function.__qualname__}")
        yield
        task.cancel()
