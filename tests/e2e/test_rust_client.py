"""The official Rust client, unmodified, against a standalone with two proxies.

The build compiles 250 packages, so these tests are large. The client has undocumented needs:

- It calls the feature `local-offset` of the library `time`, but does not enable it.
- Its long-polling time must be at least six seconds. This time is also the deadline of the call,
  and a long poll takes five seconds.
- The application must repeat sends. The client makes one attempt per send and ignores the settings.
- The application must not rely on acks. The client reports success for an invalid handle.

The client has no push consumer, no change of invisible durations and no recall.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.api import api, message
from tests.support.clients.client_process import RUST_PROGRAM, needs, run_rust_client
from tests.support.processes.processes import Standalone, standalone

LATE_MS_MAX = 10_000  # A delayed message comes with the current poll or the next one.

pytestmark = [pytest.mark.large, needs("cargo", RUST_PROGRAM)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    data_dir = tmp_path_factory.mktemp("rust") / "data"
    with standalone(data_dir, "--proxies=2") as started:
        yield started


def test_messages_of_every_kind_and_size_come_as_they_were_sent(
    tmp_path: Path, running: Standalone
) -> None:
    facts = run_rust_client(tmp_path, "roundTrip", running.grpc, topic="round", group="round")
    received = {fact["id"]: fact for fact in facts.of("received")}
    assert len(facts.of("received")) == 5
    assert received.keys() == {fact["id"] for fact in facts.of("sent")}
    assert {fact["attempt"] for fact in received.values()} == {1}
    by_body = {fact["body"]: fact for fact in received.values()}
    assert by_body["tagged"]["tag"] == "tag"
    assert by_body["keyed"]["keys"] == ["key-1", "key-2"]
    assert by_body["with properties"]["properties"] == {"name": "wert", "grün": "🌊"}
    assert max(fact["size"] for fact in received.values()) == 1 << 20
    assert facts.the("left")["count"] == 0
    assert running.lag("round") == 0


def test_a_message_that_is_not_acked_comes_back(tmp_path: Path, running: Standalone) -> None:
    facts = run_rust_client(tmp_path, "redelivery", running.grpc, topic="again", group="again")
    assert [fact["attempt"] for fact in facts.of("received")] == [1, 2]
    assert {fact["id"] for fact in facts.of("received")} == {facts.the("sent")["id"]}
    assert running.lag("again") == 0


def test_a_delayed_message_comes_when_it_is_due(tmp_path: Path, running: Standalone) -> None:
    running.put("topics/later", messageType="DELAY", queues=2)
    facts = run_rust_client(tmp_path, "delayed", running.grpc, topic="later", group="later")
    due_ms = facts.the("due")["ms"]
    assert due_ms <= facts.the("received")["atMs"] < due_ms + LATE_MS_MAX
    assert facts.the("received")["due"] == due_ms // 1000


def test_message_groups_come_in_their_order(tmp_path: Path, running: Standalone) -> None:
    running.put("topics/ordered", messageType="FIFO", queues=2)
    running.put("groups/ordered", deliveryOrder="FIFO")
    facts = run_rust_client(tmp_path, "fifo", running.grpc, topic="ordered", group="ordered")
    numbers = defaultdict(list)
    for received in facts.of("received"):
        group, number = received["body"].split()
        assert received["group"] == group
        numbers[group].append(int(number))
    assert numbers == {f"group-{n}": list(range(n, 12, 3)) for n in range(3)}
    assert running.lag("ordered") == 0


async def send_all(endpoint: str, topic: str) -> None:
    """Send one message for each tag, whose property `number` is 0, 1, ..."""
    async with api(endpoint) as client:
        for number, tag in enumerate(("red", "green", "", "blue", "Red", "re")):
            properties = {"number": str(number)}
            await client.send(message(topic, tag.encode(), tag=tag, properties=properties))


def test_a_tag_filter_passes_only_the_named_tags(tmp_path: Path, running: Standalone) -> None:
    asyncio.run(send_all(running.grpc, "tags"))
    names = {"topic": "tags", "group": "tags", "tags": "red || blue"}
    facts = run_rust_client(tmp_path, "filtered", running.grpc, **names)
    assert sorted(fact["tag"] for fact in facts.of("received")) == ["blue", "red"]
    assert facts.the("left")["count"] == 0


def test_an_sql_filter_passes_only_what_matches(tmp_path: Path, running: Standalone) -> None:
    asyncio.run(send_all(running.grpc, "conditions"))
    names = {"topic": "conditions", "group": "conditions", "sql": "number BETWEEN 3 AND 4"}
    facts = run_rust_client(tmp_path, "filtered", running.grpc, **names)
    assert sorted(fact["tag"] for fact in facts.of("received")) == ["Red", "blue"]
    assert facts.the("left")["count"] == 0


def test_a_message_goes_to_the_dead_letter_topic_after_its_last_attempt(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("groups/dead", maxAttempts=2)
    facts = run_rust_client(tmp_path, "deadLetter", running.grpc, topic="dead", group="dead")
    first, second, dead = facts.of("received")
    assert {fact["id"] for fact in (first, second, dead)} == {facts.the("sent")["id"]}
    assert [first["attempt"], second["attempt"]] == [1, 2]
    assert facts.the("left")["count"] == 0
    assert (dead["topic"], dead["body"]) == ("%DLQ%dead", "poison")


def test_a_dedup_key_is_stored_once(tmp_path: Path, running: Standalone) -> None:
    running.put("topics/dedup-rust", dedup={})
    facts = run_rust_client(tmp_path, "dedup", running.grpc, topic="dedup-rust")
    ids = [fact["id"] for fact in facts.of("sent")]
    assert len(ids) == 3
    assert len(set(ids)) == 1, "the client gets the id of the first message"
    queues = running.get("topics/dedup-rust")["queueStatus"]
    assert sum([one["maxOffset"] for one in queues]) == 1
