"""Which tests `make shake` repeats (`tools/shake.py`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools import shake

BEFORE = '''\
"""A file."""
import os
LIMIT = 1
def helper(): return LIMIT
def test_a(): assert helper()
async def test_b(): assert os
'''


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        pytest.param("", "", [], id="nothing"),
        pytest.param("import os", "import os, sys", [], id="imports"),
        pytest.param("A file", "Another text", [], id="docstring"),
        pytest.param("assert os", "assert  os  # Why.", [], id="format and comments"),
        pytest.param("assert os", "assert os.path", ["f.py::test_b"], id="one test"),
        pytest.param("def test_a", "def test_c", ["f.py::test_c"], id="another name"),
        pytest.param("LIMIT = 1", "LIMIT = 2", ["f.py"], id="a constant"),
        pytest.param("return LIMIT", "return 2", ["f.py"], id="a helper"),
    ],
)
def test_changed_tests_are_selected(old: str, new: str, changed: list[str]) -> None:
    assert shake.changed_in_file("f.py", BEFORE, BEFORE.replace(old, new)) == changed


def test_new_and_changed_files_are_found_since_a_commit(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_old.py").write_text(BEFORE)
    (folder / "test_deleted.py").write_text(BEFORE)
    identity = {"GIT_CONFIG_GLOBAL": os.devnull} | {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    for line in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "tests: begin"]):
        subprocess.run(["git", *line], cwd=tmp_path, env={**os.environ, **identity}, check=True)
    assert shake.changed_tests(tmp_path, "HEAD") == []
    (folder / "test_deleted.py").unlink()
    (folder / "test_new.py").write_text("def test_x(): pass\n")
    (folder / "helper.py").write_text("x = 1\n")
    (folder / "test_old.py").write_text(BEFORE.replace("assert os", "assert not os"))
    assert shake.changed_tests(tmp_path, "HEAD") == [
        "tests/unit/test_new.py::test_x",
        "tests/unit/test_old.py::test_b",
    ]
