"""Tests that share a standalone create topics and groups of different names.

A worker runs several files of `tests/e2e` against one standalone. Which files share it changes
from run to run, so two files with one name fail rarely and look like lost or doubled messages.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

E2E = Path(__file__).resolve().parents[2] / "e2e"
CREATED = re.compile(r'put\(\s*"/?((?:topics|groups)/[\w.-]+)"')


def shares_the_standalone(module: ast.Module) -> bool:
    """Return whether a test or fixture of the file takes `running` from `conftest.py`."""
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    return not any(one.name == "running" for one in functions) and any(
        argument.arg == "running"
        for one in functions
        if one.name.startswith("test_") or one.decorator_list
        for argument in one.args.args
    )


def files_by_name() -> dict[str, set[str]]:
    """Return the files that create each topic or group in the shared standalone."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in E2E.rglob("test_*.py"):
        text = file.read_text("utf-8")
        if shares_the_standalone(ast.parse(text)):
            for name in CREATED.findall(text):
                found[name].add(file.name)
    return found


def test_no_two_files_create_one_name_in_the_shared_standalone() -> None:
    created = files_by_name()
    assert len(created) > 20
    assert not {name: files for name, files in created.items() if len(files) > 1}
