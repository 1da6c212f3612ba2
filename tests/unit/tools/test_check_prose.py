"""`tools/check_prose.py` counts riddle words in prose and skips code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_prose
from tools.check_prose import prose_of

# Two words in each literal: longer literals of this file count, too.
WORDS = ("It", "is told", "of", "whoever", "comes.")
RIDDLES = " ".join(WORDS)


def count(path: str, source: str) -> int:
    return sum(finding.riddles for finding in prose_of(path, source).findings)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f'"""{RIDDLES}"""\n', 2),
        (f"# {RIDDLES}\n", 2),
        ("# The broker\n# reports to whoever\n# comes.\n", 1),
        (f'log.info(f"{{name}}: {RIDDLES}")\n', 2),
        ('KIND = "whoever"\n', 0),
        ("anew = 1\n", 0),
        ("# The broker sends the reply.\n", 0),
        ("# There is no reply.\n", 0),
    ],
)
def test_python_prose_is_docstrings_comments_and_long_strings(source: str, expected: int) -> None:
    assert count("services/a.py", source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"# Title\n\n{RIDDLES}\n", 2),
        (f"| a | {RIDDLES} |\n", 2),
        (f"```\n{RIDDLES}\n```\n", 0),
        (f"Run `{RIDDLES}` or\n``{RIDDLES}``.\n", 0),
    ],
)
def test_markdown_prose_is_the_text_without_code(source: str, expected: int) -> None:
    assert count("docs/a.md", source) == expected


def test_a_finding_names_its_line() -> None:
    source = f'"""The first line.\n\nThe third line.\n{RIDDLES}\n"""\n'
    (finding,) = prose_of("services/a.py", source).findings
    assert (finding.line, finding.sentence) == (4, RIDDLES)


def test_only_the_title_of_an_adr_counts() -> None:
    assert count("docs/adr/0001-title.md", f"# Title\n\n{RIDDLES}\n") == 0
    assert count("docs/adr/0001-title.md", f"# {RIDDLES}\n\nText.\n") == 2
    assert count("docs/bugs-found.md", f"# {RIDDLES}\n") == 0


def test_the_score_of_a_short_file_is_that_of_200_words() -> None:
    assert prose_of("docs/a.md", RIDDLES).score == 10
    assert prose_of("docs/a.md", RIDDLES + " word" * 394).score == 5


def test_generated_and_hidden_files_are_not_checked(tmp_path: Path) -> None:
    for name in ("a.py", "stubs/b.py", "node_modules/c.md", ".cache/d.md", "e_pb2.py", "f.txt"):
        file = tmp_path / "services" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "README.md").touch()
    assert set(check_prose.files_of(tmp_path)) == {"services/a.py", "README.md"}
