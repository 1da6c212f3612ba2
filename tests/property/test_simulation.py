"""Brokers and proxies on virtual time; a seed chooses the order of events (`tests/simulation`)."""

from __future__ import annotations

import pytest

from tests.simulation.push import run_push
from tests.simulation.run import run_seed
from tests.support.seeds import each, seed_chunks, seeds

TROUBLE_S = 15.0  # of virtual time with failures
SEEDS = 100  # of a full round; see tests/support/seeds.py
CHUNKS = 12  # the seeds are split into this many tests


@pytest.mark.parametrize("chunk", seed_chunks("simulation", SEEDS, chunks=CHUNKS))
def test_no_promise_is_broken_in_any_order_of_events(chunk: list[int]) -> None:
    for seed in each(chunk):
        run = run_seed(seed, trouble_s=TROUBLE_S)
        assert not run.findings, str(run)
        assert run.received > 0


@pytest.mark.parametrize(
    "chunk", seed_chunks("simulation of three broker groups", SEEDS // 4, chunks=CHUNKS)
)
def test_no_promise_is_broken_with_several_broker_groups(chunk: list[int]) -> None:
    for seed in each(chunk):
        run = run_seed(seed, trouble_s=TROUBLE_S, groups=3)
        assert not run.findings, str(run)
        assert run.received > 0


@pytest.mark.parametrize("chunk", seed_chunks("simulation of moves", SEEDS // 4, chunks=CHUNKS))
def test_no_promise_is_broken_while_masters_of_several_broker_groups_move(chunk: list[int]) -> None:
    for seed in each(chunk):
        run = run_seed(seed, trouble_s=TROUBLE_S, groups=3, has_replicas=True)
        assert not run.findings, str(run)
        assert run.received > 0


@pytest.mark.parametrize("seed", seeds("simulation of push consumers", 2))  # of ten minutes each
def test_no_consumer_receives_a_message_that_a_living_push_consumer_has(seed: int) -> None:
    run, held = run_push(seed)
    assert not run.findings, str(run)
    assert held.longest_s > 120, "no consumer works longer than the first invisible duration"
    assert held.deaths > 0


def test_a_seed_repeats_its_run() -> None:
    first, second = (run_seed(1_000, trouble_s=5) for _ in range(2))
    assert first.trace == second.trace
    assert first.sent == second.sent
    assert run_seed(1_001, trouble_s=5).trace != first.trace


def test_a_seed_is_the_same_run_again_with_several_broker_groups() -> None:
    first, second = (run_seed(1_000, trouble_s=5, groups=3) for _ in range(2))
    assert first.trace == second.trace
