"""The actor of a request: the verified user, the claimed one, and the address."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from tests.support.rest_identities import identities
from tidemill.admin.audit.access_reports import RequestReports
from tidemill.admin.http.access import AccessControl
from tidemill.admin.http.actor import BUILT_IN_USER, Actor, actor_of
from tidemill.admin.http.route_templates import RouteTemplates
from tidemill.common.token_file import TokenFile
from tidemill.security.access_log import AccessLog


def ask(*, token: TokenFile | None = None, headers: dict[str, str] | None = None) -> Actor:
    """Return the actor that a route sees."""
    app, seen = FastAPI(), list[Actor]()

    @app.get("/api/v1/whoami")
    async def whoami(request: Request) -> None:
        seen.append(actor_of(request))

    async def request() -> httpx.Response:
        served = AccessControl(app, identities=identities(token), body_bytes_max=1_000)
        transport = httpx.ASGITransport(served, client=("::ffff:10.1.2.3", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/api/v1/whoami", headers=headers)

    assert asyncio.run(request()).status_code == 200
    return seen[0]


def test_an_open_api_knows_the_address_and_the_claimed_user() -> None:
    actor = ask(headers={"Tidemill-User": "alice\x01" + "x" * 200})
    assert actor == Actor("", "", "alice?" + "x" * 122, "10.1.2.3")
    assert actor.text == f"{actor.claimed_user} at 10.1.2.3"


def test_a_request_with_the_token_of_the_file_is_the_built_in_user(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("secret\n")
    headers = {"Authorization": "Bearer secret", "Tidemill-User": "alice"}
    actor = ask(token=TokenFile(str(file), setting="admin_token_file"), headers=headers)
    assert actor == Actor(BUILT_IN_USER, "token-file", "alice", "10.1.2.3")
    assert actor.text == "admin-token (alice) at 10.1.2.3"


def test_a_request_without_names_is_its_address() -> None:
    assert ask().text == "10.1.2.3"


class Reports:
    """The receiver of refusals and accesses."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        log = AccessLog("admin-0", lambda: 1, lambda: 1, self.lines.append)
        self.requests = RequestReports(log, RouteTemplates([("/api/v1/whoami", ["GET"])]))


@pytest.mark.parametrize(
    ("headers", "kind", "user", "result"),
    [
        ({"Authorization": "Bearer wrong"}, "refusal", None, "refused"),
        ({}, "refusal", None, "refused"),
        ({"Authorization": "Bearer secret"}, "access", "admin-token", "ok"),
    ],
)
def test_requests_with_a_wrong_token_and_of_the_super_user_are_reported(
    tmp_path: Path, headers: dict[str, str], kind: str, user: str | None, result: str
) -> None:
    file, reports = tmp_path / "token", Reports()
    file.touch(0o600)
    file.write_text("secret\n")

    async def request() -> None:
        app = FastAPI()
        served = AccessControl(
            app,
            identities=identities(
                TokenFile(str(file), setting="admin_token_file"), reports.requests
            ),
            body_bytes_max=1_000,
        )
        transport = httpx.ASGITransport(served, client=("10.1.2.3", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await client.get("/api/v1/whoami", headers=headers)

    asyncio.run(request())
    [line] = reports.lines
    assert (line["kind"], line.get("user"), line["result"]) == (kind, user, result)
    assert (line["call"], line["from"]) == ("GET /whoami", "10.1.2.3")
    assert "secret" not in str(line)
