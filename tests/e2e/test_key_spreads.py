"""`topic spread` over real processes: each key is stored once before, during and after (D-5)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clients.api import Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.killing import child_pid, kill, until
from tests.support.processes.processes import Standalone, standalone
from tidemill.common.clock import SystemClock
from tidemill.message.dedup_key import owner_of_key
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

TOPIC: Final = "keyed"
KEY: Final = "dedup-key"
OLD: Final = ["broker-0", "broker-1"]
NEW: Final = ["broker-0", "broker-1", "broker-2"]
HOUR_MS: Final = 3_600_000  # a window that is longer than the test on any machine
COUNT: Final = 60
BY_MESSAGE_ID: Final = "id-"  # such a key is the message id, others are the property
CALL_S: Final = 3.0
# Answers after which a producer repeats a send.
RETRYABLE: Final = {v2.INTERNAL_SERVER_ERROR, v2.HA_NOT_AVAILABLE, v2.PROXY_TIMEOUT}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Standalone]:
    """Three broker groups; the third one accepts no messages yet."""
    with standalone(tmp_path / "data", "--groups=3") as started:
        tidemill(started, "broker-group", "drain", "broker-2", "--yes")
        yield started


@contextmanager
def hanging(running: Standalone, name: str) -> Iterator[None]:
    """Freeze a process for the block."""
    os.kill(running.processes[name].pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(running.processes[name].pid, signal.SIGCONT)


def end_draining(running: Standalone) -> None:
    """Let the third broker group accept messages."""
    [address] = [
        one["address"] for one in running.get("broker-groups")["items"] if one["name"] == "broker-2"
    ]
    tidemill(running, "broker-group", "add", "broker-2", address)


async def send(client: Api, key: str, attempt: object = "") -> v2.Code.ValueType:
    """Send a message with a key; return the code of its answer."""
    is_property = not key.startswith(BY_MESSAGE_ID)
    sent = message(
        TOPIC,
        f"body of {key}".encode(),
        message_id=f"{key}-{attempt}" if is_property else key,
        properties={KEY: key} if is_property else {},
    )
    answer = await client.send(sent)
    return answer.entries[0].status.code if answer.entries else answer.status.code


async def send_all(running: Standalone, keys: list[str], attempt: object = "") -> None:
    async with api(running.grpc, call_s=30) as client:
        assert [await send(client, key, attempt) for key in keys] == [v2.OK] * len(keys)


def stored(running: Standalone) -> dict[str, int]:
    """Return the number of messages by broker group."""
    eventually(lambda: "unreachable" not in running.get(f"topics/{TOPIC}"))
    counts = dict.fromkeys(NEW, 0)
    for queue in running.get(f"topics/{TOPIC}")["queueStatus"]:
        counts[queue["broker"]] += queue["maxOffset"]
    return counts


def dedup_of(running: Standalone) -> dict[str, Any]:
    found: dict[str, Any] = running.get(f"topics/{TOPIC}")["dedup"]
    return found


def owner_before(key: str) -> str:
    return owner_of_key(key.encode(), OLD)


def owner_after(key: str) -> str:
    return owner_of_key(key.encode(), NEW)


def test_keys_move_to_a_joined_broker_group_and_no_message_is_stored_twice(
    running: Standalone,
) -> None:
    running.put(f"topics/{TOPIC}", dedup={"windowMs": HOUR_MS}, queues=2)
    assert dedup_of(running)["brokerGroups"] == OLD
    before = [f"before-{n}" for n in range(COUNT // 2)]
    before += [f"{BY_MESSAGE_ID}before-{n}" for n in range(COUNT // 2)]
    asyncio.run(send_all(running, before))
    end_draining(running)
    asyncio.run(send_all(running, before, "again"))
    planned = tidemill(running, "topic", "spread", TOPIC, "--dry-run").stdout
    assert planned.startswith(f"the dedup keys of topic {TOPIC} would be owned by broker-0")
    assert "movingFrom" not in dedup_of(running)

    done = tidemill(running, "topic", "spread", TOPIC).stdout
    assert done == (
        f"the dedup keys of topic {TOPIC} are owned by broker-0, broker-1, broker-2;"
        " before: broker-0, broker-1\n"
    )
    assert (dedup_of(running)["brokerGroups"], dedup_of(running)["movingFrom"]) == (NEW, OLD)
    assert "Keys move from broker-0, broker-1" in tidemill(running, "topic", "show", TOPIC).stdout
    again = tidemill(running, "topic", "spread", TOPIC).stdout
    assert again.endswith("unchanged\n")
    asyncio.run(send_all(running, before, "after the spread"))
    assert sum(stored(running).values()) == COUNT
    assert stored(running)["broker-2"] == 0

    after = [f"after-{n}" for n in range(COUNT)]
    for attempt in range(2):
        asyncio.run(send_all(running, after, attempt))
    moved = [key for key in after if owner_after(key) == "broker-2"]
    assert moved
    assert stored(running)["broker-2"] == len(moved)
    assert sum(stored(running).values()) == 2 * COUNT

    [record] = running.get("audit?kind=change&resource=Topic:keyed&pageSize=1")["records"]
    assert record["call"] == "POST /topics/{topic}:spread"
    assert (record["before"]["keyOwners"], record["after"]["keyOwners"]) == (OLD, NEW)
    check_rest(running, before, after)
    check_metrics(running)


def check_rest(running: Standalone, before: list[str], after: list[str]) -> None:
    """Repeat and send by the REST API, which asks the old owner, too."""
    url = f"{running.admin}/api/v1/topics/{TOPIC}/messages"
    total = sum(stored(running).values())

    def post(key: str, body: str) -> httpx.Response:
        headers = {"Idempotency-Key": key}
        return httpx.post(url, json={"body": body}, headers=headers, trust_env=False, timeout=20)

    known = next(key for key in before if owner_after(key) == "broker-2")
    answer = post(known, f"body of {known}")
    assert (answer.status_code, answer.json()["duplicate"]) == (200, True)
    assert answer.json()["messageId"] == f"{known}-"
    assert answer.json()["broker"] == owner_before(known)
    assert post(known, "another body").status_code == 422
    new = next(key for key in after if owner_after(key) == "broker-2")
    assert post(new, f"body of {new}").json()["duplicate"]
    assert sum(stored(running).values()) == total
    fresh = next(f"rest-{n}" for n in range(99) if owner_after(f"rest-{n}") == "broker-2")
    first, second = post(fresh, "b"), post(fresh, "b")
    assert (first.status_code, first.json()["broker"]) == (201, "broker-2")
    assert (second.status_code, second.json()["messageId"]) == (200, first.json()["messageId"])
    assert stored(running)["broker-2"] > 0
    assert sum(stored(running).values()) == total + 1


def check_metrics(running: Standalone) -> None:
    """Both old owners have answered lookups."""
    results: Counter[str] = Counter()
    for name in OLD:
        text = httpx.get(running.processes[name].metrics, trust_env=False).text
        for family in text_string_to_metric_families(text):
            if family.name == "rocketmq_dedup_lookup":
                for sample in family.samples:
                    results[sample.labels["result"]] += int(sample.value)
    assert results["known"] > 0
    assert results["unknown"] > 0


def test_producers_that_repeat_during_a_spread_store_each_message_once(running: Standalone) -> None:
    running.put(f"topics/{TOPIC}", dedup={"windowMs": HOUR_MS}, queues=2)
    end_draining(running)
    keys = [f"k{n}" for n in range(6 * COUNT)]
    begun = asyncio.Event()

    async def produce(client: Api, some: list[str]) -> None:
        for n, key in enumerate(some):
            if n == COUNT // 4:
                begun.set()
            for attempt in range(2):
                assert await send(client, key, attempt) == v2.OK

    async def spread() -> None:
        await begun.wait()
        await asyncio.to_thread(tidemill, running, "topic", "spread", TOPIC)
        await kill(running, "broker-1")
        await until(lambda: child_pid(running, "broker-1") > 0)
        await kill(running, "broker-2")

    async def scenario() -> None:
        async with api(running.grpc, call_s=30) as client, asyncio.TaskGroup() as tasks:
            for n in range(6):
                tasks.create_task(produce(client, keys[n::6]))
                # The same keys from another producer, at the same time.
                tasks.create_task(produce(client, keys[n::6][::-1]))
            tasks.create_task(spread())

    asyncio.run(scenario())
    assert dedup_of(running)["brokerGroups"] == NEW
    assert sum(stored(running).values()) == len(keys)


async def send_special(
    client: Api, topic: str, key: str, message_id: str, *, due_at_ms: int = 0
) -> service.SendResultEntry:
    """Send a delayed message, or a half message without a due time; return its answer."""
    sent = message(topic, b"b", message_id=message_id, due_at_ms=due_at_ms, properties={KEY: key})
    if not due_at_ms:
        sent.system_properties.message_type = v2.TRANSACTION
    [entry] = (await client.send(sent)).entries
    assert entry.status.code == v2.OK, entry
    return entry


def test_delayed_and_half_messages_keep_their_keys_through_a_spread(running: Standalone) -> None:
    dedups = {
        "replace": {"mode": "replace", "maxWaitMs": HOUR_MS, "windowMs": HOUR_MS},
        "first": {"windowMs": HOUR_MS},
        "halves": {"windowMs": HOUR_MS},
    }
    for topic, dedup in dedups.items():
        kind = "TRANSACTION" if topic == "halves" else "DELAY"
        running.put(f"topics/{topic}", messageType=kind, dedup=dedup)
    end_draining(running)
    moved = [f"k{n}" for n in range(COUNT) if owner_after(f"k{n}") == "broker-2"]
    known, fresh, *_ = moved
    due_at_ms = SystemClock().wall_ms() + HOUR_MS // 2

    async def scenario() -> None:
        async with api(running.grpc, call_s=30) as client:
            half = await send_special(client, "halves", known, "a")
            for topic in ("replace", "first"):
                await send_special(client, topic, known, "a", due_at_ms=due_at_ms)
            for topic in dedups:
                await asyncio.to_thread(tidemill, running, "topic", "spread", topic)
            assert await send_special(client, "halves", known, "b") == half
            first = await send_special(client, "halves", fresh, "c")
            assert await send_special(client, "halves", fresh, "d") == first
            for key in (known, fresh):
                for message_id in ("e", "f"):
                    for topic in ("replace", "first"):
                        await send_special(client, topic, key, message_id, due_at_ms=due_at_ms)

    asyncio.run(scenario())
    for topic, ids in (("replace", {"f"}), ("first", {"a", "e"})):
        timers = running.get(f"timers?topic={topic}")["timers"]
        assert len(timers) == 2, timers
        assert {one["messageId"] for one in timers} == ids
        assert {one["broker"] for one in timers} == {owner_before(known), "broker-2"}


def test_moved_keys_wait_for_their_old_owner_and_others_go_on(running: Standalone) -> None:
    running.put(f"topics/{TOPIC}", dedup={"windowMs": HOUR_MS}, queues=2)
    end_draining(running)
    keys = [f"k{n}" for n in range(COUNT)]
    tidemill(running, "topic", "spread", TOPIC)
    moved = [key for key in keys if (owner_before(key), owner_after(key)) == ("broker-1", NEW[2])]
    free = [key for key in keys if "broker-1" not in {owner_before(key), owner_after(key)}]
    assert moved
    assert free

    async def scenario() -> None:
        async with api(running.grpc, call_s=CALL_S) as client:
            assert await send(client, moved[0]) in RETRYABLE
            assert [await send(client, key) for key in free] == [v2.OK] * len(free)

    with hanging(running, "broker-1"):
        asyncio.run(scenario())
    assert stored(running)["broker-1"] == 0
    asyncio.run(send_all(running, moved, "again"))
    asyncio.run(send_all(running, moved, "once more"))
    assert sum(stored(running).values()) == len(free) + len(moved)


def test_a_spread_after_a_drain_serves_the_keys_of_the_draining_owner(running: Standalone) -> None:
    running.put(f"topics/{TOPIC}", dedup={"windowMs": HOUR_MS}, queues=2)
    keys = [f"k{n}" for n in range(COUNT)]
    asyncio.run(send_all(running, keys))
    owned = next(key for key in keys if owner_before(key) == "broker-1")
    tidemill(running, "broker-group", "drain", "broker-1", "--yes")

    async def repeat() -> v2.Code.ValueType:
        async with api(running.grpc, call_s=30) as client:
            return await send(client, owned, "during the drain")

    eventually(lambda: asyncio.run(repeat()) in RETRYABLE)
    tidemill(running, "topic", "spread", TOPIC)
    before = stored(running)
    asyncio.run(send_all(running, keys, "after the spread"))
    assert stored(running) == before
    asyncio.run(send_all(running, [f"new {n}" for n in range(COUNT)]))
    assert stored(running) == {**before, "broker-0": before["broker-0"] + COUNT}


def test_a_spread_ends_when_the_windows_of_all_older_keys_are_over(running: Standalone) -> None:
    running.put(f"topics/{TOPIC}", dedup={"windowMs": 1_000}, queues=2)
    end_draining(running)
    keys = [f"k{n}" for n in range(COUNT)]
    asyncio.run(send_all(running, keys))
    tidemill(running, "topic", "spread", TOPIC)
    eventually(lambda: "movingFrom" not in dedup_of(running))
    assert dedup_of(running)["brokerGroups"] == NEW
    moved = [key for key in keys if (owner_before(key), owner_after(key)) == ("broker-1", NEW[2])]
    with hanging(running, "broker-1"):
        asyncio.run(send_all(running, moved, "later"))
    assert stored(running)["broker-2"] == len(moved)


def test_deduplication_is_turned_on_again_when_all_owners_have_forgotten_its_keys(
    running: Standalone,
) -> None:
    running.put(f"topics/{TOPIC}", dedup={"windowMs": HOUR_MS}, queues=2)
    keys = [f"k{n}" for n in range(COUNT)]
    asyncio.run(send_all(running, keys))
    with hanging(running, "broker-1"):
        off = tidemill(running, "topic", "set", TOPIC, "--dedup-window", "off")
        assert "-> off, except for keys that broker-1 may still know" in off.stdout
        refused = put_dedup(running, {"windowMs": HOUR_MS})
        assert refused.status_code == 409
        assert "these broker groups may still know its keys: broker-1;" in refused.json()["detail"]
        assert "dedup" not in running.get(f"topics/{TOPIC}")
        assert running.get(f"topics/{TOPIC}")["dedupOffPending"] == ["broker-1"]
        url = f"{running.admin}/api/v1/topics/{TOPIC}/dedup"
        shown = httpx.get(url, trust_env=False, timeout=30)
        assert shown.status_code == 409
        assert "when broker-1 has received that it is off" in shown.json()["detail"]
    eventually(lambda: "dedupOffPending" not in running.get(f"topics/{TOPIC}"))
    assert put_dedup(running, {"windowMs": HOUR_MS}).status_code == 200
    eventually(lambda: "unreachable" not in running.get(f"topics/{TOPIC}/dedup"))
    for attempt in range(2):
        asyncio.run(send_all(running, keys, f"after {attempt}"))
    assert sum(stored(running).values()) == 2 * COUNT


def put_dedup(running: Standalone, dedup: dict[str, Any]) -> httpx.Response:
    """Change the deduplication of the topic; return the answer, also of a rejection."""
    url = f"{running.admin}/api/v1/topics/{TOPIC}"
    return httpx.put(url, json={"dedup": dedup}, trust_env=False, timeout=20)
