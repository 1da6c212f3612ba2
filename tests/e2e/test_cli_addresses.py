"""The command line at a wrong address, or with a wrong token, says what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from typer.testing import CliRunner

from tests.e2e.conftest import Certificates
from tests.support.rest_identities import identities
from tidemill.admin.http.access import AccessControl
from tidemill.admin.process import listening, serving
from tidemill.cli.app import app
from tidemill.common.token_file import TokenFile

if TYPE_CHECKING:
    from starlette.types import ASGIApp

START_S = 10.0  # a bound for a server in this process


def api() -> FastAPI:
    inner = FastAPI()

    @inner.get("/api/v1/topics")
    async def topics() -> dict[str, list[str]]:
        return {"topics": []}

    return inner


@contextlib.contextmanager
def served(application: ASGIApp, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve on a thread until the block ends; yield host and port."""
    loop, stop, is_ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with serving(application, listeners, 0, tls=tls):
            is_ready.set()
            await stop.wait()

    with listening("127.0.0.1", 0) as listeners:
        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert is_ready.wait(START_S)
        try:
            yield f"127.0.0.1:{listeners[0].getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


def tls_of(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.folder / "server.crt", certificates.folder / "server.key")
    return context


def run_cli(*arguments: str, command: str = "topic list") -> tuple[int, str]:
    """Return the exit status and what was said on standard error."""
    ran = CliRunner().invoke(app, [*arguments, *command.split()])
    return ran.exit_code, ran.stderr


def test_tls_to_a_port_without_it() -> None:
    with served(api()) as address:
        status, said = run_cli("--admin", f"https://{address}")
        assert (status, run_cli("--admin", address)[0]) == (3, 0)
    assert f"does not use TLS; try --admin http://{address}" in said


def test_plain_http_to_a_port_with_tls(certificates: Certificates) -> None:
    with served(api(), tls_of(certificates)) as address:
        status, said = run_cli("--admin", address)
    assert status == 3
    assert f"try --admin https://{address}" in said
    assert "standalone" not in said


def test_an_unknown_authority_names_the_ca_option(certificates: Certificates) -> None:
    with served(api(), tls_of(certificates)) as address:
        status, said = run_cli("--admin", f"https://{address}")
        known = ("--admin-ca-file", str(certificates.authority))
        assert run_cli("--admin", f"https://{address}", *known)[0] == 0
    assert status == 3
    assert "--admin-ca-file" in said
    assert "standalone" not in said


def test_no_token_and_a_wrong_one(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-secret")
    file.chmod(0o600)
    door = AccessControl(
        api(),
        identities=identities(TokenFile(str(file), setting="admin_token_file")),
        body_bytes_max=1_000,
    )
    with served(door) as address:
        without, wrong = run_cli("--admin", address), run_cli("--admin", address, "--token=b")
        assert run_cli("--admin", address, "--token-file", str(file))[0] == 0
    assert (without[0], wrong[0]) == (1, 1)
    assert "requires a token or a user" in without[1]
    assert "has another token" in wrong[1]
    assert "b" not in wrong[1].split()


@pytest.mark.parametrize("command", ["topic list", "topic create a"])
def test_an_address_of_something_else(command: str) -> None:
    with served(FastAPI()) as address:
        status, said = run_cli("--admin", address, command=command)
    assert status == 1
    assert "not an answer of the admin API" in said
    assert "--admin" in said


def test_a_page_in_place_of_an_answer() -> None:
    inner = FastAPI()

    @inner.get("/api/v1/topics")
    async def topics() -> HTMLResponse:
        return HTMLResponse("<h1>hello</h1>")

    with served(inner) as address:
        status, said = run_cli("--admin", address)
    assert (status, "not an answer of the admin API" in said) == (1, True)
