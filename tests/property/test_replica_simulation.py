"""Three replicas and two controllers on virtual time, with faults (`tests/simulation`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import replica_engines
from tests.simulation.replica_engines import Clients
from tests.simulation.replica_group import run_seed
from tests.simulation.replica_process import Answer, ReplicaProcess
from tests.simulation.situations import OPERATED, SITUATIONS
from tests.support.seeds import each, seed_chunks
from tests.support.worlds.replica_mutants import MUTANTS, NEVER_ASKED, mutated, replaced
from tidemill.broker.engine.configuration.administration import Administration
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.engine.metadata.catalog import ConsumerGroup
from tidemill.broker.engine.replication import fencing
from tidemill.broker.engine.transaction.transactions import Transactions
from tidemill.controller.election import replacement

ROOT = Path(__file__).parents[2]
SEEDS = 120
TROUBLE_S = 10.0  # virtual time with faults
# For each relaxed rule the situation, and a seed, that shows its effect.
# `tests.simulation.find_mutants` searches for new ones among all situations.
SEEN = {
    "the minimum is counted on the union": ("left alone", 2),
    "no union while a proposal is under way": ("joined unnoticed", 0),
    "eligible is not cleared": ("once eligible", 0),
    "an unclean start stays a member": ("memory lost twice", 0),
    "unclean is not sticky": ("memory lost twice", 0),
    "acks before the sync": ("power cut of all", 2),
    "no minimum": ("left alone", 0),
    "a proposal ends with the next one": ("a replaced proposal", 0),
    "an unclean start is eligible": ("memory lost of two", 9),
    "a proposal against an older version": ("an outdated proposal", 0),
    "a proposal of an older epoch": ("a proposal of a deposed master", 0),
    "another run joins": ("mistaken for an earlier run", 1),
    "every live replica joins": ("behind and alone", 0),
    "any replica is elected": ("behind and alone", 0),
    "the unclean are elected": ("memory lost of two", 9),
    "logs agree where both go on": ("a proposal of a deposed master", 0),
    "the journal keeps cut epochs": ("a journal without records", 0),
    "an epoch begins where another did": ("two epochs at one place", 0),
    "an older view is news": ("an outdated view", 0),
    "an older epoch begins again": ("elected again unnoticed", 0),
    "another run is master": ("power cut at the beginning", 0),
    "a deposed master serves, and is followed": ("elected again unnoticed", 0),
}
FORGOTTEN = [name for name in OPERATED if name.startswith("forgotten")]
FORGOTTEN_WITH_ENGINES = [name for name in FORGOTTEN if name in Clients.situations]
ENGINE_PART = 5  # one of this many seeds also runs with engines, which takes as much longer
CHUNKS = 12  # the seeds are divided among this many tests


@pytest.mark.parametrize("chunk", seed_chunks("simulation of replicas", SEEDS, chunks=CHUNKS))
def test_no_reply_is_taken_back(chunk: list[int]) -> None:
    for seed in each(chunk):
        run = run_seed(seed, trouble_s=TROUBLE_S)
        assert not run.findings, str(run)
        assert run.answered > 0


def test_a_seed_repeats_its_run() -> None:
    first, second = (run_seed(7, trouble_s=5.0) for _ in range(2))
    assert first.trace == second.trace
    assert first.notes == second.notes
    assert run_seed(8, trouble_s=5.0).trace != first.trace


def test_every_relaxed_rule_has_a_visible_effect_or_is_never_used() -> None:
    assert SEEN.keys() | NEVER_ASKED.keys() == MUTANTS.keys()
    assert not SEEN.keys() & NEVER_ASKED.keys()
    for test in NEVER_ASKED.values():
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text()


# Relaxed rules are for the night here: `test_replication_exploration.py` finds each of them in CI.
@pytest.mark.large
@pytest.mark.parametrize("name", SEEN)
def test_a_relaxed_rule_shows_in_the_history(name: str) -> None:
    situation, seed = SEEN[name]
    with mutated(name):
        assert run_seed(seed, trouble_s=0, situation=situation).findings
    run = run_seed(seed, trouble_s=0, situation=situation)
    assert not run.findings, "the situation breaks the rule without the mutant, too"
    assert run.was_staged, "the failure is not the one of the situation"


@pytest.mark.parametrize(
    "situation",
    [
        "slow disk of a master",
        "slow disk of a replica",
        "full disk of a master",
        "full disk of an heir",
    ],
)
def test_a_replica_with_a_slow_or_full_disk_is_removed_and_comes_back(situation: str) -> None:
    runs = [run_seed(seed, trouble_s=0, situation=situation) for seed in range(4)]
    for run in runs:
        assert not run.findings, str(run)
        assert run.was_staged, "\n".join(run.notes)


@pytest.mark.parametrize("situation", ["replaced while paused", "replaced after a loss"])
def test_a_master_that_was_paused_during_its_replacement_acknowledges_nothing(
    situation: str,
) -> None:
    """An operator's order may lose records at once, and none afterwards."""
    runs = [run_seed(seed, trouble_s=0, situation=situation) for seed in range(10)]
    assert not any(run.findings for run in runs), "\n".join(map(str, runs))
    assert any(run.was_staged for run in runs)


def test_without_the_check_for_a_pause_a_replaced_master_acknowledges_messages() -> None:
    with replaced(fencing, "is_late", lambda _silent_ms, *, silence_ms: silence_ms < 0):
        runs = [
            run_seed(seed, trouble_s=0, situation="replaced while paused") for seed in range(10)
        ]
    assert any("C1" in finding for run in runs for finding in run.findings)


@pytest.mark.parametrize("situation", FORGOTTEN)
def test_a_forgotten_group_is_led_again_by_the_replica_that_an_operator_names(
    situation: str,
) -> None:
    runs = [run_seed(seed, trouble_s=TROUBLE_S, situation=situation) for seed in range(4)]
    assert not any(run.findings for run in runs), "\n".join(map(str, runs))
    assert any(run.was_staged for run in runs)


def test_a_restored_record_of_the_same_epoch_elects_nobody_until_an_operator_names_a_master() -> (
    None
):
    runs = [run_seed(seed, trouble_s=0, situation="restored in an epoch") for seed in range(6)]
    assert not any(run.findings for run in runs), "\n".join(map(str, runs))
    assert any(run.was_staged for run in runs)


@pytest.mark.parametrize("situation", FORGOTTEN_WITH_ENGINES)
def test_clients_of_a_forgotten_group_miss_nothing(situation: str) -> None:
    for seed in range(2):
        run = run_seed(seed, trouble_s=TROUBLE_S, situation=situation, contents=Clients)
        assert not run.findings, str(run)
        assert run.was_staged


def test_a_named_master_leads_no_epoch_that_another_replica_has_led() -> None:
    with replaced(replacement, "UNSEEN_MAX", 0):
        run = run_seed(0, trouble_s=0, situation="forgotten with an epoch")
    assert any("C11" in finding for finding in run.findings)


@pytest.mark.large
@pytest.mark.parametrize("name", NEVER_ASKED)
def test_an_unused_rule_makes_no_difference(name: str) -> None:
    """If a rule made a difference, it would be used, and a seed would have to be recorded."""
    for number, situation in enumerate(SITUATIONS):
        with mutated(name):
            run = run_seed(number, situation=situation, trouble_s=TROUBLE_S)
        assert not run.findings, str(run)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_frame_of_another_epoch_arrives(situation: str) -> None:
    """Streams end with their epoch. The comparison of epochs on a stream is a second protection."""

    def is_of_epoch(epoch: int, other: int) -> bool:
        assert epoch == other, "a stream has outlived its epoch"
        return True

    with replaced(fencing, "is_of_epoch", is_of_epoch):
        run = run_seed(0, trouble_s=0, situation=situation)
    assert not run.findings


@pytest.mark.parametrize(
    "chunk", seed_chunks("simulation of engines", SEEDS // ENGINE_PART, chunks=CHUNKS)
)
def test_no_promise_of_a_broker_is_broken(chunk: list[int]) -> None:
    for seed in each(chunk):
        run = run_seed(seed, trouble_s=TROUBLE_S, contents=Clients)
        assert not run.findings, str(run)
        assert run.answered > 0


@pytest.mark.parametrize("situation", ["a bit flips at a replica", "a bit flips at the master"])
def test_a_flipped_bit_is_mended(situation: str) -> None:
    for seed in range(4):
        run = run_seed(seed, trouble_s=0, situation=situation, contents=Clients)
        assert not run.findings, str(run)
        assert run.was_staged


_carry_out, _put_group, _run_due, _commit = (
    ReplicaProcess.carry_out,
    Administration.put_group,
    Engine.run_due,
    Transactions.commit,
)


def _answers_at_once(self: ReplicaProcess, act: Callable[[ReplicaProcess], Answer]) -> None:
    def answered_at_once(replica: ReplicaProcess) -> Answer:
        act(replica)()
        return lambda: None

    _carry_out(self, answered_at_once)


def _is_not_ordered(self: Administration, name: str, **options: Any) -> ConsumerGroup:
    return _put_group(self, name, **{**options, "is_ordered": False})


def _delivers_early(self: Engine, now_ms: int, *, firing_ms: int) -> bool:
    return _run_due(self, now_ms, firing_ms=firing_ms + 5_000)


def _commits_as_well(self: Transactions, half_id: HalfId, *, now_ms: int, **_: Any) -> None:
    _commit(self, half_id, now_ms=now_ms, firing_ms=now_ms)


AT_ONCE = (ReplicaProcess, "carry_out", _answers_at_once)
# For each promise: the change that breaks it, and the seed that shows it.
BROKEN = {
    "C1": (AT_ONCE, "memory lost twice"),
    "C3": ((Administration, "put_group", _is_not_ordered), "left alone"),
    "C4": (AT_ONCE, "left alone"),
    "C5": (AT_ONCE, "memory lost twice"),
    "C6": (AT_ONCE, "memory lost twice"),
    "C8": ((Engine, "run_due", _delivers_early), "left alone"),
    "C9": (AT_ONCE, "memory lost twice"),
    "C1: half": ((Transactions, "roll_back", _commits_as_well), "left alone"),
    "D1": (AT_ONCE, "memory lost twice"),
    "D3": (AT_ONCE, "memory lost twice"),
    "X4": (AT_ONCE, "memory lost twice"),
    "C2": ((replica_engines, "mend", lambda *_: iter(())), "a bit flips at a replica"),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_of_a_broker_is_found(promise: str) -> None:
    patch, situation = BROKEN[promise]
    with replaced(*patch):
        runs = [
            run_seed(seed, trouble_s=0, situation=situation, contents=Clients) for seed in range(3)
        ]
    found = [finding for run in runs for finding in run.findings]
    assert any(finding.startswith(promise) for finding in found), found
