"""Login sessions: the cookie, its ends, and requests of other pages."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.support.clocks import ManualClock
from tests.support.security_home import SecurityHome
from tests.unit.admin.test_rights import SECRET
from tidemill.admin.app import create_app
from tidemill.admin.audit.access_reports import RequestReports
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.http import sessions as sessions_module
from tidemill.admin.http.access import AccessControl
from tidemill.admin.http.identities import IdentityCheck
from tidemill.admin.http.route_templates import RouteTemplates
from tidemill.admin.http.sessions import (
    HOST_COOKIE,
    IDLE_MS_MAX,
    LOOPBACK_COOKIE,
    RENEWAL_MS,
    SESSION_MS_MAX,
    Session,
    Sessions,
    cookie_name,
    find_cookie,
)
from tidemill.admin.routes import brokers_of
from tidemill.security.access_log import AccessLog
from tidemill.security.acl import parse_entry
from tidemill.security.identities import SealedSecret, User, UserType, user_of
from tidemill.security.secret_keys import SecretKeys
from tidemill.security.table import Mode, mode_item

KEYS = SecretKeys({"k1": b"k" * 32})
SAME = {"Sec-Fetch-Site": "same-origin"}
BASIC = {"Authorization": "Basic " + base64.b64encode(f"ops:{SECRET}".encode()).decode()}


class LoginWorld:
    """A home with the super user `ops`, and the API before it."""

    def __init__(self, mode: Mode = Mode.ON) -> None:
        self.home = SecurityHome()
        self.home.put(mode_item(mode))
        self.clock = ManualClock()
        self.keys = KEYS
        self.put_user()
        copy = AdminSecurityCopy(self.home.client.find, self.clock.monotonic_ms, floor=Mode.OFF)
        app = create_app(None, None, needs_identity=True, secret_keys=lambda: self.keys)  # type: ignore[arg-type]  # no brokers
        app.dependency_overrides = {brokers_of: lambda: self.home}
        self.sessions = app.state.sessions = Sessions(lambda: self.keys, self.clock.wall_ms)
        self.lines: list[dict[str, Any]] = []  # of the access log
        log = AccessLog("admin-0", lambda: 1, self.clock.monotonic_ms, self.lines.append)
        check = IdentityCheck(
            copy,
            lambda: self.keys,
            wall_ms=self.clock.wall_ms,
            monotonic_ms=self.clock.monotonic_ms,
            sessions=self.sessions,
            reports=RequestReports(log, RouteTemplates([("/api/v1/users", ["GET"])])),
        )
        self.door = AccessControl(app, body_bytes_max=10_000, hosts=["mq.io"], identities=check)
        self.url = "http://127.0.0.1"

    def put_user(self, **changes: Any) -> User:
        """Put the user again, with the same id."""
        sealed = KEYS.seal(SECRET.encode(), user_id=1, secret_id=1, created_at_ms=5)
        user = User(name="ops", id=1, type=UserType.SUPER, secrets=(sealed,))
        user = replace(user, **changes)
        self.home.put(user.to_item())
        return user

    def secret(self) -> SealedSecret:
        """Return the first secret of the user."""
        found = self.home.table.find(("user", "ops"))
        assert found is not None
        return user_of(found).secrets[0]

    def ask(self, operation: str, cookie: str = "", **headers: str) -> httpx.Response:
        """Send a request; the copies have become old."""
        self.clock.advance(500)
        method, _, path = operation.partition(" ")
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if cookie:
            sent["Cookie"] = cookie

        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(self.door, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=self.url) as http:
                return await http.request(method, f"/api/v1{path}", headers=sent)

        return asyncio.run(request())

    def log_in(self) -> str:
        """Return the cookie of a new session as a browser sends it."""
        answer = self.ask("POST /session", **BASIC)
        assert answer.status_code == 200, answer.text
        return answer.headers["set-cookie"].partition(";")[0]

    def status(self, operation: str, cookie: str = "", **headers: str) -> int:
        """Return the status of a request."""
        return self.ask(operation, cookie, **headers).status_code


def signed_in(world: LoginWorld, cookie: str) -> bool:
    return world.status("GET /users", cookie) == 200


# ---------------------------------------------------------------- log in and out


def test_a_login_sets_a_cookie_that_scripts_and_other_sites_cannot_use() -> None:
    world = LoginWorld()
    answer = world.ask("POST /session", **BASIC)
    parts = answer.headers["set-cookie"].split("; ")
    assert parts[0].startswith(f"{LOOPBACK_COOKIE}=1.")
    assert parts[1:] == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert answer.headers["cache-control"] == "no-store"
    body = answer.json()
    assert (body["user"], body["via"], body["isSuper"]) == ("ops", "session", True)
    assert SECRET not in answer.text + str(answer.headers)
    world.url = "https://mq.io"
    parts = world.ask("POST /session", **BASIC).headers["set-cookie"].split("; ")
    assert parts[0].startswith(f"{HOST_COOKIE}=1.")
    assert parts[1:] == ["Path=/", "Secure", "HttpOnly", "SameSite=Strict"]


def test_a_cookie_stands_for_its_user() -> None:
    world = LoginWorld()
    cookie = world.log_in()
    assert signed_in(world, cookie)
    seen = world.ask("GET /session", cookie).json()
    assert (seen["user"], seen["via"], seen["mode"]) == ("ops", "session", "on")
    assert seen["endsAtMs"] <= world.clock.wall_ms() + IDLE_MS_MAX
    assert world.status("DELETE /roles/x", cookie, **SAME) == 404, "it may, and there is none"
    world.put_user(type=UserType.NORMAL)
    assert world.status("GET /users", cookie) == 403, "the present rights"
    assert world.status("GET /session") == 401
    assert world.ask("GET /session", **BASIC).json()["via"] == "basic"


def test_a_caller_sees_which_objects_are_hidden_from_it() -> None:
    world = LoginWorld()
    assert "hidden" not in world.ask("GET /session", **BASIC).json()
    entries = parse_entry("Group:*", ["Get"]), parse_entry("Topic:orders", ["Get"])
    world.put_user(type=UserType.NORMAL, entries=entries)
    hidden = world.ask("GET /session", **BASIC).json()["hidden"]
    assert hidden == ["broker groups", "topics"]


def test_a_logout_ends_the_session_and_its_renewed_cookies() -> None:
    world = LoginWorld()
    cookie = world.log_in()
    world.clock.advance(RENEWAL_MS)
    renewed = world.ask("GET /session", cookie).headers["set-cookie"].partition(";")[0]
    other = world.log_in()
    answer = world.ask("DELETE /session", cookie, **SAME)
    assert answer.status_code == 204
    assert answer.headers["set-cookie"].startswith(f"{LOOPBACK_COOKIE}=; Path=/; HttpOnly;")
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert not signed_in(world, cookie)
    assert not signed_in(world, renewed)
    assert signed_in(world, other)


@pytest.mark.parametrize("shown", ["Bearer tmk_x", "Basic x", "Bearer x"])
def test_a_wrong_header_does_not_fall_through_to_the_cookie(shown: str) -> None:
    world = LoginWorld()
    assert world.status("GET /users", world.log_in(), Authorization=shown) == 401


def test_a_session_or_a_token_begins_no_session() -> None:
    world = LoginWorld()
    assert world.status("POST /session", world.log_in(), **SAME) == 409
    world.home.put(mode_item(Mode.OFF))
    assert world.status("POST /session", **BASIC) == 409
    world.home.put(mode_item(Mode.PERMISSIVE))
    assert world.status("POST /session") == 409
    assert signed_in(world, world.log_in())


# ---------------------------------------------------------------- ends


def test_a_session_ends_when_it_is_idle() -> None:
    world = LoginWorld()
    cookie = world.log_in()
    used_at_ms = world.clock.wall_ms()
    world.clock.advance(IDLE_MS_MAX - 500)
    assert world.clock.wall_ms() + 500 == used_at_ms + IDLE_MS_MAX
    answer = world.ask("GET /users", cookie)
    assert answer.status_code == 200, "in the last millisecond"
    renewed = answer.headers["set-cookie"].partition(";")[0]
    assert not signed_in(world, cookie)
    assert signed_in(world, renewed)


def test_a_session_ends_after_twelve_hours_although_it_is_used() -> None:
    world = LoginWorld()
    cookie = world.log_in()
    began_at_ms = world.clock.wall_ms()
    while world.clock.wall_ms() + IDLE_MS_MAX < began_at_ms + SESSION_MS_MAX:
        world.clock.advance(IDLE_MS_MAX - 1_000)
        cookie = world.ask("GET /users", cookie).headers["set-cookie"].partition(";")[0]
    world.clock.advance(began_at_ms + SESSION_MS_MAX - world.clock.wall_ms() - 500)
    assert signed_in(world, cookie), "in the last millisecond"
    assert not signed_in(world, cookie)


def test_a_cookie_is_renewed_once_a_minute() -> None:
    world = LoginWorld()
    cookie = world.log_in()
    world.clock.advance(RENEWAL_MS - 501)
    assert "set-cookie" not in world.ask("GET /users", cookie).headers
    assert "set-cookie" in world.ask("GET /users", cookie).headers


def test_a_session_ends_with_its_secret() -> None:
    world = LoginWorld()
    cookie = world.log_in()
    old = world.secret()
    newer = KEYS.seal(b"another-secret-of-ops", user_id=1, secret_id=2, created_at_ms=9)
    ending = replace(old, not_after_ms=world.clock.wall_ms() + 1_000)
    world.put_user(secrets=(ending, newer))
    assert signed_in(world, cookie), "the older secret is still valid"
    assert signed_in(world, cookie), "at its end"
    assert not signed_in(world, cookie)
    world.put_user(secrets=(newer,))
    assert not signed_in(world, cookie)
    same_id = KEYS.seal(SECRET.encode(), user_id=1, secret_id=1, created_at_ms=6)
    world.put_user(secrets=(same_id,))
    assert not signed_in(world, cookie), "another secret with the same number"


@pytest.mark.parametrize(
    "change",
    [
        lambda world: world.put_user(is_enabled=False),
        lambda world: world.put_user(id=2),
        lambda world: world.home.put({"op": "deleteUser", "name": "ops"}),
    ],
)
def test_a_session_ends_with_its_user(change: Any) -> None:
    world = LoginWorld()
    cookie = world.log_in()
    change(world)
    assert world.status("GET /users", cookie) == 401
    assert world.status("GET /session", cookie) == 401


def test_a_new_key_file_keeps_sessions_of_its_older_keys() -> None:
    world = LoginWorld()
    cookie = world.log_in()
    world.keys = SecretKeys({"k2": b"2" * 32, "k1": b"k" * 32})
    assert signed_in(world, cookie)
    newer = world.log_in()
    world.keys = SecretKeys({"k2": b"2" * 32})
    assert not signed_in(world, cookie)
    assert world.sessions.read(newer.partition("=")[2]) is not None


def test_a_full_list_of_logouts_forgets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "DENIED_MAX", 2)
    now_ms = [0]
    sessions = Sessions(lambda: KEYS, lambda: now_ms[0])
    user = User(name="ops", id=1)
    secret = KEYS.seal(b"x", user_id=1, secret_id=1, created_at_ms=0)
    begun: list[str] = []

    def begin() -> Session:
        now_ms[0] += 1
        session = sessions.begin(user, secret)
        begun.append(sessions.encode(session))
        return session

    for session in [begin() for _ in range(3)]:
        sessions.end(session)
    begin()
    assert [sessions.read(value) is not None for value in begun] == [False, False, False, True]
    now_ms[0] += IDLE_MS_MAX + 1
    sessions.end(begin())
    assert len(sessions._denied) == 1, "idle cookies need no entry"


# ---------------------------------------------------------------- forged cookies


def test_a_forged_cookie_is_refused() -> None:
    world = LoginWorld()
    value = world.log_in().partition("=")[2]
    version, payload, mac = value.split(".")
    fields = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    fields[1] = "root"
    forged = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")
    other = Sessions(lambda: SecretKeys({"k1": b"x" * 32}), world.clock.wall_ms)
    other_user = User(name="ops", id=1)
    for wrong in (
        "",
        "x",
        "..",
        "1..",
        f"{version}.{forged}.{mac}",
        f"2.{payload}.{mac}",
        f"{version}.{payload}.",
        f"{version}.{payload}.{mac[:-2]}",
        f"{version}.{payload}.{mac}é",
        "x" * 2_000,
        other.encode(other.begin(other_user, world.secret())),
    ):
        assert world.sessions.read(wrong) is None
        if wrong.isascii():
            assert world.status("GET /users", f"{LOOPBACK_COOKIE}={wrong}") == 401


@pytest.mark.parametrize(
    ("scheme", "host", "name"),
    [
        ("http", "127.0.0.1:8080", LOOPBACK_COOKIE),
        ("http", "localhost:8080", LOOPBACK_COOKIE),
        ("http", "[::1]:8080", LOOPBACK_COOKIE),
        ("http", "10.1.2.3:8080", HOST_COOKIE),
        ("http", "mq.io", HOST_COOKIE),
        ("https", "127.0.0.1:8080", HOST_COOKIE),
        ("https", "mq.io", HOST_COOKIE),
    ],
)
def test_each_address_has_one_cookie_name(scheme: str, host: str, name: str) -> None:
    both = f"{LOOPBACK_COOKIE}=weak; {HOST_COOKIE}=strong"
    scope: Any = {
        "type": "http",
        "scheme": scheme,
        "headers": [(b"host", host.encode()), (b"cookie", both.encode())],
    }
    assert cookie_name(scope) == name
    assert find_cookie(scope) == ("weak" if name == LOOPBACK_COOKIE else "strong")


# ---------------------------------------------------------------- other pages


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        (SAME, 204),
        ({"Sec-Fetch-Site": "none"}, 204),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://127.0.0.1"}, 204),
        ({"Origin": "http://127.0.0.1:81"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}, 403),
    ],
)
def test_a_change_in_a_session_proves_its_origin(headers: dict[str, str], status: int) -> None:
    world = LoginWorld()
    assert world.status("DELETE /session", world.log_in(), **headers) == status


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)],
)
def test_a_read_in_a_session_of_another_site_is_refused(site: str, status: int) -> None:
    world = LoginWorld()
    headers = {"Sec-Fetch-Site": site}
    assert world.status("GET /users", world.log_in(), **headers) == status
    assert world.status("GET /users", **BASIC, **headers) == 200, "no session"


def test_a_session_manages_the_credentials_of_its_user() -> None:
    world = LoginWorld()
    world.put_user(type=UserType.NORMAL, entries=(parse_entry("Topic:a", ["Get"]),))
    cookie = world.log_in()
    assert world.status("GET /users/ops", cookie) == 200
    assert world.status("POST /tokens", cookie, **SAME) == 415, "it may, and has no body"


# ---------------------------------------------------------------- the access log


def refusal_after(world: LoginWorld, cookie: str = "", **headers: str) -> dict[str, Any]:
    """Return the record of the next request, which is refused."""
    world.lines.clear()
    world.clock.advance(1_000)  # A repeated refusal has one line per second.
    assert world.status("GET /users", cookie, **headers) == 401
    [line] = world.lines
    assert (line["kind"], line["call"]) == ("refusal", "GET /users")
    return line


def test_a_refusal_of_correct_credentials_names_the_user() -> None:
    world = LoginWorld()
    cookie = world.log_in()
    world.put_user(is_enabled=False)
    for refusal, via in (
        (refusal_after(world, **BASIC), "basic"),
        (refusal_after(world, cookie), "session"),
    ):
        assert (refusal["user"], refusal["via"]) == ("ops", via)
        assert refusal["reason"] == "user ops is disabled"


def test_a_refusal_of_a_wrong_secret_has_the_name_as_claimed() -> None:
    wrong = base64.b64encode(b"ops:a wrong secret").decode()
    refusal = refusal_after(LoginWorld(), Authorization=f"Basic {wrong}", Tidemill_User="tester")
    assert "user" not in refusal
    assert refusal["claimedUser"] == "ops"
    assert "wrong secret" not in str(refusal)
