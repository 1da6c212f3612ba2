"""The pages about the architecture name modules, folders and tests that exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "architecture").glob("*.md"))]
MODULE = re.compile(r"`([\w/]+\.py)[:`]")
TEST = re.compile(r"`(test_\w+)`")


@cache
def python_files() -> list[str]:
    """Return the Python files of the repository, below a slash."""
    found = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True)
    return [f"/{name}" for name in found.split()]


@cache
def names_of_tests() -> set[str]:
    """Return the names of all tests."""
    files = [ROOT / name[1:] for name in python_files() if name.startswith("/tests/")]
    texts = [path.read_text("utf-8") for path in files if path.exists()]
    return {name for text in texts for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_names_modules_that_exist(page: Path) -> None:
    named = set(MODULE.findall(page.read_text("utf-8")))
    missing = [one for one in named if not any(f.endswith(f"/{one}") for f in python_files())]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_names_tests_that_exist(page: Path) -> None:
    assert set(TEST.findall(page.read_text("utf-8"))) <= names_of_tests()
