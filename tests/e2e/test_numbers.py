"""Numbers of topics and consumer groups, as REST and the command line show them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_rest_users import tidemill
from tests.support.clients.api import api
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone

STORED = 12
HELD = 2
HIDDEN_MS = 3_600_000
WITHIN_MS = 60_000  # some samples


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("numbers") / "data", "--groups=2") as started:
        started.put("topics/orders", queues=2)
        started.put("topics/late", messageType="DELAY")
        started.put("groups/billing")
        started.put("groups/spare")
        with client_of(started) as client:
            for _ in range(STORED):
                client.post("topics/orders/messages", json={"body": "x"}).raise_for_status()
            late = {"body": "x", "delayMs": HIDDEN_MS}
            client.post("topics/late/messages", json=late).raise_for_status()
        asyncio.run(hold(started.grpc))
        yield started


async def hold(endpoint: str) -> None:
    """Receive messages of `orders` without an ack."""
    async with api(endpoint, call_s=30) as client:
        held: list[object] = []
        while len(held) < HELD:
            held += await client.receive("orders", "billing", batch_size=1, invisible_ms=HIDDEN_MS)


def client_of(running: Standalone) -> httpx.Client:
    return httpx.Client(trust_env=False, timeout=30, base_url=f"{running.admin}/api/v1")


def get(running: Standalone, path: str, **query: str) -> Any:
    with client_of(running) as client:
        return client.get(path, params=query).raise_for_status().json()


def test_topics_have_their_messages_timers_and_rates(running: Standalone) -> None:
    def is_sampled() -> bool:
        found = {one["name"]: one for one in get(running, "topics")["topics"]}
        orders = found["orders"]
        is_known = {"inPerSecond", "bytes"} <= orders.keys()
        return bool(is_known and orders["messages"] == STORED and orders["bytes"] > 0)

    eventually(is_sampled, within_ms=WITHIN_MS)
    page = get(running, "topics", sort="-messages", pageSize="1")
    assert "nextPageToken" not in page
    [largest] = page["topics"]
    assert (largest["name"], largest["hasConsumer"], "unknown" in largest) == (
        "orders",
        True,
        False,
    )
    assert page["sampledAtMs"] > 0
    [late] = get(running, "topics", prefix="la")["topics"]
    assert (late["messages"], late["pendingTimers"], late["hasConsumer"]) == (0, 1, False)
    one = get(running, "topics/orders")
    assert one["messages"] == STORED
    assert one["groups"] == [{"name": "billing", "lag": STORED}]


def test_groups_have_their_lag_and_state(running: Standalone) -> None:
    def is_sampled() -> bool:
        billing = get(running, "groups/billing")
        return bool(billing.get("inFlight") == HELD and "inPerSecond" in billing)

    eventually(is_sampled, within_ms=WITHIN_MS)
    groups = get(running, "groups", sort="-lag")["groups"]
    assert [group["name"] for group in groups][:2] == ["billing", "spare"]
    billing, spare = groups[:2]
    assert (billing["lag"], billing["ready"], billing["blocked"]) == (STORED, STORED - HELD, 0)
    assert billing["oldestUnackedAtMs"] > 0
    assert billing["deadLetters"] == {"open": 0, "lastHour": 0}
    assert billing["lockedQueues"] == 0
    assert spare["state"] == "NEVER_POLLED"
    assert not {"lag", "ready", "oldestUnackedAtMs"} & spare.keys()
    progress = get(running, "groups/billing/progress")["total"]
    assert {name: billing[name] for name in ("lag", "ready", "inFlight", "blocked")} == {
        name: progress[name] for name in ("lag", "ready", "inFlight", "blocked")
    }


def test_an_unknown_field_of_a_sort_is_refused(running: Standalone) -> None:
    with client_of(running) as client:
        for query in ({"sort": "-size"}, {"sort": "-lag", "pageToken": "a"}):
            assert client.get("groups", params=query).status_code == 400


def test_the_history_has_the_lag(running: Standalone) -> None:
    def last_lag() -> object:
        found = get(running, "history", object="group:billing")
        return found.get("series", {}).get("lag", [None])[-1]

    eventually(lambda: last_lag() == STORED, within_ms=WITHIN_MS)
    assert get(running, "history", object="topic:orders")["stepMs"] == 5_000
    assert "unknown" in get(running, "history", object="topic:absent")


def test_the_command_line_lists_the_numbers(running: Standalone, tmp_path: Path) -> None:
    eventually(lambda: get(running, "groups/billing").get("lag") == STORED, within_ms=WITHIN_MS)
    listed = tidemill(running, tmp_path, "group", "list", "--sort", "-lag", "-o", "table")
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()
    assert lines[0].split()[:4] == ["GROUP", "ORDER", "STATE", "LAG"]
    assert lines[1].split()[0] == "billing"
    assert str(STORED) in lines[1].split()
    rows = json.loads(tidemill(running, tmp_path, "topic", "list", "--sort", "-messages").stdout)
    assert rows[0]["name"] == "orders"
    refused = tidemill(running, tmp_path, "topic", "list", "--sort", "-size")
    assert refused.returncode != 0
    assert "sort" in refused.stderr


def test_an_unreachable_broker_group_is_listed_and_missing_from_the_sums(
    running: Standalone,
) -> None:
    stopped = running.processes["broker-1"].pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        eventually(
            lambda: get(running, "topics").get("unreachable") == ["broker-1"], within_ms=WITHIN_MS
        )
        [orders] = get(running, "topics", prefix="orders")["topics"]
        assert 0 < orders["messages"] < STORED
        assert get(running, "groups")["unreachable"] == ["broker-1"]
    finally:
        os.kill(stopped, signal.SIGCONT)
    eventually(lambda: "unreachable" not in get(running, "topics"), within_ms=WITHIN_MS)
