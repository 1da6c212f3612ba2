"""Every command of the README runs as printed, or is checked by the tool that would run it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.chart import HELM, KUBERNETES, need_helm
from tests.support.processes.processes import environment

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0  # `make run` beside other tests
RUN_S = 120.0
SKIPPED = {  # the Docker daemon and a cluster have their own tests
    "docker": "tests/image/test_images.py",
    "helm test": "tests/chaos",
    "kubectl exec": "tests/chaos",
}


def blocks() -> list[list[str]]:
    """Return the shell blocks of the README, each as its commands without comments."""
    page = (ROOT / "README.md").read_text("utf-8")
    found = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [[re.sub(r"\s+#.*", "", line) for line in block.splitlines()] for block in found]


def block_with(command: str) -> list[str]:
    """Return the block that contains a command."""
    [found] = [block for block in blocks() if command in block]
    return found


@contextlib.contextmanager
def served(command: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Run a command that starts Tidemill in the foreground; yield its ready line."""
    ports = {f"TIDEMILL_{name}_PORT": "0" for name in ("GRPC", "ADMIN", "METRICS")}
    # A make around the tests sets variables that would reach this one.
    outside = {name: value for name, value in environment().items() if not name.startswith("MAKE")}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["sh", "-ec", command],
            cwd=ROOT if command.startswith("make") else folder,
            env=outside | ports | path | {"DATA_DIR": str(folder / "data")},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if readable else ""
        assert line, (folder / "log").read_text()
        yield json.loads(line)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.stdout.read()  # Ends when the last process ends.
        process.stdout.close()
        process.wait(RUN_S)


def run(command: str, ready: dict[str, Any], folder: Path) -> str:
    """Run a command against a server that is ready; return its output."""
    endpoints = {"TIDEMILL_ADMIN": ready["admin"], "ENDPOINT": ready["grpc"]}
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=ROOT,
        env=environment() | endpoints | {"HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_first_steps_show_a_message_and_a_timer(tmp_path: Path) -> None:
    export, *commands = block_with("tidemill topic create orders")
    assert export == 'export PATH="$PWD/.venv/bin:$PATH"'
    # DATA_DIR is given as an argument of make, as its help says; ./data belongs to the user.
    with served(f"make run DATA_DIR={shlex.quote(str(tmp_path / 'data'))}", tmp_path) as ready:
        shown = {command: run(f"{export}; {command}", ready, tmp_path) for command in commands}
    assert "one coffee, no sugar" in shown["python examples/first_message.py"]
    assert "orders" in shown["tidemill timer list"]


def test_the_standalone_with_replicas_shows_its_master(tmp_path: Path) -> None:
    start, status = block_with("tidemill replica list")
    with served(start, tmp_path) as ready:
        shown = run(f'PATH="{Path(sys.executable).parent}:$PATH"; {status}', ready, tmp_path)
    assert " master " in shown
    assert len(shown.splitlines()) == 4, "a heading and three replicas"


def test_the_chart_takes_the_values_of_the_install_command() -> None:
    need_helm()
    [install] = [line for block in blocks() for line in block if line.startswith("helm install")]
    arguments = shlex.split(install)[2:]
    rendered = subprocess.run(
        [HELM, "template", "--kube-version", KUBERNETES, *(w for w in arguments if w != "--wait")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert rendered.returncode == 0, rendered.stderr
    assert "registry.example.com/tidemill:" in rendered.stdout


def test_no_other_command_is_in_the_readme() -> None:
    """`make run` and `make demo` have tests of their own."""
    tested = {
        "make run",
        *block_with("tidemill topic create orders"),
        *block_with("tidemill replica list"),
    }
    rest = [line for block in blocks() for line in block if line not in tested]
    rest = [line for line in rest if not line.startswith(("helm install", *SKIPPED))]
    assert not rest
