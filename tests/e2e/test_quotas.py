"""Quotas of real processes: command line, REST API, home and proxies."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.support.clients.api import METADATA, Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

CLIENT_ID = dict(METADATA)["x-mq-client-id"]
SENDERS = 20
BURST_S = 2


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("quotas") / "data", "--proxies=2") as started:
        for topic in ("orders", "free"):
            started.put(f"topics/{topic}", messageType="NORMAL", queues=2)
        yield started


async def send_for(running: Standalone, topic: str, seconds: float) -> Counter[int]:
    """Send from several connections for a time; return the number of answers by code."""
    codes: Counter[int] = Counter()
    end_s = time.monotonic() + seconds

    async def keep_sending(client: Api) -> None:
        while time.monotonic() < end_s:
            answer = await client.send(message(topic, b"m"))
            codes[answer.status.code] += 1

    async with api(running.grpc) as one, api(running.grpc) as two, asyncio.TaskGroup() as tasks:
        for number in range(SENDERS):
            tasks.create_task(keep_sending((one, two)[number % 2]))
    return codes


def test_sends_over_a_quota_wait_and_are_then_refused(running: Standalone) -> None:
    rate, seconds = 20, 3
    planned = tidemill(running, "quota", "set", "--topic=orders", "--messages=20", "--dry-run")
    assert (
        planned.stdout == "quota of topic orders: would be set, messages/s 20, bytes/s no limit\n"
    )
    assert len(tidemill(running, "quota", "list").stdout.splitlines()) == 1, "the header alone"
    tidemill(running, "quota", "set", "--topic", "orders", "--messages", str(rate))

    async def is_limited() -> bool:
        return (await send_for(running, "orders", 0.5))[v2.TOO_MANY_REQUESTS] > 0

    eventually(lambda: asyncio.run(is_limited()), within_ms=10_000)
    codes = asyncio.run(send_for(running, "orders", seconds))
    # A send that begins at the end waits for half a second. Proxies hold tokens of 400 ms.
    most = rate * (seconds + 0.5 + 0.4)
    assert 0.5 * rate * seconds <= codes[v2.OK] <= most
    assert codes[v2.TOO_MANY_REQUESTS]
    assert asyncio.run(send_for(running, "free", 0.5))[v2.TOO_MANY_REQUESTS] == 0

    async def refusal() -> str:
        async with api(running.grpc) as client:
            batch = [message("orders", b"m", message_id=str(n)) for n in range(rate * BURST_S)]
            answer = await client.send(*batch)
            assert answer.status.code == v2.TOO_MANY_REQUESTS, "a batch passes whole or not"
            return str(answer.status.message)

    text = asyncio.run(refusal())
    assert text.startswith("publish messages/s of Topic:orders is used up; retry in ")
    [header, row] = tidemill(running, "quota", "list").stdout.splitlines()
    assert header.split() == ["KIND", "SUBJECT", "MESSAGES/S", "BYTES/S"]
    assert row.split() == ["topic", "orders", "20", "no", "limit"]
    deleted = tidemill(running, "quota", "delete", "--topic", "orders")
    assert deleted.stdout == "quota of topic orders: deleted\n"

    async def is_free() -> bool:
        return not (await send_for(running, "orders", 0.5))[v2.TOO_MANY_REQUESTS]

    eventually(lambda: asyncio.run(is_free()), within_ms=10_000)


@pytest.mark.parametrize(
    ("kind", "subject"), [("client", CLIENT_ID), ("prefix", "ord"), ("prefix", "shop%25")]
)
def test_quotas_are_set_read_and_deleted(running: Standalone, kind: str, subject: str) -> None:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20) as http:
        path = f"/quotas/{kind}/{subject}"
        assert http.get(path).status_code == 404
        made = http.put(path, json={"publishBytesPerS": 1_000_000}).raise_for_status().json()
        assert http.get(path).json() == made
        assert (made["publishMessagesPerS"], made["publishBytesPerS"]) == (0, 1_000_000)
        same = http.put(path, json={"publishBytesPerS": 1_000_000}).json()
        assert same == made, "nothing has changed"
        assert http.put(path, json={"ifVersion": 0}).status_code == 409
        assert [one["name"] for one in http.get("/quotas").json()["quotas"]] == [made["name"]]
        assert http.delete(path).raise_for_status().json()["quota"] == made
        assert http.delete(path).status_code == 404
