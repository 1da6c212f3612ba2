"""`make setup` prints one line per step and the whole output of a failed step.

A shell script replaces Python. It installs nothing and fails on request.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STEPS = (
    "making the virtual",
    "installing 2 packages",
    "compiling the packages",
    "generating the",
    "installing and compiling tidemill",
    "the virtual environment is ready",
)
LOCK = """\
a==1 \\
    --hash=sha256:0
b[c]==2.0 ; python_full_version < "3.12" \\
b[c]==3.0 ; python_full_version >= "3.12" \\
d==1 ; sys_platform == "win32"
"""
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"-r requirements.lock") test -z "$FAILS" || { printf 'no wheel\\nfor this\\n' >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A folder with the files of a fresh clone that `make setup` needs."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.lock").write_text(LOCK)
    (tmp_path / "proto").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "generate_stubs.py").touch()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "services" / "tidemill_pipeline").mkdir(parents=True)
    (tmp_path / "services" / "tidemill_pipeline" / "pyproject.toml").touch()
    (tmp_path / "fake-python").write_text(PYTHON)
    (tmp_path / "fake-python").chmod(0o755)
    return tmp_path


def make(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # A make that runs the tests sets variables such as MAKEFLAGS.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "setup", "PYTHON=./fake-python"],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_step_is_printed_once_on_standard_error(fresh: Path) -> None:
    first = make(fresh)
    assert first.returncode == 0, first.stderr
    lines = first.stderr.splitlines()
    for line, step in zip(lines, STEPS, strict=True):
        assert re.match(rf"setup: \d+ s: {step}", line)
    assert first.stdout == ""
    again = make(fresh)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_a_failed_step_prints_its_whole_output_and_runs_again(fresh: Path) -> None:
    failed = make(fresh, FAILS="yes")
    assert failed.returncode != 0
    assert "no wheel\nfor this\n" in failed.stderr
    again = make(fresh)
    assert re.match(rf"setup: \d+ s: {STEPS[1]}", again.stderr)
