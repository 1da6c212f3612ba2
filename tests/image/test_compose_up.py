"""compose.yaml starts, delays a message, delivers it, and goes, where Docker Compose is."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 1_800.0  # Includes downloads: the build cache may be empty.
ARRIVES_MS = 60_000
FREE_PORTS = {"TIDEMILL_GRPC_PORT": "0", "TIDEMILL_ADMIN_PORT": "0", "WEB_PORT": "0"}


def _has_compose() -> bool:
    try:
        for words in (["docker", "info"], ["docker", "compose", "version"]):
            subprocess.run(words, check=True, capture_output=True, timeout=BUILD_S)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not _has_compose(), reason="there is no Docker daemon with compose"),
]


@pytest.fixture(scope="module")
def compose() -> Iterator[Callable[..., str]]:
    project = f"tidemill-test-{secrets.token_hex(4)}"

    def call(*words: str) -> str:
        done = subprocess.run(
            ["docker", "compose", "--project-name", project, *words],
            cwd=ROOT,
            env=os.environ | FREE_PORTS,
            text=True,
            timeout=BUILD_S,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    try:
        # Without --wait: it takes the end of the service `definitions` for a failure.
        call("up", "--build", "--detach")
        yield call
    finally:
        call("down", "--volumes")


def test_a_reminder_arrives_and_a_stop_is_clean(compose: Callable[..., str]) -> None:
    address = compose("port", "web", "8000")
    reminder = {"text": "tea", "in_seconds": 1}
    with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=60) as web:

        def is_scheduled() -> bool:
            try:
                return web.put("/reminders/tea", json=reminder).is_success
            except httpx.TransportError:
                return False  # The server does not listen yet.

        eventually(is_scheduled, within_ms=ARRIVES_MS)
    eventually(lambda: "at attempt 1" in compose("logs", "worker"), within_ms=ARRIVES_MS)
    compose("stop", "worker")
    assert "stopped" in compose("logs", "worker")
