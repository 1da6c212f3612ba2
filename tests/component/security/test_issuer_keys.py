"""Reads of an issuer's keys from a file and from an HTTPS server of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.clocks import ManualClock
from tests.support.http_server import PatientHTTPServer
from tests.support.issuer import jwk, key_set, p256_key, rsa_key, write_keys
from tidemill.common.clock import Clock, SystemClock
from tidemill.release.certificates import CertificatePlan, secrets_to_write
from tidemill.security import issuer_keys
from tidemill.security.issuer_keys import (
    UNKNOWN_PERIOD_MS,
    IssuerKeys,
    KeySource,
    issuer_key_metrics,
)
from tidemill.security.json_web_keys import SET_BYTES_MAX, KeySet, parse_key_set

FIRST, SECOND = key_set(jwk(rsa_key())), key_set(jwk(rsa_key()), jwk(p256_key(), "k2"))
PLAN = CertificatePlan(
    authority="ca",
    certificates={"tls": ("localhost",), "other": ("elsewhere",)},
    tokens={},
    key_files={},
    administrators=(),
    job_users={},
    days=2,
    authority_days=4,
)


class Server:
    """An HTTPS server with the keys of an issuer."""

    def __init__(self, folder: Path, certificate: str = "tls") -> None:
        made = secrets_to_write(PLAN, {}, datetime.now(UTC))
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).write_bytes(made[certificate][name])
        self.ca_file = str(folder / "ca.crt")
        self.content, self.status, self.path = FIRST, 200, "/openid/v1/jwks"
        self.headers: dict[str, str] = {}
        self.is_slow = False
        self.released = threading.Event()
        self.requests: list[tuple[str, str]] = []  # path and authorization
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append((self.path, self.headers.get("Authorization", "")))
                # As the API server of Kubernetes.
                types = self.headers.get("Accept", "").split(", ")
                is_known = "application/jwk-set+json" in types
                self.send_response(server.status if is_known else 406)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(server.content)))
                self.end_headers()
                if server.is_slow:
                    server.released.wait(60)
                with contextlib.suppress(OSError):
                    self.wfile.write(server.content)

            def log_message(self, *_: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self.http = PatientHTTPServer(("localhost", 0), Handler)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)

    @property
    def url(self) -> str:
        return f"https://localhost:{self.http.server_address[1]}{self.path}"

    @property
    def source(self) -> KeySource:
        return KeySource(self.url, self.ca_file)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    yield from _serving(Server(tmp_path))


def _serving(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.http.shutdown()
        server.http.server_close()


@contextlib.asynccontextmanager
async def reading(source: KeySource, clock: Clock | None = None) -> AsyncIterator[IssuerKeys]:
    keys = IssuerKeys(source, (clock or ManualClock()).monotonic_ms)
    async with asyncio.timeout(30), keys.running():
        yield keys


def stale_s(keys: IssuerKeys | None) -> float:
    [metric] = issuer_key_metrics(keys)
    return metric.samples[0].value


def read(source: KeySource) -> tuple[KeySet | None, str]:
    """Return the keys of the first read, and the reason of its failure."""

    async def scenario() -> KeySet | None:
        async with reading(source) as keys:
            return keys.present()

    with capture_logs() as logs:
        found = asyncio.run(scenario())
    return found, "".join(entry["reason"] for entry in logs if entry["log_level"] == "error")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


def test_a_server_has_the_keys(server: Server, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("abc.def\n")
    found, reason = read(KeySource(server.url + "?a=b", server.ca_file, str(token_file)))
    assert (found, reason) == (parse_key_set(FIRST), "")
    assert read(server.source) == (parse_key_set(FIRST), "")
    assert server.requests == [("/openid/v1/jwks?a=b", "Bearer abc.def"), ("/openid/v1/jwks", "")]


def test_a_server_of_another_authority_gets_no_token(server: Server, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("abc.def")
    found, reason = read(KeySource(server.url, "", str(token_file)))
    assert found is None
    assert "CERTIFICATE_VERIFY_FAILED" in reason
    assert server.requests == []


def test_a_certificate_of_another_name_is_refused(tmp_path: Path) -> None:
    for server in _serving(Server(tmp_path, "other")):
        found, reason = read(server.source)
        assert found is None
        assert "CERTIFICATE_VERIFY_FAILED" in reason


@pytest.mark.parametrize("status", [204, 301, 307, 401, 404, 500])
def test_other_answers_are_failures(server: Server, status: int) -> None:
    server.status, server.headers = status, {"Location": server.url}
    found, reason = read(server.source)
    assert found is None
    assert reason == f"the server answered {status}"
    assert len(server.requests) == 1, "a redirection is not followed"


def test_the_size_of_an_answer_is_limited(server: Server) -> None:
    server.content = FIRST.ljust(SET_BYTES_MAX)
    assert read(server.source) == (parse_key_set(FIRST), "")
    server.content = FIRST.ljust(SET_BYTES_MAX + 1)
    found, reason = read(server.source)
    assert found is None
    assert "longer than" in reason


@pytest.mark.parametrize("content", ["", "a b", "a\nb", "tök"])
def test_a_malformed_token_is_neither_sent_nor_logged(
    server: Server, tmp_path: Path, content: str
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(content)
    found, reason = read(KeySource(server.url, server.ca_file, str(token_file)))
    assert found is None
    assert reason == f"the file {token_file} of oidc_token_file contains no bearer token"
    assert server.requests == []


def test_a_slow_server_does_not_block_the_process(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "READ_TIMEOUT_S", 0.2)
    server.is_slow = True
    found, reason = read(server.source)
    assert found is None
    assert "no answer" in reason


def test_an_unreachable_server_does_not_prevent_the_start(tmp_path: Path) -> None:
    server = Server(tmp_path)
    source = server.source
    server.http.server_close()
    found, reason = read(source)
    assert found is None
    assert "refused" in reason


def test_an_unknown_key_causes_a_read_and_all_calls_wait_for_it(server: Server) -> None:
    async def scenario() -> None:
        clock, changes = ManualClock(), list[Any]()
        async with reading(server.source, clock) as keys:
            keys.on_change = lambda: changes.append(keys.present())
            server.content = SECOND
            await asyncio.gather(*(keys.read_for_unknown() for _ in range(20)))
            assert keys.present() == parse_key_set(SECOND)
            assert changes == [parse_key_set(SECOND)]
            assert len(server.requests) == 2
            server.content = FIRST
            clock.advance(UNKNOWN_PERIOD_MS - 1)
            await keys.read_for_unknown()
            assert len(server.requests) == 2, "once per period"
            clock.advance(1)
            await keys.read_for_unknown()
            assert len(server.requests) == 3
            assert changes == [parse_key_set(SECOND), parse_key_set(FIRST)]

    run(scenario)


def test_invented_keys_delay_a_new_key_by_one_period(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "UNKNOWN_PERIOD_MS", 100)
    monkeypatch.setattr(issuer_keys, "WAITING_MAX", 2)

    async def scenario() -> None:
        changed = asyncio.Event()
        async with reading(server.source, SystemClock()) as keys:
            keys.on_change = changed.set
            await keys.read_for_unknown()
            server.content = SECOND
            await asyncio.gather(*(keys.read_for_unknown() for _ in range(20)))
            await changed.wait()
            assert keys.present() == parse_key_set(SECOND)
            assert len(server.requests) == 3

    run(scenario)


def test_former_keys_stay_after_a_failure(server: Server) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with reading(server.source, clock) as keys:
            assert stale_s(keys) == 0
            server.status = 500
            with capture_logs() as logs:
                await keys.read_for_unknown()
            clock.advance(7_000)
            assert stale_s(keys) == 7
            assert keys.present() == parse_key_set(FIRST)
            assert [entry["has_keys"] for entry in logs] == [True]

    run(scenario)


def test_few_calls_wait_for_a_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_keys, "WAITING_MAX", 2)

    async def scenario() -> None:
        async with reading(server.source) as keys:
            server.is_slow = True
            waiting = [asyncio.create_task(keys.read_for_unknown()) for _ in range(2)]
            await asyncio.sleep(0)  # They begin in this turn.
            async with asyncio.timeout(5):
                await keys.read_for_unknown()
            assert not any(each.done() for each in waiting)
            server.released.set()
            await asyncio.gather(*waiting)

    run(scenario)


def test_a_file_is_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        source = KeySource(write_keys(tmp_path, jwk(rsa_key())))
        async with reading(source) as keys:
            assert keys.present() == parse_key_set(FIRST)
            write_keys(tmp_path, jwk(rsa_key()), jwk(p256_key(), "k2"))
            await keys.read_for_unknown()
            assert keys.present() == parse_key_set(SECOND)

    run(scenario)
