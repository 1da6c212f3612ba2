"""The REST API of deduplication: Idempotency-Key, the keys of a topic, and the end of a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import httpx
import pytest

from tests.support.clients.commands import tidemill
from tests.support.processes.processes import Standalone, standalone
from tidemill.admin.http.problems import MEDIA_TYPE

HOUR_MS: Final = 3_600_000
WINDOW_MS: Final = HOUR_MS
ODD_KEYS: Final = ("a/b", "/", "a//b/", "100%", "%2F", "ä ö", "a?b#c", "a+b&c=d", ".hidden")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("idempotency") / "data") as started:
        started.put("topics/idem-orders", dedup={"windowMs": WINDOW_MS})
        started.put("topics/idem-off")
        started.put("topics/idem-ids", dedup={"keyFrom": "messageId"})
        yield started


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("idempotency-groups") / "data", "--groups=2") as both:
        yield both


@dataclass
class SendApi:
    """The REST API of a standalone."""

    http: httpx.Client

    def send(self, topic: str, key: str | None, body: str = "one", **more: Any) -> httpx.Response:
        given = {} if key is None else {"Idempotency-Key": key}
        headers = httpx.Headers(given, encoding="utf-8")
        return self.http.post(
            f"/topics/{topic}/messages", json={"body": body, **more}, headers=headers
        )

    def stored(self, topic: str) -> int:
        """Return the number of stored messages of a topic."""
        queues = self.http.get(f"/topics/{topic}").raise_for_status().json()["queueStatus"]
        return sum(one["maxOffset"] for one in queues)


@pytest.fixture
def rest(running: Standalone) -> Iterator[SendApi]:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=30) as http:
        yield SendApi(http)


@dataclass(frozen=True)
class Case:
    """A row of the table: a message after the first one with its key."""

    name: str
    status: HTTPStatus
    key: str | None
    topic: str = "idem-orders"
    first_key: str | None = None  # of the message before; None: there is none
    body: str = "one"
    more: dict[str, Any] = field(default_factory=dict)
    is_duplicate: bool | None = None
    is_stored: bool = False
    detail: str = ""


CASES: Final = (
    Case("first", HTTPStatus.CREATED, "c-1", is_duplicate=False, is_stored=True),
    Case("repeat", HTTPStatus.OK, "c-2", first_key="c-2", is_duplicate=True),
    Case(
        "repeat with another body",
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "c-3",
        first_key="c-3",
        body="two",
        detail="another body",
    ),
    Case(
        "repeat by the property alone",
        HTTPStatus.OK,
        None,
        first_key="c-4",
        more={"properties": {"dedup-key": "c-4"}},
        is_duplicate=True,
    ),
    Case(
        "the property of the body is equal",
        HTTPStatus.CREATED,
        "c-5",
        more={"properties": {"dedup-key": "c-5"}},
        is_duplicate=False,
        is_stored=True,
    ),
    Case(
        "the property of the body differs",
        HTTPStatus.BAD_REQUEST,
        "c-6",
        more={"properties": {"dedup-key": "c-7"}},
        detail="'c-7'",
    ),
    Case("without a key", HTTPStatus.OK, None, is_stored=True),
    Case("an empty key", HTTPStatus.BAD_REQUEST, "", detail="1 to 255 bytes"),
    Case("a long key", HTTPStatus.BAD_REQUEST, "k" * 256, detail="not 256"),
    Case("the longest key", HTTPStatus.CREATED, "k" * 255, is_duplicate=False, is_stored=True),
    Case("a key of UTF-8", HTTPStatus.OK, "ä", first_key="ä", is_duplicate=True),
    Case("a control character", HTTPStatus.BAD_REQUEST, "a\x7f", detail="control"),
    Case(
        "deduplication is off",
        HTTPStatus.BAD_REQUEST,
        "c-8",
        topic="idem-off",
        detail="tidemill topic set idem-off --dedup-window 2m",
    ),
    Case(
        "the topic takes message ids",
        HTTPStatus.BAD_REQUEST,
        "c-9",
        topic="idem-ids",
        detail="--dedup-key-from propertyOrMessageId",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_send_with_a_key(rest: SendApi, case: Case) -> None:
    first: dict[str, Any] = {}
    if case.first_key is not None:
        answer = rest.send(case.topic, case.first_key)
        assert answer.status_code == HTTPStatus.CREATED, answer.text
        first = answer.json()
    before = rest.stored(case.topic)
    answer = rest.send(case.topic, case.key, case.body, **case.more)
    assert answer.status_code == case.status, answer.text
    assert rest.stored(case.topic) == before + case.is_stored
    sent = answer.json()
    if not answer.is_success:
        assert answer.headers["content-type"] == MEDIA_TYPE
        assert case.detail in sent["detail"]
        assert (sent["type"] == "idempotency-mismatch") is (case.status == 422)
        return
    assert sent.get("duplicate") is case.is_duplicate
    if first:
        assert sent == {**first, "duplicate": True}


@pytest.mark.parametrize("second", ["two-2", "two-1"])
def test_two_headers_are_rejected(rest: SendApi, second: str) -> None:
    before = rest.stored("idem-orders")
    headers = [("Idempotency-Key", "two-1"), ("idempotency-key", second)]
    path, body = "/topics/idem-orders/messages", {"body": "one"}
    answer = rest.http.post(path, json=body, headers=headers)
    assert answer.status_code == HTTPStatus.BAD_REQUEST
    assert "2 headers Idempotency-Key" in answer.json()["detail"]
    assert rest.stored("idem-orders") == before


def test_a_key_creates_no_topic(rest: SendApi) -> None:
    refused = rest.send("idem-unknown", "k")
    assert refused.status_code == HTTPStatus.BAD_REQUEST
    assert "tidemill topic create idem-unknown --dedup-window 2m" in refused.json()["detail"]
    assert rest.http.get("/topics/idem-unknown").status_code == HTTPStatus.NOT_FOUND


def test_calls_at_the_same_time_get_one_answer(rest: SendApi) -> None:
    before = rest.stored("idem-orders")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: rest.send("idem-orders", "at-once"), range(16)))
    assert sorted(one.status_code for one in answers) == [200] * 15 + [201]
    assert len({one.json()["messageId"] for one in answers}) == 1
    assert rest.stored("idem-orders") == before + 1


def test_a_repeat_of_a_delayed_message_has_its_timer(rest: SendApi) -> None:
    first = rest.send("idem-orders", "later", delayMs=HOUR_MS)
    assert first.status_code == HTTPStatus.CREATED
    second = rest.send("idem-orders", "later", delayMs=2 * HOUR_MS)
    assert second.json() == {**first.json(), "duplicate": True}
    refused = rest.http.delete("/topics/idem-orders/dedup/later")
    assert refused.status_code == HTTPStatus.CONFLICT
    timer = first.json()["timerId"]
    assert rest.http.get("/topics/idem-orders/dedup/later").json()["timerId"] == timer
    rest.http.post(f"/timers/{timer}:cancel").raise_for_status()
    assert rest.send("idem-orders", "later", delayMs=HOUR_MS).status_code == HTTPStatus.CREATED


def test_a_share_of_all_memory_is_stored_with_a_warning(running: Standalone, rest: SendApi) -> None:
    rest.send("idem-orders", "of-others")
    bound = rest.http.get("/topics/idem-orders/dedup").json()["bytesMax"]
    try:
        put = rest.http.put("/topics/idem-share", json={"dedup": {"memoryBytes": bound}})
        assert put.raise_for_status().json()["warning"].startswith("topics without a share have 0")
        shown = rest.http.get("/topics/idem-orders/dedup").raise_for_status().json()
        assert shown["bytesMax"] == 0 < shown["bytes"]
        assert rest.send("idem-orders", "one-more").status_code == HTTPStatus.TOO_MANY_REQUESTS
        again = tidemill(running, "topic", "set", "idem-share", "--dedup-window", "5m")
        assert "topics without a share have 0" in again.stderr
    finally:
        put = rest.http.put("/topics/idem-share", json={"dedup": {"memoryBytes": None}})
    assert "warning" not in put.raise_for_status().json()
    assert rest.send("idem-orders", "one-more").status_code == HTTPStatus.CREATED


@pytest.mark.parametrize("key", ODD_KEYS)
def test_a_key_is_shown_and_freed_by_its_path(rest: SendApi, key: str) -> None:
    path = f"/topics/idem-orders/dedup/{quote(key, safe='')}"
    assert rest.http.get(path).status_code == HTTPStatus.NOT_FOUND
    first = rest.send("idem-orders", key)
    assert first.status_code == HTTPStatus.CREATED, first.text
    shown = rest.http.get(path).raise_for_status().json()
    assert (shown["key"], shown["messageId"]) == (key, first.json()["messageId"])
    assert shown["windowEndMs"] == shown["storedAtMs"] + WINDOW_MS
    planned = rest.http.delete(path, params={"dryRun": "true"}).raise_for_status().json()
    assert planned["dryRun"]
    assert rest.send("idem-orders", key).status_code == HTTPStatus.OK
    freed = rest.http.delete(path).raise_for_status().json()
    assert (freed["key"], freed["dryRun"]) == (key, False)
    assert rest.http.delete(path).status_code == HTTPStatus.NOT_FOUND
    again = rest.send("idem-orders", key)
    assert again.status_code == HTTPStatus.CREATED
    assert again.json()["messageId"] != first.json()["messageId"]


def test_the_keys_of_a_message_group_are_apart(rest: SendApi) -> None:
    path = "/topics/idem-orders/dedup/grouped"
    assert rest.send("idem-orders", "grouped").status_code == HTTPStatus.CREATED
    for group in ("red", "blue"):
        sent = rest.send("idem-orders", "grouped", messageGroup=group)
        assert sent.status_code == HTTPStatus.CREATED
        shown = rest.http.get(path, params={"messageGroup": group}).raise_for_status().json()
        assert (shown["messageGroup"], shown["messageId"]) == (group, sent.json()["messageId"])
    rest.http.delete(path, params={"messageGroup": "red"}).raise_for_status()
    assert rest.http.get(path, params={"messageGroup": "red"}).status_code == HTTPStatus.NOT_FOUND
    assert rest.http.get(path).is_success


def test_the_keys_of_a_topic_are_counted(rest: SendApi) -> None:
    rest.http.put("/topics/idem-counted", json={"dedup": {"memoryBytes": 1 << 20}})
    for key in ("a", "b", "a"):
        rest.send("idem-counted", key)
    rest.send("idem-counted", "a", "two")
    found = rest.http.get("/topics/idem-counted/dedup").raise_for_status().json()
    [own] = found.pop("brokerGroups")
    assert own.pop("broker") == "broker-0"
    assert (found.pop("topic"), found.pop("dedup")["memoryBytes"]) == ("idem-counted", 1 << 20)
    assert found == own
    assert (found["keys"], found["hits"], found["mismatches"]) == (2, 2, 1)
    assert (found["pendingKeys"], found["rejected"], found["replaced"]) == (0, 0, 0)
    assert 0 < found["bytes"] <= found["bytesMax"] == 1 << 20


@pytest.mark.parametrize("path", ["/dedup", "/dedup/k"])
def test_a_topic_without_deduplication_has_no_keys(rest: SendApi, path: str) -> None:
    refused = rest.http.get(f"/topics/idem-off{path}")
    assert refused.status_code == HTTPStatus.CONFLICT
    assert "--dedup-window" in refused.json()["detail"]
    assert rest.http.get(f"/topics/idem-nowhere{path}").status_code == HTTPStatus.NOT_FOUND


def ran(running: Standalone, *arguments: str) -> str:
    """Return what a successful command prints."""
    done = tidemill(running, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_sends_shows_and_frees_a_key(running: Standalone) -> None:
    topic, key = "idem-commands", "a/ä 1"
    dedup = ("--dedup-window", "10m", "--dedup-key-from", "property")
    assert "within 10 m 0 s by the property" in ran(running, "topic", "create", topic, *dedup)
    send = ("message", "send", topic, "one", "--idempotency-key", key)
    first = json.loads(ran(running, *send, "-o", "json"))
    message_id = first["messageId"]
    assert f"not stored again: message {message_id}" in ran(running, *send)
    assert message_id in ran(running, "dedup-key", "show", topic, key)
    shown = ran(running, "topic", "show", topic)
    assert "Dedup keys: 1 (0 pending), the oldest" in shown
    assert "Repeats since the start: 1, with another body: 0" in shown
    delete = ("dedup-key", "delete", topic, key)
    assert f"of message {message_id} would be free" in ran(running, *delete, "--dry-run")
    assert "is free" in ran(running, *delete, "--yes")
    assert "is stored" in ran(running, *send)
    assert "-> off" in ran(running, "topic", "set", topic, "--dedup-window", "off")


def test_each_key_has_one_owner_of_two_broker_groups(two_groups: Standalone) -> None:
    with httpx.Client(base_url=f"{two_groups.admin}/api/v1", trust_env=False, timeout=30) as http:
        rest = SendApi(http)
        two_groups.put("topics/idem-owners", dedup={})
        keys = [f"order/{n}" for n in range(20)]
        first = [rest.send("idem-owners", key) for key in keys]
        assert {one.status_code for one in first} == {HTTPStatus.CREATED}
        for key, sent in zip(keys, first, strict=True):
            repeated = rest.send("idem-owners", key)
            assert repeated.status_code == HTTPStatus.OK
            assert repeated.json() == {**sent.json(), "duplicate": True}
        # The owner of a message without a property has its message id.
        assert rest.send("idem-owners", None).status_code == HTTPStatus.OK
        found = http.get("/topics/idem-owners/dedup").raise_for_status().json()
        assert (found["keys"], found["hits"]) == (len(keys) + 1, len(keys))
        by_broker = {one["broker"]: one["keys"] for one in found["brokerGroups"]}
        assert len(by_broker) == 2
        assert all(by_broker.values())
        for key, sent in zip(keys, first, strict=True):
            path = f"/topics/idem-owners/dedup/{quote(key, safe='')}"
            assert http.get(path).json()["broker"] == sent.json()["broker"]
            assert http.delete(path).is_success
        assert http.get("/topics/idem-owners/dedup").json()["keys"] == 1
