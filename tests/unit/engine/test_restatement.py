"""Restated state: a replay from the state floor finds it, and nothing of a deleted topic."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import World
from tests.support.worlds.packed_worlds import (
    delete_topic,
    floors,
    forget_derived_files,
    move_floor,
    pack_all,
    small_world,
)
from tidemill.broker.engine.layout import trim
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.upkeep import restatement as restatement_module


def fill(world: World, segments: int) -> None:
    """Fill `segments` further segments with dead messages of the topic "gone"."""
    end = len(world.engine.log.segments) + segments
    while len(world.engine.log.segments) < end:
        world.send("gone", topic="gone", size=4_000)
    world.purge("gone")
    world.checkpoint()


def replay_from_floor(world: World) -> None:
    """Let the state floor move as far as possible, and replay the log from there alone."""
    move_floor(world, floors(world)[-1])
    pack_all(world)
    forget_derived_files(world)
    world.open()


def bound_parts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let each slice and each record of a restatement have at most `size` items."""
    for module, name in (
        (restatement_module, "KEYS_SEEN_A_SLICE"),
        (restatement_module, "ENDS_A_RECORD"),
        (restatement_module, "PROGRESS_A_SECTION"),
        (trim, "ROWS_MAX"),
    ):
        monkeypatch.setattr(module, name, size)


def max_offset(world: World, name: str) -> int:
    topic = world.engine.catalog.find_topic(name)
    assert topic is not None
    return world.engine.catalog.queue(topic.id, QueueId(0)).max_offset


def test_a_queue_whose_messages_are_gone_continues_at_its_offset() -> None:
    world = small_world()
    world.send("a", "b", "c", topic="quiet")
    world.purge("quiet")
    fill(world, 4)
    before = max_offset(world, "quiet")
    replay_from_floor(world)
    assert (before, max_offset(world, "quiet")) == (3, 3)


def test_dead_messages_before_the_floor_stay_dead_in_a_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the keys of the state need several slices and records."""
    bound_parts(monkeypatch, 2)
    world = small_world()
    names = [f"quiet-{n}" for n in range(7)]
    for name in names:
        world.send("a", "b", topic=name)
        world.ack(*world.pop(1, topic=name))
        world.purge(name)
    fill(world, 4)
    move_floor(world, floors(world)[-1])
    forget_derived_files(world)
    world.open()
    assert {name: max_offset(world, name) for name in names} == dict.fromkeys(names, 2)
    world.group("fresh")
    assert [text for name in names for text in world.drain(topic=name, group="fresh")] == []


def test_queues_of_a_dropped_segment_continue_at_their_offsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restatement_module, "ENDS_A_RECORD", 2)
    monkeypatch.setattr(restatement_module, "KEYS_SEEN_A_SLICE", 2)
    world = small_world()
    names = [f"quiet-{n}" for n in range(7)]
    for name in names:
        world.send("a", "b", topic=name)
        world.ack(*world.pop(1, topic=name))
    fill(world, 4)
    world.retire()
    forget_derived_files(world)
    world.open()
    assert {name: max_offset(world, name) for name in names} == dict.fromkeys(names, 2)


def test_the_name_of_a_deleted_topic_is_kept_until_it_may_be_created_again() -> None:
    world = small_world(recreate_block_ms=60_000)
    world.send("a", topic="deleted")
    delete_topic(world, "deleted")
    fill(world, 4)
    before = dict(world.engine.catalog.deleted_names.topics)
    replay_from_floor(world)
    assert [one.name for one in before.values()] == ["deleted"]
    after = world.engine.catalog.deleted_names.topics
    assert {id_: one.name for id_, one in after.items()} == {
        id_: one.name for id_, one in before.items()
    }


def test_state_that_later_records_state_is_not_stated_again() -> None:
    world = small_world()
    world.send("a", "b", topic="quiet")
    world.purge("quiet")
    fill(world, 4)
    floor = floors(world)[-1]
    move_floor(world, floor)
    end = world.engine.log.log_end
    for files in world.engine.retention._restatement.restate(floor, world.now_ms):
        assert files == []
    for files in world.engine.retention._restatement.restate_lows(floor, world.now_ms):
        assert files == []
    assert world.engine.log.log_end == end


def test_topics_and_groups_may_be_deleted_at_any_slice_of_a_restatement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound_parts(monkeypatch, 1)
    is_done = False
    step = 0
    while not is_done:
        world = small_world()
        world.group("left")
        world.send("a", "b", topic="quiet")
        world.ack(*world.pop(1, group="left", topic="quiet"))
        world.purge("quiet")
        fill(world, 4)
        floor, restatement = floors(world)[-1], world.engine.retention._restatement
        steps = [*restatement.restate(0, world.now_ms)]  # nothing is due
        assert not any(steps)
        is_done = True
        count = 0
        for generator in (
            restatement.restate(floor, world.now_ms),
            restatement.restate_lows(floor, world.now_ms),
        ):
            for _ in generator:
                if count == step:
                    is_done = False
                    delete_topic(world, "quiet")
                    world.engine.administration.delete_group("left", world.now_ms)
                    world.commit()
                count += 1
        world.commit()
        world.restart()
        if not is_done:
            assert world.engine.catalog.find_topic("quiet") is None
            assert world.engine.catalog.find_group("left") is None
        step += 1
    assert step > 4
