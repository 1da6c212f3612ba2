"""Polls of a proxy under every order of replies, hints, deadlines, cancels and failures.

A seed chooses the order. `tests/support/worlds/polling_world.py` checks five rules: no false empty;
no message is held longer than a poll; each poll gets one answer; at most one pop is in flight; each
popped message reaches a client or goes back to the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.polling_world import World
from tidemill.proxy.polling.level_order import FACTOR_MAX

EVENTS = 60


def story(world: World, *, has_failures: bool) -> None:
    """Let things happen in the next half minute."""
    random = world.random
    names = list(world.brokers)

    def later(what: Callable[[], object]) -> None:
        world.at(random.randrange(30_000), what)

    for _ in range(EVENTS):
        later(
            lambda: world.receive(
                random.choice((300, 2_000, 5_000)), asks_all=random.random() < 0.1
            )
        )
        later(lambda: world.send(random.choice(names), count=random.choice((1, 1, 1, 3, 9))))
    for _ in range(EVENTS // 4):
        later(lambda: world.receive(0))
        later(lambda: world.take_elsewhere(random.choice(names)))
        later(lambda: world.leave(random.choice(world.clients)) if world.clients else None)
        later(lambda: toggle_mode(world))
    if has_failures:
        # Groups join while polls wait, and at times nobody is up when one begins.
        for name in names[1:]:
            if random.random() < 0.3:
                world.withhold(name)
                later(lambda name=name: world.join(name))  # type: ignore[misc]  # a default
        for _ in range(2):
            later(lambda: black_out(world))
        for _ in range(4):
            later(lambda: world.lose(random.choice(names)))
            later(lambda: world.come_back(random.choice(names)))
            later(lambda: world.drain(random.choice(names)))
            later(lambda: refuse(world, random.choice(names), "notifications"))
            later(lambda: refuse(world, random.choice(names), "pops"))
            later(lambda: refuse(world, random.choice(names), ""))


def send_levels(world: World, random: Random, names: list[str]) -> None:
    """Let messages of all levels arrive beside the others."""
    for _ in range(EVENTS):
        level, count = random.randrange(8), random.choice((1, 1, 3, 9))
        name, at_ms = random.choice(names), random.randrange(30_000)
        world.at(at_ms, partial(world.send, name, count=count, level=level))


def black_out(world: World) -> None:
    """All go, polls begin, and all are back within two seconds."""
    for name in world.brokers:
        world.lose(name)
        world.carry_out()
        world.at(world.random.randrange(2_000), lambda name=name: world.come_back(name))  # type: ignore[misc]  # a default
    for poll_ms in (0, 0, 5_000, 5_000):
        world.at(
            world.random.randrange(500),
            lambda poll_ms=poll_ms: world.receive(poll_ms, asks_all=world.random.random() < 0.5),  # type: ignore[misc]  # a default
        )


def toggle_mode(world: World) -> None:
    """The switch is right in either position."""
    for mode in world.polling.modes.values():
        mode.is_direct = not mode.is_direct


def refuse(world: World, name: str, what: str) -> None:
    world.brokers[name].refuses = what


@pytest.mark.parametrize("has_failures", [False, True], ids=["well", "failing"])
@pytest.mark.parametrize("seed", seeds("polling", 120))
def test_polls_under_any_schedule(seed: int, has_failures: bool) -> None:
    world = World(seed, brokers=seed % 4 + 1)
    story(world, has_failures=has_failures)
    world.finish()
    assert not sum(world.counts.false_empties.values())
    assert sum(world.counts.inflight.values()) == 0
    assert sum(world.counts.receives.values()) == len(world.clients)


@pytest.mark.parametrize("has_failures", [False, True], ids=["well", "failing"])
@pytest.mark.parametrize("seed", seeds("polling levels", 120))
def test_polls_of_levels_under_any_schedule(seed: int, has_failures: bool) -> None:
    world = World(
        seed,
        brokers=seed % 3 + 2,
        factor=(0, 50, 90, 100)[seed % 4],
        is_filtered=seed % 5 == 0,
        unread=seed % 7 % 3,
    )
    story(world, has_failures=has_failures)
    send_levels(world, world.random, list(world.brokers))
    world.finish()
    assert world.asks < 10 * len(world.clients), "four times what these schedules need"
    assert not sum(world.counts.false_empties.values())
    assert sum(world.counts.receives.values()) == len(world.clients)


@pytest.mark.parametrize("seed", seeds("polling order", 120))
def test_a_receive_gets_the_highest_level_that_hints_could_name(seed: int) -> None:
    """Other consumers take messages meanwhile, so hints are out of date."""
    world = World(seed, brokers=seed % 3 + 2, factor=FACTOR_MAX, refusal_ratio=0, is_fifo=True)
    names = list(world.brokers)
    send_levels(world, world.random, names)
    for _ in range(3 * EVENTS):
        at_ms = world.random.randrange(30_000)
        world.at(at_ms, partial(world.receive, world.random.choice((0, 300, 2_000))))
        name = world.random.choice(names)
        world.at(world.random.randrange(30_000), partial(world.take_elsewhere, name))
    world.finish()
    assert not sum(world.counts.inversions.values())


@pytest.mark.parametrize("brokers", [1, 8, 64])
def test_an_idle_consumer_asks_each_broker_about_once_a_poll(brokers: int) -> None:
    """One that polls again and again for 20 s each, for ten minutes."""
    world = World(0, brokers=brokers)
    polls = 30
    for _ in range(polls):
        client = world.receive(20_000)
        while client.answer is None:
            assert world.step()
    calls = world.asks + world.pops
    # Of a hundred notifications two are refused here, and asked again; and where one has ended a
    # moment before its poll the poll looks for itself.
    assert calls <= polls * brokers * 1.5 + polls
    world.finish()
