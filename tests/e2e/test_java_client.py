"""The official Java client, unmodified, against a standalone with two proxies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.client_process import (
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    needs,
    run_java_client,
)
from tests.support.processes.processes import Standalone, standalone

INVALID_RECEIPT_HANDLE = 40013

pytestmark = needs("java", JAVA_CLASSES, JAVA_LIBRARIES)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    data_dir = tmp_path_factory.mktemp("java") / "data"
    with standalone(data_dir, "--proxies=2") as started:
        yield started


def test_messages_of_every_kind_and_size_come_as_they_were_sent(
    tmp_path: Path, running: Standalone
) -> None:
    facts = run_java_client(tmp_path, "roundTrip", running.grpc, topic="round", group="round")
    sent = {fact["id"]: fact["sha"] for fact in facts.of("sent")}
    received = {fact["id"]: fact for fact in facts.of("received")}
    assert len(sent) == len(facts.of("received")) == 7
    assert {key: fact["sha"] for key, fact in received.items()} == sent
    assert {fact["attempt"] for fact in received.values()} == {1}
    by_body = {fact["body"]: fact for fact in received.values()}
    assert by_body["tagged"]["tag"] == "tag"
    assert by_body["x"]["tag"] is None
    assert sorted(by_body["keyed"]["keys"]) == ["key-1", "key-2"]
    assert by_body["with properties"]["properties"] == {"name": "wert", "grün": "🌊 \\ \"'"}
    assert not by_body["x"]["properties"]
    assert max(fact["size"] for fact in received.values()) == 1 << 20
    assert facts.the("left")["count"] == 0
    assert running.lag("round") == 0


def test_unacked_and_released_messages_are_redelivered(tmp_path: Path, running: Standalone) -> None:
    facts = run_java_client(tmp_path, "redelivery", running.grpc, topic="again", group="again")
    assert [fact["attempt"] for fact in facts.of("received")] == [1, 2, 3]
    assert {fact["id"] for fact in facts.of("received")} == {facts.the("sent")["id"]}
    assert f"response-code={INVALID_RECEIPT_HANDLE}" in facts.the("error")["text"]
    assert running.lag("again") == 0


def test_a_push_consumer_acks_successes_and_gets_failures_again(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("groups/push", retry={"customized": {"nextMs": [1000]}})
    facts = run_java_client(tmp_path, "push", running.grpc, topic="push", group="push", messages=5)
    tries = [(fact["body"], fact["attempt"], fact["succeeds"]) for fact in facts.of("received")]
    assert sorted(tries) == [
        ("0", 1, True),
        ("1", 1, True),
        ("2", 1, False),
        ("2", 2, True),
        ("3", 1, True),
        ("4", 1, True),
    ]
    # The process may have ended before its ack of the last one.
    assert running.lag("push") <= 1


def test_a_fifo_push_consumer_goes_on_after_a_repeated_forward(
    tmp_path: Path, running: Standalone
) -> None:
    """The client repeats a forward until its answer is OK; the message group waits meanwhile."""
    running.put("topics/forwarded", messageType="FIFO", queues=1)
    running.put("groups/forwarding", deliveryOrder="FIFO", maxAttempts=1)
    names = {"topic": "forwarded", "group": "forwarding"}
    facts = run_java_client(tmp_path, "repeatedForward", running.grpc, **names)
    assert "OK" in facts.the("forwarded")["answer"]
    assert facts.the("done")["is_done"]
    assert [fact["body"] for fact in facts.of("received")] == ["first", "last"]


def test_priority_0_is_level_0_and_higher_priorities_come_first(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/urgent", messageType="PRIORITY")
    facts = run_java_client(tmp_path, "priorities", running.grpc, topic="urgent", group="urgent")
    assert [fact["body"] for fact in facts.of("received")] == ["7", "100", "1", "none", "0"]
    assert facts.the("error")["during"] == "negative"
    assert facts.the("error")["text"], "a negative priority is an error"
    assert running.lag("urgent") == 0
