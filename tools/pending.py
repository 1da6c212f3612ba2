"""The list of findings that a check of `make lint` accepts until they are corrected.

The list is a text file with one entry per line. It only shrinks: an entry without a finding fails
the check, and `--update-pending` removes such entries. Nothing adds an entry.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read(file: Path) -> set[str]:
    """Return the entries of a list; a missing file is an empty list."""
    if not file.exists():
        return set()
    lines = file.read_text("utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def write(file: Path, entries: Collection[str]) -> None:
    """Replace the entries of a list; keep its comments."""
    lines = file.read_text("utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    file.write_text("\n".join([*comments, *sorted(entries)]) + "\n", "utf-8")


def report(findings: Mapping[str, str], listed: set[str], file: Path, *, update: bool) -> int:
    """Print each new finding and each corrected entry; return the exit status of the check.

    `findings` has the text of each finding by its entry, `listed` the entries of `file`. With
    `update`, remove the corrected entries from `file` instead of reporting them.
    """
    new = [text for entry, text in sorted(findings.items()) if entry not in listed]
    corrected = [
        f"{entry} is corrected; run the check with --update-pending to remove it from {file.name}"
        for entry in sorted(listed - findings.keys())
    ]
    if update:
        write(file, listed & findings.keys())
        corrected = []
    for text in [*new, *corrected]:
        print(text, file=sys.stderr)
    return 1 if new or corrected else 0
