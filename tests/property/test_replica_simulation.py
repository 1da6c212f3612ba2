"""Three replicas and two controllers on virtual time, under faults (`tests/simulation`)."""

from __future__ import annotations

import os

import pytest

from tests.simulation.find_mutants import broken_by
from tests.simulation.replica_group import run_seed

SEEDS = int(os.environ.get("TIDEMILL_SIMULATION_SEEDS", "200"))
TROUBLE_S = 10.0  # of virtual time, for which things happen
# Relaxed rules that the judges have seen, and under which seed (`tests.simulation.find_mutants`).
SEEN = {"eligible is not cleared": 4}
CHUNKS = 20  # the seeds are split into this many tests


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_answer_is_taken_back(chunk: int) -> None:
    for seed in range(chunk, SEEDS, CHUNKS):
        run = run_seed(seed, trouble_s=TROUBLE_S)
        assert not run.findings, str(run)
        assert run.answered > 0


def test_a_seed_is_the_same_run_again() -> None:
    first, second = (run_seed(7, trouble_s=5.0) for _ in range(2))
    assert first.trace == second.trace
    assert first.notes == second.notes
    assert run_seed(8, trouble_s=5.0).trace != first.trace


@pytest.mark.parametrize("name", SEEN)
def test_a_relaxed_rule_is_seen_in_the_history(name: str) -> None:
    assert broken_by(name, SEEN[name])
    assert not run_seed(SEEN[name], trouble_s=TROUBLE_S).findings
