"""Compare the CPU time of benchmarks with that of an earlier commit.

    python -m tools.bench_compare --base COMMIT --only end_to_end,engine [-- ARGUMENT ...]

The base is cloned and set up once in the cache of tools. Each benchmark runs in both trees in turn,
so a change of the machine's speed meets both. A pair of runs gives one ratio of each figure, new to
old. The table has the median of the ratios and an interval that contains the true median with at
least 90 % probability. A figure is worse if its whole interval is above the limit. It is not
measurable if the interval contains the limit; more pairs make the interval narrower. Figures are
the numbers whose name has `cpu` or `us`: CPU time depends less on the load than a rate. The exit
status is 1 if a figure is worse, and 2 if a benchmark failed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tools.cached_build import cached

ROOT: Final = Path(__file__).resolve().parents[1]
FIGURE: Final = re.compile(r"cpu(?!s\b)|\bus$")
# Not the cost of a call, or that of a program which is not ours: the load, and grpcio beside us.
OTHER: Final = re.compile(r"percent|echo|grpcio|\b(load|client)_")
PROBABILITY: Final = 0.9


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Compare benchmarks with an earlier commit.")
    parser.add_argument("--base", required=True, help="The commit to compare with.")
    parser.add_argument("--only", required=True, help="Names of benchmarks, separated by commas.")
    parser.add_argument("--pairs", type=int, default=5, help="Runs in each tree. Default: 5.")
    parser.add_argument("--limit", type=float, default=1.03, help="The ratio. Default: 1.03.")
    parser.add_argument("--targets", default="setup", help="What make prepares in the base tree.")
    parser.add_argument("arguments", nargs="*", help="Arguments of each benchmark.")
    given = parser.parse_args(arguments)
    verdicts = []
    try:
        base = base_tree(given.base, given.targets.split())
        for name in given.only.split(","):
            pairs = []
            for number in range(given.pairs):
                print(f"{name}: pair {number + 1} of {given.pairs}", file=sys.stderr)
                # The second run of a pair may meet a warmer machine, so the trees take turns.
                trees = (base, ROOT) if number % 2 else (ROOT, base)
                found = {tree: run(tree, name, given.arguments) for tree in trees}
                pairs.append((found[base], found[ROOT]))
            verdicts += report(name, pairs, limit=given.limit)
    except subprocess.CalledProcessError as error:
        print(f"{error}\n{error.output or ''}", file=sys.stderr)
        return 2
    return int("worse" in verdicts)


def base_tree(commit: str, targets: Sequence[str]) -> Path:
    """Return a tree of the commit with its virtual environment, which stays in the cache."""
    line = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{commit}^{{commit}}"]
    full = subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()
    tree = cached(
        "base",
        full[:16],
        f'git clone -q --no-checkout \'{ROOT}\' "$OUT" && git -C "$OUT" checkout -q {full}',
    )
    subprocess.run(["make", "-s", *targets], cwd=tree, check=True, stdout=sys.stderr)
    return tree


def run(tree: Path, name: str, arguments: Sequence[str]) -> dict[str, float]:
    """Run a benchmark of a tree; return its figures."""
    line = [str(tree / ".venv/bin/python"), "-m", f"tests.perf.bench_{name}", *arguments]
    output = subprocess.run(line, cwd=tree, check=True, stdout=subprocess.PIPE, text=True).stdout
    return figures(json.loads(output))


def figures(result: Any) -> dict[str, float]:
    """Return the CPU figures of a result by name; entries of a list are runs of one figure."""
    values: dict[str, list[float]] = defaultdict(list)

    def collect(part: Any, name: str) -> None:
        if isinstance(part, Mapping):
            for key, value in part.items():
                collect(value, f"{name}.{key}" if name else key)
        elif isinstance(part, list):
            for value in part:
                collect(value, name)
        elif isinstance(part, int | float) and FIGURE.search(name) and not OTHER.search(name):
            values[name].append(part)

    collect(result, "")
    return {name: statistics.median(found) for name, found in values.items()}


def report(
    name: str, pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]], *, limit: float
) -> list[str]:
    """Print a row for each figure of both trees; return the verdicts."""
    verdicts = []
    print(f"\n{'median':>8}  {'interval':15}  {'verdict':14}  {name}, new to old")
    for figure in pairs[0][0]:
        ratios = [
            new[figure] / old[figure] for old, new in pairs if old.get(figure) and figure in new
        ]
        if len(ratios) < len(pairs):
            continue  # One tree lacks the figure, or it is 0.
        low, high = interval(ratios)
        verdicts.append(verdict(low, high, limit=limit))
        median = statistics.median(ratios)
        print(f"{median:8.3f}  {low:6.3f} - {high:6.3f}  {verdicts[-1]:14}  {figure}")
    return verdicts


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest order statistics that contain the true median as often as required.

    The true median lies below the smallest of n values with probability 0.5 ** n, and below the
    next one with the binomial sum. With fewer than five values the interval is too wide to use.
    """
    ordered, count = sorted(ratios), len(ratios)
    missed, cut = 2 * 0.5**count, 0
    if missed > 1 - PROBABILITY:
        return 0.0, math.inf
    while (missed := missed + 2 * math.comb(count, cut + 1) * 0.5**count) <= 1 - PROBABILITY:
        cut += 1
    return ordered[cut], ordered[-1 - cut]


def verdict(low: float, high: float, *, limit: float) -> str:
    """Compare an interval with a limit."""
    if low > limit:
        return "worse"
    return "not worse" if high <= limit else "not measurable"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
