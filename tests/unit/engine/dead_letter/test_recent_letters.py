"""Counts of the dead letters of the last hour."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.letter_world import DEAD, LetterWorld
from tidemill.broker.engine.dead_letter.recent import HOUR_MS, RecentLetters

MINUTE_MS = 60_000


def count(world: LetterWorld) -> int:
    topic = world.engine.dead_letters.topic_of(world.found_group())
    return 0 if topic is None else world.engine.recent_letters.count(topic, world.now_ms)


def dead_world(*texts: str) -> LetterWorld:
    world = LetterWorld()
    world.topic(TOPIC)
    world.dead(*texts)
    return world


def test_a_dead_letter_counts_for_one_hour_in_any_state() -> None:
    world = dead_world("a", "b")
    died_at_ms = world.now_ms
    assert world.replay(0)
    world.now_ms = died_at_ms + HOUR_MS
    assert count(world) == 2
    world.now_ms += 1
    assert count(world) == 0


def test_the_count_survives_a_restart_and_a_failover() -> None:
    world = LetterWorld(is_followed=True)
    world.topic(TOPIC)
    world.dead("old")
    world.now_ms += HOUR_MS + 1
    world.dead("a", "b")
    world.fail_over()
    assert count(world) == 2
    world.restart()
    assert count(world) == 2


def test_a_purge_and_a_new_topic_leave_the_stored_ones() -> None:
    world = dead_world("a", "b", "c")
    assert count(world) == 3
    world.purge(DEAD, low=2)
    assert count(world) == 1
    topic = world.engine.dead_letters.topic_of(world.found_group())
    assert topic is not None
    world.engine.administration.delete_topic(DEAD, world.now_ms)
    world.commit()
    with pytest.raises(LookupError):
        world.engine.recent_letters.count(topic, world.now_ms)
    world.engine.recent_letters.forget_deleted()
    assert not world.engine.recent_letters._firsts
    world.now_ms += 1
    world.dead("d")
    assert count(world) == 1


def test_counts_without_a_change_search_once() -> None:
    world = dead_world("a")
    for _ in range(10):
        world.now_ms += MINUTE_MS
        world.dead("b")
        assert count(world) > 1
    assert world.engine.recent_letters.searches == 1
    world.now_ms += HOUR_MS + 1
    assert [count(world) for _ in range(3)] == [0] * 3
    assert world.engine.recent_letters.searches == 2
    # The first one of the next hour is found without a search.
    world.dead("c")
    assert count(world) == 1
    assert world.engine.recent_letters.searches == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_remembered_first_one_gives_the_count_of_all_times(seed: int) -> None:
    random, world = Random(seed), dead_world()
    died_at_ms: list[int] = []
    for step in range(60):
        world.now_ms += random.choice((0, MINUTE_MS, 10 * MINUTE_MS, HOUR_MS))
        for number in range(random.choice((0, 0, 1, 3))):
            world.dead(f"{step}-{number}")
            died_at_ms.append(world.now_ms)
        if random.random() < 0.1:
            world.restart()
        if random.random() < 0.7:
            expected = sum(at_ms >= world.now_ms - HOUR_MS for at_ms in died_at_ms)
            assert count(world) == expected
            topic = world.engine.dead_letters.topic_of(world.found_group())
            if topic is not None:
                fresh = RecentLetters(world.engine.catalog, world.engine.store)
                assert fresh.count(topic, world.now_ms) == expected
