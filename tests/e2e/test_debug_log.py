"""The debug log reports a message's path. The default level does not."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.api import Api, api, message
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

TOPIC, GROUP = "orders", "billing"
POLL_MS = 20_000  # Longer than any invisible duration here.
LOGGED = {"call", "frame", "round", "configuration changed", "messages revived", "timers delivered"}


async def use(running: Standalone) -> None:
    async with api(running.grpc) as client:
        await client.send(message(TOPIC, b"a"))
        await client.receive(TOPIC, GROUP, invisible_ms=1_000)
        due_at_ms = int(time.time() * 1000) + 200
        await client.send(message(TOPIC, b"later", due_at_ms=due_at_ms))
        await take(client, {b"a", b"later"})


async def take(client: Api, wanted: set[bytes]) -> None:
    """Receive until all wanted messages have come."""
    while wanted:
        received: list[v2.Message] = await client.receive(TOPIC, GROUP, poll_ms=POLL_MS)
        assert received, wanted
        wanted -= {one.body for one in received}


def events(running: Standalone) -> list[dict[str, Any]]:
    return [json.loads(line) for line in running.log.read_text().splitlines()]


@pytest.mark.parametrize("level", ["debug", "info"])
def test_only_level_debug_logs_the_path_of_a_message(tmp_path: Path, level: str) -> None:
    with standalone(tmp_path / "data", f"--log-level={level}") as running:
        asyncio.run(use(running))
    logged = events(running)
    assert {event["event"] for event in logged} & LOGGED == (LOGGED if level == "debug" else set())
    if level == "info":
        return
    [first, _] = [
        one for one in logged if one["event"] == "call" and one["method"] == "send_message"
    ]
    assert (first["client"], first["topic"], first["code"]) == ("tests", TOPIC, v2.OK)
    assert first["took_ms"] > 0
    assert "127.0.0.1" in first["peer"]
    [received, *_] = [one for one in logged if one["event"] == "call" and one["group"] == GROUP]
    assert received["topic"] == TOPIC
    [frame, *_] = [one for one in logged if one["event"] == "frame" and one.get("appends")]
    assert (frame["appends"], frame["process"]) == (1, "broker-0")
    assert frame["bytes"] > 0
    [revived] = [one for one in logged if one["event"] == "messages revived"]
    assert (revived["group"], revived["topic"], revived["count"]) == (GROUP, TOPIC, 1)
    [delivered] = [one for one in logged if one["event"] == "timers delivered"]
    assert (delivered["topic"], delivered["count"]) == (TOPIC, 1)
