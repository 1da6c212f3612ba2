"""Calls with large answers: few at a time, and the others wait for a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import pytest

from tidemill.admin.cluster import brokers as module
from tidemill.admin.cluster.brokers import LARGE_READS_MAX, SCANS_MAX, Brokers
from tidemill.common.errors import Overloaded

WAIT_S = 30.0  # far more than anything here takes


NO_CLIENT = cast("Any", None)  # none of these tests calls a broker


@pytest.mark.parametrize(
    ("kind", "count_max"), [(Brokers.large_read, LARGE_READS_MAX), (Brokers.scan, SCANS_MAX)]
)
def test_one_call_too_many_is_rejected_and_the_next_one_runs(
    kind: Callable[[Brokers], AbstractAsyncContextManager[None]],
    count_max: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LARGE_READ_WAIT_S", 0.01)

    async def scenario() -> None:
        brokers = Brokers([], NO_CLIENT, timeout_ms=1)
        async with asyncio.timeout(WAIT_S), contextlib.AsyncExitStack() as running:
            for _ in range(count_max):
                await running.enter_async_context(kind(brokers))
            with pytest.raises(Overloaded, match="try again later"):
                await running.enter_async_context(kind(brokers))
        async with asyncio.timeout(WAIT_S), kind(brokers):
            pass

    asyncio.run(scenario())


def test_a_large_read_waits_for_the_end_of_another() -> None:
    async def scenario() -> None:
        brokers = Brokers([], NO_CLIENT, timeout_ms=1)
        async with asyncio.timeout(WAIT_S):
            async with contextlib.AsyncExitStack() as running:
                for _ in range(LARGE_READS_MAX):
                    await running.enter_async_context(brokers.large_read())
                waiting = asyncio.ensure_future(brokers.large_read().__aenter__())
                await asyncio.sleep(0)
                assert not waiting.done()
            await waiting

    asyncio.run(scenario())
