"""The commands of the page for the first hour run as printed, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, environment, standalone

ROOT = Path(__file__).parents[2]
RUN_S = 120.0
# `make run` is a test of the README. The variable PATH is set for all commands.
SKIPPED = ("make run", "export PATH=")


def commands() -> list[str]:
    page = (ROOT / "docs" / "start.md").read_text("utf-8")
    found = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in found for line in block.splitlines()]
    return [line for line in lines if not line.startswith(SKIPPED)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Standalone]:
    with standalone(tmp_path / "data") as started:
        yield started


def test_the_first_hour(running: Standalone, tmp_path: Path) -> None:
    variables = environment() | {
        "TIDEMILL_ADMIN": running.admin,
        "ENDPOINT": running.grpc,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }
    worker: subprocess.Popen[bytes] | None = None
    output = tmp_path / "output"
    shown: dict[str, str] = {}
    try:
        for command in commands():
            if command.endswith("&"):
                with output.open("w") as file:
                    worker = subprocess.Popen(
                        command.removesuffix("&").split(),
                        cwd=ROOT,
                        env=variables,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                eventually(lambda: "done" in output.read_text())
                continue
            if command.startswith("tidemill dead-letter list --group billing"):
                # A reader of the page is slower than the retries.
                eventually(lambda: running.get("dead-letters")["deadLetters"])
            done = subprocess.run(
                ["sh", "-ec", command],
                cwd=ROOT,
                env=variables,
                capture_output=True,
                text=True,
                timeout=RUN_S,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            shown[command] = done.stdout
        # The two orders and the corrected one.
        eventually(lambda: output.read_text().count("done") == 3)
    finally:
        if worker is not None:
            worker.kill()
            worker.wait(RUN_S)
    assert "broker-0:0" in shown["tidemill dead-letter list --group billing"]
    assert "replayed" in shown["tidemill dead-letter list --group billing --state replayed"]
    assert "orders" in shown["tidemill timer list"]
    assert [one["keys"] for one in running.get("timers")["timers"]] == [["new-year"]]
