"""`tools/pending.py`: a list of accepted findings only shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import pending


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "pending.txt"
    file.write_text("# A comment.\nB\nC\n")
    return file


def test_a_listed_finding_passes(file: Path) -> None:
    findings = {"B": "B is wrong", "C": "C is wrong"}
    assert pending.report(findings, pending.read(file), file, update=False) == 0


def test_a_new_finding_fails(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = {"A": "A is wrong", "B": "B is wrong", "C": "C is wrong"}
    assert pending.report(findings, pending.read(file), file, update=False) == 1
    assert capsys.readouterr().err == "A is wrong\n"


def test_a_corrected_entry_fails(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pending.report({"B": "B is wrong"}, pending.read(file), file, update=False) == 1
    assert capsys.readouterr().err.startswith("C is corrected")


def test_an_update_removes_corrected_entries_and_adds_none(file: Path) -> None:
    findings = {"A": "A is wrong", "B": "B is wrong"}
    assert pending.report(findings, pending.read(file), file, update=True) == 1
    assert file.read_text() == "# A comment.\nB\n"


def test_a_missing_list_is_empty(tmp_path: Path) -> None:
    assert pending.read(tmp_path / "missing.txt") == set()
