"""`make demo` prints each step, or the reason of its failure."""

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
        [sys.executable, str(DEMO)],
        env={**os.environ, "COLUMNS": "200"},  # Long times do not break a line.
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = [line for line in shown.stdout.splitlines() if line.strip()]
    for what in (
        "sent",
        "received and acked",
        "received, not acked",
        "redelivered and acked",
        "given back, redelivered, acked",
        "rejected 2 times",
        "read as a dead letter",
        "delayed",
        "recalled",
        "rescheduled over REST",
        "delivered when due, acked",
    ):
        assert any(line.strip().startswith(f"{what}  ") for line in lines), what
    assert "1,000" in shown.stdout
    assert "%DLQ%demo-strict" in shown.stdout
    # On a busy machine, messages are due in any order, and the line is long enough to be broken.
    late = re.findall(r"(first|second|moved) \d+ ms", " ".join(shown.stdout.split()))
    assert sorted(late) == ["first", "moved", "second"], shown.stdout
    assert lines[-1].strip() == "All steps succeeded."
    assert shown.stderr == ""


def test_a_failed_demonstration_prints_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let the start fail with an unknown metrics host."""
    demo = runpy.run_path(str(DEMO))
    monkeypatch.setitem(os.environ, "TIDEMILL_LOG_LEVEL", "nonsense")
    monkeypatch.setitem(os.environ, "TIDEMILL_METRICS_HOST", "no.such.host.invalid")
    assert demo["main"]() == 1
    shown = capsys.readouterr().out
    assert "The demonstration failed: the standalone did not start" in shown
    assert "Traceback" not in shown
