"""Check the subject of each commit after `FIRST`: `area: imperative`, one change, 70 characters.

Merge commits are skipped. Without the history, such as in a shallow clone or an unpacked archive,
the check names the reason and passes.

Usage: python -m tools.check_commits
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = "6cfc1bedf4366f78788ef4a80d66593aa77f63d1"
LENGTH_MAX = 70  # Characters: `git log --oneline` fits on a line of 80 columns.
SUBJECT = re.compile(r"[\w./-]+(?:,? [\w./-]+)*: (?P<verb>[a-z][a-z-]*)\b.*[^.\s]")
# An approximation: these words and endings begin a statement, not an imperative.
STATEMENTS = ("an?", "the", "all", "each", "every", "no", "not", "it", "this", "that", "there")
QUESTIONS = ("what", "who", "when", "where", "which")
ENDINGS = (r"\w+ing", r"\w+ed", r"\w*[^su]s")
NOT_A_VERB = re.compile("|".join([*STATEMENTS, *QUESTIONS, *ENDINGS]))
VERBS = frozenset({"alias", "bring", "embed", "feed", "need", "shed", "speed", "string"})


def faults_of(subject: str) -> list[str]:
    """Return the faults of one subject."""
    faults = []
    if len(subject) > LENGTH_MAX:
        faults.append(f"it has {len(subject)} characters; the limit is {LENGTH_MAX}")
    if ";" in subject:
        faults.append("it has two changes, joined by a semicolon; make two commits")
    match = SUBJECT.fullmatch(subject)
    if not match:
        faults.append("it is not of the form `area: imperative`, without a full stop")
    elif NOT_A_VERB.fullmatch(match["verb"]) and match["verb"] not in VERBS:
        faults.append(f"`{match['verb']}` is not an imperative")
    return faults


def subjects(root: Path, first: str) -> dict[str, str]:
    """Return the subject of each commit after `first` by its hash; raise LookupError if unknown."""
    try:
        top = _git(root, "rev-parse", "--show-toplevel").strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise LookupError("git or the repository is missing") from error
    if Path(top).resolve() != root.resolve():
        raise LookupError(f"{root} is not the top folder of a repository")
    try:
        _git(root, "merge-base", "--is-ancestor", first, "HEAD")
    except subprocess.CalledProcessError as error:
        raise LookupError(f"the history does not reach back to commit {first[:12]}") from error
    lines = _git(root, "log", "--no-merges", "--format=%h %s", f"{first}..HEAD").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Print each fault; return the exit status."""
    try:
        checked = subjects(ROOT, FIRST)
    except LookupError as error:
        print(f"commit subjects are not checked: {error}", file=sys.stderr)
        return 0
    status = 0
    for commit, subject in checked.items():
        for fault in faults_of(subject):
            print(f"the subject of {commit} is wrong: {fault}: {subject}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
