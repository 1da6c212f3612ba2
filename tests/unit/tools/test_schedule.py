"""The order of test files and the record of their times (`tests/schedule.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.slowest import test_cases as cases_of

ROOT = Path(__file__).resolve().parents[3]
SHORT = "def test_short(): pass\n"
LONG = "import time\ndef test_long(): time.sleep(0.3)\n"
SLOW_FIXTURE = """
import time, pytest
@pytest.fixture
def slow(): time.sleep(0.3)
def test_waits(slow): pass
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of two test files, of which the second takes longer, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "test_a.py").write_text(SHORT)
    (tmp_path / "test_b.py").write_text(LONG)
    return tmp_path


def run(tree: Path, *arguments: str) -> list[str]:
    """Run the tests of the tree; return their names in the order of their ends."""
    line = [sys.executable, "-m", "pytest", "-v", "-p", "tests.schedule", *arguments]
    ended = subprocess.run(line, cwd=tree, capture_output=True, text=True, check=True)
    words = [line.split() for line in ended.stdout.splitlines() if "PASSED" in line]
    return [word.partition("::")[2] for line in words for word in line if "::" in word]


def test_the_longest_file_of_the_last_run_comes_first(tree: Path) -> None:
    parallel = ("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    assert run(tree, *parallel) == ["test_short", "test_long"]
    assert run(tree, *parallel) == ["test_long", "test_short"]
    (tree / "test_c.py").write_text("def test_new(): pass\n")
    assert run(tree, *parallel) == ["test_new", "test_long", "test_short"]
    assert run(tree) == ["test_short", "test_long", "test_new"]


def test_a_report_has_the_cpu_time_and_the_slow_fixtures(tree: Path) -> None:
    (tree / "test_c.py").write_text(SLOW_FIXTURE)
    run(tree, "--junitxml=report.xml", "test_c.py")
    (case,) = cases_of(tree / "report.xml")
    assert 0 <= case.duration.cpu_s < case.duration.wall_s
    assert case.fixtures["test_c.py::slow"] == pytest.approx(0.3, abs=0.2)
