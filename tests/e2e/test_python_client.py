"""The official Python client, unmodified, against a standalone with two proxies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.client_process import Facts, run_python_client
from tests.support.processes.children import two_proxies
from tests.support.processes.processes import LARGEST_MESSAGES, Standalone, standalone

INVALID_RECEIPT_HANDLE = 40013
BAD_REQUEST = 40000
NORMAL, FIFO, DELAY = 1, 2, 3
LATE_MS_MAX = 1_500  # on the slowest machine, the client's own time included


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    data_dir = tmp_path_factory.mktemp("python") / "data"
    with standalone(data_dir, "--proxies=2", LARGEST_MESSAGES) as started:
        yield started


def in_order(facts: Facts) -> dict[str, list[int]]:
    """The numbers received of each message group, in the order in which they came."""
    numbers = defaultdict(list)
    for received in facts.of("received"):
        group, number = received["body"].split()
        numbers[group].append(int(number))
    return numbers


def test_messages_of_every_kind_and_size_come_as_they_were_sent(
    tmp_path: Path, running: Standalone
) -> None:
    facts = run_python_client(tmp_path, "round_trip", running.grpc, topic="round", group="round")
    sent = {fact["id"]: fact["sha"] for fact in facts.of("sent")}
    received = {fact["id"]: fact for fact in facts.of("received")}
    assert len(sent) == 8
    assert {key: fact["sha"] for key, fact in received.items()} == sent
    assert len(facts.of("received")) == len(sent)
    assert {fact["attempt"] for fact in received.values()} == {1}
    assert {fact["type"] for fact in received.values()} == {NORMAL}
    assert not any(fact["is_corrupted"] for fact in received.values())
    by_body = {fact["body"]: fact for fact in received.values()}
    assert by_body["tagged"]["tag"] == "tag"
    assert by_body["x"]["tag"] is None
    assert by_body["keyed"]["keys"] == ["key-1", "key-2"]
    assert by_body["with properties"]["properties"] == {"name": "wert", "grün": "🌊 \\ \"'"}
    assert by_body["x"]["properties"] == {}
    assert max(fact["size"] for fact in received.values()) == 4 << 20
    assert facts.the("left")["count"] == 0


def test_a_message_that_is_not_acked_comes_back_and_its_old_handles_are_void(
    tmp_path: Path, running: Standalone
) -> None:
    facts = run_python_client(tmp_path, "redelivery", running.grpc, topic="again", group="again")
    first, second, third = facts.of("received")
    assert first["id"] == second["id"] == third["id"]
    assert [fact["attempt"] for fact in (first, second, third)] == [1, 2, 3]
    # The poll was waiting, so the message comes when its duration ends and not with the next poll.
    assert 1.5 < second["after_s"] < 4
    assert 0.5 < third["after_s"] < 3
    assert facts.the("changed")["is_new"]
    assert [error["code"] for error in facts.of("error")] == [INVALID_RECEIPT_HANDLE] * 2
    assert running.lag("again") == 0


def test_a_prolonged_delivery_outlives_its_first_duration(
    tmp_path: Path, running: Standalone
) -> None:
    facts = run_python_client(tmp_path, "extension", running.grpc, topic="longer", group="longer")
    assert facts.the("left")["count"] == 0
    assert facts.the("error")["text"] == ""


def test_a_tag_filter_passes_only_the_named_tags(tmp_path: Path, running: Standalone) -> None:
    facts = run_python_client(tmp_path, "tag_filter", running.grpc, topic="tags", group="tags")
    assert sorted(fact["tag"] for fact in facts.of("received")) == ["blue", "red"]
    assert facts.the("left")["count"] == 0


def test_message_groups_are_received_in_the_order_in_which_they_were_sent(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/ordered", messageType="FIFO", queues=4)
    running.put("groups/ordered", deliveryOrder="FIFO")
    facts = run_python_client(tmp_path, "fifo", running.grpc, topic="ordered", group="ordered")
    assert in_order(facts) == {
        "group-0": [0, 3, 6, 9],
        "group-1": [1, 4, 7, 10],
        "group-2": [2, 5, 8, 11],
    }
    assert facts.of("skipped")
    assert {fact["type"] for fact in facts.of("received")} == {FIFO}
    [skipped] = [fact for fact in facts.of("received") if fact["body"] == "group-0 3"]
    assert skipped["attempt"] == 2


def test_a_push_consumer_acks_successes_and_gets_failures_again(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("groups/push", retry={"customized": {"nextMs": [1000]}})
    facts = run_python_client(
        tmp_path, "push", running.grpc, topic="push", group="push", messages=5
    )
    assert facts.the("done")["is_done"]
    tries = [(fact["body"], fact["attempt"], fact["succeeds"]) for fact in facts.of("received")]
    assert sorted(tries) == [
        ("0", 1, True),
        ("1", 1, True),
        ("2", 1, False),
        ("2", 2, True),
        ("3", 1, True),
        ("4", 1, True),
    ]
    assert facts.the("left")["count"] == 0


def test_an_ordered_push_consumer_keeps_the_order_of_message_groups(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/ordered-push", messageType="FIFO", queues=4)
    running.put("groups/ordered-push", deliveryOrder="FIFO")
    facts = run_python_client(
        tmp_path, "push_fifo", running.grpc, topic="ordered-push", group="ordered-push", messages=30
    )
    assert facts.the("done")["is_done"]
    assert in_order(facts) == {f"group-{n}": list(range(n, 30, 3)) for n in range(3)}


def test_a_message_goes_to_the_dead_letter_topic_after_its_last_attempt(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("groups/dead", maxAttempts=2)
    facts = run_python_client(
        tmp_path, "dead_letter", running.grpc, topic="dead", group="dead", attempts=2
    )
    first, second, dead = facts.of("received")
    assert {fact["id"] for fact in (first, second, dead)} == {facts.the("sent")["id"]}
    assert [first["attempt"], second["attempt"], dead["attempt"]] == [1, 2, 1]
    assert running.lag("dead") == 0
    assert (dead["topic"], dead["body"], dead["tag"]) == ("%DLQ%dead", "poison", "tag")
    assert dead["properties"] == {"a": "b"}


def test_a_push_consumer_goes_on_after_a_repeated_forward(
    tmp_path: Path, running: Standalone
) -> None:
    """The client repeats a forward until it succeeds, and its thread consumes nothing meanwhile."""
    names = {"topic": "forwarded", "group": "forwarding"}
    running.put("topics/forwarded", messageType="FIFO")
    running.put("groups/forwarding", deliveryOrder="FIFO", maxAttempts=1)
    facts = run_python_client(tmp_path, "repeated_dead_letter", running.grpc, **names)
    assert facts.the("forwarded")["is_forwarded"]
    assert facts.the("done")["is_done"]
    assert [fact["body"] for fact in facts.of("received")] == ["first", "last"]
    assert running.lag("forwarding") == 0


def test_any_proxy_extends_and_acks_a_delivery(tmp_path: Path) -> None:
    with two_proxies(tmp_path) as (first, second):
        facts = run_python_client(
            tmp_path, "two_endpoints", first.grpc, second.grpc, topic="both", group="both"
        )
    assert facts.the("received")["body"] == "1"
    acked, again = facts.of("error")
    assert acked["text"] == ""
    assert again["code"] in {None, INVALID_RECEIPT_HANDLE}
    assert facts.the("left")["count"] == 0


def test_a_producer_and_a_push_consumer_outlive_killed_processes(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        pids = [running.processes[name].pid for name in ("proxy-0", "broker-0")]
        facts = run_python_client(
            tmp_path, "outage", running.grpc, topic="outage", group="outage", pids=pids
        )
    assert [(fact["body"], fact["is_there"]) for fact in facts.of("arrived")] == [
        ("before", True),
        ("after 0", True),
        ("after 1", True),
    ]


def test_an_unknown_topic_is_refused_where_use_does_not_create_it(tmp_path: Path) -> None:
    with standalone(
        tmp_path / "data", "--no-auto-create-topics", "--no-auto-create-groups"
    ) as running:
        facts = run_python_client(
            tmp_path, "unknown_topic", running.grpc, topic="unknown", group="unknown"
        )
    assert [error["during"] for error in facts.of("error")] == ["send", "subscribe"]
    assert all(error["text"] for error in facts.of("error"))


def test_a_message_whose_type_does_not_fit_its_topic_is_refused(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/only-normal", messageType="NORMAL")
    running.put("topics/only-fifo", messageType="FIFO")
    facts = run_python_client(
        tmp_path, "wrong_type", running.grpc, normal="only-normal", fifo="only-fifo"
    )
    errors = facts.of("error")
    assert len(errors) == 3
    assert all("message type not match" in error["text"] for error in errors)


def test_a_delayed_message_comes_when_it_is_due_unless_it_is_recalled(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/delayed", messageType="DELAY")
    facts = run_python_client(tmp_path, "delayed", running.grpc, topic="delayed", group="delayed")
    sent, recalled = facts.of("sent")
    assert [fact["id"] for fact in facts.of("recalled")] == [recalled["id"]] * 2
    received = facts.the("received")
    assert (received["id"], received["body"]) == (sent["id"], "delivered")
    assert (received["type"], received["attempt"]) == (DELAY, 1)
    assert received["due_ms"] == sent["due_ms"]
    assert 0 <= received["at_ms"] - sent["due_ms"] < LATE_MS_MAX
    assert facts.the("too late")["id"] == ""
    assert facts.the("error")["code"] == BAD_REQUEST
    assert facts.the("left")["count"] == 0


def test_priority_0_is_level_0_and_higher_priorities_come_first(
    tmp_path: Path, running: Standalone
) -> None:
    running.put("topics/urgent", messageType="PRIORITY")
    facts = run_python_client(tmp_path, "priorities", running.grpc, topic="urgent", group="urgent")
    assert [fact["body"] for fact in facts.of("received")] == ["7", "100", "1", "none", "0"]
    assert [fact["priority"] for fact in facts.of("received")] == [7, 100, 1, 0, 0]
    assert facts.the("error")["during"] == "negative"
    assert facts.the("error")["text"], "a negative priority is an error"
    assert running.lag("urgent") == 0
