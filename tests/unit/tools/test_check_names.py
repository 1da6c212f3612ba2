"""`tools/check_names.py` finds class names with two definitions, and participles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_names import findings_of


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.py": "class Cursor: ...", "b.py": "class Cursor: ..."}, {"Cursor"}),
        ({"a.py": "class Cursor:\n    class Cursor: ..."}, {"Cursor"}),
        ({"a.py": "class Cursor: ...", "b.py": "class TimerCursor: ..."}, set()),
        ({"a.py": "class _Cursor: ...", "b.py": "class _Cursor: ..."}, set()),
        ({"a.py": "class Cursor: ...", "stubs/b.py": "class Cursor: ..."}, set()),
        ({"a.py": "class Found: ...\nclass _Told: ..."}, {"Found", "_Told"}),
    ],
)
def test_findings(tmp_path: Path, files: dict[str, str], expected: set[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert findings_of(tmp_path).keys() == expected


def test_a_finding_lists_each_definition(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("\nclass Cursor: ...\n")
    (tmp_path / "b.py").write_text("class Cursor: ...\n")
    text = findings_of(tmp_path)["Cursor"]
    assert f"{tmp_path.name}/a.py:2" in text
    assert f"{tmp_path.name}/b.py:1" in text
