"""The progress of groups, read in rounds before a scrape."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.round_world import RoundWorld, idle
from tidemill.broker.metrics import LAG_AGE_MS_MAX, Lag
from tidemill.broker.server import lag as lag_module
from tidemill.broker.server.lag import LagReader


def test_a_scrape_shows_the_last_numbers_while_the_disk_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lag_module, "LAG_WAIT_S", 0.05)

    async def main() -> None:
        world, lag = RoundWorld(), Lag()
        read = LagReader(world.rounds, lag, world.clock)
        async with world.running(), world.proxy() as proxy:
            await read()
            read_at_ms = lag.now_ms
            world.syncs.gate.clear()
            await proxy.send(world.append_frame("a"))
            await idle()
            world.advance(LAG_AGE_MS_MAX)
            await read()
            assert lag.now_ms == read_at_ms, "of before"
            world.syncs.gate.set()
            await proxy.reply()
            world.advance(LAG_AGE_MS_MAX)
            await read()
            assert lag.now_ms == read_at_ms + 2 * LAG_AGE_MS_MAX

    asyncio.run(main())
