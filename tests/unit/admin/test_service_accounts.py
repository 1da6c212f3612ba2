"""Service accounts of users at the REST API: changes of users, and requests with their tokens."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clocks import ManualClock
from tests.support.issuer import (
    AUDIENCE,
    ISSUER,
    claims_of,
    jwk,
    p256_key,
    rsa_key,
    token,
    write_keys,
)
from tests.support.security_home import SecurityHome
from tests.unit.admin.test_rights import KEYS, SECRET
from tidemill.admin.app import create_app
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.http import identities
from tidemill.admin.http.access import AccessControl
from tidemill.admin.http.failed_logins import LOGINS_MAX, OF_AN_ADDRESS
from tidemill.admin.http.identities import IdentityCheck
from tidemill.admin.http.service_accounts import AccountCopy, AnyNumberOfChecks, RestServiceAccounts
from tidemill.admin.routes import brokers_of
from tidemill.admin.routes.security import clock_of
from tidemill.security.acl import AccessEntry, parse_entry
from tidemill.security.identities import ACCOUNTS_MAX, CERTIFICATES_MAX, User, UserType
from tidemill.security.issuer_keys import IssuerKeys, KeySource, following
from tidemill.security.kubernetes_tokens import KubernetesTokens
from tidemill.security.table import Mode, mode_item
from tidemill.security.tokens import make_token

READ_SECURITY = parse_entry("Cluster:security", ["Get"])
ACCOUNT = "shop/orders"


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "WRONG_ANSWER_S", 0)


class AccountWorld:
    """A home with the users `ops` and `root`, and the API before it."""

    def __init__(self, folder: Path, mode: Mode = Mode.ON) -> None:
        self.home = SecurityHome()
        self.home.put(mode_item(mode))
        self.clock = ManualClock()
        self.folder = folder
        self.pause_ms = 1_000  # before each request
        self.is_reading = False  # whether keys are read again, for one request
        self.put_user("ops", READ_SECURITY, accounts=[ACCOUNT])
        self.put_user("root", kind=UserType.SUPER)
        source = KeySource(write_keys(folder, jwk(rsa_key())))
        client, monotonic_ms = self.home.client, self.clock.monotonic_ms
        copy = AdminSecurityCopy(client.find, monotonic_ms, floor=Mode.OFF)
        self.keys = IssuerKeys(source, monotonic_ms)
        tokens = KubernetesTokens(ISSUER, AUDIENCE, self.keys.present, AnyNumberOfChecks())
        users = AccountCopy(client.all, lambda: copy.version)
        check = IdentityCheck(
            copy,
            lambda: KEYS,
            wall_ms=self.clock.wall_ms,
            monotonic_ms=monotonic_ms,
            accounts=RestServiceAccounts(copy, users, tokens, self.keys),
        )
        app = create_app(None, None, needs_identity=True, secret_keys=lambda: KEYS)  # type: ignore[arg-type]  # no brokers
        app.dependency_overrides = {brokers_of: lambda: self.home, clock_of: lambda: self.clock}
        self.door = AccessControl(app, body_bytes_max=64 << 10, identities=check)

    def put_user(
        self,
        name: str,
        *entries: AccessEntry,
        kind: UserType = UserType.NORMAL,
        accounts: list[str] | None = None,
        is_enabled: bool = True,
    ) -> None:
        user_id = self.home.table.version + 1
        sealed = KEYS.seal(SECRET.encode(), user_id=user_id, secret_id=1, created_at_ms=0)
        user = User(
            name=name,
            id=user_id,
            type=kind,
            secrets=(sealed,),
            entries=entries,
            service_accounts=tuple(accounts or ()),
            is_enabled=is_enabled,
        )
        self.home.put(user.to_item())

    def token(self, account: str = ACCOUNT, **options: Any) -> str:
        """Return a token that has just been made."""
        return token(claims_of(account, now_s=self.clock.now_ms // 1_000), **options)

    def ask(self, operation: str, shown: str, **body: Any) -> httpx.Response:
        """Send a request with a header, after the copies have become old."""
        self.clock.advance(self.pause_ms)
        method, _, path = operation.partition(" ")

        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(self.door, raise_app_exceptions=False)
            url = f"/api/v1{path}"
            sent = body if method in {"POST", "PUT"} else None
            async with (
                following(self.keys if self.is_reading else None),
                httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
            ):
                return await http.request(method, url, headers={"Authorization": shown}, json=sent)

        return asyncio.run(request())

    def as_root(self, operation: str, **body: Any) -> httpx.Response:
        basic = base64.b64encode(f"root:{SECRET}".encode()).decode()
        return self.ask(operation, f"Basic {basic}", **body)

    def as_pod(self, operation: str, shown: str = "", **body: Any) -> httpx.Response:
        return self.ask(operation, f"Bearer {shown or self.token()}", **body)


@pytest.fixture
def world(tmp_path: Path) -> AccountWorld:
    return AccountWorld(tmp_path)


def detail(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["detail"]


# ---------------------------------------------------------------- requests


def test_a_token_is_a_credential_of_its_user(world: AccountWorld) -> None:
    answer = world.as_pod("GET /session")
    assert answer.status_code == 200, answer.text
    assert (answer.json()["user"], answer.json()["via"]) == ("ops", f"serviceaccount:{ACCOUNT}")
    assert world.as_pod("GET /users").status_code == 200
    assert world.as_pod("PUT /users/other").status_code == 403


def test_wrong_tokens_are_refused(world: AccountWorld) -> None:
    wrong = (401, "the Kubernetes token is wrong")
    assert detail(world.as_pod("GET /users", world.token(key=rsa_key(1)))) == wrong
    assert detail(world.as_pod("GET /users", "a.b.c")) == wrong
    assert detail(world.as_pod("GET /users", make_token().text)) == (401, "the token is wrong")
    unknown = (401, "no user lists the service account shop/other")
    assert detail(world.as_pod("GET /users", world.token("shop/other"))) == unknown
    ended = token(claims_of(now_s=0, exp=100))
    assert detail(world.as_pod("GET /users", ended)) == (401, "the Kubernetes token has ended")


def test_a_change_of_users_counts_for_the_next_request(world: AccountWorld) -> None:
    shown = world.token()
    assert world.as_pod("GET /users", shown).status_code == 200
    world.put_user("second", accounts=[ACCOUNT])
    assert "the users ops, second list" in detail(world.as_pod("GET /users", shown))[1]
    world.home.put({"op": "deleteUser", "name": "second"})
    assert world.as_pod("GET /users", shown).status_code == 200
    world.put_user("ops", READ_SECURITY, accounts=[ACCOUNT], is_enabled=False)
    assert detail(world.as_pod("GET /users", shown)) == (401, "user ops is disabled")
    world.put_user("ops", READ_SECURITY)
    gone = (401, f"no user lists the service account {ACCOUNT}")
    assert detail(world.as_pod("GET /users", shown)) == gone


def test_a_token_makes_no_credentials(world: AccountWorld) -> None:
    assert world.as_pod("POST /users/ops:rotate").status_code == 403
    assert world.as_pod("POST /tokens", name="ci").status_code == 403
    assert world.as_pod("POST /session").status_code == 409


def test_failed_tokens_of_an_address_are_limited(world: AccountWorld) -> None:
    forged = world.token(key=rsa_key(1))
    world.pause_ms = 0
    codes = [world.as_pod("GET /users", forged).status_code for _ in range(LOGINS_MAX + 1)]
    assert codes == [401] * LOGINS_MAX + [429]
    assert world.as_pod("GET /users").status_code == 200, "of another token"
    others = [f"a.b.{number}" for number in range(LOGINS_MAX * (OF_AN_ADDRESS - 1))]
    assert {world.as_pod("GET /users", text).status_code for text in others} == {401}
    assert world.as_pod("GET /users").status_code == 429, "all tokens of the address"


def test_a_new_key_is_read_for_the_first_token_with_it(world: AccountWorld) -> None:
    write_keys(world.folder, jwk(p256_key(), "k2"))
    world.is_reading = True
    shown = world.token(key=p256_key(), kid="k2")
    assert world.as_pod("GET /users", shown).status_code == 200


def test_nothing_is_known_before_the_first_answer(tmp_path: Path) -> None:
    world = AccountWorld(tmp_path)
    world.home.is_up = False
    assert world.as_pod("GET /users").status_code == 503


# ---------------------------------------------------------------- changes


def test_service_accounts_are_put_shown_and_removed(world: AccountWorld) -> None:
    body = {"serviceAccounts": ["b/b", "a/a", "b/b"]}
    made = world.as_root("PUT /users/new", **body).json()
    assert made["serviceAccounts"] == ["a/a", "b/b"]
    stored = world.home.find("user", "new")
    assert stored is not None
    assert stored["user"]["serviceAccounts"] == ["a/a", "b/b"]
    assert world.as_root("PUT /users/new", enabled=True).json()["serviceAccounts"] == ["a/a", "b/b"]
    assert world.as_root("PUT /users/new", serviceAccounts=[]).json()["serviceAccounts"] == []
    stored = world.home.find("user", "new")
    assert stored is not None
    assert "serviceAccounts" not in stored["user"]


def test_a_service_account_has_one_user(world: AccountWorld) -> None:
    refused = world.as_root("PUT /users/new", serviceAccounts=["a/a", ACCOUNT])
    assert refused.status_code == 409
    assert "user ops lists the service account shop/orders" in refused.json()["detail"]
    assert world.home.find("user", "new") is None
    assert world.as_root("PUT /users/ops", serviceAccounts=["a/a", ACCOUNT]).status_code == 200


def test_two_changes_at_once_do_not_share_a_service_account(world: AccountWorld) -> None:
    async def put_other() -> None:
        world.home.before_change = _nothing
        world.put_user("first", accounts=["a/a"])

    world.home.before_change = put_other
    assert world.as_root("PUT /users/new", serviceAccounts=["a/a"]).status_code == 409


async def _nothing() -> None:
    pass


def test_names_and_their_number_are_checked(world: AccountWorld) -> None:
    many = [f"shop/a{number}" for number in range(ACCOUNTS_MAX + 1)]
    assert world.as_root("PUT /users/new", serviceAccounts=many).status_code == 400
    assert world.as_root("PUT /users/new", serviceAccounts=many[1:]).status_code == 200
    refused = world.as_root("PUT /users/other", serviceAccounts=["shop"])
    assert (refused.status_code, "NAMESPACE/NAME" in refused.text) == (400, True)


# ---------------------------------------------------------------- certificates


def test_certificates_are_put_shown_and_removed(world: AccountWorld) -> None:
    names = ["spiffe://cluster/ns/shop/sa/orders", "Orders Service", "Orders Service"]
    made = world.as_root("PUT /users/new", certificates=names).json()
    assert made["certificates"] == sorted(set(names))
    assert made["serviceAccounts"] == []
    assert world.as_root("PUT /users/new", enabled=True).json()["certificates"] == sorted(
        set(names)
    )
    refused = world.as_root("PUT /users/other", certificates=names[1:])
    assert refused.status_code == 409
    assert "user new lists the certificate Orders Service" in refused.json()["detail"]
    assert world.as_root("PUT /users/new", certificates=[]).json()["certificates"] == []
    assert world.as_root("PUT /users/other", certificates=names).status_code == 200


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "ä", "x" * 256])
def test_names_of_certificates_are_checked(world: AccountWorld, name: str) -> None:
    refused = world.as_root("PUT /users/new", certificates=[name])
    assert (refused.status_code, "certificate" in refused.text) == (400, True)
    assert world.as_root("PUT /users/new", certificates=["x" * 255]).status_code == 200
    many = [f"c{number}" for number in range(CERTIFICATES_MAX + 1)]
    assert world.as_root("PUT /users/new", certificates=many).status_code == 400
    assert world.as_root("PUT /users/new", certificates=many[1:]).status_code == 200


def test_the_rest_api_refuses_a_user_with_certificates(world: AccountWorld) -> None:
    """It accepts no certificates, so none of the requests can have one."""
    made = world.as_pod("GET /session")
    assert made.status_code == 200
    token_of_root = world.as_root("POST /tokens", name="ci", user="ops").json()["token"]
    assert world.as_pod("GET /users", token_of_root).status_code == 200
    assert world.as_root("PUT /users/ops", certificates=["own"]).status_code == 200
    needed = "user ops needs one of its certificates"
    basic = base64.b64encode(f"ops:{SECRET}".encode()).decode()
    for answer in (
        world.as_pod("GET /users"),
        world.as_pod("GET /users", token_of_root),
        world.ask("GET /users", f"Basic {basic}"),
    ):
        assert answer.status_code == 401
        assert needed in answer.json()["detail"]


def test_large_lists_leave_room_for_secrets(world: AccountWorld) -> None:
    entries = [
        {"resource": f"Topic:{'t' * 96}{number}", "actions": ["Pub", "Sub", "Get"]}
        for number in range(256)
    ]
    lists = {
        "certificates": [f"{number}".ljust(255, "x") for number in range(CERTIFICATES_MAX)],
        "serviceAccounts": [f"{'n' * 63}/a{number}" for number in range(ACCOUNTS_MAX)],
    }
    world.pause_ms = 0
    assert world.as_root("PUT /users/new", entries=entries).status_code == 200
    refused = world.as_root("PUT /users/new", entries=entries, **lists)
    accepted = world.as_root("PUT /users/new", entries=entries[:200], **lists)
    assert (refused.status_code, accepted.status_code) == (400, 200)
    assert "entries and identities" in refused.json()["detail"]
