"""The audit log of real processes: each changing operation of the REST API leaves one record."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from tests.support.clients.api import METADATA, Api, api, message
from tests.support.clients.commands import tidemill
from tests.support.clients.transactions import checking_producer, half_message, send_half
from tests.support.eventually import eventually
from tests.support.processes.killing import child_pid
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.replicated_standalone import FLAGS
from tests.support.worlds.access_world import signed
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

ROOT = Path(__file__).resolve().parents[2]
HOUR_MS = 3_600_000
CLAIMED = {"Tidemill-User": "tester"}
# Operations other than GET without a lasting change.
WITHOUT_RECORD = {
    "beginSession",
    "endSession",
    "checkAccess",
    "printStack",
    "verifyMessage",
    "convertDefinitions",
    "makeSupportBundle",
}


class World:
    """A standalone, its REST API, and the audited operations so far."""

    def __init__(self, running: Standalone) -> None:
        self.running = running
        self.http = httpx.Client(
            base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20, headers=CLAIMED
        )
        self.paths = operations()
        self.secret = ""  # of the user `shop`
        self.done: set[str] = set()

    def changes(self, **query: str) -> list[dict[str, Any]]:
        """Return the records of changes, the newest first."""
        asked = {"kind": "change", "pageSize": "1000", **query}
        found = self.http.get("/audit", params=asked).raise_for_status().json()
        assert "nextPageToken" not in found
        records: list[dict[str, Any]] = found["records"]
        return records

    def act(
        self,
        operation: str,
        resource: str,
        action: str,
        *names: object,
        body: dict[str, Any] | None = None,
        has_dry_run: bool = True,
        query: dict[str, str] | None = None,
        results: tuple[str, ...] = ("ok",),
    ) -> Any:
        """Do an operation; check that it leaves its records, and a dry run none."""
        method, template = self.paths[operation]
        path = template
        for name in names:
            begin, end = path.index("{"), path.index("}")
            path = path[:begin] + str(name) + path[end + 1 :]
        before = self.changes()
        if has_dry_run:
            planned = self.http.request(
                method, path, params={**(query or {}), "dryRun": "true"}, json=body
            )
            expected = 409 if "failed" in results else 200
            assert planned.status_code == expected, planned.text
            assert self.changes() == before, "a dry run leaves no record"
        answer = self.http.request(method, path, params=query, json=body)
        assert answer.is_success == ("failed" not in results), answer.text
        known = {one["id"] for one in before}
        new = [one for one in self.changes() if one["id"] not in known]
        assert [one["result"] for one in reversed(new)] == list(results)
        for record in new:
            assert record["call"] == f"{method} {template}"
            assert (record["resource"], record["action"]) == (resource, action)
            assert (record["claimedUser"], record["from"]) == ("tester", "127.0.0.1")
            assert record["id"].startswith("broker-0")
            assert record["process"]
        self.done.add(operation)
        return answer.json() if answer.content else None


@contextlib.contextmanager
def world_of(running: Standalone) -> Iterator[World]:
    world = World(running)
    with world.http:
        yield world


def operations() -> dict[str, tuple[str, str]]:
    """Return method and path template of each operation of the OpenAPI document."""
    document = json.loads((ROOT / "docs" / "openapi.json").read_text())
    return {
        operation["operationId"]: (method.upper(), path.removeprefix("/api/v1"))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("audit") / "data") as started:
        yield started


def change_topics(world: World) -> None:
    settings = {"messageType": "NORMAL", "queues": 4}
    world.act("putTopic", "Topic:orders", "Create", "orders", body=settings)
    [created] = world.changes(resource="Topic:orders")
    assert created["after"] == settings
    world.act("putTopic", "Topic:orders", "Update", "orders", body={"queues": 8})
    [changed, _] = world.changes(resource="Topic:orders")
    assert (changed["before"], changed["after"]) == ({"queues": 4}, {"queues": 8})
    before = world.changes()
    assert world.http.put("/topics/orders", json={"queues": 8}).is_success
    assert world.http.put("/topics/orders", json={"queues": 2}).status_code == 409
    assert world.changes() == before, "nothing has changed"
    secret = "a body with a secret"
    world.act(
        "sendMessage", "Topic:orders", "Pub", "orders", body={"body": secret}, has_dry_run=False
    )
    before = world.changes()
    world.http.post(
        "/topics/orders/messages:batch",
        content='{"body": "a body with a secret"}\n{"tag": "no body"}\n',
        headers={"Content-Type": "application/x-ndjson"},
    ).raise_for_status()
    record, *others = world.changes()
    assert (record["call"], others) == ("POST /topics/{topic}/messages:batch", before)
    assert (record["resource"], record["action"]) == ("Topic:orders", "Pub")
    world.done.add("sendMessages")
    assert secret not in json.dumps(world.changes())


def free_dedup_key(world: World) -> None:
    """Free the key of a message, which contains a slash."""
    world.http.put("/topics/keyed", json={"dedup": {}}).raise_for_status()
    sent = {"body": "b", "messageGroup": "g"}
    first = world.http.post(
        "/topics/keyed/messages", json=sent, headers={"Idempotency-Key": "a/b"}
    ).json()
    query = {"messageGroup": "g"}
    world.act("deleteDedupKey", "Topic:keyed", "Update", "keyed", "a%2Fb", query=query)
    freed = world.changes(resource="Topic:keyed")[0]
    # A single broker group owns all keys, so nothing changes.
    world.act("spreadTopic", "Topic:keyed", "Update", "keyed", results=())
    assert freed["before"]["key"] == "a/b"
    assert freed["before"]["messageId"] == first["messageId"]
    assert freed["before"]["messageGroup"] == "g"


async def change_groups(world: World, client: Api) -> None:
    act = world.act
    act("putGroup", "Group:billing", "Create", "billing", body={})
    [held] = await client.receive("orders", "billing", batch_size=1, invisible_ms=HOUR_MS)
    assert held.body
    act("releaseDeliveries", "Group:billing", "Update", "billing", body={"topic": "orders"})
    reset = {"topic": "orders", "to": "earliest"}
    act("resetOffset", "Group:billing", "Update", "billing", body=reset)
    act("pauseGroup", "Group:billing", "Update", "billing", body={"reason": "a test"})
    act("resumeGroup", "Group:billing", "Update", "billing")
    level = {"level": "debug", "forMs": 60_000}
    done = "begun", "ok"
    act("setLogLevel", "Process:broker-0", "Update", "broker-0", body=level, results=done)
    stored = await client.stub.UpdateOffset(
        service.UpdateOffsetRequest(
            group=v2.Resource(name="billing"),
            message_queue=v2.MessageQueue(
                topic=v2.Resource(name="orders"), id=0, broker=v2.Broker(name="broker-0")
            ),
            offset=0,
        ),
        metadata=METADATA,
        timeout=20,
    )
    assert stored.status.code == v2.OK
    pulled = {"topic": "orders"}
    act("forgetPullOffsets", "Group:billing", "Update", "billing", body=pulled)
    world.http.put("/topics/fifo", json={"messageType": "FIFO", "queues": 1})
    world.http.put("/groups/fifo", json={"deliveryOrder": "FIFO"})
    await client.send(message("fifo", b"a", message_group="one"))
    assert await client.receive("fifo", "fifo", batch_size=1, invisible_ms=HOUR_MS)
    lock = {"topic": "fifo", "queue": 0}
    act("releaseLock", "Group:fifo", "Update", "fifo", body=lock)


def change_timers(world: World) -> None:
    world.http.put("/topics/later", json={"messageType": "DELAY"})
    ids = []
    for _ in range(3):
        sent = world.http.post("/topics/later/messages", json={"body": "m", "delayMs": HOUR_MS})
        ids.append(sent.json()["timerId"])
    names = [f"Timer:{one}" for one in ids]
    delay = {"delayMs": 2 * HOUR_MS}
    act = world.act
    act("rescheduleTimer", names[0], "Update", ids[0], body=delay)
    act("cancelTimer", names[1], "Update", ids[1])
    [cancelled] = world.changes(resource=names[1])
    assert (cancelled["before"]["state"], cancelled["after"]["state"]) == ("PENDING", "CANCELLED")
    before = world.changes()
    planned = world.http.post(f"/timers/{ids[0]}:cancel", params={"dryRun": "true"})
    assert planned.json()["outcome"] == "DONE"
    for query in ({"dryRun": "true"}, {}):
        repeated = world.http.post(f"/timers/{ids[1]}:cancel", params=query)
        assert repeated.json()["outcome"] == "ALREADY_CANCELLED"
    assert world.changes() == before, "a second cancel changes nothing"
    act("fireTimer", names[2], "Update", ids[2])
    change_several_timers(world)


def change_several_timers(world: World) -> None:
    """Cancel, move and fire timers by ids, and cancel those of a filter."""
    sent = [
        world.http.post("/topics/later/messages", json={"body": "m", "delayMs": HOUR_MS}).json()
        for _ in range(3)
    ]
    ids = [f"{one['broker']}:{one['timerId']}" for one in sent]
    resource, act = "Topic:later", world.act
    act("cancelTimers", resource, "Update", body={"ids": ids[:1]})
    act("rescheduleTimers", resource, "Update", body={"ids": ids[1:2], "shiftMs": HOUR_MS})
    act("fireTimers", resource, "Update", body={"ids": ids[2:]})
    wanted: dict[str, Any] = {"filter": {"topic": "later"}}
    planned = world.http.post("/timers:cancel", json=wanted, params={"dryRun": "true"}).json()
    wanted |= {"asOfMs": planned["asOfMs"], "maxCount": 100}
    act("cancelTimers", resource, "Update", body=wanted, has_dry_run=False)
    record, *_ = world.changes(resource=resource)
    assert (record["after"]["kind"], record["after"]["timers"]) == ("CANCEL_TIMERS", 2)


async def change_transactions(world: World, client: Api) -> None:
    """Decide two transactions, check one, and recover expired ones."""

    async def act(*arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(world.act, *arguments, **options)

    policy = {"firstCheckMs": 1_000, "periodMs": 1_000, "attempts": 1}
    world.http.put(
        "/topics/halves", json={"messageType": "TRANSACTION", "transaction": policy}
    ).raise_for_status()
    ids = {
        name: await send_half(client, half_message("halves", name.encode(), first_check_ms=HOUR_MS))
        for name in ("commit", "rollBack", "check")
    }
    for name, state in (("commit", "COMMITTED"), ("rollBack", "ROLLED_BACK")):
        resource = f"Transaction:{ids[name]}"
        changed = await act(f"{name}Transaction", resource, "Update", ids[name])
        assert changed["transaction"]["state"] == state
        [record] = world.changes(resource=resource)
        assert (record["before"]["state"], record["after"]["state"]) == ("OPEN", state)
    await act("checkTransaction", f"Transaction:{ids['check']}", "Update", ids["check"])
    expired = [await send_half(client, half_message("halves", body)) for body in (b"1", b"2", b"3")]
    async with checking_producer(client, ["halves"]):
        query = {"topic": "halves", "state": "EXPIRED"}

        def are_expired() -> bool:
            found = world.http.get("/transactions", params=query).raise_for_status().json()
            return len(found["transactions"]) == len(expired)

        await asyncio.to_thread(eventually, are_expired)
    resource = f"Transaction:{expired[0]}"
    recovered = await act("recoverTransaction", resource, "Update", expired[0])
    assert recovered["recovered"]["state"] == "OPEN"
    body = {"topic": "halves"}
    assert (await act("recoverTransactions", "Topic:halves", "Update", body=body))["count"] == 2


async def fail(world: World, client: Api, name: str, count: int) -> None:
    """Let a group fail messages of the topic with its name."""
    world.http.put(f"/topics/{name}", json={"queues": 1}).raise_for_status()
    world.http.put(f"/groups/{name}", json={"maxAttempts": 1}).raise_for_status()
    await client.send(*(message(name, b"%d" % n) for n in range(count)))
    held = 0
    while held < count:
        held += len(await client.receive(name, name, invisible_ms=HOUR_MS))
    released = world.http.post(f"/groups/{name}/deliveries:release", json={"all": True})
    assert released.json()["messages"] == count
    await asyncio.to_thread(eventually, lambda: len(dead_letters(world, name)) == count)


def dead_letters(world: World, group: str) -> list[dict[str, Any]]:
    found = world.http.get("/dead-letters", params={"group": group}).raise_for_status()
    letters: list[dict[str, Any]] = found.json()["deadLetters"]
    return letters


async def change_dead_letters(world: World, client: Api) -> None:
    """Replay, discard and copy a dead letter each, and cancel an operation on others."""
    await fail(world, client, "halted", 100)
    path = "/groups/halted/dead-letters:discard"
    wanted: dict[str, Any] = {"filter": {}}
    planned = world.http.post(path, json=wanted, params={"dryRun": "true"}).json()
    wanted |= {"asOfMs": planned["asOfMs"], "maxCount": 100, "ratePerSecond": 1}
    begun = world.http.post(path, json=wanted).json()["operation"]["id"]
    [record] = world.changes(resource="Group:halted")[:1]
    assert (record["after"]["kind"], record["after"]["deadLetters"]) == ("DISCARD", 100)
    await asyncio.to_thread(world.act, "cancelOperation", f"Operation:{begun}", "Update", begun)
    await fail(world, client, "doomed", 3)
    first, second, third = [one["id"] for one in dead_letters(world, "doomed")]
    resource, act = "Group:doomed", world.act
    act("replayDeadLetters", resource, "Update", "doomed", body={"ids": [first]})
    act("discardDeadLetters", resource, "Update", "doomed", body={"ids": [second, first]})
    [record, _, *_] = world.changes(resource=resource)
    assert (record["before"]["state"], record["after"]["state"]) == ("OPEN", "DISCARDED")
    assert record["after"]["deadLetters"] == 2
    act("copyDeadLetter", resource, "Update", "doomed", third, body={"body": "a secret"})
    assert "a secret" not in json.dumps(world.changes())
    assert [one["settledBy"] for one in dead_letters(world, "doomed")] == ["tester"] * 3


def change_users(world: World) -> None:
    act = world.act
    entries = [{"resource": "Topic:orders", "actions": ["Pub"]}]
    act("putRole", "Role:sellers", "Create", "sellers", body={"entries": entries})
    made = act("putUser", "User:shop", "Create", "shop", body={"roles": ["sellers"]})
    rotated = act("rotateUser", "User:shop", "Update", "shop", body={"retireAfterMs": HOUR_MS})
    token = act("createToken", "Token:ci", "Create", body={"name": "ci", "user": "shop"})
    key = act("addKey", "Cluster:security", "Create", results=("begun", "ok"))["keyId"]

    def is_everywhere() -> bool:
        known = world.http.get("/security/keys").json()
        return known["firstKeyId"] == key and not known["lacking"]

    eventually(is_everywhere)
    act("putSecurity", "Cluster:security", "Create", body={"mode": "permissive"})
    act("putSecurity", "Cluster:security", "Update", body={"mode": "off"})
    # The first page also names the key of new secrets.
    act("encryptSecrets", "Cluster:security", "Update", body={"keyId": key}, results=("ok", "ok"))
    known = json.dumps(world.changes())
    assert token["token"][-43:] not in known
    assert "sha256" not in known
    assert made["secret"] not in known
    assert rotated["secret"] not in known
    assert "sealed" not in known
    act("deleteToken", "Token:ci", "Delete", token["id"])
    limits = {"publishMessagesPerS": 100}
    act("putQuota", "Quota:topic:orders", "Create", "topic", "orders", body=limits)
    limits = {"publishMessagesPerS": 1}
    act("putQuota", "Quota:topic:orders", "Update", "topic", "orders", body=limits)
    act("deleteQuota", "Quota:topic:orders", "Delete", "topic", "orders")
    act("createBan", "Ban:user:shop", "Create", body={"user": "shop", "reason": "a loop"})
    act("createBan", "Ban:user:shop", "Update", body={"user": "shop", "reason": "two loops"})
    act("deleteBan", "Ban:user:shop", "Delete", "user:shop")
    act("deleteUser", "User:shop", "Delete", "shop")
    act("deleteRole", "Role:sellers", "Delete", "sellers")


def apply_definitions(world: World) -> None:
    """Each change of a file has the record of its own operation."""
    before, file = world.changes(), {"topics": [{"name": "defined"}], "groups": []}
    planned = world.http.post("/definitions:apply", json=file, params={"dryRun": "true"})
    assert len(planned.raise_for_status().json()["changes"]) == 1
    assert world.changes() == before, "a dry run leaves no record"
    begun = world.http.post("/definitions:apply", json=file).json()["operation"]["id"]
    eventually(lambda: world.http.get(f"/operations/{begun}").json()["state"] == "DONE")
    [record] = world.changes()[: len(world.changes()) - len(before)]
    assert (record["resource"], record["action"]) == ("Topic:defined", "Create")
    assert (record["call"], record["claimedUser"]) == ("PUT /topics/{topic}", "tester")
    world.done.add("applyDefinitions")


def change_broker_groups(world: World) -> None:
    [own] = world.http.get("/broker-groups").json()["items"]
    body = {"address": own["address"]}
    world.http.put("/broker-groups/broker-0", json=body).raise_for_status()
    other = {"address": "127.0.0.1:9", "force": True}
    act, name = world.act, "BrokerGroup:broker-9"
    act("addBrokerGroup", name, "Create", "broker-9", body=other)
    act("drainBrokerGroup", name, "Update", "broker-9")
    act("removeBrokerGroup", name, "Delete", "broker-9", query={"force": "true"})


async def end_clients(world: World, client: Api) -> None:
    """Kick the client that has received."""
    beat = service.HeartbeatRequest(client_type=v2.SIMPLE_CONSUMER, group=v2.Resource(name="fifo"))
    answer = await client.stub.Heartbeat(beat, metadata=METADATA, timeout=20)
    assert answer.status.code == v2.OK, answer
    client_id = dict(METADATA)["x-mq-client-id"]

    def is_listed() -> bool:
        """The stream for questions to the proxy opens within 2 s after a start of its broker."""
        return world.http.get(f"/clients/{client_id}").is_success

    await asyncio.to_thread(eventually, is_listed)
    done, failed = ("begun", "ok"), ("begun", "failed")
    for name, results in ((client_id, done), ("unknown", failed)):
        world.act(
            "kick", f"Client:{name}", "Update", name, has_dry_run=name != "unknown", results=results
        )


async def change_everything(world: World) -> None:
    async with api(world.running.grpc) as client:
        await asyncio.to_thread(change_topics, world)
        await change_groups(world, client)
        await end_clients(world, client)
        await change_transactions(world, client)
        await change_dead_letters(world, client)
    await asyncio.to_thread(free_dedup_key, world)
    await asyncio.to_thread(change_timers, world)
    world.act("purgeTopic", "Topic:orders", "Delete", "orders", body={"all": True})
    world.act("deleteGroup", "Group:billing", "Delete", "billing")
    world.act("deleteTopic", "Topic:orders", "Delete", "orders")
    change_users(world)
    apply_definitions(world)
    change_broker_groups(world)


def change_replicas(world: World) -> None:
    """Act on the replicas of a broker group; the controller rejects some of the actions."""
    act, name = world.act, "broker-0"
    group = f"BrokerGroup:{name}"
    done, failed = ("begun", "ok"), ("begun", "failed")
    for operation, resource, body, results in (
        ("setMinInSync", group, {"minInSync": 2}, done),
        ("transferMaster", group, {}, done),
        ("drainReplica", f"Replica:{name}-99", {"replica": 99}, failed),
        ("replaceMaster", group, {"target": 99, "reason": "a test"}, failed),
    ):
        act(operation, resource, "Update", name, body=body, results=results)
    act("forgetReplicas", group, "Delete", name, results=failed)


def test_every_changing_operation_leaves_its_records(running: Standalone, tmp_path: Path) -> None:
    """A new operation without a row here fails this test."""
    with world_of(running) as world:
        asyncio.run(change_everything(world))
    with standalone(tmp_path / "data", *FLAGS) as replicated, world_of(replicated) as of_replicas:
        change_replicas(of_replicas)
    changing = {name for name, (method, _) in operations().items() if method != "GET"}
    assert world.done | of_replicas.done == changing - WITHOUT_RECORD


# ---------------------------------------------------------------- refusals and accesses


class Secured(NamedTuple):
    """A standalone with its security on, and its command line."""

    running: Standalone
    world: World


@pytest.fixture
def world(running: Standalone) -> Iterator[World]:
    with world_of(running) as started:
        yield started


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    with standalone(tmp_path / "data") as started, world_of(started) as world:
        world.http.put("/topics/orders", json={"messageType": "NORMAL"}).raise_for_status()
        made = world.http.put("/users/shop", json={}).raise_for_status().json()
        ops = world.http.put("/users/ops", json={"type": "SUPER"}).raise_for_status().json()
        world.http.put("/security", json={"mode": "on"}).raise_for_status()
        world.http.auth = "ops", ops["secret"]
        world.secret = made["secret"]
        yield Secured(started, world)


def test_refused_calls_and_accesses_are_listed_and_logged(secured: Secured) -> None:
    running, world = secured

    async def send() -> int:
        async with grpc.aio.insecure_channel(running.grpc) as channel:
            headers = (*METADATA, *signed("shop", world.secret).items())
            call = channel.unary_unary(
                "/apache.rocketmq.v2.MessagingService/SendMessage",
                request_serializer=service.SendMessageRequest.SerializeToString,
                response_deserializer=service.SendMessageResponse.FromString,
            )
            request = service.SendMessageRequest(messages=[message("orders", b"m")])
            return int((await call(request, metadata=headers, timeout=20)).status.code)

    async def send_twice() -> list[int]:
        return [await send(), await send()]

    assert asyncio.run(send_twice()) == [40100, 40100]
    eventually(lambda: world.http.get("/audit?kind=refusal").json()["records"])
    record = world.http.get("/audit?kind=refusal").json()["records"][-1]
    assert (record["user"], record["call"], record["result"]) == ("shop", "SendMessage", "refused")
    assert (record["resource"], record["action"], record["code"]) == ("Topic:orders", "Pub", 40100)
    assert record["id"].startswith("proxy-0:")
    assert record["from"] == "127.0.0.1"
    client_id = record["clientId"]
    for wanted, count in ((client_id, 1), ("another", 0)):
        query = {"kind": "refusal", "clientId": wanted, "resource": "Topic:orders"}
        found = world.http.get("/audit", params=query).raise_for_status().json()["records"]
        assert len({one["id"] for one in found}) >= count
        assert {one["clientId"] for one in found} == ({client_id} if count else set())
    for action in ("Pub", "pub", "PUB"):
        found = world.http.get("/audit", params={"action": action}).raise_for_status().json()
        assert {one["action"] for one in found["records"]} == {"Pub"}
    assert world.http.get("/audit?action=publish").status_code == 400
    lines = [json.loads(line) for line in running.log.read_text().splitlines() if '"audit"' in line]
    assert [(line["process"], line["user"]) for line in lines if line.get("kind") == "refusal"]
    world.http.get("/topics/orders/messages", params={"key": "k"}).raise_for_status()
    found = world.http.get("/audit?kind=access&resource=Topic:orders").json()["records"]
    [access] = [one for one in found if one["call"] == "GET /topics/{topic}/messages"]
    assert (access["user"], access["via"]) == ("ops", "basic")
    assert (access["claimedUser"], access["process"]) == ("tester", "admin")
    assert world.secret not in running.log.read_text()


def test_pages_continue_over_all_sources(world: World) -> None:
    for number in range(7):
        world.http.put(f"/topics/page-{number}", json={}).raise_for_status()
    world.http.get("/topics/page-0/messages", params={"key": "k"})
    whole = world.http.get("/audit", params={"pageSize": "1000"}).json()["records"]
    paged: list[dict[str, Any]] = []
    query = {"pageSize": "3"}
    while True:
        page = world.http.get("/audit", params=query).raise_for_status().json()
        paged += page["records"]
        if "nextPageToken" not in page:
            break
        query["pageToken"] = page["nextPageToken"]
    assert paged == whole
    # The tests before may have left refusals: they change the mode.
    assert {record["kind"] for record in whole} >= {"change", "access"}
    assert [one["atMs"] for one in whole] == sorted((one["atMs"] for one in whole), reverse=True)
    assert world.http.get("/audit", params={"pageToken": "x"}).status_code == 400


def test_the_command_line_lists_the_newest_records(running: Standalone, world: World) -> None:
    world.http.put("/topics/listed", json={"messageType": "NORMAL", "queues": 2})
    shown = tidemill(running, "audit", "list", "--since", "1h", "--resource", "Topic:listed").stdout
    header, row = shown.splitlines()
    assert header.split() == ["TIME", "BY", "ACTION", "RESOURCE", "RESULT", "CHANGE"]
    assert "tester at 127.0.0.1  Create  Topic:listed  ok" in row
    assert row.rstrip().endswith("messageType NORMAL, queues 2")
    found = json.loads(
        tidemill(running, "audit", "list", "--resource=Topic:listed", "-o", "json").stdout
    )
    assert [one["resource"] for one in found] == ["Topic:listed"]
    unknown = tidemill(running, "audit", "list", "--resource", "Topic:unknown", "-o", "json")
    assert unknown.stdout == "[]\n"


# ---------------------------------------------------------------- kill -9 of the home


def until_up(act: Callable[[], httpx.Response]) -> httpx.Response:
    """Repeat a read until the broker is up."""

    def answer() -> httpx.Response | None:
        found = act()
        return found if found.is_success else None

    found = eventually(answer, within_ms=60_000)
    assert found is not None
    return found


def test_each_applied_change_has_one_record_after_kills_of_the_home(tmp_path: Path) -> None:
    """S-15. A change without an answer has its record if it was applied, else none."""
    with standalone(tmp_path / "data") as running, world_of(running) as world:

        async def change_while_killed() -> None:
            async with httpx.AsyncClient(
                base_url=f"{running.admin}/api/v1", trust_env=False, timeout=20
            ) as client:
                created: asyncio.Queue[str] = asyncio.Queue()

                async def put(name: str) -> None:
                    settings = {"messageType": "NORMAL", "queues": 4}
                    answer = await client.put(f"/topics/{name}", json=settings)
                    # After a lost creation, the second request would create the topic.
                    if answer.is_success:
                        created.put_nowait(name)
                        await client.put(f"/topics/{name}", json={"queues": 20})

                for number in range(3):
                    async with asyncio.TaskGroup() as tasks:
                        for n in range(40):
                            tasks.create_task(put(f"t{number}-{n}"))
                        for _ in range(15):
                            await created.get()
                        os.kill(child_pid(running, "broker-0"), signal.SIGKILL)
                    while not created.empty():
                        created.get_nowait()
                    await asyncio.to_thread(until_up, lambda: world.http.get("/topics"))

        asyncio.run(change_while_killed())
        topics = until_up(lambda: world.http.get("/topics?pageSize=1000")).json()["topics"]
        expected = {}
        for topic in topics:
            changed = ["Create", "Update"] if topic["queues"] == 20 else ["Create"]
            expected[f"Topic:{topic['name']}"] = changed
        found: dict[str, list[str]] = {}
        for record in reversed(world.changes()):
            found.setdefault(record["resource"], []).append(record["action"])
        assert found == expected
        assert len(found) >= 45
