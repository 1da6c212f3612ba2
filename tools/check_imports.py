"""Check that no module of services/ imports itself through other modules.

A cycle of imports at module level fails. A cycle with imports under TYPE_CHECKING also fails,
unless its modules are in the list of those that are still to be cut. An import inside a function
does not count: it runs after both modules are loaded.

Usage: python -m tools.check_imports
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools import pending
from tools.pending import ROOT

PENDING = ROOT / "tools" / "imports_pending.txt"
Graph = Mapping[str, set[str]]  # imported modules by module


class Imports(NamedTuple):
    """Two graphs of the same modules: imports at run time, and those together with type imports."""

    at_run_time: Graph
    of_all: Graph


def read(root: Path) -> Imports:
    """Parse all modules below `root`, without the generated stubs."""
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted(root.rglob("*.py"))
        if "stubs" not in file.parts
    }
    at_run_time: dict[str, set[str]] = {}
    of_all: dict[str, set[str]] = {}
    for module, file in files.items():
        found = list(_imports(ast.parse(file.read_text("utf-8")).body, is_for_types=False))
        targets = [(_module_of(name, files), is_for_types) for name, is_for_types in found]
        of_all[module] = {target for target, _ in targets if target and target != module}
        at_run_time[module] = of_all[module] & {
            name for name, for_types in targets if not for_types
        }
    return Imports(at_run_time, of_all)


def _imports(body: list[ast.stmt], *, is_for_types: bool) -> Iterator[tuple[str, bool]]:
    """Yield each imported name, and whether only a type checker imports it."""
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, is_for_types) for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((f"{module}.{alias.name}", is_for_types) for alias in names)
            case ast.If(test=test, body=body, orelse=orelse):
                is_guard = ast.unparse(test).endswith("TYPE_CHECKING")
                yield from _imports(body, is_for_types=is_for_types or is_guard)
                yield from _imports(orelse, is_for_types=is_for_types)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                parts = [body, *(handler.body for handler in handlers), orelse, final]
                for part in parts:
                    yield from _imports(part, is_for_types=is_for_types)
            case ast.With(body=body) | ast.ClassDef(body=body):
                yield from _imports(body, is_for_types=is_for_types)


def _module_of(name: str, modules: Mapping[str, Path]) -> str | None:
    """Return the module that has the imported name; None if it is not one of ours."""
    if name in modules:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in modules else None


def shortest_cycles(graph: Graph) -> dict[str, list[str]]:
    """Return for each module in a cycle the shortest one, such as `[a, b, a]`."""
    cycles = {}
    for start in graph:
        paths = deque([[start]])
        seen: set[str] = set()
        while paths and start not in cycles:
            path = paths.popleft()
            for target in sorted(graph[path[-1]]):
                if target == start:
                    cycles[start] = [*path, start]
                    break
                if target not in seen:
                    seen.add(target)
                    paths.append([*path, target])
    return cycles


def main() -> int:
    """Check services/; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--update-pending", action="store_true", help=f"remove modules from {PENDING.name}"
    )
    options = parser.parse_args()
    imports = read(ROOT / "services")
    real = shortest_cycles(imports.at_run_time)
    for cycle in real.values():
        print(f"import cycle: {' -> '.join(cycle)}; cut it", file=sys.stderr)
    findings = {
        module: f"import cycle with imports for types: {' -> '.join(cycle)}; cut it, for example"
        " with a Protocol"
        for module, cycle in shortest_cycles(imports.of_all).items()
        if module not in real
    }
    listed = pending.read(PENDING)
    status = pending.report(findings, listed, PENDING, update=options.update_pending)
    return 1 if real or status else 0


if __name__ == "__main__":
    sys.exit(main())
