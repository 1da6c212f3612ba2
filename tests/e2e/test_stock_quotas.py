"""Quotas on stored bytes and pending timers, of real processes with two broker groups."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.clients.api import Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.killing import child_pid
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

DAY_MS = 86_400_000
BODY = bytes(20_000)
LIMIT = 1 << 20
# A record has a header beside the message.
BOUND = LIMIT + LIMIT // len(BODY) * 500


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder: Path = tmp_path_factory.mktemp("stocks")
    with standalone(folder / "data", "--groups=2", "--proxies=2") as started:
        yield started


@pytest.fixture
def rest(running: Standalone) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20) as http:
        yield http


def send_until_refused(running: Standalone, topic: str, most: int, *, due_at_ms: int = 0) -> int:
    """Send from two connections until both are refused; return the number of stored messages."""
    stored = 0
    texts: set[str] = set()

    async def send_all() -> None:
        async with api(running.grpc) as one, api(running.grpc) as two:

            async def send(client: Api) -> None:
                nonlocal stored
                for _ in range(most):
                    answer = await client.send(
                        message(topic, BODY, message_id=f"id-{stored}", due_at_ms=due_at_ms)
                    )
                    if answer.status.code != v2.OK:
                        assert answer.status.code == v2.TOO_MANY_REQUESTS, answer.status
                        texts.add(answer.status.message)
                        return
                    stored += 1
                raise AssertionError(f"{most} messages, and no refusal")

            await asyncio.gather(send(one), send(two))

    asyncio.run(send_all())
    assert all("has reached its limit of" in text for text in texts), texts
    return stored


def use_up(running: Standalone, topic: str, *, stored: int = 0, due_at_ms: int = 0) -> int:
    """Send until the stored bytes are used up; return the number of stored messages.

    Near the limit, sends wait for the next report.
    """

    def is_used_up() -> bool:
        nonlocal stored
        stored += send_until_refused(running, topic, 2 * LIMIT // len(BODY), due_at_ms=due_at_ms)
        assert stored * len(BODY) <= LIMIT
        return stored * len(BODY) >= 0.9 * LIMIT

    eventually(is_used_up, within_ms=20_000)
    return stored


def is_accepted(running: Standalone, topic: str, *, due_at_ms: int = 0) -> bool:
    async def send() -> bool:
        async with api(running.grpc) as client:
            answer = await client.send(message(topic, BODY, due_at_ms=due_at_ms))
            return answer.status.code == v2.OK

    return asyncio.run(send())


def stored_bytes(rest: httpx.Client, topic: str) -> int:
    """Return the stored bytes of a topic, as soon as both broker groups have counted them."""

    def find() -> int | None:
        topics = rest.get("/storage").raise_for_status().json()["topics"]
        [found] = [one for one in topics if one["name"] == topic]
        live_bytes: int | None = found["liveBytes"]
        return live_bytes

    eventually(lambda: find() is not None)
    return find() or 0


def wait_for_report(running: Standalone, quota: str) -> None:
    """Wait until the home has counted the stock of a quota."""
    url = running.processes["broker-0"].metrics
    eventually(lambda: f'quota="{quota}"' in httpx.get(url, trust_env=False).text)


def test_a_send_over_the_stored_bytes_is_refused_until_messages_are_deleted(
    running: Standalone, rest: httpx.Client
) -> None:
    running.put("topics/orders", messageType="NORMAL", queues=2)
    made = tidemill(running, "quota", "set", "--prefix=ord", "--stored-bytes=1MiB")
    assert made.stdout == (
        "quota of prefix ord: set, messages/s no limit, bytes/s no limit, stored bytes 1MiB,"
        " pending timers no limit\n"
    )
    [header, row] = tidemill(running, "quota", "list").stdout.splitlines()
    assert header.split()[-2:] == ["STORED-BYTES", "PENDING-TIMERS"]
    assert "1MiB" in row
    wait_for_report(running, "prefix:ord")
    use_up(running, "orders")
    refused = rest.post("/topics/orders/messages", json={"body": "m" * len(BODY)})
    assert (refused.status_code, refused.json()["code"]) == (429, 42900)
    assert refused.json()["detail"].startswith("Prefix:ord has reached its limit of 1048576 stored")
    assert refused.headers["Retry-After"] == "1"
    # A topic without the prefix has no limit.
    running.put("topics/letters", messageType="NORMAL", queues=1)
    eventually(lambda: is_accepted(running, "letters"))
    tidemill(running, "topic", "purge", "orders", "--yes")
    eventually(lambda: is_accepted(running, "orders"), within_ms=15_000)
    use_up(running, "orders", stored=1)
    eventually(lambda: 0.9 * LIMIT <= stored_bytes(rest, "orders") <= BOUND, within_ms=15_000)
    assert rest.delete("/quotas/prefix/ord").is_success
    eventually(lambda: is_accepted(running, "orders"))


def test_a_delayed_message_over_the_pending_timers_is_refused_until_others_are_cancelled(
    running: Standalone, rest: httpx.Client
) -> None:
    running.put("topics/later", messageType="DELAY", queues=2)
    tidemill(running, "quota", "set", "--prefix=later", "--pending-timers=5")
    wait_for_report(running, "prefix:later")
    due_at_ms = int(time.time() * 1_000) + DAY_MS
    sent = 0

    def is_used_up() -> bool:
        nonlocal sent
        sent += send_until_refused(running, "later", 20, due_at_ms=due_at_ms)
        assert sent <= 5
        return sent == 5

    eventually(is_used_up, within_ms=15_000)
    refused = rest.post("/topics/later/messages", json={"body": "m", "delayMs": DAY_MS})
    assert refused.status_code == 429
    assert refused.json()["detail"].startswith("Prefix:later has reached its limit of 5 pending")
    running.put("topics/later-normal", messageType="NORMAL", queues=2)
    # A message without a delay is no timer.
    eventually(lambda: is_accepted(running, "later-normal"))
    [*timers] = rest.get("/timers", params={"topic": "later"}).raise_for_status().json()["timers"]
    # A later due time needs no room.
    moved = rest.post(
        f"/timers/{timers[0]['timerId']}:reschedule",
        params={"broker": timers[0]["broker"]},
        json={"delayMs": 2 * DAY_MS},
    )
    assert moved.is_success, moved.text
    for timer in timers[:2]:
        assert rest.post(
            f"/timers/{timer['timerId']}:cancel", params={"broker": timer["broker"]}
        ).is_success

    def is_used_up_again() -> bool:
        send_until_refused(running, "later", 20, due_at_ms=due_at_ms)
        found = rest.get("/timers", params={"topic": "later"}).raise_for_status().json()["timers"]
        assert len(found) <= 5
        return len(found) == 5

    eventually(is_used_up_again, within_ms=15_000)


def test_delayed_messages_need_room_of_stored_bytes(running: Standalone) -> None:
    running.put("topics/postponed", messageType="DELAY", queues=2)
    tidemill(running, "quota", "set", "--topic=postponed", "--stored-bytes=1MiB")
    wait_for_report(running, "topic:postponed")
    use_up(running, "postponed", due_at_ms=int(time.time() * 1_000) + DAY_MS)


def test_a_home_that_starts_again_keeps_a_limit_that_is_used_up(running: Standalone) -> None:
    running.put("topics/invoices", messageType="NORMAL", queues=2)
    tidemill(running, "quota", "set", "--topic=invoices", "--stored-bytes=1MiB")
    wait_for_report(running, "topic:invoices")
    stored = use_up(running, "invoices")
    # Each connection has any proxy. A proxy that has never asked for room does not know the limit.
    refused = 0
    while refused < 20:
        is_stored = is_accepted(running, "invoices")
        stored += is_stored
        refused = 0 if is_stored else refused + 1
    url = running.processes["broker-0"].metrics
    os.kill(child_pid(running, "broker-0"), signal.SIGKILL)
    accepted = 0

    def has_report() -> bool:
        nonlocal accepted
        accepted += is_accepted(running, "invoices")
        try:
            return 'quota="topic:invoices"' in httpx.get(url, trust_env=False).text
        except httpx.TransportError:
            return False

    eventually(has_report, within_ms=60_000)
    # The first leases of a home that knows the stock.
    eventually(lambda: not is_accepted(running, "invoices"))
    assert (stored + accepted) * len(BODY) <= LIMIT


def test_users_clients_and_consumer_groups_have_no_stock(rest: httpx.Client) -> None:
    for kind, field in (("user", "storedBytes"), ("client", "pendingTimers")):
        answer = rest.put(f"/quotas/{kind}/shop", json={field: 1})
        assert (answer.status_code, field in answer.text) == (409, True)
    answer = rest.put("/quotas/group/billing", json={"storedBytes": 1})
    assert answer.status_code == 409
    assert rest.put("/quotas/topic/t", json={"storedBytes": (1 << 50) + 1}).status_code == 400
