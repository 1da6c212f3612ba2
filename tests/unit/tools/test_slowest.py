"""The tables of the slowest tests, files and fixtures (`tools/slowest.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import slowest

REPORT = """\
<testsuites><testsuite>
<testcase classname="tests.a" name="test_long" time="9.5"><properties>
<property name="fixture tests/a.py::world" value="4.0" /><property name="cpu_s" value="2.5" />
</properties></testcase>
<testcase classname="tests.a" name="test_short" time="0.5"></testcase>
<testcase classname="tests.b" name="test_other" time="8.0"></testcase>
</testsuite></testsuites>
"""


def test_the_longest_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert slowest.main([str(report), "--count", "2"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "18.0 s wall 2.5 s CPU 3 tests in all",
        "",
        "wall CPU count files",
        "10.0 2.5 2 tests.a",
        "8.0 0.0 1 tests.b",
        "",
        "wall CPU count tests",
        "9.5 2.5 1 tests.a::test_long",
        "8.0 0.0 1 tests.b::test_other",
        "",
        "wall CPU count fixtures",
        "4.0 0.0 1 tests/a.py::world",
    ]
