"""Access control of the REST API without a server: host name, token and body size."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request

from tests.support.rest_identities import identities
from tidemill.admin.http import access
from tidemill.admin.http.access import OTHER_BODY_BYTES_MAX, AccessControl, BodyLimit
from tidemill.admin.http.problems import add_problem_handlers
from tidemill.admin.routes.definitions import BODY_LIMITS
from tidemill.common.lifecycle import StartError
from tidemill.common.token_file import TokenFile

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 1_000
WAIT_S = 30.0  # far more than anything here takes


def app() -> ASGIApp:
    """Return an application that reads the body."""
    inner = FastAPI()
    add_problem_handlers(inner)

    @inner.post("/api/v1/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    @inner.get("/some-page")
    async def page() -> str:
        return "page"

    @inner.get("/locked")
    async def locked() -> str:
        raise HTTPException(429, "wait 6 s", {"Retry-After": "6"})

    return inner


def ask(
    served: ASGIApp, method: str = "POST", path: str = "/api/v1/read", **arguments: object
) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://10.1.2.3:80") as client:
            return await client.request(method, path, **arguments)  # type: ignore[arg-type]

    return asyncio.run(request())


def guarded(**options: object) -> AccessControl:
    options = {"body_bytes_max": BODY_BYTES_MAX, "identities": identities(), **options}
    return AccessControl(app(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost.:8080",
        "127.0.0.1:1",
        "127.9.9.9",
        "[::1]:8080",
        "10.1.2.3:80",
        "broker.example",
        "BROKER.example:443",
    ],
)
def test_an_allowed_host_name_is_served(host: str) -> None:
    answer = ask(guarded(hosts=["0.0.0.0", "Broker.Example", ""]), headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "10.1.2.4",
        "a@localhost",
        "localhost:80:80",
        "localhost/x",
        "[localhost",
        "",
        "127.0.0.1.evil.example",
        "localhost x",
    ],
)
def test_an_unknown_host_name_is_rejected(host: str) -> None:
    answer = ask(guarded(hosts=["broker.example", ""]), headers={"Host": host})
    assert answer.status_code == 421
    assert answer.headers["content-type"] == "application/problem+json"
    assert "admin_hosts" in answer.json()["detail"]


def test_two_host_names_are_rejected() -> None:
    headers = [("Host", "localhost"), ("Host", "evil.example")]
    assert ask(guarded(), headers=headers).status_code == 421


def private(path: Path, content: str) -> Path:
    """Write a file that other users cannot read."""
    path.touch(0o600)
    path.write_text(content)
    return path


def test_the_api_needs_the_token_and_pages_do_not(tmp_path: Path) -> None:
    file = private(tmp_path / "token", "a-secret\n")
    served = guarded(identities=identities(TokenFile(str(file), setting="admin_token_file")))
    assert ask(served, "GET", "/some-page").status_code == 200
    for shown in ("", "a-secret", "Bearer", "Bearer b-secret", "Basic a-secret", "Bearer \u00e9"):
        headers = {"Authorization": shown.encode()} if shown else {}
        refused = ask(served, headers=headers)
        assert refused.status_code == 401, shown
        assert "Bearer" in refused.headers["www-authenticate"]
        assert refused.headers["content-type"] == "application/problem+json"
    assert ask(served, headers={"Authorization": "bearer a-secret"}).status_code == 200


def test_a_changed_token_is_reloaded_and_an_invalid_one_is_ignored(tmp_path: Path) -> None:
    file = private(tmp_path / "token", "first")
    token = TokenFile(str(file), setting="admin_token_file")
    new = private(tmp_path / "new", "second-one")
    new.replace(file)
    assert not token.admits("Bearer first")
    assert token.admits("Bearer second-one")
    for broken in ("", "two words", "x" * 5_000):
        file.write_text(broken)
        assert token.admits("Bearer second-one")
        assert not token.admits(f"Bearer {broken}")
    file.unlink()
    assert token.admits("Bearer second-one")


@pytest.mark.parametrize("content", [None, "", " \n", "two words"])
def test_a_file_without_a_token_stops_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        private(file, content)
    with pytest.raises(StartError, match="admin_token_file") as caught:
        TokenFile(str(file), setting="admin_token_file")
    assert "chmod" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601])
def test_a_token_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    file = private(tmp_path / "token", "a-secret")
    file.chmod(0o440)
    token = TokenFile(str(file), setting="admin_token_file")
    file.chmod(mode)
    with pytest.raises(StartError, match="chmod"):
        TokenFile(str(file), setting="admin_token_file")
    other = private(tmp_path / "other", "b-secret")
    other.chmod(mode)
    other.replace(file)
    assert token.admits("Bearer a-secret"), "the previous token stays valid"


def test_a_body_over_the_limit_is_rejected_before_it_is_read() -> None:
    was_read = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal was_read
        was_read = True
        yield bytes(BODY_BYTES_MAX + 1)

    answer = ask(guarded(), content=body(), headers={"Content-Length": str(BODY_BYTES_MAX + 1)})
    assert (answer.status_code, was_read) == (413, False)
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/problem+json"
    assert ask(guarded(), content=bytes(BODY_BYTES_MAX)).json() == BODY_BYTES_MAX


def test_a_body_without_a_declared_size_is_read_up_to_the_limit() -> None:
    parts = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal parts
        for _ in range(100):
            parts += 1
            yield bytes(BODY_BYTES_MAX // 2)

    answer = ask(guarded(), content=body())
    assert (answer.status_code, parts) == (413, 3)
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_sum_of_all_bodies_in_progress_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODIES_BYTES_MAX", 10)
    monkeypatch.setattr(access, "ORDINARY_BYTES_MAX", 5)
    served = guarded()
    assert ask(served, content=bytes(16)).status_code == 429
    for _ in range(3):  # Finished bodies no longer count.
        assert ask(served, content=bytes(15)).status_code == 200


async def post(served: ASGIApp, receive: Receive) -> int:
    """Send a request with the body parts of `receive`; return the status."""
    answer: list[Message] = []

    async def send(message: Message) -> None:
        answer.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/read",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    async with asyncio.timeout(WAIT_S):
        await served(scope, receive, send)
    return int(answer[0]["status"])


def part(size_bytes: int) -> Message:
    return {"type": "http.request", "body": bytes(size_bytes), "more_body": True}


def test_small_bodies_are_read_while_large_ones_use_the_whole_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "BODIES_BYTES_MAX", 10)
    monkeypatch.setattr(access, "ORDINARY_BYTES_MAX", 5)
    served = guarded()

    async def scenario() -> None:
        parts, is_full = [part(15)], asyncio.Event()

        async def fill() -> Message:
            if parts:
                return parts.pop()
            is_full.set()
            return await asyncio.Future()

        async def ordinary() -> Message:
            return {**part(5), "more_body": False}

        filling = asyncio.create_task(post(served, fill))
        async with asyncio.timeout(WAIT_S):
            await is_full.wait()
        assert await post(served, ordinary) == 200
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)

    asyncio.run(scenario())


def test_a_body_with_a_long_pause_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_PAUSE_S", 0.01)

    async def silent() -> Message:
        return await asyncio.Future()

    assert asyncio.run(post(guarded(), silent)) == 408


def test_a_body_that_takes_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.01)

    async def trickle() -> Message:
        await asyncio.sleep(0)
        return part(0)

    assert asyncio.run(post(guarded(), trickle)) == 408


def test_a_client_with_a_complete_body_has_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.0)
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.sleep(0)  # The client disconnects later.
        return {"type": "http.disconnect"}

    async def wait_for_disconnect(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    served = AccessControl(
        wait_for_disconnect, identities=identities(), body_bytes_max=BODY_BYTES_MAX
    )
    assert asyncio.run(post(served, receive)) == 200


@pytest.mark.parametrize(
    ("path", "sent_bytes", "expected"),
    [
        ("/api/v1/definitions:apply", 901, "at most 900 bytes are allowed; split the file"),
        ("/ui/settings-definitions/apply", 901, "are allowed; split the file"),
        ("/api/v1/definitions:convert", 901, "are allowed; remove the objects"),
        ("/api/v1/read", BODY_BYTES_MAX + 1, "at most 1000 bytes are allowed; raise admin_body_"),
    ],
)
def test_a_large_body_has_a_remedy_for_the_limit_that_it_exceeds(
    path: str, sent_bytes: int, expected: str
) -> None:
    limits = {
        **{each: limit._replace(bytes_max=900) for each, limit in BODY_LIMITS.items()},
        re.compile("/api/v1/read"): BodyLimit(BODY_BYTES_MAX * 2),
    }
    refused = ask(guarded(large=limits), "POST", path, content=bytes(sent_bytes))
    assert refused.status_code == 413
    assert expected in refused.json()["detail"]


def test_a_limit_without_a_setting_names_none() -> None:
    door = guarded(body_bytes_max=OTHER_BODY_BYTES_MAX * 2, large={})
    refused = ask(door, content=bytes(OTHER_BODY_BYTES_MAX + 1))
    assert refused.json()["detail"] == "the body is too large; at most 65536 bytes are allowed"


def test_a_problem_document_has_the_time_of_the_error() -> None:
    refused = ask(guarded(), "GET", "/locked")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "6")
    assert refused.json()["retryAfterMs"] == 6_000
