"""Search seeds under which the simulation of a broker group sees that a rule was relaxed.

    python -m tests.simulation.find_mutants --seeds 2000 --first 0 [NAME ...]

Prints one line per rule of `tests/support/worlds/replica_mutants.py`: the first seed whose history
is broken, the situation, and the violation. The exploration finds all relaxed rules. This search
tests the history checkers: a checker that never finds a relaxed rule may be blind. The situation
and seed of each rule stand in `tests/property/test_replica_simulation.py`.
"""

from __future__ import annotations

import argparse
import sys

from tests.simulation.replica_group import run_seed
from tests.support.worlds.replica_mutants import MUTANTS, NEVER_ASKED, mutated

TROUBLE_S = 10.0


def broken_by(name: str, seed: int) -> str:
    """Return the first finding of a seed under a relaxed rule, or "" if there is none."""
    with mutated(name):
        run = run_seed(seed, trouble_s=TROUBLE_S)
    return f"{run.situation}: {run.findings[0]}" if run.findings else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("names", nargs="*", default=sorted(MUTANTS.keys() - NEVER_ASKED.keys()))
    chosen = parser.parse_args()
    missed = 0
    for name, test in NEVER_ASKED.items():
        sys.stdout.write(f"{name}: processes never use this rule: {test}\n")
    for name in chosen.names:
        seeds = range(chosen.first, chosen.first + chosen.seeds)
        found = next(((seed, why) for seed in seeds if (why := broken_by(name, seed))), None)
        missed += found is None
        text = "not found" if found is None else f"seed {found[0]}: {found[1]}"
        sys.stdout.write(f"{name}: {text}\n")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
