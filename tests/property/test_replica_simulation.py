"""Three replicas and two controllers on virtual time, under faults (`tests/simulation`)."""

from __future__ import annotations

import os

import pytest

from tests.simulation.replica_group import run_seed
from tests.simulation.situations import SITUATIONS
from tests.support.replica_mutants import MUTANTS, NEVER_ASKED, mutated, replaced
from tidemill.broker.engine.replication import fencing

SEEDS = int(os.environ.get("TIDEMILL_SIMULATION_SEEDS", "200"))
TROUBLE_S = 10.0  # of virtual time, for which things happen
# Where each relaxed rule is seen: the situation, and a seed of it. `tests.simulation.find_mutants`
# searches anew, among runs that draw their situation.
SEEN = {
    "the minimum is counted on the union": ("left alone", 1),
    "no union while a proposal is under way": ("joined without a word", 0),
    "eligible is not cleared": ("once eligible", 0),
    "an unclean start stays a member": ("memory lost twice", 0),
    "unclean is not sticky": ("memory lost twice", 0),
    "acks before the sync": ("power cut of all", 2),
    "no minimum": ("left alone", 0),
    "a proposal ends with the next one": ("a proposal that was replaced", 0),
    "an unclean start is eligible": ("memory lost of two", 2),
    "a proposal against an older version": ("a proposal of before", 1),
    "a proposal of an older epoch": ("a proposal of a deposed master", 0),
    "another run joins": ("taken for a former run", 0),
    "who is alive goes along": ("behind, and alone", 0),
    "anybody is elected": ("behind, and alone", 0),
    "the unclean are elected": ("memory lost of two", 2),
    "logs agree where both go on": ("a proposal of a deposed master", 0),
    "the journal keeps what was cut": ("a journal without records", 0),
    "an epoch begins where another did": ("two epochs at one place", 0),
    "an older view is news": ("a view of before", 1),
    "an older epoch begins again": ("elected again unawares", 0),
    "another run is master": ("power cut at the beginning", 0),
    "a deposed master serves, and is followed": ("elected again unawares", 0),
}
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


def test_every_relaxed_rule_is_seen_or_never_asked() -> None:
    assert SEEN.keys() | NEVER_ASKED == MUTANTS.keys()
    assert not SEEN.keys() & NEVER_ASKED


@pytest.mark.parametrize("name", SEEN)
def test_a_relaxed_rule_is_seen_in_the_history(name: str) -> None:
    situation, seed = SEEN[name]
    with mutated(name):
        assert run_seed(seed, trouble_s=0, situation=situation).findings
    run = run_seed(seed, trouble_s=0, situation=situation)
    assert not run.findings, "without the mutant, too: the situation breaks what it may not"
    assert run.was_staged, "what was found is not of the situation"


@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_frame_of_another_epoch_is_heard_of(situation: str) -> None:
    """Streams end with their epoch: the comparison of epochs on them is a second line."""

    def is_of_epoch(epoch: int, other: int) -> bool:
        assert epoch == other, "a stream has outlived its epoch"
        return True

    with replaced(fencing, "is_of_epoch", is_of_epoch):
        run = run_seed(0, trouble_s=0, situation=situation)
    assert not run.findings
