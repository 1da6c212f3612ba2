"""Broker groups under one admin process: queries to all, drain, removal, and a hanging broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.clients.api import api, message
from tests.support.clients.commands import tidemill
from tests.support.clients.pulling import PullClient
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, broker, standalone
from tidemill.common.feature_level import FEATURE_LEVEL
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

NAMES = ["broker-0", "broker-1", "broker-2"]
CALL_S = 20.0  # The API's timeout for a hanging broker is 5 s.
COMMAND_S = 30.0
HIDDEN_MS = 600_000  # Longer than any test.
QUEUES = 2
COUNT = 24  # Message groups: enough to use every broker group.


# The API's timeout for a hanging broker, in tests that repeat the request.
IMPATIENT = "request_timeout_ms: 1500\n"
# For tests that change the list of broker groups.
own_cluster = pytest.mark.parametrize("running", ["{}\n"], indirect=True, ids=["own"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("groups") / "data", "--groups=3") as started:
        yield started


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Standalone]:
    """A standalone with three broker groups: the shared one, or one with a configuration."""
    if not hasattr(request, "param"):
        yield request.getfixturevalue("shared")
        return
    config = tmp_path / "tidemill.yaml"
    config.write_text(request.param)
    with standalone(tmp_path / "data", "--groups=3", f"--config={config}") as started:
        yield started


@pytest.fixture
def rest(running: Standalone, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    base_url = f"{running.admin}/api/v1"
    with httpx.Client(base_url=base_url, trust_env=False, timeout=CALL_S) as client:
        client.put("/topics/orders", json={"queues": QUEUES}).raise_for_status()
        client.put("/groups/billing", json={}).raise_for_status()
        yield client
        if "shared" in request.fixturenames:
            for kind in ("topics", "groups"):
                for one in client.get(f"/{kind}").raise_for_status().json()[kind]:
                    client.delete(f"/{kind}/{one['name']}").raise_for_status()


def send_all(rest: httpx.Client) -> list[dict[str, Any]]:
    """Send a message of each message group. All broker groups store some."""
    sent = []
    for n in range(COUNT):
        body = {"body": f"m{n}", "messageGroup": f"g{n}", "keys": ["key"]}
        sent.append(rest.post("/topics/orders/messages", json=body).raise_for_status().json())
    assert {each["broker"] for each in sent} == set(NAMES)
    return sent


def begin_to_read(rest: httpx.Client) -> dict[str, Any]:
    """Reset the consumer group to the beginning, also in queues that it has not read."""
    body = {"topic": "orders", "to": "earliest"}
    done: dict[str, Any] = rest.post("/groups/billing:resetOffset", json=body).json()
    return done


def progress(rest: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = rest.get("/groups/billing/progress").json()
    return found


def progress_of(rest: httpx.Client, group: str) -> dict[str, Any]:
    found: dict[str, Any] = rest.get(f"/groups/{group}/progress").raise_for_status().json()
    return found


def group_of(rest: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = rest.get(f"/broker-groups/{name}").raise_for_status().json()
    return found


def consume_all(running: Standalone, rest: httpx.Client, topic: str = "orders") -> None:
    async def scenario() -> None:
        async with api(running.grpc) as client:
            while progress(rest)["total"]["lag"]:
                for one in await client.receive(topic, "billing"):
                    handle = one.system_properties.receipt_handle
                    await client.ack(topic, "billing", [handle])

    asyncio.run(scenario())


@contextlib.contextmanager
def hanging(running: Standalone, name: str) -> Iterator[None]:
    """Freeze a process for the block."""
    os.kill(running.processes[name].pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(running.processes[name].pid, signal.SIGCONT)


def test_a_type_does_not_change_while_another_broker_group_than_the_home_has_messages(
    rest: httpx.Client,
) -> None:
    for n in range(COUNT):
        rest.put("/topics/typed", json={"queues": 1}).raise_for_status()
        body = {"body": "m", "messageGroup": f"g{n}"}
        sent = rest.post("/topics/typed/messages", json=body).raise_for_status().json()
        if sent["broker"] != NAMES[0]:
            break
        rest.delete("/topics/typed").raise_for_status()
    changed = rest.put("/topics/typed", json={"messageType": "NORMAL"})
    assert changed.status_code == 409
    detail = changed.json()["detail"]
    assert f"has 1 messages and 0 delayed ones at {sent['broker']}" in detail
    assert "only with force" in detail
    assert rest.put("/topics/typed", json={"messageType": "MIXED"}).is_success
    assert rest.put("/topics/typed", json={"messageType": "NORMAL", "force": True}).is_success


def test_queries_cover_all_broker_groups(running: Standalone, rest: httpx.Client) -> None:
    listed = rest.get("/broker-groups").json()["items"]
    assert [group["name"] for group in listed] == NAMES
    assert [group["isHome"] for group in listed] == [True, False, False]
    assert listed[0] == {
        "name": "broker-0",
        "state": "active",
        "isHome": True,
        "address": listed[0]["address"],
        "reachable": True,
        "master": "broker-0",
        "epoch": 1,
        "featureLevel": FEATURE_LEVEL,
        "replicas": [{"name": "broker-0", "role": "master", "inSync": True, "behindBytes": 0}],
    }
    sent = send_all(rest)
    check_messages(running, rest, sent)
    queues = rest.get("/topics/orders").json()["queueStatus"]
    assert [(q["broker"], q["queueId"]) for q in queues] == [(n, q) for n in NAMES for q in (0, 1)]
    assert sum(queue["maxOffset"] for queue in queues) == COUNT
    assert rest.delete("/topics/orders?dryRun=true").json()["messages"] == COUNT

    reset = begin_to_read(rest)
    assert [(q["broker"], q["queueId"], q["toOffset"]) for q in reset["queues"]] == [
        (name, queue, 0) for name in NAMES for queue in range(QUEUES)
    ]
    total = progress(rest)["total"]
    assert (total["lag"], total["stored"]) == (COUNT, COUNT)
    assert rest.delete("/groups/billing?dryRun=true").json()["lag"] == COUNT
    consume_all(running, rest)
    assert progress(rest)["total"] == {
        "lag": 0,
        "ready": 0,
        "blocked": 0,
        "inFlight": 0,
        "stored": COUNT,
    }


def check_messages(running: Standalone, rest: httpx.Client, sent: list[dict[str, Any]]) -> None:
    """Check that messages are found, shown and read at the broker group of their message group."""
    found = rest.get("/topics/orders/messages?key=key&limit=100").json()["messages"]
    by_id = {each["messageId"]: each for each in found}
    for each in sent:
        shown = by_id[each["messageId"]]
        assert [shown[key] for key in ("broker", "queueId", "queueOffset")] == [
            each[key] for key in ("broker", "queueId", "queueOffset")
        ]
    stored = [each["storedAtMs"] for each in found]
    assert stored == sorted(stored, reverse=True)
    last = sent[-1]
    path = f"/topics/orders/messages/{last['messageId']}"
    [shown] = rest.get(path).json()["messages"]
    assert shown["broker"] == last["broker"]
    peeked = tidemill(running, "message", "peek", "orders", "--limit=100", "-o", "json")
    read = json.loads(peeked.stdout)["messages"]
    assert {each["messageId"] for each in read} == by_id.keys()
    places = [(each["broker"], each["queueId"], each["queueOffset"]) for each in read]
    assert places == sorted(places)
    table = tidemill(running, "message", "peek", "orders", "--queue=0", "--limit=1").stdout
    assert len(table.splitlines()) == 1 + len(NAMES)


@own_cluster
def test_a_broker_group_is_added_drained_and_removed(
    running: Standalone, rest: httpx.Client, tmp_path: Path
) -> None:
    with broker(tmp_path / "fourth", "--name=broker-3") as (process, address, _):
        added = tidemill(running, "broker-group", "add", "broker-3", address)
        assert added.stdout.startswith(f"broker group broker-3 at {address} is a member")
        eventually(lambda: "reason" not in group_of(rest, "broker-3"))
        assert group_of(rest, "broker-3")["epoch"] == 1
        check_draining(running, rest)
        names = [group["name"] for group in rest.get("/broker-groups").json()["items"]]
        assert names == ["broker-0", "broker-2", "broker-3"]
        # The other broker groups now store its message groups.
        for n in range(COUNT):
            body = {"body": "again", "messageGroup": f"g{n}"}
            assert rest.post("/topics/orders/messages", json=body).json()["broker"] in names
        process.kill()
        process.wait()
        check_dead(running, rest, "broker-3")


def check_dead(running: Standalone, rest: httpx.Client, name: str) -> None:
    """Check that answers name a broker group that is down. It can be drained but not removed."""
    assert rest.get("/topics/orders").json()["unreachable"] == [name]
    tidemill(running, "broker-group", "drain", name, "--yes")
    shown = group_of(rest, name)
    assert (shown["state"], shown["reachable"]) == ("draining", False)
    assert "left" not in shown, "nobody knows"
    assert "backlog unknown" in tidemill(running, "broker-group", "show", name).stdout
    assert rest.delete(f"/broker-groups/{name}?dryRun=true").status_code == 409
    assert not rest.delete(f"/broker-groups/{name}").is_success
    forced = ("broker-group", "remove", name, "--force")
    unknown_backlog = "its backlog is given up; its size is unknown"
    assert unknown_backlog in tidemill(running, *forced, "--dry-run").stdout
    assert group_of(rest, name)["state"] == "draining"
    removed = tidemill(running, *forced, "--yes")
    assert removed.stdout == f"broker group {name} is removed: {unknown_backlog}\n"
    assert rest.get(f"/broker-groups/{name}").status_code == 404
    # Other broker groups store its message groups.
    for n in range(COUNT):
        body = {"body": "again", "messageGroup": f"g{n}"}
        rest.post("/topics/orders/messages", json=body).raise_for_status()


def check_draining(running: Standalone, rest: httpx.Client) -> None:
    send_all(rest)
    begin_to_read(rest)
    for path in ("/broker-groups/broker-0:drain", "/broker-groups/broker-0:drain?dryRun=true"):
        assert rest.post(path).status_code == 409
    assert rest.delete("/broker-groups/broker-1").status_code == 409
    planned = rest.post("/broker-groups/broker-1:drain?dryRun=true").json()
    assert (planned["dryRun"], planned["group"]["state"]) == (True, "active")
    assert group_of(rest, "broker-1")["state"] == "active"

    drained = tidemill(running, "broker-group", "drain", "broker-1", "--yes")
    assert "messages, 0 in flight, 0 delayed" in drained.stdout
    left = group_of(rest, "broker-1")["left"]
    assert left["messages"] > 0
    for dry_run in ("true", "false"):
        refused = rest.delete(f"/broker-groups/broker-1?dryRun={dry_run}")
        assert refused.status_code == 409
        assert f"{left['messages']} messages are ready" in refused.json()["detail"]
    consume_all(running, rest)
    waited = tidemill(running, "broker-group", "drain", "broker-1", "--wait", "--yes")
    assert "broker-1: empty: it can be removed" in waited.stdout
    planned = rest.delete("/broker-groups/broker-1?dryRun=true").json()
    assert planned["group"]["left"] == {
        "messages": 0,
        "inFlight": 0,
        "delayed": 0,
        "halfMessages": 0,
        "dedupKeys": 0,
        "items": [],
        "unnamed": 0,
    }
    removed = tidemill(running, "broker-group", "remove", "broker-1", "--yes")
    assert removed.stdout == "broker group broker-1 is removed; its broker may be stopped\n"
    assert rest.get("/broker-groups/broker-1").status_code == 404


@own_cluster
def test_messages_of_a_group_that_has_never_polled_are_not_removed(
    running: Standalone, rest: httpx.Client
) -> None:
    rest.put("/groups/late", json={}).raise_for_status()
    send_all(rest)
    begin_to_read(rest)
    consume_all(running, rest)
    tidemill(running, "broker-group", "drain", "broker-1", "--yes")
    refused = tidemill(running, "broker-group", "remove", "broker-1", "--yes")
    assert "which has not read it there yet" in refused.stderr
    left = group_of(rest, "broker-1")["left"]
    [item] = left["items"]
    assert (item["topic"], item["group"], item["unread"]) == ("orders", "late", True)
    assert item["messages"] == left["messages"] > 0
    status = tidemill(running, "broker-group", "show", "broker-1").stdout
    assert f"orders for late: {left['messages']} (not read there yet)" in status

    planned = tidemill(running, "broker-group", "remove", "broker-1", "--force", "--dry-run")
    given_up = f"{left['messages']} messages, 0 in flight, 0 delayed are given up (orders for late"
    assert given_up in planned.stdout
    removed = rest.delete("/broker-groups/broker-1?force=true")
    assert removed.json()["group"]["left"] == left
    # No message was deleted: added again, the broker group still has its messages.
    address = removed.json()["group"]["address"]
    tidemill(running, "broker-group", "add", "broker-1", address)
    asyncio.run(receive_all_as(running, "late"))


@own_cluster
def test_removal_is_rejected_while_dedup_keys_are_known(
    running: Standalone, rest: httpx.Client
) -> None:
    """Consumers have acked the messages, but another broker group would store their repeats."""
    dedup = {"windowMs": HIDDEN_MS}
    rest.put("/topics/keyed", json={"queues": QUEUES, "dedup": dedup}).raise_for_status()
    rest.post("/groups/billing:resetOffset", json={"topic": "keyed", "to": "earliest"})
    for n in range(COUNT):
        key = {"Idempotency-Key": f"key-{n}"}
        rest.post("/topics/keyed/messages", json={"body": "m"}, headers=key).raise_for_status()
    consume_all(running, rest, "keyed")
    tidemill(running, "broker-group", "drain", "broker-1", "--yes")
    left = group_of(rest, "broker-1")["left"]
    assert (left["messages"], left["inFlight"]) == (0, 0)
    known = left["dedupKeys"]
    assert known > 0
    shown = f"0 messages, 0 in flight, 0 delayed, {known} dedup keys"
    assert shown in tidemill(running, "broker-group", "show", "broker-1").stdout
    for dry_run in ("true", "false"):
        refused = rest.delete(f"/broker-groups/broker-1?dryRun={dry_run}")
        assert refused.status_code == 409
        assert f"{known} dedup keys are known" in refused.json()["detail"]
    planned = tidemill(running, "broker-group", "remove", "broker-1", "--force", "--dry-run")
    assert f"{shown} are given up" in planned.stdout

    tidemill(running, "topic", "set", "keyed", "--dedup-window", "off")
    waited = tidemill(running, "broker-group", "drain", "broker-1", "--wait", "--yes")
    assert "broker-1: empty: it can be removed" in waited.stdout
    removed = tidemill(running, "broker-group", "remove", "broker-1", "--yes")
    assert removed.stdout == "broker group broker-1 is removed; its broker may be stopped\n"


@own_cluster
def test_removal_is_rejected_while_an_archive_has_unpulled_messages(
    running: Standalone, rest: httpx.Client
) -> None:
    """Consumers have acked the messages, but the archive has not sealed them yet."""
    rest.put("/groups/archive", json={}).raise_for_status()
    send_all(rest)
    begin_to_read(rest)
    consume_all(running, rest)
    queues = rest.get("/topics/orders").json()["queueStatus"]
    ends = {q["queueId"]: q["maxOffset"] for q in queues if q["broker"] == "broker-1"}
    with grpc.insecure_channel(running.grpc) as channel:
        puller = PullClient(channel)

        def report_offset(queue_id: int, offset: int) -> None:
            answer = puller.update_offset(
                "archive", "orders", offset, queue_id=queue_id, broker="broker-1"
            )
            assert answer.status.code == v2.OK

        last = max(ends, key=lambda queue_id: ends[queue_id])
        for queue_id, end in ends.items():
            report_offset(queue_id, end - (queue_id == last))
        tidemill(running, "broker-group", "drain", "broker-1", "--yes")
        refused = tidemill(running, "broker-group", "remove", "broker-1", "--yes")
        assert refused.returncode != 0
        what = f"orders, queue {last}: 1 for archive, which has not pulled them yet"
        assert what in refused.stderr
        [item] = group_of(rest, "broker-1")["left"]["items"]
        assert item == {
            "topic": "orders",
            "group": "archive",
            "messages": 1,
            "inFlight": 0,
            "unread": False,
            "pulledQueue": last,
        }
        planned = tidemill(running, "broker-group", "remove", "broker-1", "--force", "--dry-run")
        assert f"(orders, queue {last} for archive: 1 (not pulled there yet))" in planned.stdout
        report_offset(last, ends[last])
    removed = tidemill(running, "broker-group", "remove", "broker-1", "--yes")
    assert removed.stdout == "broker group broker-1 is removed; its broker may be stopped\n"


def test_forget_deletes_pull_offsets_at_every_broker_group(
    running: Standalone, rest: httpx.Client
) -> None:
    rest.put("/groups/archive", json={}).raise_for_status()
    rest.put("/topics/kept", json={"queues": 1}).raise_for_status()
    send_all(rest)
    with grpc.insecure_channel(running.grpc) as channel:
        puller = PullClient(channel)
        for topic in ("orders", "kept"):
            for broker_name in NAMES:
                answer = puller.update_offset("archive", topic, 0, broker=broker_name)
                assert answer.status.code == v2.OK

    def pulled() -> list[str]:
        return [each["topic"] for each in progress_of(rest, "archive").get("pulled", [])]

    assert sorted(pulled()) == ["kept", "orders"]
    forget = ("pull-offset", "delete", "archive", "--topic=orders")
    planned = tidemill(running, *forget, "--dry-run")
    assert planned.stdout.startswith("would be deleted: pull offsets of archive in 3 queues of")
    assert sorted(pulled()) == ["kept", "orders"]
    with hanging(running, "broker-2"):
        refused = tidemill(running, *forget, "--yes")
        assert "broker-2 cannot be reached: nothing was done" in refused.stderr
    done = tidemill(running, *forget, "--yes")
    assert done.stdout.startswith("deleted: pull offsets of archive in 3 queues of orders")
    assert pulled() == ["kept"]
    assert running.log.read_text().count("pull offsets forgotten") == len(NAMES)
    assert "nothing: archive has no pull offsets" in tidemill(running, *forget, "--yes").stdout
    unknown = ("pull-offset", "delete", "nobody", "--topic=orders", "--yes")
    assert tidemill(running, *unknown).returncode != 0


async def receive_all_as(running: Standalone, group: str) -> None:
    """Receive every message of every broker group."""
    found: set[bytes] = set()
    async with api(running.grpc) as client:
        while len(found) < COUNT:
            for one in await client.receive("orders", group):
                await client.ack("orders", group, [one.system_properties.receipt_handle])
                found.add(one.body)


@pytest.mark.heavy
@pytest.mark.parametrize("running", [IMPATIENT], indirect=True, ids=["impatient"])
def test_listings_name_the_unreachable_broker_group(
    running: Standalone, rest: httpx.Client
) -> None:
    sent = send_all(rest)
    begin_to_read(rest)
    lost = [each for each in sent if each["broker"] == "broker-2"]
    with hanging(running, "broker-2"):
        found = progress(rest)
        assert found["unreachable"] == ["broker-2"]
        assert found["total"]["lag"] == COUNT - len(lost)
        shown = tidemill(running, "group", "show", "billing")
        assert "broker-2 is unreachable" in shown.stderr
        # A change for all broker groups is applied at none.
        refused = begin_to_read(rest)
        assert (refused["status"], refused["title"]) == (503, "BrokerGroupUnreachable")
        assert "broker-2 cannot be reached: nothing was done" in refused["detail"]
        # The reachable broker groups do not have the message. The unreachable one may have it.
        shown_message = rest.get(f"/topics/orders/messages/{lost[0]['messageId']}")
        assert shown_message.status_code == 503
        listed = rest.get("/broker-groups").json()["items"]
        assert [group["reachable"] for group in listed] == [True, True, False]
    with hanging(running, "broker-0"):
        # The home is down. The API knows the members from before.
        assert progress(rest)["unreachable"] == ["broker-0"]
        topics = rest.get("/topics").raise_for_status().json()
        assert [topic["name"] for topic in topics["topics"]] == ["orders"]
        groups = rest.get("/groups").raise_for_status().json()
        assert [group["name"] for group in groups["groups"]] == ["billing"]
        assert topics["unreachable"] == groups["unreachable"] == ["broker-0"]
        assert rest.get("/groups/billing").json()["name"] == "billing"
        listed = tidemill(running, "topic", "list")
        assert "orders" in listed.stdout
        assert "broker-0 is unreachable; its part of the list is missing" in listed.stderr
    assert "unreachable" not in progress(rest)


def test_a_dead_letter_topic_is_deleted_at_every_broker_group(
    running: Standalone, rest: httpx.Client
) -> None:
    rest.put("/groups/strict", json={"maxAttempts": 1}).raise_for_status()
    send_all(rest)

    async def read() -> None:
        async with api(running.grpc) as client:
            while dead_letters(rest) < COUNT:
                await client.receive("orders", "strict", invisible_ms=1_000)

    asyncio.run(read())
    with hanging(running, "broker-2"):
        assert rest.delete("/topics/%25DLQ%25strict").status_code == 503
    assert dead_letters(rest) == COUNT
    assert rest.delete("/topics/%25DLQ%25strict").status_code == 200
    assert rest.get("/topics/%25DLQ%25strict").status_code == 404


def dead_letters(rest: httpx.Client) -> int:
    found = rest.get("/topics/%25DLQ%25strict").json().get("queueStatus", [])
    return sum(queue["maxOffset"] for queue in found)


def test_timers_with_equal_ids_are_distinguished_by_broker_group(
    running: Standalone, rest: httpx.Client
) -> None:
    sent: list[str] = []

    async def schedule(due_at_ms: int) -> None:
        async with api(running.grpc) as client:
            for _ in range(6):
                sent.append(f"id-{len(sent)}")
                answer = await client.send(
                    message("orders", b"later", message_id=sent[-1], due_at_ms=due_at_ms)
                )
                assert answer.status.code == v2.OK

    due_at_ms = (int(time.time()) + 3600) * 1000
    page: dict[str, Any] = {"timers": []}
    # The proxy chooses the broker group of a message. All messages of a turn are due in the same
    # millisecond, so the order must decide.
    while len({timer["broker"] for timer in page["timers"]}) < len(NAMES):
        assert len(sent) < 60
        asyncio.run(schedule(due_at_ms + len(sent)))
        page = rest.get("/timers").json()
    assert {timer["messageId"] for timer in page["timers"]} == set(sent)
    order = [(t["dueAtMs"], t["timerId"], t["broker"]) for t in page["timers"]]
    assert order == sorted(order)
    assert {timer["broker"] for timer in page["timers"]} == set(NAMES)
    paged, token = [], None
    while True:
        query = {"pageSize": 1} | ({"pageToken": token} if token else {})
        part = rest.get("/timers", params=query).json()
        paged += part["timers"]
        token = part.get("nextPageToken")
        if token is None:
            break
    assert paged == page["timers"]

    refused = rest.get("/timers/0")
    assert refused.status_code == 409
    assert "?broker=" in refused.json()["detail"]
    [timer] = [t for t in paged if (t["timerId"], t["broker"]) == (0, "broker-1")]
    assert rest.get("/timers/0?broker=broker-1").json() == timer
    cancelled = tidemill(running, "timer", "cancel", "0", "--broker=broker-1", "--yes")
    assert cancelled.returncode == 0
    left = rest.get("/timers").json()["timers"]
    assert [each for each in paged if each != timer] == left
    assert rest.get("/timers/0?broker=nobody").status_code == 404


def test_a_locked_queue_is_released_at_the_broker_group_that_has_it(
    running: Standalone, rest: httpx.Client
) -> None:
    rest.put("/groups/ordered", json={"deliveryOrder": "FIFO"}).raise_for_status()
    sent = send_all(rest)

    async def lock_all() -> None:
        async with api(running.grpc) as client:
            while not all(queue_of(each) in locked(rest) for each in sent):
                await client.receive("orders", "ordered", invisible_ms=HIDDEN_MS)

    asyncio.run(lock_all())
    body = {"topic": "orders", "queue": sent[0]["queueId"]}
    refused = rest.post("/groups/ordered:releaseLock", json=body)
    assert refused.status_code == 409
    assert "name the broker group" in refused.json()["detail"]
    place = queue_of(sent[0])
    released = tidemill(
        running,
        "group",
        "unlock",
        "ordered",
        "--topic=orders",
        f"--queue={place[1]}",
        f"--broker={place[0]}",
        "--yes",
    )
    assert released.returncode == 0
    assert place not in locked(rest)
    others = {queue_of(each) for each in sent} - {place}
    assert others <= locked(rest)


def test_queues_of_several_broker_groups_are_reset_together_or_not_at_all(
    running: Standalone, rest: httpx.Client
) -> None:
    sent = send_all(rest)
    begin_to_read(rest)
    rest.post("/groups/billing:resetOffset", json={"topic": "orders", "to": "latest"})
    ends = {queue_of(each): each["queueOffset"] + 1 for each in sent}
    first, second = sorted(key for key in ends if key[0] in NAMES[1:])[::2][:2]

    def reset(*offsets: tuple[tuple[str, int], int]) -> httpx.Response:
        queues = [{"broker": b, "queue": q, "offset": offset} for (b, q), offset in offsets]
        return rest.post("/groups/billing:resetOffset", json={"topic": "orders", "queues": queues})

    refused = reset((first, 0), (second, ends[second] + 1))
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith(f"{second[0]}: queue {second[1]} has the offsets 0")
    assert progress(rest)["total"]["lag"] == 0
    nameless = {"topic": "orders", "queues": [{"queue": 0, "offset": 0}]}
    refused = rest.post("/groups/billing:resetOffset", json=nameless)
    assert "name the broker of queue 0" in refused.json()["detail"]
    tag = rest.get("/groups/billing").headers["ETag"]
    queues = [f"--queue={broker}/{queue}=0" for broker, queue in (first, second)]
    done = tidemill(running, "group", "reset", "billing", "--topic=orders", *queues, "--yes")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert rows == [[str(q), str(ends[b, q]), "0", b] for b, q in (first, second)]
    assert progress(rest)["total"]["lag"] == ends[first] + ends[second]
    body = {"topic": "orders", "queues": [{"broker": first[0], "queue": first[1], "offset": 0}]}
    path = "/groups/billing:resetOffset"
    assert rest.post(path, json=body, headers={"If-Match": tag}).status_code == 200


def queue_of(sent: dict[str, Any]) -> tuple[str, int]:
    return sent["broker"], sent["queueId"]


def locked(rest: httpx.Client) -> set[tuple[str, int]]:
    found = rest.get("/groups/ordered/progress").json()
    return {(lock["broker"], lock["queue"]) for lock in found["locks"]}


def test_the_first_message_of_a_message_group_makes_its_topic(rest: httpx.Client) -> None:
    sent = []
    for n in range(COUNT):
        body = {"body": "b", "messageGroup": f"g{n}"}
        sent.append(
            rest.post("/topics/made/messages?create=true", json=body).raise_for_status().json()
        )
    assert {each["broker"] for each in sent} == set(NAMES)
