"""Check that no module of services/ imports itself through other modules.

A cycle of imports at module level fails, and so does a cycle with imports under TYPE_CHECKING. An
import inside a function does not count: it runs after both modules are loaded.

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

ROOT = Path(__file__).resolve().parent.parent
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
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    imports = read(ROOT / "services")
    at_run_time = shortest_cycles(imports.at_run_time)
    cycles = shortest_cycles(imports.of_all)
    for module, cycle in cycles.items():
        path = " -> ".join(at_run_time.get(module, cycle))
        kind = "import cycle" if module in at_run_time else "import cycle with imports for types"
        print(f"{kind}: {path}; cut it, for example with a Protocol", file=sys.stderr)
    return int(bool(cycles))


if __name__ == "__main__":
    sys.exit(main())
