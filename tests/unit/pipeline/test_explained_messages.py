"""docs/pipeline-messages.md explains only messages that the pipeline prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ROOT / "services"
SOURCES = list((SERVICES / "tidemill_pipeline").rglob("*.py"))
ELLIPSIS = "…"


def sentences() -> list[str]:
    """Return the messages in the table: in italics, in the first cell of a row."""
    page = (ROOT / "docs" / "pipeline-messages.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| *")]
    return [quoted for row in rows for quoted in re.findall(r"\*([^*]+)\*", row.split(" | ")[0])]


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a program, with an ellipsis for each field; no docstrings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(each.value) if isinstance(each, ast.Constant) else ELLIPSIS
                for each in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from texts(node)


@cache
def all_texts() -> str:
    """Return every text of the pipeline, each on a line."""
    return "\n".join(
        " ".join(text.split())
        for path in SOURCES
        for text in texts(ast.parse(path.read_text("utf-8")))
    )


@pytest.mark.parametrize("sentence", sentences())
def test_a_sentence_that_is_explained_is_said(sentence: str) -> None:
    fragments = [part for part in map(str.strip, sentence.split(ELLIPSIS)) if part.strip(" .,;:")]
    assert fragments
    assert [part for part in fragments if part not in all_texts()] == []


def test_the_table_has_at_least_20_errors() -> None:
    assert len(sentences()) >= 20
