"""Attacks on the users of the REST API: held bodies, outages, recreated users, hidden rows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.admin.test_rights import KEYS, SECRET, Door, Items
from tidemill.admin.app import create_app
from tidemill.admin.cluster import security_copy
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerAnswers, BrokerGroupClient, Brokers
from tidemill.admin.cluster.security_client import SecurityClient
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.http import access
from tidemill.admin.http.access import AccessControl
from tidemill.admin.http.identities import IdentityCheck
from tidemill.admin.json.messages import NewMessage
from tidemill.admin.messages.compose import Composer
from tidemill.admin.routes import brokers_of
from tidemill.common.clock import SystemClock
from tidemill.common.errors import BrokerUnreachable, TopicNotFound
from tidemill.security.acl import AccessEntry, parse_entry
from tidemill.security.identities import User, UserType
from tidemill.security.table import Mode, mode_item
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

Receive = Callable[[], Awaitable[dict[str, Any]]]


def basic(name: str = "ops", secret: str = SECRET) -> tuple[bytes, bytes]:
    return b"authorization", b"Basic " + base64.b64encode(f"{name}:{secret}".encode())


async def raw(
    door: Door, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], receive: Receive
) -> tuple[int, bytes]:
    """Send a request whose body `receive` returns; return the status and the body of the answer."""
    sent: list[dict[str, Any]] = []

    async def send(part: Any) -> None:
        sent.append(part)

    scope: Any = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), *headers],
        "client": ("10.1.1.1", 5),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "root_path": "",
        "http_version": "1.1",
    }
    async with asyncio.timeout(20):
        await door.served(scope, receive, send)
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:])


def serve(door: Door, brokers: Callable[[], Any]) -> Door:
    """Let the API behind a door use these brokers."""
    app = create_app(None, None, needs_identity=True, secret_keys=lambda: KEYS)  # type: ignore[arg-type]  # no brokers
    app.dependency_overrides = {brokers_of: brokers}
    door.served = AccessControl(app, body_bytes_max=10_000, identities=door.identities)
    return door


def check_with(door: Door, find: security_copy.FindItem, *, floor: Mode) -> None:
    """Let a door read its users with `find`."""
    door.copy = AdminSecurityCopy(find, door.clock.monotonic_ms, floor=floor)
    door.identities = IdentityCheck(
        door.copy, lambda: KEYS, wall_ms=door.clock.wall_ms, monotonic_ms=door.clock.monotonic_ms
    )
    door.served = AccessControl(door.app, body_bytes_max=10_000, identities=door.identities)


# ---------------------------------------------------------------- a body that is held back


@pytest.fixture(autouse=True)
def _each_body_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "IDENTITY_AGE_S", 0.0)


def with_held_body(
    revoke: Callable[[Door], object], path: str = "/api/v1/users/evil", method: str = "PUT"
) -> int:
    """Send a request as a super user, and `revoke` its rights before the end of its body."""
    door = Door()
    door.items.put_user(kind=UserType.SUPER)
    parts = [b"{", b"}"]

    async def receive() -> dict[str, Any]:
        if len(parts) == 1:
            revoke(door)
            door.clock.advance(59_000)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    headers = [basic(), (b"content-type", b"application/json")]
    return asyncio.run(raw(door, method, path, headers, receive))[0]


def created_again(door: Door) -> None:
    item = json.loads(door.items.found["user", "ops"])
    item["user"].update(id=2, secrets=[])
    door.items.put(item)


@pytest.mark.parametrize(
    ("revoke", "status"),
    [
        (lambda door: None, 502),
        (lambda door: door.items.put_user(), 403),
        (lambda door: door.items.put_user(kind=UserType.SUPER, is_enabled=False), 401),
        (lambda door: door.items.found.pop(("user", "ops")), 401),
        (created_again, 401),
    ],
)
def test_a_held_body_keeps_no_lost_right(revoke: Callable[[Door], object], status: int) -> None:
    assert with_held_body(revoke) == status


def test_a_held_body_rotates_no_secret_of_a_new_user() -> None:
    assert with_held_body(created_again, "/api/v1/users/ops:rotate", "POST") == 401


def test_the_former_secret_does_not_rotate_the_new_user() -> None:
    door = Door()
    door.items.put_user()
    assert door.ask("GET /users/ops").status_code == 502, "known with id 1"
    sealed = KEYS.seal(b"the-secret-of-the-new", user_id=2, secret_id=1, created_at_ms=0)
    user = User(name="ops", id=2, secrets=(sealed,), type=UserType.SUPER)
    door.items.put(user.to_item())
    door.clock.advance(400)

    class Cluster:
        async def call_home(
            self, _call: object, request: pb.ListSecurityRequest
        ) -> BrokerAnswers[Any]:
            found = door.items.found.get((request.kind, request.name))
            reply = pb.ListSecurityReply(items=[found] if found else [], version=9)
            return BrokerAnswers([BrokerAnswer("b", reply)], [])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [basic(), (b"content-type", b"application/json")]
    path = "/api/v1/users/ops:rotate"
    assert asyncio.run(raw(serve(door, Cluster), "POST", path, headers, receive))[0] == 403


# ---------------------------------------------------------------- outages


class Group:
    """One broker group with a table of users."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, str], bytes] = {}
        self.version = 0
        self.is_up = True

    async def call(self, _call: object, request: pb.ListSecurityRequest) -> pb.ListSecurityReply:
        if not self.is_up:
            raise BrokerUnreachable("down")
        found = self.items.get((request.kind, request.name))
        return pb.ListSecurityReply(items=[found] if found else [], version=self.version)


def brokers_with(*groups: Group) -> Brokers:
    """Return the brokers of a cluster; the first group is the home."""
    members = [
        BrokerGroupClient(
            f"b{number}",
            is_home=not number,
            address=f"b{number}",
            is_draining=False,
            client=group,  # type: ignore[arg-type]  # only called
        )
        for number, group in enumerate(groups)
    ]

    async def find_members() -> list[BrokerGroupClient]:
        return members

    brokers = Brokers.__new__(Brokers)
    vars(brokers).update(_timeout_s=5.0, members=find_members)
    return brokers


class Outage:
    """A super user that the home and one group know as disabled, and an older group does not."""

    def __init__(self) -> None:
        self.home, self.older, self.newer = Group(), Group(), Group()
        items = Items()
        items.put(mode_item(Mode.ON))
        items.put_user(kind=UserType.SUPER)
        self.older.items, self.older.version = dict(items.found), 5
        items.put_user(kind=UserType.SUPER, is_enabled=False)
        self.home.items = self.newer.items = dict(items.found)
        self.home.version = self.newer.version = 6
        self.door = Door()
        brokers = brokers_with(self.home, self.older, self.newer)
        check_with(self.door, SecurityClient(brokers).find, floor=Mode.OFF)

    def status(self, credentials: tuple[str, str] | None = ("ops", SECRET)) -> int:
        self.door.clock.advance(600)
        return self.door.ask("PUT /users/evil", credentials).status_code


def test_an_older_broker_group_brings_no_disabled_user_back() -> None:
    world = Outage()
    assert world.status() == 401
    world.home.is_up = False
    assert world.status() == 401
    world.newer.is_up = False
    assert world.status() == 401


def test_a_broker_group_without_users_does_not_end_the_mode() -> None:
    world = Outage()
    world.older.items, world.older.version = {}, 0
    assert world.status(None) == 401
    world.home.is_up = False
    assert world.status(None) == 401


def test_a_restored_home_counts_with_an_older_table() -> None:
    world = Outage()
    assert world.status() == 401
    world.home.items, world.home.version = world.older.items, 2
    assert world.status() == 502


def test_invented_names_push_no_known_user_out_in_an_outage() -> None:
    door = Door()
    door.items.put_user(kind=UserType.SUPER)
    assert door.ask("GET /topics").status_code == 502
    door.items.is_up = False

    async def ask(count: int) -> set[int]:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        return {
            (await raw(door, "GET", "/api/v1/topics", [basic(f"i{n}", "x")], receive))[0]
            for n in range(count)
        }

    assert asyncio.run(ask(security_copy.USERS_MAX + security_copy.ROLES_MAX + 5)) == {503, 429}
    assert door.ask("GET /topics").status_code == 502
    door.ask("GET /topics", ("x" * 2_900, "x"))
    assert all(len(name) <= 64 for _, name in door.copy._copies)


def test_the_token_of_the_file_counts_while_no_broker_answers() -> None:
    class Token:
        def admits(self, authorization: str) -> bool:
            return authorization == "Bearer t"

    door = Door()
    door.items.is_up = False
    door.identities._token = Token()
    door.address = "10.1.2.3"
    for token, status in (("t", 502), ("u", 503)):
        headers = {"Authorization": f"Bearer {token}"}
        answer = door.ask("POST /replicas/b1:transfer", None, headers)
        assert answer.status_code == status


@pytest.mark.parametrize("floor", list(Mode))
def test_nothing_passes_before_a_broker_group_tells_the_mode(floor: Mode) -> None:
    door = Door()
    door.items.is_up = False
    door.address = "10.1.2.3"
    check_with(door, door.items.find, floor=floor)
    refused = door.ask("POST /replicas/b1:transfer", None)
    assert refused.status_code == 503
    assert "admin_token_file" in refused.json()["detail"]
    assert door.ask("GET /topics", None).status_code == 503


@pytest.mark.parametrize(("floor", "status"), [(Mode.OFF, 502), (Mode.ON, 401)])
def test_on_the_machine_of_the_process_the_floor_counts_for_repairs(
    floor: Mode, status: int
) -> None:
    """So a broker group of a laptop is repaired without a token."""
    door = Door()
    door.items.is_up = False
    check_with(door, door.items.find, floor=floor)
    assert door.ask("POST /replicas/b1:transfer", None).status_code == status
    assert door.ask("GET /topics", None).status_code == 503


def test_the_last_known_mode_counts_in_an_outage() -> None:
    door = Door(Mode.OFF)
    assert door.ask("GET /topics", None).status_code == 502
    door.items.is_up = False
    assert door.ask("POST /replicas/b1:transfer", None).status_code == 502


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.PERMISSIVE])
@pytest.mark.parametrize("shown", ["Basic !!!", "Basic w7Y6eA==", "Basic bm9jb2xvbg==", "Basic"])
def test_malformed_credentials_pass_unless_the_mode_is_on(mode: Mode, shown: str) -> None:
    assert Door(mode).ask("GET /topics", None, {"Authorization": shown}).status_code == 502


@pytest.mark.parametrize("origin", ["http://[", "http://[x]"])
def test_a_malformed_origin_is_refused(origin: str) -> None:
    answer = Door().ask("POST /groups/{group}:releaseLock", None, {"Origin": origin})
    assert answer.status_code == 403
    assert answer.headers["content-type"] == "application/problem+json"


# ---------------------------------------------------------------- hidden rows


class Lists:
    """Brokers with topics and timers that a user may not see."""

    topics = ("aa", "secret-merger", "secret-payroll", "zz")
    timers = tuple(
        pb.Timer(timer_id=n, topic=topic, due_at_ms=1_000 + n, state=pb.TIMER_STATE_PENDING)
        for n, topic in enumerate(["secret-merger", "secret-merger", "aa", "secret-payroll"], 1)
    )

    async def call_all(self, _call: object, request: pb.GetStorageRequest) -> BrokerAnswers[Any]:
        later = [topic for topic in self.topics if topic > request.after_topic]
        page = later[: request.topics_max]
        reply = pb.GetStorageReply(
            topics=[pb.TopicStorage(name=topic) for topic in page],
            last_topic=page[-1] if len(later) > len(page) else "",
        )
        return BrokerAnswers([BrokerAnswer("b", reply)], [])

    async def ask_all(self, ask: Callable[[Any], Awaitable[Any]]) -> BrokerAnswers[Any]:
        reply = await ask(SimpleNamespace(name="b", client=self))
        return BrokerAnswers([BrokerAnswer("b", reply)], [])

    async def call(self, _call: object, request: pb.ListTimersRequest) -> pb.ListTimersReply:
        if request.topic and request.topic not in self.topics:
            raise TopicNotFound("there is no topic")
        after = request.after_due_ms, request.after_timer_id
        found = [
            timer
            for timer in self.timers
            if (timer.due_at_ms, timer.timer_id) > after
            and request.topic in ("", timer.topic)
            and request.key in ("", "K")
        ]
        page = found[: request.page_size]
        if len(found) == len(page):
            return pb.ListTimersReply(timers=page)
        last = page[-1]
        return pb.ListTimersReply(
            timers=page, has_more=True, last_due_ms=last.due_at_ms, last_timer_id=last.timer_id
        )


VISIBLE = [parse_entry(f"Topic:{topic}", ["Get"]) for topic in ("aa", "zz")]
VISIBLE.append(parse_entry("Cluster:broker-groups", ["Get"]))


def door_to_lists(*entries: AccessEntry) -> Door:
    door = Door()
    door.items.put_user(*VISIBLE, *entries)
    return serve(door, Lists)


def walk(path: str) -> tuple[list[str], str]:
    """Return the names of all pages, and all texts."""
    door, names, texts, token = door_to_lists(), [], "", ""
    while True:
        page = door.ask(f"GET {path}{token}")
        texts += page.text
        body = page.json()
        names += [row.get("name") or row["topic"] for row in body.get("topics", body.get("timers"))]
        if "nextPageToken" not in body:
            return names, texts
        token = f"&pageToken={body['nextPageToken']}"


def test_pages_of_storage_name_no_hidden_topic() -> None:
    names, texts = walk("/storage?pageSize=1")
    assert names == ["aa", "zz"]
    assert "secret" not in texts


def test_pages_of_timers_tell_nothing_about_hidden_timers() -> None:
    names, texts = walk("/timers?pageSize=1")
    assert names == ["aa"]
    assert not any(f"{1_000 + n}:{n}" in texts for n in (1, 2, 4))


def test_a_hidden_topic_looks_like_a_missing_one() -> None:
    door = door_to_lists()
    hidden, missing = (door.ask(f"GET /timers?topic={name}") for name in ("secret-merger", "none"))
    assert (hidden.status_code, hidden.text) == (missing.status_code, missing.text)


def test_a_search_by_key_needs_sub() -> None:
    door = door_to_lists()
    right, wrong = (door.ask(f"GET /timers?topic=aa&key={key}") for key in ("K", "other"))
    assert right.text == wrong.text
    door = door_to_lists(parse_entry("Topic:aa", ["Sub"]))
    assert len(door.ask("GET /timers?topic=aa&key=K").json()["timers"]) == 1


@pytest.mark.parametrize("path", ["/topics/orders/messages/X", "/topics/orders/messages?key=k"])
def test_dead_letters_of_hidden_groups_are_left_out(path: str) -> None:
    message = NewMessage.model_validate({"body": "x"})
    blob = Composer(SystemClock(), item_bytes_max=1 << 20).compose("orders", message).blob
    dead = pb.FoundMessage(blob=blob, stored_topic="%DLQ%secret", group="secret", reason="r")

    class Messages:
        @contextlib.asynccontextmanager
        async def large_read(self) -> AsyncIterator[None]:
            yield

        async def call_all(self, _call: object, _request: object) -> BrokerAnswers[Any]:
            reply = pb.FindMessagesReply(messages=[pb.FoundMessage(blob=blob), dead])
            return BrokerAnswers([BrokerAnswer("b", reply)], [])

    door = Door()
    door.items.put_user(parse_entry("Topic:orders", ["Get", "Sub"]))
    answer = serve(door, Messages).ask(f"GET {path}")
    assert len(answer.json()["messages"]) == 1
    assert "secret" not in answer.text
