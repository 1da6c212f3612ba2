"""One scenario with several official clients, unmodified, against a standalone with two proxies.

`tools/client_table.py` names these tests, with those of each client.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    NODE_PACKAGES,
    Fact,
    needs,
    run_go_client,
    run_java_client,
    run_node_client,
    run_python_client,
    staying_client,
)
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

LATE_MS_MAX = 1_500  # on the slowest machine, the client's own time included
MARKS = {
    "go": needs("go", GO_PROGRAM),
    "java": needs("java", JAVA_CLASSES),
    "node": needs("node", NODE_PACKAGES),
}
RUN = {
    "python": run_python_client,
    "go": run_go_client,
    "java": run_java_client,
    "node": run_node_client,
}


def with_clients(*languages: str) -> pytest.MarkDecorator:
    """Run a test with each of these clients, as its argument `language`."""
    return pytest.mark.parametrize(
        "language", [pytest.param(each, marks=MARKS.get(each, ())) for each in languages]
    )


def has_code(error: Fact, code: v2.Code.ValueType) -> bool:
    """Return whether an error of a client has a code; the Java client puts it into the text."""
    return error.get("code") == code or f"response-code={code}" in error["text"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    data_dir = tmp_path_factory.mktemp("scenarios") / "data"
    with standalone(data_dir, "--proxies=2") as started:
        yield started


@with_clients("go", "java")
def test_message_groups_keep_their_order_and_a_failing_message_becomes_a_dead_letter(
    language: str, tmp_path: Path, running: Standalone
) -> None:
    name = f"ordered-{language}"
    running.put(f"topics/{name}", messageType="FIFO", queues=4)
    running.put(f"groups/{name}", deliveryOrder="FIFO", maxAttempts=2)
    names = {"topic": name, "group": name, "messages": 12, "poison": "group-1 4"}
    facts = RUN[language](tmp_path, "pushFifo", running.grpc, **names)
    assert facts.the("done")["is_done"]
    numbers = defaultdict(list)
    for received in facts.of("received"):
        if received.get("succeeds"):
            group, number = received["body"].split()
            numbers[group].append(int(number))
    assert numbers == {"group-0": [0, 3, 6, 9], "group-1": [1, 7, 10], "group-2": [2, 5, 8, 11]}
    [dead] = [fact for fact in facts.of("received") if fact.get("isDead")]
    assert (dead["topic"], dead["body"]) == (f"%DLQ%{name}", "group-1 4")


@with_clients("go", "java")
def test_a_delayed_message_comes_when_it_is_due_unless_it_is_recalled(
    language: str, tmp_path: Path, running: Standalone
) -> None:
    name = f"delayed-{language}"
    running.put(f"topics/{name}", messageType="DELAY")
    facts = RUN[language](tmp_path, "delayed", running.grpc, topic=name, group=name)
    sent, recalled = facts.of("sent")
    assert [fact["id"] for fact in facts.of("recalled")] == [recalled["id"]] * 2
    received = facts.the("received")
    assert (received["id"], received["body"]) == (sent["id"], "delivered")
    assert 0 <= received["atMs"] - sent["dueMs"] < LATE_MS_MAX
    assert has_code(facts.the("error"), v2.MESSAGE_NOT_FOUND), facts.the("error")
    assert facts.the("left")["count"] == 0


@with_clients("python", "go", "java", "node")
def test_a_push_consumer_gets_the_messages_with_its_tags(
    language: str, tmp_path: Path, running: Standalone
) -> None:
    name = f"tags-{language}"
    names = {"topic": name, "group": name, "tags": "red || blue"}
    with staying_client(language, tmp_path, running.grpc, **names) as client:
        for tag in ("red", "green", "*", "blue", "Red", "re"):
            sent = tidemill(running, "message", "send", name, f"is {tag}", "--tag", tag)
            assert sent.returncode == 0, sent.stderr
        client.wait_for("received", 2)
        eventually(lambda: running.lag(name) == 0)
        assert sorted(each["tag"] for each in client.facts_of("received")) == ["blue", "red"]


@with_clients("python", "go", "java", "node")
def test_a_send_to_a_lite_topic_gets_not_implemented(
    language: str, tmp_path: Path, running: Standalone
) -> None:
    name = f"lite-{language}"
    running.put(f"topics/{name}", messageType="LITE")
    error = RUN[language](tmp_path, "lite", running.grpc, topic=name).the("error")
    assert has_code(error, v2.NOT_IMPLEMENTED), error


@with_clients("python", "go", "java", "node")
def test_a_dedup_key_is_stored_once(language: str, tmp_path: Path, running: Standalone) -> None:
    name = f"dedup-{language}"
    running.put(f"topics/{name}", dedup={})
    facts = RUN[language](tmp_path, "dedup", running.grpc, topic=name)
    ids = [fact["id"] for fact in facts.of("sent")]
    assert len(ids) == 3
    assert len(set(ids)) == 1, "the client gets the id of the first message"
    queues = running.get(f"topics/{name}")["queueStatus"]
    assert sum([one["maxOffset"] for one in queues]) == 1
