"""The rights of REST calls that their path does not tell, with a standalone in the mode `on`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

import httpx
import pytest

from tests.support.clients.api import POLL_MS_MIN, api
from tests.support.clients.transactions import half_message, send_half
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tests.support.worlds.access_world import signed
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

SECRET: Final = "a-secret-of-sixteen"
HOUR_MS: Final = 3_600_000
USERS: Final = {
    "creator": [("Topic:*", ["Create"]), ("Group:*", ["Create"])],
    "changer": [("Topic:*", ["Update"]), ("Group:*", ["Update"])],
    "reader": [("Topic:orders", ["Get"])],
    "consumer": [("Topic:orders", ["Get", "Sub"]), ("Group:billing", ["Sub", "Get"])],
    "producer": [("Topic:orders", ["Pub"]), ("Topic:other", ["Pub"])],
    "deleter": [("Topic:*", ["Delete"]), ("Group:*", ["Delete"])],
    "stranger": [("Topic:other", ["All"])],
}
ALLOW_SEND: Final = [{"resource": "Topic:first", "actions": ["Pub"]}]
ALLOW_CREATE: Final = [{"resource": "Topic:first", "actions": ["Create"]}]


class RestApi:
    """The REST API of a standalone, called by its users."""

    def __init__(self, running: Standalone, http: httpx.Client) -> None:
        self.running = running
        self._url = f"{running.admin}/api/v1"
        self._http = http

    def ask(self, user: str, operation: str, *, key: str = "", **body: Any) -> httpx.Response:
        """Send a request with a JSON body, and an Idempotency-Key if it is not empty."""
        method, _, path = operation.partition(" ")
        document = body if method in {"PUT", "POST"} else None
        auth = (user, SECRET) if user else None
        headers = {"Idempotency-Key": key} if key else {}
        return self._http.request(
            method, self._url + path, json=document, auth=auth, headers=headers
        )

    def passed(self, user: str, operation: str, **body: Any) -> dict[str, Any]:
        """Return the answer to an allowed request."""
        answer = self.ask(user, operation, **body)
        assert answer.status_code == HTTPStatus.OK, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def refused(self, user: str, operation: str, **body: Any) -> str:
        """Return the reason of a refusal by a missing right."""
        answer = self.ask(user, operation, **body)
        assert answer.status_code == HTTPStatus.FORBIDDEN, answer.text
        return str(answer.json()["detail"])

    def missing(self, user: str, operation: str, **body: Any) -> str:
        """Return the document of a missing resource."""
        answer = self.ask(user, operation, **body)
        assert answer.status_code == HTTPStatus.NOT_FOUND, answer.text
        return answer.text

    def batch_of_one(self, user: str, topic: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the outcome of a batch of one message, which may create the topic."""
        answer = self._http.post(
            f"{self._url}/topics/{topic}/messages:batch?create=true",
            content=json.dumps(fields).encode(),
            auth=(user, SECRET),
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert answer.status_code == HTTPStatus.OK, answer.text
        outcomes = answer.json()["outcomes"]
        assert isinstance(outcomes, list)
        return outcomes


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestApi]:
    folder = tmp_path_factory.mktemp("rights")
    with standalone(folder / "data") as running, httpx.Client(trust_env=False, timeout=30) as http:
        rest = RestApi(running, http)
        rest.passed("", "PUT /users/root", type="SUPER", secret=SECRET)
        for name, entries in USERS.items():
            listed = [{"resource": resource, "actions": actions} for resource, actions in entries]
            rest.passed("", f"PUT /users/{name}", secret=SECRET, entries=listed)
        rest.passed("", "PUT /security", mode="on")
        eventually(lambda: rest.ask("", "GET /topics").status_code == HTTPStatus.UNAUTHORIZED)
        for operation in ("PUT /topics/orders", "PUT /topics/other", "PUT /groups/billing"):
            rest.passed("root", operation)
        yield rest


@pytest.mark.parametrize("kind", ["topics", "groups"])
def test_a_put_needs_create_for_a_new_name_and_update_for_another(rest: RestApi, kind: str) -> None:
    change = {"deliverySpreadMs": 9} if kind == "topics" else {"maxAttempts": 9}
    new, old = f"PUT /{kind}/new", f"PUT /{kind}/{'other' if kind == 'topics' else 'billing'}"
    assert "may not Create or Update" in rest.refused("stranger", f"PUT /{kind}/hidden")
    assert "may not Create" in rest.refused("changer", new)
    assert rest.passed("creator", new)["isNew"]
    assert "may not Update" in rest.refused("creator", old, **change)
    if kind == "topics":
        assert "may not Update" in rest.refused("creator", old, messageType="FIFO")
    assert not rest.passed("changer", old, **change)["isNew"]


def test_a_put_of_dead_letters_needs_update_of_the_group(rest: RestApi) -> None:
    dead = "PUT /topics/%25DLQ%25billing"
    assert "may not Update on Group:billing" in rest.refused(
        "creator", dead, retention={"ms": HOUR_MS}
    )
    rest.passed("changer", dead, retention={"ms": HOUR_MS})


def test_a_send_creates_a_topic_only_with_the_right_create(rest: RestApi) -> None:
    plain, send = "POST /topics/first/messages", "POST /topics/first/messages?create=true"
    rest.passed("root", "PUT /users/sender", secret=SECRET, entries=ALLOW_SEND)
    assert "there is no topic 'first'" in rest.missing("sender", plain, body="x")
    for fields in ({}, {"messageGroup": "g"}):
        assert "may not Create on Topic:first" in rest.refused("sender", send, body="x", **fields)
    [line] = rest.batch_of_one("sender", "first", body="x")
    assert (line["outcome"], line["title"]) == ("REFUSED", "Forbidden")
    assert "may not Create on Topic:first" in line["detail"]
    rest.passed("root", "PUT /users/sender", entries=[*ALLOW_SEND, *ALLOW_CREATE])
    eventually(lambda: rest.ask("sender", send, body="x").status_code == 200)


def test_bodies_keys_and_properties_need_sub(rest: RestApi) -> None:
    sent = rest.passed(
        "producer",
        "POST /topics/orders/messages",
        body="secret body",
        keys=["secret-key"],
        properties={"secret": "property"},
        tag="a-tag",
    )
    one = f"GET /topics/orders/messages/{sent['messageId']}"
    queue = f"GET /topics/orders/queues/{sent['queueId']}/messages"
    for operation in (one, queue):
        answer = rest.ask("reader", operation)
        assert "secret" not in answer.text
        [message] = answer.json()["messages"]
        assert (message["bodyHidden"], message["tag"], message["bodySize"]) == (True, "a-tag", 11)
        [message] = rest.passed("consumer", operation)["messages"]
        assert message["bodyText"] == "secret body"
        assert (message["keys"], message["properties"]) == (["secret-key"], {"secret": "property"})
        assert "bodyHidden" not in message
    search = "GET /topics/orders/messages?key=secret-key"
    assert "may not Sub" in rest.refused("reader", search)
    assert len(rest.passed("consumer", search)["messages"]) == 1
    reads = rest.passed("root", "GET /audit?kind=access&user=consumer")["records"]
    assert {record["resource"] for record in reads} == {"Topic:orders"}
    assert not rest.passed("root", "GET /audit?kind=access&user=reader")["records"]


def test_the_trace_of_a_hidden_message_looks_like_that_of_a_missing_one(rest: RestApi) -> None:
    sent = rest.passed("producer", "POST /topics/orders/messages", body="x")
    operation = f"GET /messages/{sent['messageId']}/trace"
    [event] = rest.passed("reader", operation)["events"]
    cursor = f"broker-0:{event['position']}:0:{event['position'] + 1}:x"
    for query in ("", f"?cursor={cursor}"):
        hidden = rest.missing("stranger", operation + query)
        missing = rest.missing("stranger", f"GET /messages/none/trace{query}")
        assert hidden.replace(sent["messageId"], "none") == missing


def test_the_trace_leaves_out_hidden_consumer_groups(rest: RestApi) -> None:
    rest.passed("root", "PUT /topics/traced")
    entries = [{"resource": "Topic:traced", "actions": ["Get", "Sub", "Pub"]}]
    of_group = [{"resource": "Group:tracing", "actions": ["Get", "Sub", "Create"]}]
    rest.passed("root", "PUT /users/tracer", secret=SECRET, entries=[*entries, *of_group])
    sent = rest.passed("tracer", "POST /topics/traced/messages", body="x")

    async def receive() -> None:
        async with api(rest.running.grpc, headers=signed("tracer", SECRET)) as client:
            [message] = await client.receive("traced", "tracing")
            handle = message.system_properties.receipt_handle
            assert (await client.ack("traced", "tracing", [handle])).status.code == v2.OK

    asyncio.run(receive())
    trace = f"GET /messages/{sent['messageId']}/trace"
    events = [event["event"] for event in rest.passed("tracer", trace)["events"]]
    assert events == ["stored", "delivered", "acked"]
    rest.passed("root", "PUT /users/tracer", entries=entries)
    eventually(lambda: len(rest.passed("tracer", trace)["events"]) == 1)


def test_a_timer_needs_the_rights_of_its_topic(rest: RestApi) -> None:
    def delayed() -> int:
        sent = rest.passed(
            "producer", "POST /topics/orders/messages", body="x", keys=["k"], delayMs=HOUR_MS
        )
        return int(sent["timerId"])

    timer = delayed()
    for action in ("", ":cancel", ":reschedule", ":fire"):
        method = "POST" if action else "GET"
        body = {"delayMs": HOUR_MS} if action == ":reschedule" else {}
        hidden = rest.missing("stranger", f"{method} /timers/{timer}{action}", **body)
        missing = rest.missing("stranger", f"{method} /timers/999999{action}", **body)
        assert hidden.replace(f"timer {timer} ", "timer 999999 ") == missing
        if action:
            assert "may not" in rest.refused("reader", f"POST /timers/{timer}{action}", **body)
    assert rest.passed("reader", f"GET /timers/{timer}")["keys"] == []
    assert rest.passed("consumer", f"GET /timers/{timer}")["keys"] == ["k"]
    rest.missing("producer", f"POST /timers/{timer}:fire")
    assert rest.passed("producer", f"POST /timers/{timer}:cancel")["state"] == "CANCELLED"
    timer = delayed()
    reschedule = f"POST /timers/{timer}:reschedule"
    assert rest.passed("changer", reschedule, delayMs=2 * HOUR_MS)["state"] == "PENDING"
    assert rest.passed("changer", f"POST /timers/{timer}:fire")["timerId"] == timer


def test_bulk_changes_of_timers_need_the_rights_of_each_topic(rest: RestApi) -> None:
    sent = rest.passed(
        "producer", "POST /topics/orders/messages", body="x", keys=["k"], delayMs=HOUR_MS
    )
    id_ = f"{sent['broker']}:{sent['timerId']}"
    for verb in ("cancel", "reschedule", "fire"):
        path, move = f"POST /timers:{verb}", {"delayMs": HOUR_MS} if verb == "reschedule" else {}
        [hidden] = rest.passed("stranger", path, ids=[id_], **move)["outcomes"]
        assert hidden["outcome"] == "NOT_FOUND"
        assert "may not" in rest.refused("reader", path, ids=[id_], **move)
        for wanted in ({"topic": "orders"}, {"topic": "missing"}, {"key": "k"}):
            assert "may not" in rest.refused("reader", path, filter=wanted, **move)
        keyed = {"topic": "orders", "key": "k"}
        assert "Sub" in rest.refused("changer", path, filter=keyed, **move)
    count = "POST /timers:cancel?dryRun=true"
    assert rest.passed("producer", count, filter={"topic": "orders"})["count"] >= 1
    [done] = rest.passed("producer", "POST /timers:cancel", ids=[id_])["outcomes"]
    assert done == {"id": id_, "outcome": "DONE"}


def test_a_transaction_needs_the_rights_of_its_topic(rest: RestApi) -> None:
    async def send() -> list[str]:
        async with api(rest.running.grpc, headers=signed("producer", SECRET)) as client:
            return [await send_half(client, half_message("orders", body)) for body in (b"a", b"b")]

    first, second = asyncio.run(send())
    for action in ("", ":commit", ":rollback", ":check", ":recover"):
        method = "POST" if action else "GET"
        unknown = "A" * len(first)
        hidden = rest.missing("stranger", f"{method} /transactions/{first}{action}")
        missing = rest.missing("stranger", f"{method} /transactions/{unknown}{action}")
        assert hidden.replace(first, unknown) == missing
        if action:
            assert "may not" in rest.refused("reader", f"POST /transactions/{first}{action}")
    assert rest.passed("reader", f"GET /transactions/{first}")["state"] == "OPEN"
    for user, count in (("stranger", 0), ("reader", 2)):
        assert len(rest.passed(user, "GET /transactions")["transactions"]) == count
        assert len(rest.passed(user, "GET /transactions?topic=orders")["transactions"]) == count
    rest.refused("reader", "POST /transactions:recover", topic="orders")
    assert rest.passed("changer", "POST /transactions:recover", topic="orders")["count"] == 0
    changed = rest.passed("changer", f"POST /transactions/{first}:commit")
    assert changed["transaction"]["state"] == "COMMITTED"
    changed = rest.passed("changer", f"POST /transactions/{second}:rollback")
    assert changed["transaction"]["state"] == "ROLLED_BACK"


def test_dead_letters_need_the_rights_of_their_group(rest: RestApi) -> None:
    rest.passed("root", "PUT /topics/dying")
    rest.passed("root", "PUT /groups/dying", maxAttempts=1)
    for name, actions in (("lister", ["List"]), ("getter", ["Get"]), ("owner", ["Get", "Sub"])):
        entries = [{"resource": "Group:dying", "actions": actions}]
        rest.passed("root", f"PUT /users/{name}", secret=SECRET, entries=entries)
    sent = {"body": "secret", "keys": ["key"], "properties": {"a": "b"}}
    rest.passed("root", "POST /topics/dying/messages", **sent)

    async def hold() -> None:
        async with api(rest.running.grpc, headers=signed("root", SECRET)) as client:
            while not await client.receive("dying", "dying", invisible_ms=HOUR_MS):
                pass

    asyncio.run(hold())
    rest.passed("root", "POST /groups/dying/deliveries:release", all=True)
    path = "/groups/dying/dead-letters"

    def listed(user: str) -> list[dict[str, Any]]:
        return list(rest.passed(user, "GET /dead-letters?group=dying")["deadLetters"])

    eventually(lambda: len(listed("root")) == 1)
    [letter] = listed("root")
    for user, count in (("stranger", 0), ("lister", 1), ("getter", 1), ("owner", 1)):
        assert len(listed(user)) == count
        summary = rest.passed(user, "GET /dead-letters/summary")
        assert [one["group"] for one in summary["groups"]] == ["dying"] * count
    assert [one.get("keys") for user in ("lister", "owner") for one in listed(user)] == [
        None,
        ["key"],
    ]
    for user in ("stranger", "lister"):
        assert "may not Get on Group:dying" in rest.refused(user, f"GET {path}/{letter['id']}")
    hidden = rest.passed("getter", f"GET {path}/{letter['id']}")
    assert hidden["bodyHidden"]
    assert not {"bodyText", "bodyBase64", "keys", "properties"} & hidden.keys()
    shown = rest.passed("owner", f"GET {path}/{letter['id']}")
    assert (shown["bodyText"], shown["keys"], shown["properties"]) == (
        "secret",
        ["key"],
        {"a": "b"},
    )
    for user in ("owner", "stranger"):
        for verb in (":replay", ":discard", f"/{letter['id']}:copy"):
            assert "may not Update on Group:dying" in rest.refused(user, f"POST {path}{verb}")
    copy = f"POST {path}/{letter['id']}:copy"
    rest.passed("root", "PUT /topics/mine")
    for name, actions in (("thief", ["Get", "Update"]), ("copier", ["Update", "Sub"])):
        entries = [
            {"resource": "Group:dying", "actions": actions},
            {"resource": "Topic:mine", "actions": ["Get", "Pub", "Sub"]},
        ]
        rest.passed("root", f"PUT /users/{name}", secret=SECRET, entries=entries)
    # A copy to a topic shows the message to its consumers.
    for call in (copy, f"{copy}?dryRun=true"):
        refused = rest.refused("thief", call, to="topic", topic="mine", body="new")
        assert "may not Sub on Group:dying" in refused
    assert "may not Pub on Topic:other" in rest.refused("copier", copy, to="topic", topic="other")
    assert rest.passed("copier", copy, to="topic", topic="mine")["topic"] == "mine"
    assert rest.passed("changer", f"POST {path}:discard", ids=[letter["id"]])["count"] == 1
    [settled] = listed("getter")
    assert (settled["state"], settled["settledBy"]) == ("DISCARDED", "changer")


def recreate(rest: RestApi, user: str) -> None:
    """Delete a user, and create another user with the same name and rights."""
    entries = rest.passed("root", f"GET /users/{user}")["entries"]
    rest.passed("root", f"DELETE /users/{user}")
    rest.passed("root", f"PUT /users/{user}", secret=SECRET, entries=entries)


def test_an_operation_belongs_to_its_starter(rest: RestApi) -> None:
    rest.passed("root", "PUT /topics/halted")
    rest.passed("root", "PUT /groups/halted", maxAttempts=1)
    for n in range(40):
        rest.passed("root", "POST /topics/halted/messages", body=str(n))

    async def hold() -> None:
        held = 0
        async with api(rest.running.grpc, headers=signed("root", SECRET)) as client:
            while held < 40:
                held += len(await client.receive("halted", "halted", invisible_ms=HOUR_MS))

    asyncio.run(hold())
    rest.passed("root", "POST /groups/halted/deliveries:release", all=True)
    count = "POST /groups/halted/dead-letters:discard?dryRun=true"
    eventually(lambda: rest.passed("root", count, filter={})["count"] == 40)
    as_of_ms = rest.passed("changer", count, filter={})["asOfMs"]
    wanted = {"filter": {}, "asOfMs": as_of_ms, "maxCount": 40, "ratePerSecond": 1}
    discard = "POST /groups/halted/dead-letters:discard"
    answers = [rest.ask("changer", discard, key="k", **wanted) for _ in range(2)]
    assert [one.status_code for one in answers] == [HTTPStatus.ACCEPTED] * 2, answers[0].text
    [id_] = {one.json()["operation"]["id"] for one in answers}
    # The key of another user is another key.
    other = rest.ask("root", discard, key="k", **{**wanted, "ratePerSecond": 2})
    assert other.status_code == HTTPStatus.ACCEPTED, other.text
    other_id = other.json()["operation"]["id"]
    assert other_id != id_
    cancelled = rest.passed("root", f"POST /operations/{other_id}:cancel")["operation"]
    assert [part["id"] for part in cancelled["brokers"]] == [other_id]
    entries = [{"resource": "Cluster:processes", "actions": ["Get"]}]
    rest.passed("root", "PUT /users/watcher", secret=SECRET, entries=entries)
    for user, sees in (("changer", 1), ("watcher", 2), ("root", 2), ("owner", 0), ("stranger", 0)):
        assert len(rest.passed(user, "GET /operations")["operations"]) == sees
        if not sees:
            rest.missing(user, f"GET /operations/{id_}")
            rest.missing(user, f"POST /operations/{id_}:cancel")
    cancel = f"POST /operations/{id_}:cancel"
    assert "may not Update on Cluster:processes" in rest.refused("watcher", cancel)
    plan = f"{cancel}?dryRun=true"
    assert rest.passed("changer", plan)["operation"]["state"] == "RUNNING"
    recreate(rest, "changer")
    eventually(lambda: rest.ask("changer", plan).status_code == HTTPStatus.NOT_FOUND)
    rest.missing("changer", cancel)
    assert rest.passed("changer", "GET /operations")["operations"] == []
    assert rest.passed("root", cancel)["operation"]["state"] == "CANCELLED"


def test_a_dedup_key_needs_the_rights_of_its_topic(rest: RestApi) -> None:
    rest.passed("root", "PUT /topics/orders", dedup={})
    body = {"body": "b", "properties": {"dedup-key": "a/b"}}
    rest.passed("producer", "POST /topics/orders/messages", **body)
    key = "/topics/orders/dedup/a%2Fb"
    rest.passed("reader", "GET /topics/orders/dedup")
    assert "may not Sub" in rest.refused("reader", f"GET {key}")
    rest.passed("consumer", f"GET {key}")
    for path in ("/topics/orders/dedup", key):
        for user in ("producer", "changer", "stranger"):
            assert "may not Get" in rest.refused(user, f"GET {path}")
    for user in ("reader", "producer", "deleter", "stranger"):
        assert "may not Update" in rest.refused(user, f"DELETE {key}?dryRun=true")
    rest.passed("changer", f"DELETE {key}")
    spread = "POST /topics/orders:spread"
    for user in ("reader", "producer", "deleter", "stranger"):
        assert "may not Update" in rest.refused(user, spread)
    assert "before" not in rest.passed("changer", spread)
    assert rest.ask("consumer", f"GET {key}").status_code == HTTPStatus.NOT_FOUND


def test_a_user_sees_its_own_clients_only(rest: RestApi) -> None:
    async def look() -> None:
        consumer = api(rest.running.grpc, headers=signed("consumer", SECRET))
        producer = api(rest.running.grpc, headers=signed("producer", SECRET))
        async with consumer as one, producer as other:
            assert (await one.heartbeat("billing")).status.code == v2.OK
            assert (await other.send()).status is not None
            shown = await asyncio.to_thread(rest.passed, "consumer", "GET /clients")
            [client] = shown["clients"]
            assert (client["users"], client["group"]) == (["consumer"], "billing")
            path = f"/clients/{client['clientId']}"
            await asyncio.to_thread(rest.passed, "consumer", f"GET {path}")
            hidden = await asyncio.to_thread(rest.missing, "stranger", f"GET {path}")
            missing = await asyncio.to_thread(rest.missing, "stranger", "GET /clients/none")
            assert hidden.replace(client["clientId"], "none") == missing
            everyone = await asyncio.to_thread(rest.passed, "root", "GET /clients?group=billing")
            assert client["clientId"] in {each["clientId"] for each in everyone["clients"]}
            listed = await asyncio.to_thread(rest.passed, "stranger", "GET /clients?group=billing")
            nothing = await asyncio.to_thread(rest.passed, "stranger", "GET /clients?group=none")
            assert listed["clients"] == nothing["clients"] == []

    asyncio.run(look())


def test_a_verification_needs_the_bodies_of_the_topic(rest: RestApi) -> None:
    body = {"topic": "orders", "messageId": "none"}
    verify = "POST /clients/none:verify"
    assert "may not Update on Cluster:clients" in rest.refused("consumer", verify, **body)
    entries = [{"resource": "Cluster:clients", "actions": ["Update"]}]
    rest.passed("root", "PUT /users/verifier", secret=SECRET, entries=entries)
    assert "may not Sub on Topic:orders" in rest.refused("verifier", verify, **body)
    entries.append({"resource": "Topic:orders", "actions": ["Sub"]})
    rest.passed("root", "PUT /users/verifier", entries=entries)
    eventually(lambda: rest.ask("verifier", verify, **body).status_code == 404)


def test_a_deletion_names_no_hidden_group_and_no_hidden_client(rest: RestApi) -> None:
    async def look() -> None:
        async with api(rest.running.grpc, headers=signed("consumer", SECRET)) as client:
            assert (await client.heartbeat("billing")).status.code == v2.OK
            await client.receive("orders", "billing", poll_ms=POLL_MS_MIN)
            for path in ("/topics/orders", "/groups/billing"):
                planned = f"DELETE {path}?dryRun=true"
                shown = await asyncio.to_thread(rest.passed, "root", planned)
                hidden = await asyncio.to_thread(rest.passed, "deleter", planned)
                assert "orders" in shown.get("topics", []) or "billing" in shown.get("groups", [])
                assert not hidden.get("groups")
                assert not hidden.get("topics")
                assert not hidden["clients"]
            purge = "POST /topics/orders:purge?dryRun=true"
            shown = await asyncio.to_thread(rest.passed, "root", purge, all=True)
            hidden = await asyncio.to_thread(rest.passed, "deleter", purge, all=True)
            assert (shown["groups"], hidden["groups"]) == (["billing"], [])

    asyncio.run(look())


def test_a_topic_shows_the_levels_of_visible_consumer_groups_only(rest: RestApi) -> None:
    rest.passed("root", "PUT /topics/urgent", messageType="PRIORITY", queues=2)
    entries = [{"resource": "Topic:urgent", "actions": ["Get", "Sub"]}]
    rest.passed("root", "PUT /users/looker", secret=SECRET, entries=entries)
    of_group = [{"resource": "Group:billing", "actions": ["Get", "Sub"]}]
    rest.passed("root", "PUT /users/alarm", secret=SECRET, entries=[*entries, *of_group])

    async def read() -> None:
        async with api(rest.running.grpc, headers=signed("alarm", SECRET)) as client:
            await client.receive("urgent", "billing", poll_ms=POLL_MS_MIN)

    asyncio.run(read())

    def groups(user: str) -> list[list[str]]:
        levels = rest.passed(user, "GET /topics/urgent")["levels"]
        return [[each["group"] for each in level["groups"]] for level in levels]

    assert groups("alarm") == [["billing"], ["billing"]]
    assert groups("looker") == [[], []]
