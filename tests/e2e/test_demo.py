"""`make demo` shows what it says, or says that it does not."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent.parent / "tools" / "demo.py"


def test_the_demonstration_shows_every_step() -> None:
    shown = subprocess.run(
        [sys.executable, str(DEMO)], capture_output=True, text=True, timeout=120, check=False
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = [line for line in shown.stdout.splitlines() if line.strip()]
    for what in (
        "sent",
        "received and acked",
        "received and forgotten",
        "came back, acked",
        "given back, came again, acked",
        "refused 2 times",
        "read as a dead letter",
        "delayed",
        "moved over REST",
        "recalled",
        "came when due, acked",
    ):
        assert any(line.strip().startswith(f"{what}  ") for line in lines), what
    assert "1,000" in shown.stdout
    assert "%DLQ%demo-strict" in shown.stdout
    late_ms = re.search(r"late: first (\d+) ms, second (\d+) ms, moved (\d+) ms", shown.stdout)
    assert late_ms, shown.stdout
    assert lines[-1].strip() == "All of it happened as it should."
    assert shown.stderr == ""


def test_a_demonstration_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A temporary folder that cannot hold a store, for the start to fail."""
    demo = runpy.run_path(str(DEMO))
    monkeypatch.setitem(os.environ, "TIDEMILL_LOG_LEVEL", "nonsense")
    monkeypatch.setitem(os.environ, "TIDEMILL_METRICS_HOST", "no.such.host.invalid")
    assert demo["main"]() == 1
    shown = capsys.readouterr().out
    assert "The demonstration failed: the standalone did not start" in shown
    assert "Traceback" not in shown
