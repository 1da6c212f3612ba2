"""`tools/check_imports.py` finds cycles of imports, apart from those of a type checker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_imports import read, shortest_cycles

TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


def cycles(folder: Path, files: dict[str, str]) -> tuple[set[str], set[str]]:
    """Return the modules in cycles at run time, and those in any cycle."""
    for name, text in files.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    imports = read(folder)
    return set(shortest_cycles(imports.at_run_time)), set(shortest_cycles(imports.of_all))


@pytest.mark.parametrize(
    ("first", "second", "at_run_time", "of_all"),
    [
        ("import p.b", "import p.a", {"p.a", "p.b"}, {"p.a", "p.b"}),
        ("from p.b import x", "from p import a", {"p.a", "p.b"}, {"p.a", "p.b"}),
        ("try:\n    import p.b\nfinally: ...", "import p.a", {"p.a", "p.b"}, {"p.a", "p.b"}),
        ("import p.b", f"{TYPES}import p.a", set(), {"p.a", "p.b"}),
        ("import p.b", "def f():\n    import p.a", set(), set()),
        ("import p.b", "import os", set(), set()),
    ],
)
def test_cycles(
    tmp_path: Path, first: str, second: str, at_run_time: set[str], of_all: set[str]
) -> None:
    assert cycles(tmp_path, {"p/a": first, "p/b": second}) == (at_run_time, of_all)


def test_a_package_is_a_module(tmp_path: Path) -> None:
    files = {"p/__init__": "from p.a import x", "p/a": "from p import y", "stubs/s": "import p"}
    assert cycles(tmp_path, files)[0] == {"p", "p.a"}


def test_the_shortest_cycle_of_a_module_is_found() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert shortest_cycles(graph) == {
        "a": ["a", "c", "a"],
        "b": ["b", "c", "a", "b"],
        "c": ["c", "a", "c"],
    }
