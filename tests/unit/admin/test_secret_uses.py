"""The last uses of the secrets of a user, from all processes."""

from __future__ import annotations

from typing import Any

from tests.unit.admin.test_rights import KEYS
from tests.unit.admin.test_token_routes import READ_SECURITY, TokenWorld
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.http.access import AccessControl
from tidemill.admin.http.identities import IdentityCheck
from tidemill.security.table import Mode
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

LATER_MS = 10**15  # later than the start of this process


def shown(world: TokenWorld, name: str = "root") -> dict[str, Any]:
    answer = world.ask(f"GET /users/{name}", "root")
    assert answer.status_code == 200, answer.text
    user: dict[str, Any] = answer.json()
    return user


def report(
    world: TokenWorld, proxy: str, *used_at_ms: int, since_ms: int = 1, created_at_ms: int = 0
) -> None:
    uses = [
        pb.SecretUse(secret_id=1, created_at_ms=created_at_ms, used_at_ms=used)
        for used in used_at_ms
    ]
    world.home.proxies[proxy] = pb.SecurityState(
        mode="on", secret_uses=uses, uses_since_ms=since_ms
    )


def test_the_latest_use_at_any_proxy_counts() -> None:
    world = TokenWorld()
    report(world, "proxy-0", 2_000)
    report(world, "proxy-1", 5_000, since_ms=LATER_MS)
    report(world, "proxy-2")
    user = shown(world)
    assert [secret["usedAtMs"] for secret in user["secrets"]] == [5_000]
    assert user["usesSinceMs"] == LATER_MS
    assert "unreachable" not in user


def test_a_secret_without_a_use_has_no_time() -> None:
    world = TokenWorld()
    report(world, "proxy-0", 2_000, created_at_ms=7)
    user = shown(world)
    assert "usedAtMs" not in user["secrets"][0], "the use is of a former secret"
    assert user["usesSinceMs"] > 1


def test_processes_without_an_answer_are_named() -> None:
    world = TokenWorld()
    report(world, "proxy-0", 2_000)
    world.home.proxies["proxy-1"] = None
    report(world, "proxy-2", since_ms=0)
    unreachable = " ".join(shown(world)["unreachable"])
    assert "proxy-0" not in unreachable
    assert "proxy-1" in unreachable
    assert "proxy-2: its version knows no last uses" in unreachable


def test_logins_at_the_rest_api_are_uses() -> None:
    world = TokenWorld(READ_SECURITY)
    copy = AdminSecurityCopy(world.home.client.find, world.clock.monotonic_ms, floor=Mode.OFF)
    check = IdentityCheck(
        copy,
        lambda: KEYS,
        wall_ms=world.clock.wall_ms,
        monotonic_ms=world.clock.monotonic_ms,
        uses=world.app.state.secret_uses,
    )
    world.door = AccessControl(world.app, body_bytes_max=10_000, identities=check)
    assert "usedAtMs" not in shown(world, "ops")["secrets"][0]
    assert world.status("GET /users/root", "ops") == 200
    used_at_ms = shown(world, "ops")["secrets"][0]["usedAtMs"]
    assert used_at_ms >= shown(world, "ops")["usesSinceMs"]
