"""The decisions of replication, in every order of steps of a small scope, and in long walks.

The tests explore `tests/support/worlds/replica_world.py`. They also test the exploration: it must
find a violation for each relaxed rule of `replica_mutants.py`.
"""

from __future__ import annotations

import pytest

from tests.support.seeds import each, seeds
from tests.support.worlds.exploration import explore, walk
from tests.support.worlds.replica_mutants import MUTANTS, mutated
from tests.support.worlds.replica_world import Scope, beginning, beginning_alone

WALKS = 40
STEPS = 300
MEMORY = Scope(is_synced=False, epochs=9, appends=6, crashes=8, power_cuts=6, proposals=30)
FSYNC = Scope(is_synced=True, epochs=9, appends=6, crashes=8, proposals=30)


def small(*, is_synced: bool = False, **limits: int) -> Scope:
    """Return a scope without late views and commit news, which only multiply the states."""
    return Scope(
        is_synced=is_synced,
        stale_views=False,
        tells_confirm=False,
        crashes_in_begin=False,
        **limits,
    )


# The ack of an old run must arrive when its replica has lost the records and is a member again. Few
# walks do that, and a scope that is just large enough is soon explored completely.
LATE_ACK = small(epochs=1, appends=1, crashes=1, power_cuts=1, proposals=1)
# The scope, and the seed of a walk that finds the violation. Search again after adding steps.
FOUND_BY = {
    "the minimum is counted on the union": (FSYNC, 5),
    "no union while a proposal is under way": (FSYNC, 1),
    "eligible is not cleared": (MEMORY, 0),
    "an unclean start stays a member": (MEMORY, 0),
    "unclean is not sticky": (MEMORY, 0),
    "acks before the sync": (FSYNC, 8),
    "no minimum": (MEMORY, 0),
    "a proposal ends with the next one": (FSYNC, 1),
    "an unclean start is eligible": (MEMORY, 1),
    "a proposal against an older version": (MEMORY, 7),
    "a proposal of an older epoch": (FSYNC, 4),
    "another run joins": (MEMORY, 0),
    "every live replica joins": (MEMORY, 0),
    "any replica is elected": (MEMORY, 0),
    "the unclean are elected": (MEMORY, 0),
    "logs agree where both go on": (FSYNC, 0),
    "the journal keeps cut epochs": (FSYNC, 4),
    "an epoch begins where another did": (FSYNC, 1),
    "an older view is news": (FSYNC, 1),
    "an older epoch begins again": (FSYNC, 0),
    "another run is master": (MEMORY, 1),
    "a deposed master serves, and is followed": (FSYNC, 11),
    "an ack of another epoch": (FSYNC, 13),
}


def test_the_smallest_scope_has_no_violation() -> None:
    scope = small(is_synced=True, epochs=2, appends=1, crashes=0, proposals=0)
    found = explore(beginning(scope), scope, states_max=1_000_000)
    assert not found.broken
    assert found.is_complete, f"{found.states} states, and more to come"


@pytest.mark.parametrize(
    ("scope", "members"),
    [
        pytest.param(
            small(epochs=2, appends=0, crashes=1, power_cuts=1, proposals=1),
            (0, 1),
            id="a crash, a power cut and a proposal, with a learner: 570,000 states",
            marks=pytest.mark.large,
        ),
        pytest.param(
            small(epochs=2, appends=1, crashes=0, proposals=1),
            (0, 1, 2),
            id="a message, a proposal and an election: 110,000 states",
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            small(epochs=3, appends=0, crashes=0, proposals=1),
            (0, 1, 2),
            id="three epochs",
            marks=pytest.mark.large,
        ),
    ],
)
def test_a_small_scope_has_no_violation(scope: Scope, members: tuple[int, ...]) -> None:
    found = explore(beginning(scope, members=members), scope, states_max=5_000_000)
    assert not found.broken
    assert found.is_complete, f"{found.states} states, and more to come"


@pytest.mark.parametrize("scope", [MEMORY, FSYNC], ids=["memory", "fsync"])
def test_long_walks_have_no_violation(scope: Scope) -> None:
    for seed in each(seeds("walks", WALKS)):
        found = walk(beginning(scope), scope, seed=seed, length=STEPS)
        assert not found.broken, f"seed {seed}: {found.broken}"


@pytest.mark.parametrize("scope", [MEMORY, FSYNC], ids=["memory", "fsync"])
def test_a_group_that_grows_from_one_replica_has_no_violation(scope: Scope) -> None:
    scope = scope._replace(crashes_in_begin=True)
    for seed in each(seeds("walks from one replica", WALKS)):
        found = walk(beginning_alone(scope), scope, seed=seed, length=STEPS)
        assert not found.broken, f"seed {seed}: {found.broken}"


@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "acks count for any run"])
def test_the_exploration_finds_each_relaxed_rule(name: str) -> None:
    scope, seed = FOUND_BY[name]
    with mutated(name):
        found = walk(beginning(scope), scope, seed=seed, length=STEPS)
    assert found.broken, "the exploration does not reach the states that need this rule"


def test_the_exploration_finds_acks_of_another_run() -> None:
    with mutated("acks count for any run"):
        found = explore(beginning(LATE_ACK, members=(0, 1)), LATE_ACK, states_max=100_000)
    assert "F-4" in found.broken
