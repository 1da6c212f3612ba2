"""Official clients in their own processes: run a script and read the facts that it prints.

A client has its own stubs of the public contract, which one process cannot load beside ours. A
script prints facts as JSON lines on standard output. The test compares them with its expectations.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "e2e"
NODE_PACKAGES = SCRIPTS / "node" / "node_modules"
GO_PROGRAM = SCRIPTS / "go" / "build" / "scenarios"
JAVA_CLASSES = SCRIPTS / "java" / "target" / "classes"
RUST_PROGRAM = SCRIPTS / "rust" / "target" / "debug" / "scenarios"
JAVA_LIBRARIES = SCRIPTS / "java" / "target" / "lib"
RUN_S = 60.0  # twice the time of any script on the slowest machine

Fact = dict[str, Any]


class Facts(list[Fact]):
    """The facts of a script, in order."""

    def of(self, fact: str) -> list[Fact]:
        """Return the facts of one kind."""
        return [entry for entry in self if entry["fact"] == fact]

    def the(self, fact: str) -> Fact:
        """Return the only fact of its kind."""
        [entry] = self.of(fact)
        return entry


def needs(tool: str, *made: Path) -> pytest.MarkDecorator:
    """Skip tests if a client's tool, or a file that `make test` builds with it, is missing.

    If the variable CI is set, the tests fail instead.
    """
    is_there = bool(shutil.which(tool)) and all(path.exists() for path in made)
    return pytest.mark.skipif(
        not is_there and not os.environ.get("CI"),
        reason=f"{tool} or what is made with it is missing; `make test` makes it",
    )


class StayingClient:
    """A client that runs until its block ends, with its facts so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._facts = Facts()
        self._changed = threading.Condition()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                with self._changed:
                    self._facts.append(json.loads(line))
                    self._changed.notify_all()

    def kill(self) -> None:
        """Kill the process, as `kill -9` does."""
        self._process.kill()

    def wait_for(
        self, fact: str, count: int = 1, *, timeout_s: float = RUN_S, **values: object
    ) -> list[Fact]:
        """Wait for `count` facts of one kind with these values; return them."""

        def matching() -> list[Fact]:
            return [f for f in self._facts.of(fact) if values.items() <= f.items()]

        with self._changed:
            if not self._changed.wait_for(lambda: len(matching()) >= count, timeout=timeout_s):
                raise AssertionError(f"only {self._facts}")
            return matching()

    def facts_of(self, fact: str, **values: object) -> list[Fact]:
        """Return the facts so far of one kind with these values."""
        with self._changed:
            return [each for each in self._facts.of(fact) if values.items() <= each.items()]

    def write_line(self, line: str) -> None:
        """Write a line to the client's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def staying_client(
    language: str, home: Path, endpoint: str, **names: object
) -> Iterator[StayingClient]:
    """Run a client's scenario `stay` during the block. Wait first until the client is ready.

    `credentials=(access key, secret)` lets it sign its calls.
    """
    commands = {
        "python": [sys.executable, str(SCRIPTS / "python" / "scenarios.py")],
        "node": ["node", str(SCRIPTS / "node" / "scenarios.mjs")],
        "go": [str(GO_PROGRAM)],
        "java": _java(home),
    }
    environment = _environment(home, names)
    arguments = json.dumps({"endpoints": [endpoint], **names})
    process = subprocess.Popen(
        [*commands[language], "stay", arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        client = StayingClient(process)
        client.wait_for("ready")
        yield client
    finally:
        # Kill it without an orderly end: a push consumer's shutdown may wait for a long poll.
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()


def run_python_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/python/scenarios.py.

    As for each client, `credentials=(access key, secret)` lets it sign its calls.
    """
    script = SCRIPTS / "python" / "scenarios.py"
    return _run([sys.executable, str(script)], home, scenario, endpoints, names)


def run_node_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/node/scenarios.mjs; `tls=True` lets it use TLS."""
    script = SCRIPTS / "node" / "scenarios.mjs"
    return _run(["node", str(script)], home, scenario, endpoints, names)


def run_go_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/go/main.go; `tls=True` lets it use TLS."""
    return _run([str(GO_PROGRAM)], home, scenario, endpoints, names)


def run_java_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/java/src/Scenarios.java; `tls=True` lets it use TLS."""
    return _run(_java(home), home, scenario, endpoints, names)


def _java(home: Path) -> list[str]:
    # By default Java takes the home folder from the system's user database.
    return ["java", f"-Duser.home={home}", "-cp", f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*", "Scenarios"]


def run_rust_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/rust/src/main.rs."""
    return _run([str(RUST_PROGRAM)], home, scenario, endpoints, names)


def _run(
    command: Sequence[str],
    home: Path,
    scenario: str,
    endpoints: Sequence[str],
    names: dict[str, object],
) -> Facts:
    environment = _environment(home, names)
    arguments = json.dumps({"endpoints": endpoints, **names})
    try:
        ended = subprocess.run(
            [*command, scenario, arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(
            f"{scenario} did not end:\n{_text(late.stdout)}\n{_text(late.stderr)}"
        ) from None
    assert ended.returncode == 0, f"{scenario} failed:\n{ended.stdout}\n{ended.stderr}"
    return Facts(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))


def _environment(home: Path, names: dict[str, object]) -> dict[str, str]:
    """Return the environment of a client, with the credentials, which are not among its names.

    The Java client also reads a session token from `session_token_file` for each call.
    """
    # The clients log below the home folder.
    environment = {**os.environ, "HOME": str(home)}
    credentials = names.pop("credentials", None)
    if isinstance(credentials, tuple):
        environment["ROCKETMQ_ACCESS_KEY"], environment["ROCKETMQ_SECRET_KEY"] = credentials
    if token_file := names.pop("session_token_file", None):
        environment["ROCKETMQ_SESSION_TOKEN_FILE"] = str(token_file)
    return environment


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
