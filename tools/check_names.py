"""Check that each public class name of services/ has one definition, and that it is a noun.

A name with two definitions makes a reader guess. Qualify it by its subject or its side, such as
`TraceCursor` and `TimerCursor`. Participles and fillers such as `Found` or `Place` are not nouns
with a meaning; the check rejects them for private classes and in tests/, too.

Usage: python -m tools.check_names
"""

from __future__ import annotations

import ast
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNED = frozenset(
    [
        *("Away", "Found", "Gone", "Kept", "Left", "Place"),
        *("Refused", "Rest", "Taken", "Told", "Wanted", "Written"),
    ]
)


def definitions(root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and `file:line` of each class below `root`, without the generated stubs."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - {"stubs", "__pycache__"})
        for file in sorted(Path(folder) / name for name in names if name.endswith(".py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node.name, f"{file.relative_to(root.parent)}:{node.lineno}"


def definitions_by_name(root: Path) -> dict[str, list[str]]:
    """Return the places of the definitions below `root` by the name of the class."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in definitions(root):
        places[name].append(place)
    return places


def banned_of(root: Path) -> dict[str, str]:
    """Return a finding for each class below `root` whose name is not a noun."""
    return {
        name: f"class {name} ({', '.join(found)}) needs a name that is a noun"
        for name, found in definitions_by_name(root).items()
        if name.lstrip("_") in BANNED
    }


def findings_of(root: Path) -> dict[str, str]:
    """Return the text of each finding below `root` by the name of the class."""
    duplicates = {
        name: f"class {name} has {len(found)} definitions: {', '.join(found)};"
        " qualify each by its subject or side"
        for name, found in definitions_by_name(root).items()
        if len(found) > 1 and not name.startswith("_")
    }
    return duplicates | banned_of(root)


def main() -> int:
    """Check services/, and the nouns of tests/; return the exit status."""
    findings = findings_of(ROOT / "services") | banned_of(ROOT / "tests")
    for _, text in sorted(findings.items()):
        print(text, file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
