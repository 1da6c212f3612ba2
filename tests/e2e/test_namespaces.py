"""Two namespaces use the same names of topics and groups and never meet, through any call."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import grpc
import pytest

from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    NODE_PACKAGES,
    needs,
    run_go_client,
    run_java_client,
    run_node_client,
    run_python_client,
    staying_client,
)
from tests.support.clients.commands import tidemill
from tests.support.clients.pulling import PullClient
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

BAD_REQUEST = 40000
INVALID_RECEIPT_HANDLE = 40013
NAMES = ["tenant-a", "tenant-b"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    data_dir = tmp_path_factory.mktemp("namespaces") / "data"
    with standalone(data_dir, "--proxies=2") as started:
        yield started


def test_no_message_of_another_namespace_comes_through_retries_and_dead_letters(
    tmp_path: Path, running: Standalone
) -> None:
    for name in NAMES:
        running.put(f"groups/{name}%25worker", maxAttempts=2)
    facts = run_python_client(
        tmp_path, "namespaces", running.grpc, topic="orders", group="worker", names=NAMES
    )
    found = defaultdict(list)
    for fact in facts.of("received"):
        found[fact["of"], fact["during"]].append((fact["body"], fact["attempt"]))
        assert fact["shown"] == fact["of"]
        is_dead = fact["during"] == "dead letters"
        assert fact["topic"] == ("%DLQ%worker" if is_dead else "orders")
    for name in NAMES:
        bodies = [f"{name} {n}" for n in range(2)]
        received = [(body, attempt) for attempt in (1, 2) for body in bodies]
        assert sorted(found[name, "receive"], key=lambda each: each[::-1]) == received
        assert sorted(found[name, "dead letters"]) == [(body, 1) for body in bodies]
        assert running.lag(f"{name}%25worker") == 0
    assert {fact["count"] for fact in facts.of("left")} == {0}
    topics = {topic["name"] for topic in running.get("topics?includeSystem=true")["topics"]}
    derived = {
        each.format(name)
        for name in NAMES
        for each in ("{0}%orders", "%DLQ%{0}%worker", "%RETRY%{0}%worker+{0}%orders")
    }
    assert derived <= topics
    assert "orders" not in topics


def test_only_its_own_namespace_recalls_a_message_or_acks_it(
    tmp_path: Path, running: Standalone
) -> None:
    for name in NAMES:
        running.put(f"topics/{name}%25later", messageType="DELAY")
    facts = run_python_client(
        tmp_path, "recall_in_namespaces", running.grpc, topic="later", group="later", names=NAMES
    )
    assert facts.the("received")["body"] == "tenant-a"
    errors = {fact["during"]: fact["code"] for fact in facts.of("error")}
    assert errors == {
        "recall by a stranger": BAD_REQUEST,
        "recall by the owner": None,
        "ack by a stranger": INVALID_RECEIPT_HANDLE,
    }
    assert facts.the("left")["count"] == 0


def test_push_consumers_of_one_group_name_share_nothing(
    tmp_path: Path, running: Standalone
) -> None:
    facts = run_python_client(
        tmp_path, "push_in_namespaces", running.grpc, topic="pushed", group="pushed", names=NAMES
    )
    assert facts.the("done")["is_done"]
    found = [(fact["of"], fact["body"]) for fact in facts.of("received")]
    assert sorted(found) == [(name, f"{name} {n}") for name in NAMES for n in range(10)]


def test_a_client_without_a_namespace_reads_a_topic_by_its_full_name(running: Standalone) -> None:
    running.put("topics/tenant-c%25read", queues=1)
    running.put("groups/tenant-c%25readers")
    with grpc.insecure_channel(running.grpc) as channel:
        client, full = PullClient(channel, namespace="tenant-c"), PullClient(channel)
        client.send("read", b"one")
        assert full.pull("tenant-c%read", 0).bodies == [b"one"]
        assert full.pull("read", 0).code == v2.TOPIC_NOT_FOUND
        [pulled] = client.pull("read", 0).messages
        assert pulled.topic == v2.Resource(resource_namespace="tenant-c", name="read")
        assert client.update_offset("readers", "read", 1).status.code == v2.OK
        assert full.get_offset("tenant-c%readers", "tenant-c%read").offset == 1
        assert client.query("read", v2.END).offset == 1
        [received] = full.receive("tenant-c%read", "tenant-c%readers")
        assert received.topic == v2.Resource(name="tenant-c%read")
        client.forward_to_dead_letters("read", "readers", received)
        [dead] = client.pull("%DLQ%readers", 0).messages
        assert dead.system_properties.dead_letter_queue.topic == "read"


def test_the_namespace_of_the_header_is_that_of_resources_without_one(running: Standalone) -> None:
    """Node.js clients omit the namespace in routes, receives and acks."""
    with grpc.insecure_channel(running.grpc) as channel:
        client = PullClient(channel, header_namespace="tenant-d")
        client.send("headed", b"one")
        [received] = client.receive("headed", "headed")
        assert received.topic == v2.Resource(resource_namespace="tenant-d", name="headed")
        illegal = PullClient(channel, namespace="a%b")
        assert illegal.pull("headed", 0).code == BAD_REQUEST
    assert running.lag("tenant-d%25headed") == 1  # in flight
    assert "headed" not in {topic["name"] for topic in running.get("topics")["topics"]}


@needs("node", NODE_PACKAGES)
def test_a_node_client_stays_in_its_namespace(tmp_path: Path, running: Standalone) -> None:
    facts = run_node_client(
        tmp_path, "roundTrip", running.grpc, topic="node", group="node", namespace="tenant-a"
    )
    assert len(facts.of("received")) == 5
    assert running.lag("tenant-a%25node") == 0
    topics = {topic["name"] for topic in running.get("topics")["topics"]}
    assert "tenant-a%node" in topics
    assert "node" not in topics


@needs("go", GO_PROGRAM)
def test_a_go_client_stays_in_its_namespace(tmp_path: Path, running: Standalone) -> None:
    facts = run_go_client(
        tmp_path, "roundTrip", running.grpc, topic="go", group="go", namespace="tenant-a"
    )
    assert len(facts.of("received")) == 7
    assert running.lag("tenant-a%25go") == 0
    topics = {topic["name"] for topic in running.get("topics")["topics"]}
    assert "tenant-a%go" in topics
    assert "go" not in topics


@needs("java", JAVA_CLASSES, JAVA_LIBRARIES)
def test_a_java_client_stays_in_its_namespace(tmp_path: Path, running: Standalone) -> None:
    facts = run_java_client(
        tmp_path, "push", running.grpc, topic="java", group="java", messages=5, namespace="tenant-a"
    )
    assert len(facts.of("received")) == 6
    assert running.lag("tenant-a%25java") == 0
    topics = {topic["name"] for topic in running.get("topics")["topics"]}
    assert "tenant-a%java" in topics
    assert "java" not in topics


def test_an_operator_names_topics_and_groups_of_a_namespace(running: Standalone) -> None:
    def shop(*arguments: str) -> CompletedProcess[str]:
        return tidemill(running, *arguments, "--namespace", "shop")

    assert shop("topic", "create", "orders", "--type", "delay").returncode == 0
    assert shop("group", "create", "billing", "--max-attempts=3").returncode == 0
    tidemill(running, "topic", "create", "unspaced")
    [topic] = json.loads(shop("topic", "list", "-o", "json").stdout)
    assert (topic["name"], topic["messageType"]) == ("shop%orders", "DELAY")
    [group] = json.loads(shop("group", "list", "-o", "json").stdout)
    assert (group["name"], group["maxAttempts"]) == ("shop%billing", 3)
    sent = json.loads(shop("message", "send", "orders", "x", "--delay=1h", "-o", "json").stdout)
    other = tidemill(
        running, "message", "send", "unspaced", "x", "--delay=1h", "--create", "-o", "json"
    )
    timers = [timer["timerId"] for timer in json.loads(shop("timer", "list", "-o", "json").stdout)]
    assert timers == [sent["timerId"]]
    assert json.loads(other.stdout)["timerId"] not in timers
    reset = shop("group", "reset", "billing", "--topic=orders", "--to=latest", "-y", "-o", "json")
    answer = json.loads(reset.stdout)
    assert (answer["group"], answer["topic"]) == ("shop%billing", "shop%orders")
    assert running.get("groups/shop%25billing/progress")["group"] == "shop%billing"
    assert shop("topic", "delete", "orders", "--yes").returncode == 0
    missing = tidemill(running, "topic", "show", "shop%orders")
    assert "TopicNotFound: there is no topic 'shop%orders'" in missing.stderr


def test_a_trace_in_a_namespace_leaves_out_the_messages_of_others(running: Standalone) -> None:
    with grpc.insecure_channel(running.grpc) as channel:
        for name in NAMES:
            PullClient(channel, namespace=name).send("traced", b"one", message_id="same")
    for name in [*NAMES, ""]:
        trace = tidemill(running, "message", "trace", "same", "-o", "json", "--namespace", name)
        topics = [event["topic"] for event in json.loads(trace.stdout)["events"]]
        assert topics == [f"{each}%traced" for each in NAMES if name in ("", each)]


def test_the_lag_before_the_first_poll_is_that_of_the_namespace(running: Standalone) -> None:
    for name in NAMES:
        running.put(f"groups/{name}%25early")
    running.put("groups/early")
    with grpc.insecure_channel(running.grpc) as channel:
        client = PullClient(channel, namespace=NAMES[0])
        client.send("awaited", b"one")
        for body in (b"two", b"three"):
            PullClient(channel).send("awaited", body)
        client.announce("awaited", "early")
        eventually(lambda: running.lag(f"{NAMES[0]}%25early") == 1)
    assert [running.lag(group) for group in (f"{NAMES[1]}%25early", "early")] == [0, 0]


def test_the_rest_api_lists_one_namespace(tmp_path: Path, running: Standalone) -> None:
    running.put("topics/store%25listed")
    running.put("groups/store%25listeners")
    running.put("topics/listed")
    assert [each["name"] for each in running.get("topics?namespace=store")["topics"]] == [
        "store%listed"
    ]
    assert [each["name"] for each in running.get("groups?namespace=store")["groups"]] == [
        "store%listeners"
    ]
    assert running.get("topics?namespace=nothing")["topics"] == []
    names = {"topic": "listed", "group": "listeners", "namespace": "store"}
    with staying_client("python", tmp_path, running.grpc, **names):
        [client] = running.get("clients?namespace=store&group=store%25listeners")["clients"]
        assert (client["group"], client["topics"]) == ("store%listeners", ["store%listed"])
        kinds = {each["kind"] for each in running.get("clients?namespace=store")["clients"]}
        assert kinds == {"producer", "pushConsumer"}
        assert len(running.get("clients?topic=store%25listed")["clients"]) == 2
        assert running.get("clients?namespace=stores")["clients"] == []
