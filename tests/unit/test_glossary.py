"""The names that the glossary quotes from the code exist there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The last cell of a row with three cells.
IN_THE_CODE = re.compile(r"^\|[^|]+\|[^|]+\|([^|]+)\|$", re.MULTILINE)


def names_in_the_code() -> set[str]:
    """Return every identifier of the Python files in `services/`."""
    files = (ROOT / "services").rglob("*.py")
    return {name for path in files for name in re.findall(r"\w+", path.read_text("utf-8"))}


def test_the_glossary_names_code_that_exists() -> None:
    cells = IN_THE_CODE.findall((ROOT / "docs" / "glossary.md").read_text("utf-8"))
    quoted = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert quoted
    assert quoted <= names_in_the_code()


def test_the_glossary_defines_each_term_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    terms = re.findall(r"^\| ([a-z][^|]*) \|", text, re.MULTILINE)
    defined = [term for term in terms if term != "term"]
    assert len(defined) == len(set(defined))
