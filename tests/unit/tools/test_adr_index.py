"""The index of architecture decision records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.adr_index import index_of, read_record


def write(folder: Path, name: str, status: str) -> Path:
    path = folder / name
    path.write_text(f"# {name[:4]} A title\n\n{status}## Context\n")
    return path


def test_a_record_has_number_title_and_status(tmp_path: Path) -> None:
    record = read_record(write(tmp_path, "0001-a.md", "Status: accepted.\n\n"))
    assert record == ("0001", "A title", "accepted", [])


def test_a_superseded_record_names_its_successor(tmp_path: Path) -> None:
    write(tmp_path, "0001-a.md", "Status: superseded by [ADR 0002](0002-b.md).\n\n")
    write(tmp_path, "0002-b.md", "Status: accepted. Supersedes ADR 0001.\n\n")
    index = index_of(tmp_path)
    assert "| 0001 | [A title](0001-a.md) | superseded | [0002](0002-b.md) |" in index
    assert "| 0002 | [A title](0002-b.md) | accepted |  |" in index


def test_a_part_can_be_superseded(tmp_path: Path) -> None:
    status = "Status: accepted. [ADR 0002](0002-b.md) supersedes its numbers.\n\n"
    record = read_record(write(tmp_path, "0001-a.md", status))
    assert record.status == "accepted, in part superseded"
    assert record.superseded_by == ["0002"]


def test_a_record_without_a_status_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0001-a\.md begins without"):
        read_record(write(tmp_path, "0001-a.md", ""))
