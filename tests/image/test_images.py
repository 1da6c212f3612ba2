"""The image that the Dockerfile builds: it serves as an ordinary user from a read-only root."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD_S = 1_800.0  # Includes downloads: the build cache may be empty.
CALL_S = 300.0
SERVES_MS = 120_000


def docker(*words: str, timeout_s: float = CALL_S) -> subprocess.CompletedProcess[str]:
    """Run docker; both streams are in `stdout`."""
    return subprocess.run(
        ["docker", *words],
        cwd=ROOT,
        text=True,
        timeout=timeout_s,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def answered(*words: str, timeout_s: float = CALL_S) -> str:
    done = docker(*words, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


# The list of tools that CI requires omits Docker: a CI machine may lack the daemon.
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        shutil.which("docker") is None or docker("info").returncode != 0,
        reason="there is no Docker daemon",
    ),
]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    tag = f"tidemill-test:{secrets.token_hex(4)}"
    answered("build", "--tag", tag, ".", timeout_s=BUILD_S)
    yield tag
    docker("image", "rm", "--force", tag)


def test_the_image_serves_with_a_read_only_root(image: str) -> None:
    name = f"tidemill-test-{secrets.token_hex(4)}"
    answered(
        "run",
        "--detach",
        "--read-only",
        "--network",
        "none",
        "--cap-drop",
        "ALL",
        "--tmpfs",
        "/data:uid=10001",
        "--name",
        name,
        image,
    )
    try:
        eventually(lambda: "standalone serves" in answered("logs", name), within_ms=SERVES_MS)
        answered("stop", "--time", "60", name)
        [state] = json.loads(answered("inspect", name))
        assert state["State"]["ExitCode"] == 0, answered("logs", name)
        assert state["Config"]["User"] not in ("", "0", "root")
        assert not state["Config"].get("Volumes"), "each pod would have a writable folder"
    finally:
        docker("rm", "--force", name)


@pytest.mark.parametrize("tool", ["gcc", "cc", "ld", "make", "pip"])
def test_the_image_has_nothing_to_build_with(image: str, tool: str) -> None:
    look = ["--entrypoint", "sh", image, "-c", f"command -v sh && ! command -v {tool}"]
    assert answered("run", "--rm", "--network", "none", *look).endswith("/sh")
