"""The official Node.js client, unmodified, against a standalone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.api import api, message
from tests.support.clients.client_process import NODE_PACKAGES, needs, run_node_client
from tests.support.processes.processes import Standalone, standalone
from tidemill.common.item_bytes import DELIVERY_BYTES, ITEM_BYTES_MAX
from tidemill.proxy.clients.settings import PROPERTIES_BYTES
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

INVALID_RECEIPT_HANDLE = 40013
MESSAGE_NOT_FOUND = 40401
SEND_S = 60.0  # for 4 MiB on a busy machine
LATE_MS_MAX = 1_500  # on the slowest machine, the client's own time included

pytestmark = needs("node", NODE_PACKAGES)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    data_dir = tmp_path_factory.mktemp("node") / "data"
    with standalone(data_dir, "--proxies=2") as started:
        yield started


def test_messages_of_every_kind_come_as_they_were_sent(tmp_path: Path, running: Standalone) -> None:
    facts = run_node_client(tmp_path, "roundTrip", running.grpc, topic="round", group="round")
    sent = {fact["id"]: fact["sha"] for fact in facts.of("sent")}
    received = {fact["id"]: fact for fact in facts.of("received")}
    assert len(sent) == len(facts.of("received")) == 5
    assert {key: fact["sha"] for key, fact in received.items()} == sent
    assert {fact["attempt"] for fact in received.values()} == {1}
    assert not any(fact["isCorrupted"] for fact in received.values())
    by_body = {fact["body"]: fact for fact in received.values()}
    assert by_body["tagged"]["tag"] == "tag"
    assert sorted(by_body["keyed"]["keys"]) == ["key-1", "key-2"]
    assert by_body["with properties"]["properties"] == {"name": "wert", "grün": "🌊"}
    assert facts.the("left")["count"] == 0


def test_unacked_and_released_messages_are_redelivered(tmp_path: Path, running: Standalone) -> None:
    facts = run_node_client(tmp_path, "redelivery", running.grpc, topic="again", group="again")
    assert [fact["attempt"] for fact in facts.of("received")] == [1, 2, 3]
    assert len({fact["id"] for fact in facts.of("received")}) == 1
    assert facts.the("error")["code"] == INVALID_RECEIPT_HANDLE
    assert facts.the("changed")["isNew"]
    assert running.lag("again") == 0


def test_a_client_with_several_topics_starts_at_once(tmp_path: Path, running: Standalone) -> None:
    """Without the second answer to its settings it would hang until its next ones, in 5 minutes."""
    topics = ["first", "second", "third"]
    facts = run_node_client(tmp_path, "twoTopics", running.grpc, topics=topics, group="several")
    assert sorted(fact["body"] for fact in facts.of("received")) == topics


def test_a_push_consumer_acks_successes_and_gets_failures_again(
    tmp_path: Path, running: Standalone
) -> None:
    facts = run_node_client(tmp_path, "push", running.grpc, topic="push", group="push", messages=5)
    assert facts.the("done")
    tries = [(fact["body"], fact["attempt"], fact["succeeds"]) for fact in facts.of("received")]
    assert sorted(tries) == [
        ("0", 1, True),
        ("1", 1, True),
        ("2", 1, False),
        ("2", 2, True),
        ("3", 1, True),
        ("4", 1, True),
    ]


def test_an_ordered_push_consumer_keeps_the_order_of_message_groups(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/ordered", messageType="FIFO", queues=4)
    running.put("groups/ordered", deliveryOrder="FIFO")
    facts = run_node_client(
        tmp_path, "pushFifo", running.grpc, topic="ordered", group="ordered", messages=30
    )
    numbers = defaultdict(list)
    for received in facts.of("received"):
        group, number = received["body"].split()
        numbers[group].append(int(number))
    assert numbers == {f"group-{n}": list(range(n, 30, 3)) for n in range(3)}


def test_an_ordered_push_consumer_dead_letters_a_failing_message_and_continues(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/ordered-dead", messageType="FIFO", queues=4)
    running.put("groups/ordered-dead", deliveryOrder="FIFO", maxAttempts=2)
    facts = run_node_client(
        tmp_path,
        "pushFifo",
        running.grpc,
        topic="ordered-dead",
        group="ordered-dead",
        messages=12,
        poison="group-1 4",
    )
    numbers = defaultdict(list)
    for received in facts.of("received"):
        if received.get("succeeds"):
            group, number = received["body"].split()
            numbers[group].append(int(number))
    assert numbers == {"group-0": [0, 3, 6, 9], "group-1": [1, 7, 10], "group-2": [2, 5, 8, 11]}
    [dead] = [fact for fact in facts.of("received") if fact.get("isDead")]
    assert (dead["topic"], dead["body"]) == ("%DLQ%ordered-dead", "group-1 4")


def test_a_message_goes_to_the_dead_letter_topic_after_its_last_attempt(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("groups/dead", maxAttempts=2)
    facts = run_node_client(
        tmp_path, "deadLetter", running.grpc, topic="dead", group="dead", attempts=2
    )
    first, second, dead = facts.of("received")
    assert {fact["id"] for fact in (first, second, dead)} == {facts.the("sent")["id"]}
    assert [first["attempt"], second["attempt"]] == [1, 2]
    assert running.lag("dead") == 0
    assert (dead["topic"], dead["body"], dead["tag"]) == ("%DLQ%dead", "poison", "tag")


def test_a_producer_and_a_push_consumer_outlive_killed_processes(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        pids = [running.processes[name].pid for name in ("proxy-0", "broker-0")]
        facts = run_node_client(
            tmp_path, "outage", running.grpc, topic="outage", group="outage", pids=pids
        )
    assert [fact["body"] for fact in facts.of("arrived")] == ["0", "1", "2"]


def test_a_message_whose_type_does_not_fit_its_topic_is_refused(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/only-normal", messageType="NORMAL")
    running.put("topics/only-fifo", messageType="FIFO")
    facts = run_node_client(
        tmp_path, "wrongType", running.grpc, normal="only-normal", fifo="only-fifo"
    )
    assert all("message type not match" in error["text"] for error in facts.of("error"))
    assert len(facts.of("error")) == 2


def test_a_delayed_message_comes_when_it_is_due_unless_it_is_recalled(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/delayed", messageType="DELAY")
    facts = run_node_client(tmp_path, "delayed", running.grpc, topic="delayed", group="delayed")
    sent, recalled = facts.of("sent")
    assert [fact["id"] for fact in facts.of("recalled")] == [recalled["id"]] * 2
    received = facts.the("received")
    assert (received["id"], received["body"]) == (sent["id"], "delivered")
    assert received["dueMs"] == sent["dueMs"]
    assert 0 <= received["atMs"] - sent["dueMs"] < LATE_MS_MAX
    assert str(MESSAGE_NOT_FOUND) in facts.the("error")["text"]
    assert facts.the("left")["count"] == 0


def test_the_largest_message_arrives_and_the_small_ones_beside_it(
    tmp_path: Path, running: Standalone
) -> None:
    body_bytes = ITEM_BYTES_MAX - DELIVERY_BYTES - PROPERTIES_BYTES

    async def send() -> None:
        async with api(running.grpc, call_s=SEND_S) as client:
            for body in (b"small", b"x" * body_bytes, b"another"):
                sent = await client.send(message("largest", body))
                assert sent.status.code == v2.OK, sent

    asyncio.run(send())
    facts = run_node_client(
        tmp_path,
        "consumeAll",
        running.grpc,
        topic="largest",
        group="largest",
        messages=3,
        receivers=1,
        wait_s=SEND_S,
    )
    consumed = facts.the("consumed")
    assert (consumed["messages"], consumed["bytes"]) == (3, body_bytes + len("smallanother"))
    assert not [name for name in consumed["ended"] if "RESOURCE_EXHAUSTED" in name]


def test_node_js_priority_0_is_level_0_and_higher_priorities_come_first(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/urgent", messageType="PRIORITY")
    facts = run_node_client(tmp_path, "priorities", running.grpc, topic="urgent", group="urgent")
    assert [fact["body"] for fact in facts.of("received")] == ["7", "100", "1", "none", "0"]
    assert [fact["priority"] for fact in facts.of("received")] == [7, 100, 1, 0, 0]
    assert facts.the("error")["during"] == "negative"
    assert facts.the("error")["text"], "a negative priority is an error"
    assert running.lag("urgent") == 0
