"""The lines of the README about TLS work as they stand, for the official Python client too."""

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


def readme_lines(holding: str) -> str:
    """Return the one block of shell lines of the README in which a text stands."""
    page = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if holding in block]
    return str(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is like the repository's to these lines, and of this test alone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture
def variables() -> dict[str, str]:
    """The environment of the README's reader; only ports are free ones."""
    ports = {f"TIDEMILL_{name}_PORT": "0" for name in ("GRPC", "ADMIN", "METRICS")}
    return environment() | ports | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture
def endpoint(folder: Path, variables: dict[str, str]) -> Iterator[str]:
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(
            ["sh", "-ec", readme_lines("openssl req")],
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
        ["sh", "-ec", readme_lines("--tls\n")],
        cwd=folder,
        env=variables | {"ENDPOINT": endpoint, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert "received" in run.stdout, run.stdout + run.stderr
    assert "one coffee, no sugar" in run.stdout
