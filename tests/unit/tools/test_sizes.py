"""A long file, class or function of services/ says in a docstring why it is one piece.

The docstring of a command is its help text, so the docstring of its module may name the reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SERVICES = Path(__file__).resolve().parents[3] / "services"
LINES_MAX = {ast.Module: 500, ast.ClassDef: 350, ast.FunctionDef: 67, ast.AsyncFunctionDef: 67}


def long_pieces(path: Path) -> Iterator[str]:
    """Yield each long piece of a file whose docstring has no "because"."""
    module = ast.parse(path.read_text("utf-8"))
    of_module = ast.get_docstring(module) or ""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = getattr(node, "name", path.stem)
            first = getattr(node, "lineno", 1)
            last = max((one.end_lineno or 0 for one in node.body), default=0)
            reason = (ast.get_docstring(node) or "") + of_module * (f"`{name}`" in of_module)
            if last - first >= LINES_MAX[type(node)] and "because" not in reason:
                yield f"{name} ({path.relative_to(SERVICES)}:{first})"


def test_a_long_piece_says_why_it_is_one() -> None:
    files = [file for file in SERVICES.rglob("*.py") if "stubs" not in file.parts]
    assert not [text for file in files for text in long_pieces(file)]
