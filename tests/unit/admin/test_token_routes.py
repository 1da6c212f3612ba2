"""Named tokens of the REST API: their owners, their limits, and requests with them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.clocks import ManualClock
from tests.support.security_home import SecurityHome
from tests.unit.admin.test_rights import KEYS, SECRET
from tidemill.admin.app import create_app
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.http import identities
from tidemill.admin.http.access import AccessControl
from tidemill.admin.http.failed_logins import LOGINS_MAX
from tidemill.admin.http.identities import IdentityCheck
from tidemill.admin.routes import brokers_of
from tidemill.admin.routes.security import clock_of
from tidemill.security.acl import AccessEntry, parse_entry
from tidemill.security.identities import AccessRole, User, UserType
from tidemill.security.secret_keys import SecretKeys
from tidemill.security.table import Mode, mode_item
from tidemill.security.tokens import (
    DAY_MS,
    DURATION_MS_MAX,
    TOKENS_OF_A_USER_MAX,
    NamedToken,
    make_token,
)

READ_SECURITY = parse_entry("Cluster:security", ["Get"])
MADE = make_token()


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "WRONG_ANSWER_S", 0)


class TokenWorld:
    """A home with the users `ops` and `root`, and the API before it."""

    def __init__(
        self,
        *entries: AccessEntry,
        mode: Mode = Mode.ON,
        keys: Callable[[], SecretKeys] = lambda: KEYS,
        key_file: str = "",
    ) -> None:
        self.home = SecurityHome()
        self.home.put(mode_item(mode))
        self.clock = ManualClock()
        self.put_user("ops", *entries)
        self.put_user("root", kind=UserType.SUPER)
        copy = AdminSecurityCopy(self.home.client.find, self.clock.monotonic_ms, floor=Mode.OFF)
        check = IdentityCheck(
            copy, keys, wall_ms=self.clock.wall_ms, monotonic_ms=self.clock.monotonic_ms
        )
        app = create_app(
            None,  # type: ignore[arg-type]  # no brokers
            None,  # type: ignore[arg-type]  # no queries
            needs_identity=True,
            secret_keys=keys,
            key_file=key_file,
        )
        self.app = app
        app.dependency_overrides = {brokers_of: lambda: self.home, clock_of: lambda: self.clock}
        self.door = AccessControl(app, body_bytes_max=10_000, identities=check)

    def put_user(
        self,
        name: str,
        *entries: AccessEntry,
        kind: UserType = UserType.NORMAL,
        keys: SecretKeys = KEYS,
    ) -> None:
        user_id = self.home.table.version + 1
        sealed = keys.seal(SECRET.encode(), user_id=user_id, secret_id=1, created_at_ms=0)
        user = User(name=name, id=user_id, type=kind, secrets=(sealed,), entries=entries)
        self.home.put(user.to_item())

    def ask(self, operation: str, by: str = "ops", **body: Any) -> httpx.Response:
        """Send a request by a user or with a token, after the copies have become old."""
        self.clock.advance(1_000)
        method, _, path = operation.partition(" ")
        basic = base64.b64encode(f"{by}:{SECRET}".encode()).decode()
        shown = f"Bearer {by}" if by.startswith("tmk_") else f"Basic {basic}"

        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(self.door, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await http.request(
                    method,
                    f"/api/v1{path}",
                    headers={"Authorization": shown},
                    json=body if method in {"POST", "PUT"} else None,
                )

        return asyncio.run(request())

    def create(self, by: str = "ops", **body: Any) -> dict[str, Any]:
        """Create a token; return the answer."""
        answer = self.ask("POST /tokens", by, **{"name": "ci", **body})
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def status(self, operation: str, by: str = "ops", **body: Any) -> int:
        """Return the status of a request."""
        return self.ask(operation, by, **body).status_code


# ---------------------------------------------------------------- owners


def test_a_user_manages_its_own_tokens() -> None:
    world = TokenWorld()
    made = world.create()
    assert made["token"].startswith(f"tmk_{made['id']}_")
    assert (made["user"], made["roles"], made["dryRun"]) == ("ops", [], False)
    assert made["notAfterMs"] - made["createdAtMs"] == 90 * DAY_MS
    shown = world.ask(f"GET /tokens/{made['id']}").json()
    assert shown == {key: made[key] for key in shown}
    assert "token" not in shown
    assert [one["name"] for one in world.ask("GET /tokens").json()["tokens"]] == ["ci"]
    [author] = world.home.audits
    assert (author.user, author.resource, author.action) == ("ops", "Token:ci", "Create")
    assert made["token"][-43:] not in str(world.home.find("token", made["id"]))
    deleted = world.ask(f"DELETE /tokens/{made['id']}").json()
    assert (deleted["dryRun"], deleted["token"]["name"]) == (False, "ci")
    assert world.status(f"GET /tokens/{made['id']}") == 403, "as a token of another user"
    assert world.status("GET /topics", made["token"]) == 401


def test_a_token_of_another_user_looks_like_a_missing_one() -> None:
    world = TokenWorld()
    other = world.create("root")["id"]
    for method in ("GET", "DELETE"):
        hidden, missing = (world.ask(f"{method} /tokens/{one}") for one in (other, make_token().id))
        assert (hidden.status_code, hidden.json()["detail"]) == (403, missing.json()["detail"])
    assert world.ask("GET /tokens").json() == {"tokens": []}
    assert world.status("POST /tokens", name="ci", user="root") == 403


def test_super_users_manage_all_tokens_and_readers_list_them() -> None:
    world = TokenWorld(READ_SECURITY)
    made = world.create("root", user="ops")
    of_root = world.create("root")
    assert len(world.ask("GET /tokens").json()["tokens"]) == 2
    assert world.status(f"GET /tokens/{of_root['id']}") == 200
    assert world.status(f"GET /tokens/{make_token().id}") == 404
    assert world.status(f"DELETE /tokens/{of_root['id']}") == 403
    assert world.status(f"DELETE /tokens/{made['id']}", "root") == 200
    assert world.status(f"DELETE /tokens/{made['id']}", "root") == 404


@pytest.mark.parametrize("entries", [[], [READ_SECURITY]])
def test_pages_have_every_visible_token_once(entries: list[AccessEntry]) -> None:
    world = TokenWorld(*entries)
    names = {f"t{n}" for n in range(5)}
    for name in names:
        world.create(name=name)
    world.create("root", name="root")
    found, token = [], ""
    while True:
        page = world.ask(f"GET /tokens?pageSize=2{token}").json()
        found += [one["name"] for one in page["tokens"]]
        if "nextPageToken" not in page:
            break
        token = f"&pageToken={page['nextPageToken']}"
    assert sorted(found) == sorted(names | ({"root"} if entries else set()))


def test_in_the_mode_off_a_token_needs_a_named_user() -> None:
    world = TokenWorld(mode=Mode.OFF)
    refused = world.ask("POST /tokens", name="ci")
    assert refused.status_code == 409
    assert "(--user)" in refused.json()["detail"]
    assert world.create(user="ops")["user"] == "ops"


# ---------------------------------------------------------------- requests with a token


def test_a_token_has_the_rights_of_its_user() -> None:
    world = TokenWorld(READ_SECURITY)
    token = world.create()["token"]
    assert world.status("GET /users", token) == 200
    assert world.status("PUT /users/x", token) == 403
    world.put_user("x")
    root = world.create("root")["token"]
    assert world.status("PUT /users/y", root) == 200
    author = world.home.audits[-1]
    assert (author.user, author.via) == ("root", "token:ci")


def test_roles_limit_a_token() -> None:
    world = TokenWorld(parse_entry("*", ["All"]))
    world.home.put(AccessRole(name="readers", entries=(READ_SECURITY,)).to_item())
    token = world.create(roles=["readers"])["token"]
    assert world.status("GET /users", token) == 200
    assert world.status("GET /audit", token) == 403
    limited = world.create("root", roles=["readers"])["token"]
    assert world.status("PUT /users/x", limited) == 403
    refused = world.ask("DELETE /roles/readers", "root")
    assert refused.status_code == 409
    assert "ci of ops" in refused.json()["detail"]


@pytest.mark.parametrize("roles", [[], ["admin"]])
def test_a_token_makes_no_credentials_of_its_user(roles: list[str]) -> None:
    world = TokenWorld(parse_entry("*", ["All"]))
    made = world.create(roles=roles)
    token = made["token"]
    for operation in ("POST /tokens", f"DELETE /tokens/{made['id']}", "POST /users/ops:rotate"):
        body = {"name": "other"} if operation == "POST /tokens" else {}
        assert world.status(operation, token, **body) == 403
    limited = world.create("root", roles=["admin"])["token"]
    assert world.status("POST /tokens", limited, name="other", user="ops") == 403


def test_a_token_of_a_deleted_user_counts_for_no_later_one() -> None:
    world = TokenWorld()
    token = world.create()["token"]
    other = world.create("root")["token"]
    planned = world.ask("DELETE /users/ops?dryRun=true", "root").json()
    assert planned["tokens"] == ["ci"]
    assert world.status("GET /topics?pageSize=0", token) != 401
    assert world.ask("DELETE /users/ops", "root").json()["tokens"] == ["ci"]
    world.put_user("ops", parse_entry("*", ["All"]))
    assert world.status("GET /users", token) == 401
    assert world.status("GET /users", other) == 200
    assert world.home.table.count("token") == 1


def test_a_token_that_outlived_its_user_counts_for_no_later_one() -> None:
    """Such an item is left if a change of another program deletes the user alone."""
    world = TokenWorld()
    token = world.create()["token"]
    world.home.put({"op": "deleteUser", "name": "ops"})
    assert world.status("GET /users", token) == 401
    world.put_user("ops", parse_entry("*", ["All"]))
    assert world.status("GET /users", token) == 401


def test_a_token_ends() -> None:
    world = TokenWorld(READ_SECURITY)
    token = world.create(expiresAfterMs=10_000)["token"]
    world.clock.advance(8_000)
    assert world.status("GET /users", token) == 200
    refused = world.ask("GET /users", token)
    assert refused.status_code == 200, "at the end"
    refused = world.ask("GET /users", token)
    assert refused.status_code == 401
    assert "token ci of user ops has ended" in refused.json()["detail"]
    forever = world.create(name="forever", noExpiry=True)
    assert forever["notAfterMs"] == 0


def test_unknown_wrong_and_malformed_tokens_get_one_answer_and_a_limit() -> None:
    world = TokenWorld()
    made = world.create()
    wrong = f"tmk_{made['id']}_{MADE.text[-43:]}"
    answers = [world.ask("GET /topics", one) for one in (MADE.text, wrong, "tmk_x")]
    assert {answer.text for answer in answers} == {answers[0].text}
    assert answers[0].status_code == 401
    statuses = [world.status("GET /topics", wrong) for _ in range(LOGINS_MAX + 2)]
    assert statuses[0] == 401
    assert statuses[-1] == 429
    assert world.status("GET /topics", MADE.text) == 401, "another id"


def test_a_disabled_user_and_an_outage() -> None:
    world = TokenWorld(READ_SECURITY)
    token = world.create()["token"]
    assert world.status("GET /security", token) == 200
    world.home.is_up = False
    assert world.status("GET /security", token) == 502, "verified by the last known items"
    assert world.status("GET /security", MADE.text) == 503
    world.home.is_up = True
    item = world.home.find("user", "ops") or {}
    item["user"]["enabled"] = False
    world.home.put({key: item[key] for key in ("op", "name", "user")})
    assert "disabled" in world.ask("GET /security", token).json()["detail"]


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "two words"}, 400),
        ({"name": "x" * 64}, 200),
        ({"name": "x" * 65}, 400),
        ({"roles": ["missing"]}, 404),
        ({"user": "nobody"}, 404),
        ({"expiresAfterMs": DURATION_MS_MAX}, 200),
        ({"expiresAfterMs": DURATION_MS_MAX + 1}, 400),
        ({"expiresAfterMs": 0}, 400),
        ({"expiresAfterMs": 1, "noExpiry": True}, 400),
    ],
)
def test_a_token_request_is_checked(body: dict[str, Any], status: int) -> None:
    world = TokenWorld()
    assert world.status("POST /tokens", "root", **{"name": "ci", **body}) == status


def test_a_dry_run_makes_no_token() -> None:
    world = TokenWorld()
    planned = world.ask("POST /tokens?dryRun=true", name="ci").json()
    assert "token" not in planned
    assert planned["dryRun"] is True
    assert world.home.table.count("token") == 0
    made = world.create()
    assert world.ask(f"DELETE /tokens/{made['id']}?dryRun=true").json()["dryRun"] is True
    assert world.home.table.count("token") == 1


def test_a_name_is_unique_among_the_tokens_of_its_user() -> None:
    world = TokenWorld()
    world.create()
    assert world.status("POST /tokens", name="ci") == 409
    assert world.create("root")["name"] == "ci"


def test_a_user_has_a_limited_number_of_tokens() -> None:
    world = TokenWorld()
    user_id = (world.home.find("user", "ops") or {})["user"]["id"]
    for n in range(TOKENS_OF_A_USER_MAX - 1):
        made = make_token()
        token = NamedToken(
            id=made.id, name=f"t{n}", user="ops", user_id=user_id, sha256=made.sha256
        )
        world.home.put(token.to_item())
    world.create()
    refused = world.ask("POST /tokens", name="more")
    assert refused.status_code == 409
    assert "at most 100" in refused.json()["detail"]
    assert world.create("root")["name"] == "ci", "another user"
    assert world.status("DELETE /users/ops", "root") == 200
    assert world.home.table.count("token") == 1


def test_a_user_may_ask_about_its_own_access_alone() -> None:
    world = TokenWorld()
    question = {"action": "Pub", "resource": "Topic:orders"}
    own = world.ask("POST /access:check", "ops", user="ops", **question)
    assert own.json()["allowed"] is False
    for name in ("root", "nobody"):
        other = world.ask("POST /access:check", "ops", user=name, **question)
        assert other.status_code == 403, "the answer does not tell whether the user exists"
    world = TokenWorld(READ_SECURITY)
    assert world.ask("POST /access:check", "ops", user="root", **question).json()["allowed"]
    assert world.ask("POST /access:check", "root", user="ops", **question).status_code == 200
