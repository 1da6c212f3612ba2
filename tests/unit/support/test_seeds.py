"""Which seeds a run tries (`tests/support/seeds.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import seeds as chosen
from tests.support.seeds import each, examples, seed_base, seed_chunks, seeds


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_TEST_SEEDS", raising=False)
    monkeypatch.setenv("TIDEMILL_TEST_SEED_BASE", "1000")
    monkeypatch.setattr(chosen, "EXAMPLES", 25)
    seed_base.cache_clear()


def test_a_run_tries_a_quarter_and_every_seed_that_failed() -> None:
    assert seeds("unknown", 40) == list(range(1000, 1010))
    assert seeds("simulation", 40) == [*chosen.FAILED["simulation"], *range(1000, 1010)]
    assert 199 in chosen.FAILED["simulation"]


def test_a_property_with_few_seeds_has_at_least_four() -> None:
    assert seeds("unknown", 5) == [1000, 1001, 1002, 1003]
    assert seeds("unknown", 2) == [1000, 1001]
    assert examples(2) == 1


def test_a_night_tries_more_than_a_full_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "EXAMPLES", 2000)
    assert len(seeds("unknown", 40)) == 800


def test_given_seeds_are_the_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_TEST_SEEDS", "7,8")
    assert seeds("simulation", 40) == [7, 8]
    assert seed_chunks("simulation", 40, chunks=5) == [[7], [8]]


def test_chunks_have_all_seeds() -> None:
    chunks = seed_chunks("unknown", 40, chunks=3)
    assert sorted(seed for chunk in chunks for seed in chunk) == seeds("unknown", 40)


def test_the_base_follows_from_the_commit_and_is_fixed_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEMILL_TEST_SEED_BASE")
    assert seed_base() > 0
    monkeypatch.setattr(chosen, "__file__", str(tmp_path / "seeds.py"))
    seed_base.cache_clear()
    assert seed_base() == chosen.BASE_WITHOUT_GIT
    seed_base.cache_clear()


def test_the_seed_of_a_failed_test_is_known_until_it_is_reported() -> None:
    for seed in each([3, 4]):
        if seed == 4:
            break
    assert chosen.current_seed() == 4
    chosen.forget_current_seed()
    assert chosen.current_seed() is None
