"""Quotas of real processes: command line, REST API, home and proxies."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.support.clients.api import METADATA, POLL_MS_MIN, Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill_pipeline.client import connect
from tidemill_pipeline.offsets import SourceRange
from tidemill_pipeline.options import parse_source
from tidemill_pipeline.pulling import pull_range

CLIENT_ID = dict(METADATA)["x-mq-client-id"]
SENDERS = 20
BURST_S = 2
# Proxies hold permits of this time beside the bucket.
LEASED_S = 0.4


def most(rate: int, seconds: float) -> float:
    """Return how much a limit of `rate` per second lets pass in a time, from a full bucket."""
    return rate * (seconds + BURST_S + LEASED_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("quotas") / "data", "--proxies=2") as started:
        for topic in ("orders", "free"):
            started.put(f"topics/{topic}", messageType="NORMAL", queues=2)
        yield started


async def send_for(
    running: Standalone, topic: str, seconds: float, *, stored: float = math.inf
) -> Counter[int]:
    """Send from several connections for a time, or until `stored` sends were answered with OK.

    Returns:
        The number of answers by code.

    """
    codes: Counter[int] = Counter()
    end_s = time.monotonic() + seconds

    async def keep_sending(client: Api) -> None:
        while time.monotonic() < end_s and codes[v2.OK] < stored:
            answer = await client.send(message(topic, b"m"))
            codes[answer.status.code] += 1

    async with api(running.grpc) as one, api(running.grpc) as two, asyncio.TaskGroup() as tasks:
        for number in range(SENDERS):
            tasks.create_task(keep_sending((one, two)[number % 2]))
    return codes


def test_sends_over_a_quota_wait_and_are_then_refused(running: Standalone) -> None:
    rate = 20
    planned = tidemill(running, "quota", "set", "--topic=orders", "--messages=20", "--dry-run")
    assert (
        planned.stdout == "quota of topic orders: would be set, messages/s 20, bytes/s no limit\n"
    )
    assert len(tidemill(running, "quota", "list").stdout.splitlines()) == 1, "the header alone"
    tidemill(running, "quota", "set", "--topic", "orders", "--messages", str(rate))

    async def is_limited() -> bool:
        return (await send_for(running, "orders", 0.5))[v2.TOO_MANY_REQUESTS] > 0

    eventually(lambda: asyncio.run(is_limited()))
    began_s = time.monotonic()
    codes = asyncio.run(send_for(running, "orders", 60, stored=5 * rate))
    assert 5 * rate <= codes[v2.OK] <= most(rate, time.monotonic() - began_s)
    assert codes[v2.TOO_MANY_REQUESTS]
    assert asyncio.run(send_for(running, "free", 0.5))[v2.TOO_MANY_REQUESTS] == 0

    async def refusal() -> str:
        async with api(running.grpc) as client:
            for _ in range(60):
                batch = [message("orders", b"m", message_id=str(n)) for n in range(rate * BURST_S)]
                answer = await client.send(*batch)
                if answer.status.code == v2.TOO_MANY_REQUESTS:
                    return str(answer.status.message)
            raise AssertionError("a batch passes whole or not, and needs the whole bucket")

    text = asyncio.run(refusal())
    assert text.startswith("publish messages/s of Topic:orders is used up; retry in ")
    [header, row] = tidemill(running, "quota", "list").stdout.splitlines()
    assert header.split() == [
        *("KIND", "SUBJECT", "MESSAGES/S", "BYTES/S", "STORED-BYTES", "PENDING-TIMERS")
    ]
    assert row.split() == ["topic", "orders", "20", *("no", "limit") * 3]
    deleted = tidemill(running, "quota", "delete", "--topic", "orders")
    assert deleted.stdout == "quota of topic orders: deleted\n"

    async def is_free() -> bool:
        return not (await send_for(running, "orders", 0.5))[v2.TOO_MANY_REQUESTS]

    eventually(lambda: asyncio.run(is_free()))


@pytest.mark.parametrize(
    ("kind", "subject"),
    [("client", CLIENT_ID), ("client", "10.0.0.1%2Fa"), ("prefix", "ord"), ("prefix", "shop%25")],
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
        assert http.put(path, json={"publishBytesPerS": 1, "ifVersion": 0}).status_code == 409
        assert http.put(path, json={"publishBytesPerS": 0}).status_code == 409
        assert [one["name"] for one in http.get("/quotas").json()["quotas"]] == [made["name"]]
        assert http.delete(path).raise_for_status().json()["quota"] == made
        assert http.delete(path).status_code == 404


def test_the_command_line_limits_and_bans_client_ids_with_slashes(running: Standalone) -> None:
    client = "--client=pods/a/../b"
    made = tidemill(running, "quota", "set", client, "--messages=5")
    assert made.stdout.startswith("quota of client pods/a/../b: set, messages/s 5")
    row = tidemill(running, "quota", "list").stdout.splitlines()[-1]
    assert row.split()[:3] == ["client", "pods/a/../b", "5"]
    assert tidemill(running, "quota", "delete", client).returncode == 0
    assert tidemill(running, "ban", "create", client).returncode == 0
    assert "pods/a/../b" in tidemill(running, "ban", "list").stdout
    assert tidemill(running, "ban", "delete", client).returncode == 0


def test_a_quota_of_a_user_belongs_to_the_user_of_that_time(running: Standalone) -> None:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20) as http:
        path, limits = "/quotas/user/shop", {"publishMessagesPerS": 5}
        assert http.put(path, json=limits).status_code == 404, "there is no such user"
        http.put("/users/shop", json={}).raise_for_status()
        first = http.put(path, json=limits).raise_for_status().json()
        assert http.put(path, json=limits).json()["version"] == first["version"]
        http.delete("/users/shop").raise_for_status()
        http.put("/users/shop", json={}).raise_for_status()
        again = http.put(path, json=limits).raise_for_status().json()
        assert again["version"] > first["version"], "the later user has no quota before"
        http.delete(path).raise_for_status()
        http.delete("/users/shop").raise_for_status()


async def consume(running: Standalone, seconds: float, *, count: int) -> Counter[bytes]:
    """Receive and ack with two consumers for a time, or until `count` messages have arrived."""
    received: Counter[bytes] = Counter()
    end_s = time.monotonic() + seconds

    async def keep_receiving(client: Api) -> None:
        while time.monotonic() < end_s and received.total() < count:
            messages = await client.receive("parcels", "billing", poll_ms=POLL_MS_MIN)
            if messages:
                handles = [one.system_properties.receipt_handle for one in messages]
                assert (await client.ack("parcels", "billing", handles)).status.code == v2.OK
            received.update(one.body for one in messages)

    async with api(running.grpc) as one, api(running.grpc) as two, asyncio.TaskGroup() as tasks:
        for client in (one, two):
            tasks.create_task(keep_receiving(client))
    return received


async def pull_all(running: Standalone, count: int) -> float:
    """Pull `count` messages of queue 0 as the consumer group; return the time in seconds."""
    began_s, offset = time.monotonic(), 0
    async with api(running.grpc) as client:
        while offset < count:
            request = service.PullMessageRequest(
                group=v2.Resource(name="billing"),
                message_queue=v2.MessageQueue(
                    topic=v2.Resource(name="parcels"), broker=v2.Broker(name="broker-0")
                ),
                offset=offset,
                batch_size=32,
            )
            items = [item async for item in client.stub.PullMessage(request, metadata=METADATA)]
            assert items[0].status.code in {v2.OK, v2.MESSAGE_NOT_FOUND}, items[0].status
            assert items[-1].next_offset == offset + len(items) - 2
            offset = items[-1].next_offset
    return time.monotonic() - began_s


def test_deliveries_of_a_consumer_group_wait_and_none_is_lost(running: Standalone) -> None:
    rate, count = 10, 100
    running.put("topics/parcels", messageType="NORMAL", queues=1)
    running.put("groups/billing")
    made = tidemill(running, "quota", "set", "--group=billing", f"--messages={rate}")
    assert made.stdout == "quota of group billing: set, messages/s 10, bytes/s no limit\n"

    async def load_and_consume() -> tuple[set[bytes], Counter[bytes], float]:
        sent = {b"m%d" % number for number in range(count)}
        async with api(running.grpc) as client:
            for body in sent:
                assert (await client.send(message("parcels", body))).status.code == v2.OK
        began_s = time.monotonic()
        received = await consume(running, 60, count=count // 2)
        return sent, received, time.monotonic() - began_s

    sent, received, took_s = asyncio.run(load_and_consume())
    assert count // 2 <= received.total() <= most(rate, took_s)
    # A pull of the consumer group shares its limit.
    assert most(rate, asyncio.run(pull_all(running, count // 2))) >= count // 2
    tidemill(running, "quota", "delete", "--group", "billing")
    received += asyncio.run(consume(running, 60, count=count - received.total()))
    assert received == Counter(sent), "each message arrives once"
    planned = tidemill(running, "quota", "set", "--group=billing", "--bytes=5", "--dry-run")
    assert planned.stdout.startswith("quota of group billing: would be set, messages/s no limit")


@pytest.mark.parametrize(("limit", "size_bytes"), [("--messages=20", 10), ("--bytes=20000", 1_000)])
def test_a_pipeline_that_names_a_consumer_group_keeps_its_limit(
    running: Standalone, limit: str, size_bytes: int
) -> None:
    """It reads a range for ten seconds and longer, over several calls with short deadlines."""
    rate, count, topic = 20, 20 * (10 + BURST_S), f"range-{size_bytes}"
    running.put(f"topics/{topic}", messageType="NORMAL", queues=1)
    running.put("groups/archive")
    tidemill(running, "quota", "set", "--group=archive", limit)

    async def send() -> None:
        async with api(running.grpc) as client:
            for _ in range(count):
                answer = await client.send(message(topic, b"b" * size_bytes))
                assert answer.status.code == v2.OK

    asyncio.run(send())
    given = {"endpoints": running.grpc, "topic": topic, "quotaGroup": "archive"}
    given |= {"pullTimeoutMs": "3000", "maxRetries": "0"}
    options = parse_source(given, is_stream=False)
    client = connect(options.connection)
    (queue,) = client.cluster(options.topics).queues
    began_s, offsets = time.monotonic(), []
    for batch in pull_range(client, options, SourceRange(queue=queue, start=0, end=count)):
        offsets += [each.system_properties.queue_offset for each in batch]
    took_s = time.monotonic() - began_s
    client.close()
    assert offsets == list(range(count)), "each message once and in order"
    assert count <= 1.05 * most(rate, took_s)
    tidemill(running, "quota", "delete", "--group", "archive")


def test_a_subject_has_only_limits_that_fit(running: Standalone) -> None:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20) as http:
        answer = http.put("/quotas/group/billing", json={"publishMessagesPerS": 1})
        assert answer.status_code == 409
        assert "dispatchMessagesPerS, dispatchBytesPerS" in answer.text
        answer = http.put("/quotas/topic/orders", json={"dispatchBytesPerS": 1})
        assert answer.status_code == 409
        assert "publishMessagesPerS, publishBytesPerS" in answer.text


def test_messages_of_the_rest_api_need_permits_too(running: Standalone) -> None:
    rate = 1
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20) as http:

        def send(topic: str) -> httpx.Response:
            return http.post(f"/topics/{topic}/messages", json={"body": "m"})

        running.put("topics/letters", messageType="NORMAL", queues=1)
        running.put("quotas/topic/letters", publishMessagesPerS=rate)
        running.put("quotas/prefix/lett", publishBytesPerS=1_000_000)
        # The proxy applies the quota within a second of the command.
        eventually(lambda: send("letters").status_code == 429)
        began_s, answers = time.monotonic(), [send("letters")]
        while sum(answer.is_success for answer in answers) < 5 * rate:
            answers.append(send("letters"))
        assert most(rate, time.monotonic() - began_s) >= 5 * rate
        refused = next(answer for answer in answers if not answer.is_success)
        assert (refused.status_code, refused.json()["code"]) == (429, 42900)
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["detail"] == (
            "publish messages/s of Topic:letters is used up; retry in a second"
        )
        assert send("free").status_code == 200
        for path in ("topic/letters", "prefix/lett"):
            http.delete(f"/quotas/{path}").raise_for_status()
        eventually(lambda: send("letters").status_code == 200)
