"""The rights of the REST API: each operation has a row, and each right of a row is needed."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.support.clocks import ManualClock
from tidemill.admin.app import create_app
from tidemill.admin.cluster.security_client import FoundItem
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.http.access import AccessControl
from tidemill.admin.http.identities import IdentityCheck
from tidemill.admin.http.rights import ROWS, NeededRight, RightsRow
from tidemill.admin.http.route_templates import PREFIX
from tidemill.admin.routes import brokers_of, demand_queries_of, timer_histograms_of
from tidemill.admin.routes.replicas import controllers_of
from tidemill.common.errors import BrokerUnreachable
from tidemill.security.acl import AccessEntry, parse_entry
from tidemill.security.identities import User, UserType
from tidemill.security.secret_keys import SecretKeys
from tidemill.security.table import Mode, mode_item

SECRET = "a-secret-of-sixteen"
KEYS = SecretKeys({"k1": b"k" * 32})
NAMES = {"{topic}": "orders", "{group}": "billing", "{user}": "other"}
# Without brokers: a passed request fails with 502, which is neither 401 nor 403.
APP: FastAPI = create_app(None, None, needs_identity=True)  # type: ignore[arg-type]  # no brokers


def fail() -> None:
    """Fail as without brokers."""
    raise BrokerUnreachable("no brokers in this test")


APP.dependency_overrides = {
    brokers_of: fail,
    demand_queries_of: fail,
    timer_histograms_of: fail,
    controllers_of: fail,
}
OPERATIONS = [
    f"{method.upper()} {path.removeprefix(PREFIX)}"
    for path, operations in APP.openapi()["paths"].items()
    for method in operations
]


class Items:
    """The security items of a cluster that may be down."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], bytes] = {}
        self.is_up = True
        self.reads = 0

    async def find(self, kind: str, name: str) -> FoundItem:
        """Return an item."""
        self.reads += 1
        if not self.is_up:
            raise BrokerUnreachable("down")
        return FoundItem(self.found.get((kind, name)), 1)

    def put(self, item: dict[str, Any]) -> None:
        """Put an item."""
        self.found[item["op"], item.get("name", "")] = json.dumps(item).encode()

    def put_user(
        self,
        *entries: AccessEntry,
        kind: UserType = UserType.NORMAL,
        is_enabled: bool = True,
        not_after_ms: int = 0,
    ) -> None:
        """Put the user `ops`."""
        sealed = KEYS.seal(SECRET.encode(), user_id=1, secret_id=1, created_at_ms=0)
        sealed = replace(sealed, not_after_ms=not_after_ms)
        user = User(
            name="ops", id=1, type=kind, is_enabled=is_enabled, secrets=(sealed,), entries=entries
        )
        self.put(user.to_item())


class Door:
    """The API behind its access control, without brokers."""

    def __init__(self, mode: Mode = Mode.ON) -> None:
        self.items = Items()
        self.items.put(mode_item(mode))
        self.clock = ManualClock()
        self.address = "127.0.0.1"  # of the caller
        self.copy = AdminSecurityCopy(self.items.find, self.clock.monotonic_ms, floor=Mode.OFF)
        self.app = APP
        self.identities = IdentityCheck(
            self.copy,
            lambda: KEYS,
            wall_ms=self.clock.wall_ms,
            monotonic_ms=self.clock.monotonic_ms,
        )
        self.served = AccessControl(self.app, body_bytes_max=10_000, identities=self.identities)

    def ask(
        self,
        operation: str,
        credentials: tuple[str, str] | None = ("ops", SECRET),
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request without a body."""
        method, _, path = operation.partition(" ")
        for parameter, name in NAMES.items():
            path = path.replace(parameter, name)
        path = (
            path.replace("{timer_id}", "1")
            .replace("{transaction_id}", "A" * 26)
            .replace("{queue}", "0")
        )
        path = path.replace("{", "").replace("}", "")
        sent = dict(headers or {})
        if credentials is not None:
            encoded = base64.b64encode(":".join(credentials).encode()).decode()
            sent["Authorization"] = f"Basic {encoded}"

        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(
                self.served, raise_app_exceptions=False, client=(self.address, 1)
            )
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await http.request(method, PREFIX + path, headers=sent)

        return asyncio.run(request())


def entry_of(right: NeededRight, at: int = 0) -> AccessEntry:
    resource = f"{right.type.text}:{NAMES.get(right.name, right.name)}"
    return parse_entry(resource, [right.actions[at].text])


def test_each_operation_has_a_row() -> None:
    assert set(ROWS) == set(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_needs_credentials(operation: str) -> None:
    door = Door()
    door.items.put_user(kind=UserType.SUPER)
    for credentials in (None, ("ops", "wrong"), ("nobody", SECRET)):
        refused = door.ask(operation, credentials)
        assert refused.status_code == 401, credentials
        assert refused.headers["content-type"] == "application/problem+json"
        assert "Basic" in refused.headers["www-authenticate"]
    assert door.ask(operation).status_code not in {401, 403}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_needs_each_of_its_rights_and_no_other(operation: str) -> None:
    row = ROWS[operation]
    entries = [entry_of(right) for right in row.needed]
    door = Door()
    door.items.put_user(*entries)
    passes = not row.is_super
    assert (door.ask(operation).status_code != 403) is passes
    for at in range(1, max((len(right.actions) for right in row.needed), default=0)):
        door = Door()
        door.items.put_user(*(entry_of(right, at % len(right.actions)) for right in row.needed))
        assert door.ask(operation).status_code != 403
    for missing in entries:
        door = Door()
        door.items.put_user(*(one for one in entries if one is not missing))
        refused = door.ask(operation)
        assert refused.status_code == 403
        assert "user ops may not" in refused.json()["detail"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_super_row_is_refused_to_a_user_with_every_right(operation: str) -> None:
    row: RightsRow = ROWS[operation]
    door = Door()
    door.items.put_user(parse_entry("*", ["All"]))
    assert (door.ask(operation).status_code == 403) is row.is_super


def test_a_user_reads_itself_and_rotates_its_own_secret() -> None:
    door = Door()
    door.items.put_user()
    for operation in ("GET /users/ops", "POST /users/ops:rotate"):
        assert door.ask(operation).status_code not in {401, 403}
    assert door.ask("PUT /users/ops").status_code == 403


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.PERMISSIVE])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_modes_off_and_permissive_refuse_nothing(operation: str, mode: Mode) -> None:
    door = Door(mode)
    door.items.put_user()
    for credentials in (None, ("ops", "wrong"), ("ops", SECRET)):
        assert door.ask(operation, credentials).status_code not in {401, 403, 429}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"is_enabled": False}, "user ops is disabled"),
        ({"not_after_ms": 1}, "the secret of user ops has ended"),
    ],
)
def test_a_disabled_user_and_an_ended_secret_are_refused(change: dict[str, Any], text: str) -> None:
    door = Door()
    door.items.put_user(kind=UserType.SUPER, **change)
    refused = door.ask("GET /topics")
    assert refused.status_code == 401
    assert text in refused.json()["detail"]


def test_unknown_users_and_wrong_secrets_get_the_same_answer() -> None:
    door = Door()
    door.items.put_user()
    texts = {door.ask("GET /topics", one).text for one in (("ops", "x"), ("nobody", SECRET))}
    assert len(texts) == 1


def test_a_change_counts_after_half_a_second() -> None:
    door = Door()
    door.items.put_user(kind=UserType.SUPER)
    assert door.ask("GET /security").status_code != 403
    door.items.put_user()
    door.clock.advance(500)
    assert door.ask("GET /security").status_code == 403


def test_the_last_known_items_stay_in_force_without_brokers() -> None:
    door = Door()
    door.items.is_up = False
    unknown = door.ask("GET /topics")
    assert unknown.status_code == 503
    door.items.is_up = True
    door.items.put_user()
    assert door.ask("GET /security").status_code == 403
    door.items.is_up = False
    door.clock.advance(3_600_000)
    assert door.ask("GET /security").status_code == 403
    assert door.ask("GET /security", None).status_code == 401


def test_failed_logins_are_limited_per_user_and_address() -> None:
    door = Door()
    door.items.put_user(kind=UserType.SUPER)
    for _ in range(10):
        assert door.ask("GET /topics", ("ops", "wrong")).status_code == 401
    refused = door.ask("GET /topics")
    assert refused.status_code == 429
    assert 0 < int(refused.headers["retry-after"]) <= 6
    assert refused.json()["retryAfterMs"] == int(refused.headers["retry-after"]) * 1_000
    assert door.ask("GET /topics", ("nobody", "wrong")).status_code == 401
    door.clock.advance(6_000)
    assert door.ask("GET /topics").status_code not in {401, 429}


FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_page_of_another_origin_changes_nothing(headers: dict[str, str]) -> None:
    door = Door()
    door.items.put_user(kind=UserType.SUPER)
    changes = [one for one in OPERATIONS if not one.startswith("GET")]
    assert {door.ask(one, headers=headers).status_code for one in changes} == {403}
    assert door.items.reads == 0
    own = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
    assert door.ask("POST /groups/{group}:releaseLock", headers=own).status_code != 403


def test_each_answer_has_the_headers_of_a_safe_page() -> None:
    door = Door()
    for answer in (door.ask("GET /topics", None), door.ask("GET /unknown", None)):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_a_request_past_the_identity_check_is_refused() -> None:
    async def bare() -> httpx.Response:
        transport = httpx.ASGITransport(APP, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.get(f"{PREFIX}/topics")

    assert asyncio.run(bare()).status_code == 403
