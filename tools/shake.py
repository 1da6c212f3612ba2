"""Run each test that changed since a commit many times, beside processes that use all of the CPU.

    shake.py BASE [--times 20]

A test changed if its source changed, or if other code of its file changed except imports. Each
repetition has other seeds. The first failure ends the run with status 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUSY = "while True: pass"


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Repeat the tests that changed since a commit.")
    parser.add_argument("base", metavar="BASE", help="The commit before the changes.")
    parser.add_argument("--times", type=int, default=20, help="Repetitions. Default: 20.")
    given = parser.parse_args(arguments)
    tests = changed_tests(ROOT, given.base)
    if not tests:
        print(f"no test changed since {given.base}")
        return 0
    print("\n".join(tests))
    with cpu_load():
        for number in range(given.times):
            print(f"{number + 1} of {given.times}", flush=True)
            environment = {**os.environ, "TIDEMILL_TEST_SEED_BASE": str(1000 * (number + 1))}
            line = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
            if status := subprocess.run(line, cwd=ROOT, env=environment, check=False).returncode:
                return status
    return 0


def changed_tests(root: Path, base: str) -> list[str]:
    """Return the pytest ids of the tests that changed since `base`; a whole file is its path."""
    names = git(root, "diff", "--name-only", "--diff-filter=d", base, "--", "tests/**/test_*.py")
    new = git(root, "ls-files", "--others", "--exclude-standard", "--", "tests/**/test_*.py")
    found = []
    for name in sorted({*names.splitlines(), *new.splitlines()}):
        try:
            before = git(root, "show", f"{base}:{name}")
        except subprocess.CalledProcessError:
            before = ""  # The file is new.
        found += changed_in_file(name, before, (root / name).read_text())
    return found


def changed_in_file(name: str, before: str, after: str) -> list[str]:
    """Return the ids of the changed tests of one file."""
    (old_tests, old_rest), (tests, rest) = parts(before), parts(after)
    if old_rest != rest:
        return [name]
    return [f"{name}::{test}" for test, source in tests.items() if old_tests.get(test) != source]


def parts(source: str) -> tuple[dict[str, str], list[str]]:
    """Return the tests of a file by name, and its other statements except imports."""
    tests, rest = dict[str, str](), list[str]()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if name.startswith("test_"):
            tests[name] = ast.unparse(node)
        elif not is_docstring(node):
            rest.append(ast.unparse(node))
    return tests, rest


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a text that nothing uses."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@contextlib.contextmanager
def cpu_load() -> Iterator[None]:
    """Keep every core busy with one process."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def git(root: Path, *arguments: str) -> str:
    """Return what git prints. Raises CalledProcessError."""
    line = ["git", "-C", str(root), *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
