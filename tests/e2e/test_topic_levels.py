"""The levels of a PRIORITY topic over two broker groups, by REST and by the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support.clients.api import POLL_MS_MIN, api
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.common.clock import SystemClock
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

INVISIBLE_MS: Final = 600_000
LEVELS: Final = {2: 4, 1: 0, 0: 3}  # messages of each level


@pytest.fixture
def two_groups(tmp_path: Path) -> Iterator[Standalone]:
    with standalone(tmp_path / "data", "--groups=2") as running:
        running.put("topics/by-level", messageType="PRIORITY", queues=3)
        running.put("groups/billing")
        yield running


async def receive_all(running: Standalone, count: int) -> list[v2.Message]:
    """Receive messages without acks until there are `count`."""
    received: list[v2.Message] = []
    async with api(running.grpc, call_s=30) as client:
        while len(received) < count:
            received += await client.receive(
                "by-level", "billing", poll_ms=POLL_MS_MIN, invisible_ms=INVISIBLE_MS
            )
    return received


async def return_at_once(running: Standalone, message: v2.Message) -> None:
    """Make a message in flight visible again after the shortest time."""
    handle = message.system_properties.receipt_handle
    async with api(running.grpc, call_s=30) as client:
        answer = await client.change_invisible("by-level", "billing", handle, 10)
        assert answer.status.code == v2.OK


def test_a_topic_shows_its_levels_with_the_progress_of_each_group(two_groups: Standalone) -> None:
    running = two_groups
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=30) as rest:

        def send(priority: int) -> None:
            sent = rest.post("/topics/by-level/messages", json={"body": "b", "priority": priority})
            assert sent.status_code == 200, sent.text

        def levels() -> dict[int, dict[str, Any]]:
            shown = rest.get("/topics/by-level").json()["levels"]
            assert [level["level"] for level in shown] == [0, 1, 2]
            return {level["level"]: level for level in shown}

        def reader(level: int) -> dict[str, Any]:
            [found] = levels()[level]["groups"]
            assert found.pop("group") == "billing"
            return dict(found)

        for level, count in LEVELS.items():
            for _ in range(count):
                send(level)
        assert {level: one["messages"] for level, one in levels().items()} == LEVELS
        assert all(not one["groups"] for one in levels().values()), "no consumer group has read"

        received = asyncio.run(receive_all(running, sum(LEVELS.values())))
        for level, count in LEVELS.items():
            assert reader(level) == {"ready": 0, "blocked": 0, "inFlight": count}

        before_ms = SystemClock().wall_ms()
        send(1)
        send(1)
        ready = reader(1)
        assert (ready["ready"], ready["inFlight"], levels()[1]["messages"]) == (2, 0, 2)
        assert before_ms <= ready["oldestReadyAtMs"] <= SystemClock().wall_ms()

        high = next(m for m in received if m.system_properties.priority == 2)
        asyncio.run(return_at_once(running, high))
        eventually(lambda: (reader(2)["ready"], reader(2)["inFlight"]) == (1, 3))
        assert levels()[2]["messages"] == LEVELS[2], "a retry is not a new message"

        table = tidemill(running, "topic", "show", "by-level").stdout.split("Levels:\n")[1]
        header, *rows = table.splitlines()
        columns = "LEVEL", "MESSAGES", "GROUP", "READY", "IN", "FLIGHT", "OLDEST", "READY"
        assert tuple(header.split()) == columns
        cells = [row.split() for row in rows]
        assert [row[:5] for row in cells] == [
            ["2", "4", "billing", "1", "3"],
            ["1", "2", "billing", "2", "0"],
            ["0", "3", "billing", "0", "3"],
        ]
        assert cells[2][5:] == ["-"], "no message of level 0 is ready"
        assert cells[1][-1] in {"s", "ms", "m"}, "an age"
        printed = tidemill(running, "topic", "show", "by-level", "--output", "json").stdout
        assert len(json.loads(printed)["levels"]) == 3


def test_a_topic_of_another_type_has_no_levels(running: Standalone) -> None:
    running.put("topics/level-less", messageType="NORMAL")
    shown = tidemill(running, "topic", "show", "level-less")
    assert "Levels" not in shown.stdout
    printed = tidemill(running, "topic", "show", "level-less", "--output", "json")
    assert "levels" not in json.loads(printed.stdout)
