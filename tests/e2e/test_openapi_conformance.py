"""Requests that the OpenAPI document allows succeed, and others fail as it says.

The requests come from the document: boundary values of every field, random ones, and sequences.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.support.processes.processes import Standalone, standalone

TIMEOUT_S = 600.0
EXAMPLES_MAX = 10  # random requests per operation, beside some thousand boundary values
SEED = 1
TOKEN: Final = "a-token-of-all-rights"
HOOKS = Path(__file__).parents[1] / "support" / "clients" / "schemathesis_hooks.py"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Run a standalone of its own: the requests delete whatever they find.

    A request may set the mode `on`, and the others would then be refused before they are parsed. So
    the mode is `on` from the begin. The requests have a token that none of them can delete, as they
    delete users.
    """
    folder = tmp_path_factory.mktemp("conformance")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    secured = ("--security-floor=on", f"--admin-token-file={token}")
    with standalone(folder / "data", *secured) as started:
        yield started


def test_the_api_answers_as_its_document_says(running: Standalone, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            "run",
            f"{running.admin}/openapi.json",
            "--checks=all",
            # Each request has credentials. Other tests check each operation without them.
            "--exclude-checks=ignored_auth",
            f"--max-examples={EXAMPLES_MAX}",
            f"--seed={SEED}",
            "--continue-on-failure",
            "--no-color",
        ],
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), "CONFORMANCE_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Authentication failed" not in done.stdout, done.stdout
    assert "Rate limited" not in done.stdout, done.stdout
    document = httpx.get(f"{running.admin}/openapi.json", trust_env=False).raise_for_status().json()
    operations = sum(len(path) for path in document["paths"].values())
    assert f"Tested: {operations}\n" in done.stdout
