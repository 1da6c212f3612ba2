"""The order of a PRIORITY topic across several broker groups, over real processes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.support.clients.api import Api, api, message
from tests.support.processes.processes import Standalone, standalone

TOPIC = GROUP = "urgent-work"
LEVELS = (7, 3, 0)
COUNT = 240  # messages of each level, spread over the broker groups
BATCH = 8


@pytest.mark.parametrize("factor", [100, 90])
def test_levels_keep_their_order_across_broker_groups(tmp_path: Path, factor: int) -> None:
    with standalone(tmp_path / "data", "--groups=3") as running:
        create(running, factor)
        levels = asyncio.run(asyncio.wait_for(send_and_receive(running), 120))
        assert sorted(levels) == sorted(COUNT * LEVELS)
        # The first receives bring the hints of the broker groups, whose messages are of one level.
        del levels[: levels.index(7)]
        assert len(levels) > 2 * COUNT
        rises = sum(before < after for before, after in pairwise(levels))
        if factor == 100:
            assert rises == 0, "strict: no message comes after one of a lower level"
        else:
            assert rises > 0, "fair: lower levels get a share"
            assert levels[: COUNT // 2].count(7) >= COUNT // 2 * 0.8, "high levels come first"


def create(running: Standalone, factor: int) -> None:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20) as http:
        topic = {"messageType": "PRIORITY", "queues": 8}
        http.put(f"/topics/{TOPIC}", json=topic).raise_for_status()
        http.put(f"/groups/{GROUP}", json={"priorityFactor": factor}).raise_for_status()


async def send_and_receive(running: Standalone) -> list[int]:
    """Send all levels mixed; return the levels in the order of their arrival."""
    async with api(running.grpc) as client:
        for number in range(COUNT):
            for level in LEVELS:
                body = b"%d-%d" % (level, number)
                sent = await client.send(message(TOPIC, body, priority=level))
                assert sent.status.code == 20000, sent
        return await receive_all(client)


async def receive_all(client: Api) -> list[int]:
    levels: list[int] = []
    while len(levels) < COUNT * len(LEVELS):
        found = await client.receive(TOPIC, GROUP, batch_size=BATCH)
        await client.ack(TOPIC, GROUP, [one.system_properties.receipt_handle for one in found])
        levels += [int(one.body.split(b"-")[0]) for one in found]
    return levels
