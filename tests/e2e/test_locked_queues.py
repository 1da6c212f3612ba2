"""A locked FIFO queue: operators see its holder and release the lock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.api import Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

TOPIC, GROUP = "orders", "billing"
HIDDEN_MS = 3_600_000
UNLOCK = ("group", "unlock", GROUP, f"--topic={TOPIC}", "--queue=0")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Standalone]:
    with standalone(tmp_path / "data") as started:
        yield started


def progress(running: Standalone) -> dict[str, Any]:
    output = tidemill(running, "--output=json", "group", "show", GROUP).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def test_a_locked_queue_is_listed_and_released(running: Standalone) -> None:
    tidemill(running, "topic", "create", TOPIC, "--type=fifo", "--queues=1")
    tidemill(running, "group", "create", GROUP, "--order=fifo")
    assert "not locked" in tidemill(running, *UNLOCK, "--yes").stderr

    async def scenario(client: Api) -> None:
        for body in (b"a", b"b", b"c"):
            await client.send(message(TOPIC, body, message_group="one"))
        [held] = await client.receive(TOPIC, GROUP, batch_size=1, invisible_ms=HIDDEN_MS)
        check_listed(running, held.system_properties.message_id)
        assert not await client.receive(TOPIC, GROUP)
        waits = asyncio.create_task(client.receive(TOPIC, GROUP, batch_size=1, poll_ms=20_000))
        await asyncio.to_thread(check_unlock, running)
        [again] = await waits
        assert (again.body, again.system_properties.delivery_attempt) == (b"a", 2)
        old = await client.ack(TOPIC, GROUP, [held.system_properties.receipt_handle])
        assert old.entries[0].status.code == v2.INVALID_RECEIPT_HANDLE
        await client.ack(TOPIC, GROUP, [again.system_properties.receipt_handle])
        assert [one.body for one in await client.receive(TOPIC, GROUP)] == [b"b", b"c"]

    async def main() -> None:
        async with api(running.grpc) as client:
            await scenario(client)

    asyncio.run(main())
    [line] = [line for line in running.log.read_text().splitlines() if "lock released" in line]
    released = json.loads(line)
    assert (released["holder"], released["queue_id"]) == ("tests", 0)
    assert released["by"].endswith("127.0.0.1")


def check_listed(running: Standalone, message_id: str) -> None:
    found = progress(running)
    total = found["total"]
    assert [total[key] for key in ("lag", "ready", "blocked", "inFlight")] == [3, 0, 2, 1]
    [lock] = found["locks"]
    assert lock["untilMs"] - lock["sinceMs"] == HIDDEN_MS
    del lock["untilMs"], lock["sinceMs"]
    assert lock == {
        "topic": TOPIC,
        "broker": "broker-0",
        "queue": 0,
        "messages": 1,
        "offset": 0,
        "messageId": message_id,
        "clientId": "tests",
        "waiting": 2,
    }
    shown = tidemill(running, "group", "show", GROUP).stdout.splitlines()
    head = shown.index("Locked queues:")
    assert shown[head + 2].split()[:7] == [TOPIC, "0", "2", "1", "0", message_id, "tests"]


def check_unlock(running: Standalone) -> None:
    # Without a terminal on standard input, the command cannot ask for confirmation.
    refused = tidemill(running, *UNLOCK)
    assert refused.returncode == 2
    assert "add --yes" in refused.stderr
    assert progress(running)["locks"]
    planned = tidemill(running, *UNLOCK, "--dry-run")
    assert planned.stdout.strip() == (
        "would be unlocked: 1 messages from offset 0, held by tests, and 2 behind them"
    )
    assert progress(running)["locks"]
    done = tidemill(running, *UNLOCK, "--yes")
    assert done.stdout.strip() == (
        "queue 0 of orders is unlocked: 1 messages from offset 0, held by tests, and 2 behind them"
    )


def test_releasing_an_impossible_lock_fails_with_the_reason(running: Standalone) -> None:
    tidemill(running, "topic", "create", TOPIC, "--queues=2")
    tidemill(running, "group", "create", GROUP)
    assert "is not FIFO" in tidemill(running, *UNLOCK, "--yes").stderr
    tidemill(running, "group", "create", "fifo", "--order=fifo")
    planned = tidemill(
        running, "group", "unlock", "fifo", f"--topic={TOPIC}", "--queue=1", "--dry-run"
    )
    assert planned.returncode == 1
    assert "queue 1 of orders is not locked at broker-0" in planned.stderr
    wrong = tidemill(running, "group", "unlock", "fifo", f"--topic={TOPIC}", "--queue=2", "--yes")
    assert "has the queues 0 to 1, not 2" in wrong.stderr
