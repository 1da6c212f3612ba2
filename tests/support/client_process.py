"""Official clients in processes of their own: run a script, read the facts that it prints.

A client brings its own stubs of the public contract, which cannot be loaded beside ours. A script
prints facts as JSON lines on standard output; what they should be is the test's to say.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "e2e"
NODE_PACKAGES = SCRIPTS / "node" / "node_modules"
GO_PROGRAM = SCRIPTS / "go" / "build" / "scenarios"
JAVA_CLASSES = SCRIPTS / "java" / "target" / "classes"
JAVA_LIBRARIES = SCRIPTS / "java" / "target" / "lib"
RUN_S = 60.0  # no script takes half of it, on the slowest machine

Fact = dict[str, Any]


class Facts(list[Fact]):
    """What a script said, in its order."""

    def of(self, fact: str) -> list[Fact]:
        """Return the facts of one kind."""
        return [entry for entry in self if entry["fact"] == fact]

    def the(self, fact: str) -> Fact:
        """Return the only fact of its kind."""
        [entry] = self.of(fact)
        return entry


def needs(tool: str, *made: Path) -> pytest.MarkDecorator:
    """Skip tests where a client is not there: its tool, or what `make test` makes with it.

    A laptop may do without; where CI is set its absence is a failure.
    """
    is_there = bool(shutil.which(tool)) and all(path.exists() for path in made)
    return pytest.mark.skipif(
        not is_there and not os.environ.get("CI"),
        reason=f"{tool} or what is made with it is missing; `make test` makes it",
    )


def run_python_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/python/scenarios.py."""
    script = SCRIPTS / "python" / "scenarios.py"
    return _run([sys.executable, str(script)], home, scenario, endpoints, names)


def run_node_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/node/scenarios.mjs."""
    script = SCRIPTS / "node" / "scenarios.mjs"
    return _run(["node", str(script)], home, scenario, endpoints, names)


def run_go_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/go/main.go; `tls=True` lets it use TLS."""
    return _run([str(GO_PROGRAM)], home, scenario, endpoints, names)


def run_java_client(home: Path, scenario: str, *endpoints: str, **names: object) -> Facts:
    """Run a scenario of tests/e2e/java/src/Scenarios.java; `tls=True` lets it use TLS."""
    # Java takes the home folder from the system's user database unless it is told.
    java = ["java", f"-Duser.home={home}", "-cp", f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*", "Scenarios"]
    return _run(java, home, scenario, endpoints, names)


def _run(
    command: Sequence[str],
    home: Path,
    scenario: str,
    endpoints: Sequence[str],
    names: dict[str, object],
) -> Facts:
    arguments = json.dumps({"endpoints": endpoints, **names})
    # The clients log below the home folder.
    environment = {**os.environ, "HOME": str(home)}
    try:
        ended = subprocess.run(
            [*command, scenario, arguments], env=environment, capture_output=True, text=True,
            timeout=RUN_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise AssertionError(
            f"{scenario} did not end:\n{_text(late.stdout)}\n{_text(late.stderr)}"
        ) from None
    assert ended.returncode == 0, f"{scenario} failed:\n{ended.stdout}\n{ended.stderr}"
    return Facts(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
