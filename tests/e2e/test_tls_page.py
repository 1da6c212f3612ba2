"""The commands of docs/operations/tls.md work, also for the official Python client."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.processes import environment

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0  # standalone on the slowest machine
RUN_S = 60.0  # the client


def page_lines(holding: str) -> str:
    """Return the block of shell commands of the page that contains a text."""
    page = (ROOT / "docs/operations/tls.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if holding in block]
    return str(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of this test with the examples of the repository."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture
def variables() -> dict[str, str]:
    """The environment of a reader, with free ports."""
    ports = {f"TIDEMILL_{name}_PORT": "0" for name in ("GRPC", "ADMIN", "METRICS")}
    return environment() | ports | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture
def endpoint(folder: Path, variables: dict[str, str]) -> Iterator[str]:
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(
            ["sh", "-ec", page_lines("openssl req")],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert started.stdout is not None
    try:
        readable, _, _ = select.select([started.stdout], [], [], START_S)
        line = started.stdout.readline() if readable else ""
        assert line, (folder / "log").read_text()
        yield json.loads(line)["grpc"]
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        started.stdout.read()  # Its end comes with that of the last process.
        started.stdout.close()
        started.wait()


def test_the_python_client_is_served_with_tls(
    folder: Path, variables: dict[str, str], endpoint: str
) -> None:
    run = subprocess.run(
        ["sh", "-ec", page_lines("--tls\n")],
        cwd=folder,
        env=variables | {"ENDPOINT": endpoint, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert "received" in run.stdout, run.stdout + run.stderr
    assert "one coffee, no sugar" in run.stdout
