"""Check the prose of the repository for riddle words, per 1,000 words of each file.

A riddle word hides the subject of a sentence: a pronoun or a relative clause replaces a noun.
Counted are docstrings, comments and string literals of Python files, and the text of Markdown files
without code. The body of an ADR and the record of bugs are exempt; the title of an ADR is not.

Usage: python -m tools.check_prose [--show] [PATH...]
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("services", "tools", "docs", "tests")
FILE_MAX, TEST_MAX, README_MAX, CODE_MAX = 6, 10, 2, 4  # per 1,000 words; CODE: all of services
WORDS_MIN = 200  # One riddle word in a short file is not a habit.
ADR = re.compile(r"docs/adr/\d{4}-.*\.md")
EXEMPT = frozenset({"docs/bugs-found.md"})
GENERATED_FOLDERS = frozenset({"stubs", "node_modules", "build", "target", "golden"})
GENERATED_FILE = re.compile(r"_pb2(_grpc)?\.py$")


def _either(*words: str) -> str:
    return f"(?:{'|'.join(words)})"


_BE = _either("is", "are", "was", "were")
RIDDLES = [
    re.compile(rf"\b{pattern}\b", re.IGNORECASE)
    for pattern in (
        _either("who", "whom", "whose", "whoever"),
        _either("nobody", "anybody", "somebody", "everybody"),
        _either(f"(?:{_BE}|be|been) told", "told of", "tells? of", "hears? of", "heard of"),
        _either("says? so", "(?:is|are) said"),
        _either("of", "by", "for", "from", "in", "with", "to", "behind", "at")
        + _either(" which", " what", " whom", " that which"),
        f"what {_either(_BE, 'has', 'had', 'it', 'they', 'an?', 'the', 'others', 'clients')}",
        f"what {_either('waits?', 'waited', 'comes?', 'came', 'goes', 'went')}",
        f"what {_either('stays', 'stands', 'lies', 'remains')}",
        _either(rf"(?<!there ){_BE} (?:no|none)", "as one", "another one"),
        _either("(?:is|be) so", "any more", "anew"),
    )
]
SENTENCE_END = re.compile(r"[.!?](?=\s)|\||\n\s*\n")
THREE_WORDS = re.compile(r"(?:\b[A-Za-z][a-z']+\b\W+){2}[A-Za-z][a-z']")
CODE = re.compile(r"^ *```.*?^ *```|(`{1,2})(?:(?!\n\s*\n).)+?\1", re.MULTILINE | re.DOTALL)


class Finding(NamedTuple):
    """A sentence with riddle words."""

    line: int
    sentence: str
    riddles: int


class Prose(NamedTuple):
    """The number of words of one file or folder, and its findings."""

    words: int
    findings: list[Finding]

    @property
    def score(self) -> float:
        """Riddle words per 1,000 words."""
        return 1000 * sum(each.riddles for each in self.findings) / max(self.words, WORDS_MIN)


def prose_of(path: str, source: str) -> Prose:
    """Return the prose of one file; `path` is relative to the root of the repository."""
    if path in EXEMPT:
        return Prose(0, [])
    if ADR.fullmatch(path):
        source = source.partition("\n")[0]
    if path.endswith(".py"):
        passages = [*_strings(source), *_comments(source)]
    else:
        passages = [(1, CODE.sub(lambda code: "CODE" + "\n" * code[0].count("\n"), source))]
    findings = [
        Finding(line, sentence, riddles)
        for first_line, text in passages
        for line, sentence in _sentences(first_line, text)
        if (riddles := sum(len(riddle.findall(sentence)) for riddle in RIDDLES))
    ]
    return Prose(sum(len(text.split()) for _, text in passages), sorted(findings))


def _strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string of three words or more; `{}` stands for a value."""
    parts: set[int] = set()
    for node in ast.walk(ast.parse(source)):  # An f-string comes before its parts.
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            text = str(node.value)
        else:
            continue
        if THREE_WORDS.search(text):
            yield node.lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield first line and text of each block of comments on adjacent lines."""
    lines = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for first in lines:
        if first - 1 not in lines:
            last = first
            while last + 1 in lines:
                last += 1
            yield first, "\n".join(lines[line] for line in range(first, last + 1))


def _sentences(first_line: int, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each sentence, with single spaces."""
    begin = 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(text)), len(text)]:
        sentence = text[begin:end]
        indent = len(sentence) - len(sentence.lstrip())
        yield first_line + text.count("\n", 0, begin + indent), " ".join(sentence.split())
        begin = end


def limit_of(path: str) -> int:
    """Return the highest score that the file at `path` may have."""
    if ADR.fullmatch(path):
        return 0  # Its title is one line.
    if path == "README.md":
        return README_MAX
    return TEST_MAX if path.startswith("tests/") else FILE_MAX


def files_of(root: Path) -> Iterator[str]:
    """Yield the path of each checked file, relative to `root`."""
    yield from (file.name for file in root.glob("*.md"))
    for top in FOLDERS:
        for folder, subfolders, names in os.walk(root / top):
            subfolders[:] = [
                name for name in subfolders if name not in GENERATED_FOLDERS and name[0] != "."
            ]
            for name in names:
                if name.endswith((".py", ".md")) and not GENERATED_FILE.search(name):
                    yield (Path(folder) / name).relative_to(root).as_posix()


def show(paths: list[Path]) -> None:
    """Print the score and the riddle sentences of each file."""
    every = sorted(files_of(ROOT))
    for argument in paths:
        path = argument.resolve().relative_to(ROOT).as_posix()
        for file in [each for each in every if each == path or each.startswith(f"{path}/")] or [
            path
        ]:
            prose = prose_of(file, (ROOT / file).read_text("utf-8"))
            print(f"{prose.score:5.1f} {file}")
            for finding in prose.findings:
                print(f"{file}:{finding.line}: {finding.sentence}")


def main() -> int:
    """Check all files, or print the findings in PATHs; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="for --show")
    parser.add_argument("--show", action="store_true", help="print the riddle sentences of PATHs")
    options = parser.parse_args()
    if options.show:
        show(options.paths or [ROOT / folder for folder in FOLDERS])
        return 0
    proses = {path: prose_of(path, (ROOT / path).read_text("utf-8")) for path in files_of(ROOT)}
    findings = [
        f"{path}: {prose.score:.1f} riddle words per 1,000 words; the limit is"
        f" {limit_of(path)}; list them with: python -m tools.check_prose --show {path}"
        for path, prose in sorted(proses.items())
        if prose.score > limit_of(path)
    ]
    for finding in findings:
        print(finding, file=sys.stderr)
    code = [prose for path, prose in proses.items() if path.startswith("services/")]
    total = Prose(
        sum(each.words for each in code), [line for each in code for line in each.findings]
    )
    print(f"prose of services: {total.score:.1f} riddle words per 1,000 words", file=sys.stderr)
    return 1 if findings or total.score > CODE_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
