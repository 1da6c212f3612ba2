"""Producer deduplication through real processes (ADR 0087)."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support.clients.api import POLL_MS_MIN, api, message
from tests.support.clients.commands import tidemill
from tests.support.processes.processes import Standalone, standalone
from tidemill.common.clock import SystemClock
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

ROOT: Final = Path(__file__).resolve().parents[2]
KEY: Final = "dedup-key"
HOUR_MS: Final = 3_600_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("dedup") / "data") as started:
        yield started


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("dedup-groups") / "data", "--groups=2") as started:
        yield started


def of(reply: service.SendMessageResponse) -> service.SendResultEntry:
    [entry] = reply.entries
    assert entry.status.code == v2.OK, entry
    return entry


async def bodies(running: Standalone, topic: str) -> list[str]:
    """Receive and ack all messages of a topic."""
    found: list[str] = []
    group = f"{topic}-readers"
    async with api(running.grpc, call_s=30) as client:
        while received := await client.receive(topic, group, poll_ms=POLL_MS_MIN):
            found += [one.body.decode() for one in received]
            handles = [one.system_properties.receipt_handle for one in received]
            await client.ack(topic, group, handles)
    return sorted(found)


def test_a_repeat_gets_the_first_answer(running: Standalone) -> None:
    topic = "dedup-plain"
    running.put(f"topics/{topic}", dedup={})

    async def run() -> None:
        async with api(running.grpc) as client:
            one = message(topic, b"one", message_id="m-1", properties={KEY: "k"})
            two = message(topic, b"one", message_id="m-2", properties={KEY: "k"})
            first, second = of(await client.send(one)), of(await client.send(two))
            assert second == first
            assert second.message_id == "m-1"
            # The message id is the key of a message without the property.
            plain = message(topic, b"two", message_id="m-3")
            assert of(await client.send(plain)) == of(await client.send(plain))
            # Two messages of one batch with one key: the second is a repeat.
            batch = [
                message(topic, b"three", message_id=f"b-{n}", properties={KEY: "b"}) for n in (1, 2)
            ]
            entries = (await client.send(*batch)).entries
            assert [entry.message_id for entry in entries] == ["b-1", "b-1"]

    asyncio.run(run())
    assert asyncio.run(bodies(running, topic)) == ["one", "three", "two"]


def test_a_repeat_of_a_delayed_message_gets_its_recall_handle(running: Standalone) -> None:
    topic = "dedup-delayed"
    running.put(f"topics/{topic}", dedup={})
    due_at_ms = SystemClock().wall_ms() + HOUR_MS

    async def run() -> None:
        async with api(running.grpc) as client:

            def delayed(message_id: str) -> v2.Message:
                return message(
                    topic, b"b", message_id=message_id, due_at_ms=due_at_ms, properties={KEY: "k"}
                )

            first, second = of(await client.send(delayed("a"))), of(await client.send(delayed("b")))
            assert first.recall_handle
            assert second == first
            recalled = await client.recall(topic, second.recall_handle)
            assert (recalled.status.code, recalled.message_id) == (v2.OK, "a")
            third = of(await client.send(delayed("c")))
            assert third.recall_handle not in {"", first.recall_handle}

    asyncio.run(run())


def test_a_send_replaces_a_delayed_message(running: Standalone) -> None:
    topic = "dedup-debounce"
    running.put(f"topics/{topic}", dedup={"mode": "replace", "maxWaitMs": HOUR_MS})

    async def run() -> None:
        async with api(running.grpc) as client:
            due_at_ms = SystemClock().wall_ms() + HOUR_MS // 2
            for body in (b"one", b"two"):
                later = message(topic, body, due_at_ms=due_at_ms, properties={KEY: "k"})
                assert of(await client.send(later)).recall_handle
            of(await client.send(message(topic, b"now", properties={KEY: "k"})))

    asyncio.run(run())
    assert asyncio.run(bodies(running, topic)) == ["now"]


def dedup_key(running: Standalone, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = running.get(f"topics/{topic}/dedup/k")
    return found


def test_a_repeat_of_a_half_message_gets_its_transaction_id(running: Standalone) -> None:
    topic = "dedup-halves"
    running.put(f"topics/{topic}", messageType="TRANSACTION", dedup={})

    async def run() -> str:
        async with api(running.grpc) as client:
            entries = []
            for message_id in ("a", "b"):
                half = message(topic, b"half", message_id=message_id, properties={KEY: "k"})
                half.system_properties.message_type = v2.TRANSACTION
                entries.append(of(await client.send(half)))
            assert entries[1] == entries[0]
            assert entries[0].transaction_id
            return entries[0].transaction_id

    transaction_id = asyncio.run(run())
    assert dedup_key(running, topic)["transactionId"] == transaction_id
    assert transaction_id in tidemill(running, "dedup-key", "show", topic, "k").stdout
    url = f"{running.admin}/api/v1/topics/{topic}/dedup/k"
    refused = httpx.delete(url, trust_env=False, timeout=30)
    assert refused.status_code == 409
    assert "roll it back, which frees the key" in refused.json()["detail"]
    tidemill(running, "transaction", "commit", transaction_id, "--yes")
    assert "transactionId" not in dedup_key(running, topic)


def test_the_commands_of_the_page_work_on_an_empty_machine(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deduplication.md").read_text()
    lines = [
        line.partition("  #")[0]
        for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
        if line.startswith("tidemill ")
    ]
    assert len(lines) >= 7
    with standalone(tmp_path / "data") as started:
        for line in lines:
            words = shlex.split(line)[1:]
            if words[:2] == ["dedup-key", "delete"]:
                words.append("--yes")  # It asks, and there is no terminal.
            done = tidemill(started, *words)
            assert done.returncode == 0, (line, done.stderr)


def test_the_setting_is_checked(running: Standalone) -> None:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=30) as rest:

        def put(dedup: object) -> httpx.Response:
            return rest.put("/topics/dedup-setting", json={"dedup": dedup})

        refused = put({"mode": "replace"})
        assert refused.status_code == 409
        assert "needs maxWaitMs (--dedup-max-wait)" in refused.json()["detail"]
        assert put({"maxWaitMs": 5_000}).status_code == 409
        assert put({"windowMs": 10}).status_code in {400, 422}
        shown = put({"windowMs": 5_000}).json()["dedup"]
        assert shown == {"windowMs": 5_000, "keyFrom": "propertyOrMessageId", "mode": "first"}
        assert put({"keyFrom": "property"}).json()["dedup"]["windowMs"] == 5_000
        assert "dedup" not in put(None).json()


def test_a_key_has_one_owner_of_several_broker_groups(two_groups: Standalone) -> None:
    topic, count = "dedup-owners", 40
    two_groups.put(f"topics/{topic}", dedup={})

    async def run() -> None:
        async with api(two_groups.grpc) as client:
            for n in range(count):
                for repeat in range(3):
                    sent = message(
                        topic,
                        f"{n}".encode(),
                        message_id=f"m-{n}-{repeat}",
                        properties={KEY: f"{n}"},
                    )
                    assert of(await client.send(sent)).message_id == f"m-{n}-0"

    asyncio.run(run())
    assert len(asyncio.run(bodies(two_groups, topic))) == count
    with httpx.Client(base_url=f"{two_groups.admin}/api/v1", trust_env=False, timeout=30) as rest:
        queues = rest.get(f"/topics/{topic}").json()["queueStatus"]
    by_broker = {one["broker"]: 0 for one in queues}
    for one in queues:
        by_broker[one["broker"]] += one["maxOffset"]
    assert len(by_broker) == 2
    assert all(by_broker.values()), by_broker
