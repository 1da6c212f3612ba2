"""The check for noise in the output of tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.quiet_runs import noise

GOAWAY = (
    "I1127 18:32:48.297871   11858 chttp2_transport.cc:1403] ipv4:127.0.0.1:33205: Got goaway [2]"
)
TESTS = f"""
import sys, pytest

@pytest.fixture
def server():
    yield
    print({GOAWAY!r}, file=sys.stderr)

def test_that_prints_noise(server): pass
def test_that_logs(): print("I am fine", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"a\n{GOAWAY}\nb", GOAWAY),
        ("Fatal Python error: Bus error\n\nCurrent thread", "Fatal Python error: Bus error"),
        ('{"level": "ERROR", "message": "Got goaway"}', ""),
        ("E1127 is a name", ""),
        ("", ""),
    ],
)
def test_noise_is_a_fatal_error_or_a_line_of_grpc(text: str, found: str) -> None:
    assert noise(text) == found


def test_a_test_that_prints_noise_fails_and_others_do_not(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    (tmp_path / "test_noise.py").write_text(TESTS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.quiet_runs",
            "-c",
            "/dev/null",
            tmp_path,
        ],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "test_that_prints_noise printed noise on standard error" in done.stdout
