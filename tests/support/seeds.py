"""Seeds of the randomized tests: new ones for each commit, and every seed that ever failed.

Seeds are derived from the commit, so each change is tested with other seeds and a second run of one
commit repeats them. A failure prints its seed and the command that repeats it. Variables:

| variable | meaning |
| --- | --- |
| `TIDEMILL_TEST_EXAMPLES` | examples of each property; 100 are a full round. Default: 25 |
| `TIDEMILL_TEST_SEED_BASE` | the first seed, instead of one derived from the commit |
| `TIDEMILL_TEST_SEEDS` | the only seeds to try, separated by commas |
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

DEFAULT_EXAMPLES: Final = 25
EXAMPLES: Final = int(os.environ.get("TIDEMILL_TEST_EXAMPLES", DEFAULT_EXAMPLES))
FULL_EXAMPLES: Final = 100
SEEDS_MIN: Final = 4  # of a property with few seeds: their remainders choose among few cases
BASE_WITHOUT_GIT: Final = 1
# Seeds under which a test once failed. Each stays, although later code draws other numbers from it.
FAILED: Final[Mapping[str, Sequence[int]]] = {
    "acks answered ok": (268, 292, 314, 491, 543, 640, 660, 761),
    "flipped bits": (2309152766,),
    "simulation": (0, 101, 199, 900, 910, 419470409, 4032556698),
    "simulation of three broker groups": (0, 4, 7, 9, 4032556702, 892041422),
    "transaction model": (2299911595,),
    "simulation of replicas": (0, 73, 1028, 1067, 1133, 2797776572),
}

_current: int | None = None  # the seed that a test of several seeds tries now


@cache
def seed_base() -> int:
    """Return the first seed of this run."""
    if given := os.environ.get("TIDEMILL_TEST_SEED_BASE"):
        return int(given)
    line = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return BASE_WITHOUT_GIT
    return int(commit[:8], 16)


def examples(full: int) -> int:
    """Return how many examples to try of a property that has `full` of them in a full round."""
    return max(full * EXAMPLES // FULL_EXAMPLES, 1)


def seeds(name: str, full: int) -> list[int]:
    """Return the seeds of this run for a property that has `full` of them in a full round."""
    if given := os.environ.get("TIDEMILL_TEST_SEEDS"):
        return [int(seed) for seed in given.split(",")]
    count = max(examples(full), min(full, SEEDS_MIN))
    new = range(seed_base(), seed_base() + count)
    return [*FAILED.get(name, ()), *new]


def part_of(count: int, *, parts: int) -> range:
    """Return the numbers below `count` to try: all, or in a run with few examples every `parts`th.

    Each commit begins at another number, so that all are tried in a few commits.
    """
    return range(seed_base() % parts, count, parts) if EXAMPLES < DEFAULT_EXAMPLES else range(count)


def seed_chunks(name: str, full: int, *, chunks: int) -> list[list[int]]:
    """Divide the seeds among tests, for a property with many cheap seeds."""
    all_seeds = seeds(name, full)
    return [all_seeds[n::chunks] for n in range(min(chunks, len(all_seeds)))]


def each(chunk: Sequence[int]) -> Iterator[int]:
    """Yield the seeds of a chunk, and note the current one for the report of a failure."""
    global _current
    for seed in chunk:
        _current = seed
        yield seed
    _current = None


def current_seed() -> int | None:
    """Return the seed that `each` has yielded last, if its test has not passed."""
    return _current


def forget_current_seed() -> None:
    """Forget the seed of a test that has ended."""
    global _current
    _current = None
