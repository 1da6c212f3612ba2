"""Access to `/metrics`: the host name and the token of a request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest

from tests.unit.common.test_metrics import fetch, registry
from tidemill.common.lifecycle import StartError
from tidemill.common.metrics_server import MetricsServer
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.scrape_access import ScrapeAccess, scrape_access_of
from tidemill.common.settings import ProcessSettings
from tidemill.common.token_file import TokenFile

TOKEN = "a-token-of-metrics"


class Settings(ProcessSettings):
    """A process for tests."""

    command: ClassVar[str] = "test"


def token_file(folder: Path, text: str = TOKEN) -> str:
    file = folder / "metrics.token"
    file.write_text(f"{text}\n")
    file.chmod(0o600)
    return str(file)


def status(access: ScrapeAccess, host: str, authorization: str = "") -> int:
    refusal = access.find_refusal(host, authorization)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:5557",
        "10.1.2.3",
        "[::1]:5557",
        "localhost:5557",
        "LOCALHOST",
        "broker-0:5557",
        "",
    ],
)
def test_addresses_and_known_names_may_read_the_metrics(host: str) -> None:
    access = scrape_access_of(Settings(metrics_host="0.0.0.0", metrics_hosts=["Broker-0."]))
    assert status(access, host) == 200


@pytest.mark.parametrize("host", ["evil.example:5557", "broker-1", "a b", "localhost.evil.example"])
def test_other_host_names_are_refused(host: str) -> None:
    access = ScrapeAccess(["broker-0"])
    assert status(access, host) == 421
    refusal = access.find_refusal(host, "")
    assert refusal is not None
    assert repr(host) in refusal.text
    assert "metrics_hosts" in refusal.text


def test_a_refused_host_name_is_shown_short_and_in_ascii() -> None:
    refusal = ScrapeAccess().find_refusal("\xe4" * 10_000, "")
    assert refusal is not None
    assert refusal.text.isascii()
    assert len(refusal.text) < 2_000


def test_a_token_is_needed_for_the_metrics_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        access = ScrapeAccess(token=TokenFile(token_file(tmp_path), setting="metrics_token_file"))
        endpoint = MetricsServer(registry(), ProcessReadiness(), access=access)
        async with endpoint.serving("127.0.0.1", 0) as server:
            for method in ("GET", "HEAD"):
                for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}):
                    head, body = await fetch(server, "/metrics", method, **headers)
                    assert head.startswith("HTTP/1.1 401 ")
                    assert "\r\nWWW-Authenticate: Bearer\r\n" in head
                    assert "rocketmq_" not in body
                head, body = await fetch(
                    server, "/metrics", method, Authorization=f"Bearer {TOKEN}"
                )
                assert head.startswith("HTTP/1.1 200 ")
                assert ("rocketmq_build_info" in body) == (method == "GET")
            assert (await fetch(server, "/livez"))[0].startswith("HTTP/1.1 200 ")
            assert (await fetch(server, "/readyz"))[0].startswith("HTTP/1.1 503 ")

    asyncio.run(scenario())


def test_a_changed_token_counts_without_a_restart(tmp_path: Path) -> None:
    file = token_file(tmp_path)
    access = scrape_access_of(Settings(metrics_token_file=file))
    assert status(access, "localhost", f"Bearer {TOKEN}") == 200
    replacement = tmp_path / "new"
    replacement.write_text("another-token\n")
    replacement.chmod(0o600)
    replacement.rename(file)
    assert status(access, "localhost", "bearer another-token") == 200
    assert status(access, "localhost", f"Bearer {TOKEN}") == 401


def test_a_token_file_that_others_can_read_ends_the_start(tmp_path: Path) -> None:
    file = token_file(tmp_path)
    Path(file).chmod(0o644)
    with pytest.raises(StartError, match="metrics_token_file"):
        scrape_access_of(Settings(metrics_token_file=file))
