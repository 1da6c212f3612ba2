"""An operator purges a topic of two broker groups, by the command line and by REST."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.support.clients.api import api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, Standalone, standalone

MESSAGES = 12


def fill(running: Standalone, topic: str) -> None:
    """Send messages until both broker groups have some."""
    running.put(f"topics/{topic}", messageType="MIXED", queues=2)
    for n in range(MESSAGES):
        send(running, topic, f"m{n}")
    brokers = {one["broker"] for one in status(running, topic) if one["maxOffset"]}
    assert brokers == {"broker-0", "broker-1"}


def send(running: Standalone, topic: str, body: str) -> None:
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        path = f"{running.admin}/api/v1/topics/{topic}/messages"
        client.post(path, json={"body": body}).raise_for_status()


def status(running: Standalone, topic: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = running.get(f"topics/{topic}")["queueStatus"]
    return found


def stored(running: Standalone, topic: str) -> int:
    return sum(one["maxOffset"] - one["minOffset"] for one in status(running, topic))


def test_a_purge_removes_messages_at_all_broker_groups(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--groups=2") as running:
        eventually(lambda: len(running.get("broker-groups")["items"]) == 2)
        fill(running, "orders")
        planned = tidemill(running, "topic", "purge", "orders", "--dry-run")
        assert planned.returncode == 0, planned.stderr
        assert planned.stdout.startswith(f"{MESSAGES} messages (0.0 MiB) of topic orders would be")
        assert stored(running, "orders") == MESSAGES
        # Without --yes and without a terminal nothing is removed.
        refused = tidemill(running, "topic", "purge", "orders")
        assert refused.returncode != 0
        assert stored(running, "orders") == MESSAGES
        done = tidemill(running, "topic", "purge", "orders", "--yes")
        assert done.returncode == 0, done.stderr
        assert (
            done.stdout
            == f"{MESSAGES} messages (0.0 MiB) of topic orders are removed. Read by nobody.\n"
        )
        assert stored(running, "orders") == 0
        send(running, "orders", "later")
        assert stored(running, "orders") == 1
        check_rest(running)
        left = stored(running, "orders")
        assert running.stop() == 0
    with standalone(tmp_path / "data", "--groups=2") as running:
        eventually(lambda: len(running.get("broker-groups")["items"]) == 2)
        eventually(lambda: stored(running, "orders") == left)


def test_a_purge_of_a_level_keeps_the_retries_of_other_levels(running: Standalone) -> None:
    running.put("topics/purged-levels", messageType="PRIORITY", queues=8)
    running.put("groups/purging-levels")

    def purge(*, is_dry: bool = False, **body: object) -> int:
        query, body = {"dryRun": str(is_dry).lower()}, {"includeRetries": True, "all": True, **body}
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            path = f"{running.admin}/api/v1/topics/purged-levels:purge"
            answer = client.post(path, params=query, json=body).raise_for_status()
        return sum(one["messages"] for one in answer.json()["brokerGroups"])

    async def send_and_leave() -> None:
        async with api(running.grpc) as client:
            for level in (0, 0, 7, 7, 7):
                await client.send(message("purged-levels", b"%d" % level, priority=level))
            received = await client.receive("purged-levels", "purging-levels", poll_ms=5_000)
            assert len(received) == 5
            for each in received:
                handle = each.system_properties.receipt_handle
                await client.change_invisible("purged-levels", "purging-levels", handle, 10)

    async def receive_all() -> list[bytes]:
        bodies: list[bytes] = []
        async with api(running.grpc) as client:
            while len(bodies) < 3:
                received = await client.receive("purged-levels", "purging-levels", poll_ms=5_000)
                bodies += [each.body for each in received]
        return bodies

    asyncio.run(send_and_leave())
    # Each of the five messages has a copy in a retry topic.
    eventually(lambda: purge(is_dry=True) == 10)
    assert purge(is_dry=True, queue=0) == 4
    assert purge(queue=0) == 4
    assert asyncio.run(receive_all()) == [b"7"] * 3


def check_rest(running: Standalone) -> None:
    """Check what REST rejects, and a purge of old messages of one queue."""
    with httpx.Client(
        base_url=f"{running.admin}/api/v1", trust_env=False, timeout=ADMIN_S
    ) as client:

        def purge(topic: str = "orders", **body: object) -> tuple[int, dict[str, object]]:
            answer = client.post(f"/topics/{topic}:purge", json=body)
            found: dict[str, object] = answer.json()
            return answer.status_code, found

        assert purge()[0] == 400
        assert purge(all=True, beforeTimestampMs=1)[0] == 400
        assert purge(all=True, queue=2)[0] == 404
        assert purge("missing", all=True)[0] == 404
        code, found = purge(beforeTimestampMs=1)
        assert (code, found["brokerGroups"]) == (
            200,
            [
                {"broker": "broker-0", "messages": 0, "bytes": 0},
                {"broker": "broker-1", "messages": 0, "bytes": 0},
            ],
        )
        assert stored(running, "orders") == 1
        code, found = purge(beforeTimestampMs=4_000_000_000_000, queue=0, includeRetries=True)
        groups = found["brokerGroups"]
        assert isinstance(groups, list)
        removed = sum(one["messages"] for one in groups)
        assert stored(running, "orders") == 1 - removed
