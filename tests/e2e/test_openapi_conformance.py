"""Requests that the OpenAPI document allows succeed, and others fail as it says.

The requests come from the document: boundary values of every field, random ones, and sequences.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes.processes import Standalone, standalone

TIMEOUT_S = 600.0
EXAMPLES_MAX = 10  # random requests per operation, beside some thousand boundary values
SEED = 1
HOOKS = Path(__file__).parents[1] / "support" / "clients" / "schemathesis_hooks.py"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Run a standalone of its own: the requests delete whatever they find."""
    with standalone(tmp_path_factory.mktemp("conformance") / "data") as started:
        yield started


def test_the_api_answers_as_its_document_says(running: Standalone, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            "run",
            f"{running.admin}/openapi.json",
            "--checks=all",
            f"--max-examples={EXAMPLES_MAX}",
            f"--seed={SEED}",
            "--continue-on-failure",
            "--no-color",
        ],
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = httpx.get(f"{running.admin}/openapi.json", trust_env=False).raise_for_status().json()
    operations = sum(len(path) for path in document["paths"].values())
    assert f"Tested: {operations}\n" in done.stdout
