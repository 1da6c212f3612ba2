"""Deleted groups and topics leave nothing behind, and no slice of their removal is long."""

from __future__ import annotations

import pytest

from tests.support.disk.counted_work import Meter, each_turn
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import GroupId
from tidemill.broker.engine.metadata.catalog import QUEUES_MAX
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.pop.deliveries import AckResult, Delivery
from tidemill.broker.engine.pop.forgetting import FORGOTTEN_A_SLICE, is_forgetting
from tidemill.common.errors import GroupNotFound, InvalidReceiptHandle, TopicNotFound
from tidemill.message.resource_names import RETRY_TOPIC_PREFIX

HOUR_MS = 3_600_000
GROUPS = 10_000


def pop_once(world: World, group_id: GroupId, *, invisible_ms: int = 12 * HOUR_MS) -> None:
    """Pop a message for a group that never acks it."""
    assert world.engine.commands.pop(
        group_id,
        world.engine.catalog.topic_ids[TOPIC],
        max_messages=1,
        invisible_duration_ms=invisible_ms,
        attempt_id="",
        now_ms=world.now_ms,
    )


def let_follower_forget(world: World) -> Engine:
    """Let the follower run all slices of forgetting."""
    assert world.follower is not None
    follower = world.follower.engine
    while is_forgetting(follower.state):
        follower.consumption.reviver.remove_due(world.now_ms)
    return follower


def test_deleted_groups_are_forgotten_while_their_deliveries_are_in_flight() -> None:
    world = World(is_followed=True, segment_bytes=16 << 20, checkpoint_records=1 << 40)
    world.send("m")
    world.pop(1)
    administration = world.engine.administration
    for n in range(GROUPS):
        pop_once(world, administration.put_group(f"group-{n}", now_ms=world.now_ms).id)
        administration.delete_group(f"group-{n}", world.now_ms)
        world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
        if n % 1_000 == 999:
            world.commit()
    world.run_due()
    for engine in (world.engine, let_follower_forget(world)):
        seen = engine.state
        assert seen.table.used_count == 1
        assert len(seen.table.ids) <= (4_096 if engine is world.engine else GROUPS + 4_096)
        # The follower forgets a part after each of ten rounds.
        assert len(seen.owners) <= (8 if engine is world.engine else GROUPS // 2)
        assert len(seen.progress) == 1
        assert len(seen.subscriptions) <= 1
        assert not is_forgetting(seen)
        assert len(seen.counts) <= 2
    world.checkpoint()
    world.restart()
    assert world.report.snapshot
    assert len(world.engine.state.owners) == 1
    world.follow()
    world.fail_over()
    world.advance(13 * HOUR_MS)
    assert world.engine.state.table.used_count == 0
    assert world.bodies() == ["m"]


def wide_group(world: World, topics: int, *, queues: int = QUEUES_MAX) -> GroupId:
    """Give a group progress in every queue of many topics, and a message in flight in each."""
    group_id = world.group()
    put, engine = world.engine.administration.put_topic, world.engine
    for n in range(topics):
        topic = put(f"wide-{n}", type_=None, queues=queues, now_ms=world.now_ms)
        world.send(f"m{n}", topic=topic.name)
        assert engine.commands.pop(
            group_id,
            topic.id,
            max_messages=1,
            invisible_duration_ms=30_000,
            attempt_id="",
            now_ms=world.now_ms,
        )
    world.commit()
    return group_id


def test_a_group_with_65_536_queues_is_forgotten_in_slices() -> None:
    world = World(segment_bytes=16 << 20, checkpoint_records=1 << 40)
    wide_group(world, 64)
    world.send("m")
    (popped,) = world.pop(1)
    meter, state = Meter(world.engine), world.engine.state
    world.engine.administration.delete_group(GROUP, world.now_ms)
    assert meter.take().items <= FORGOTTEN_A_SLICE
    slices = [FORGOTTEN_A_SLICE]
    slices += [one.items for one in each_turn(world.engine, world.now_ms, lambda: None)]
    assert max(slices) <= FORGOTTEN_A_SLICE
    assert sum(slices) == 64 * QUEUES_MAX + 1 + 64 + 1, "queues and deliveries"
    assert not state.progress
    assert not state.subscriptions
    assert world.ack(popped) == [AckResult.GONE]
    world.advance(31_000)
    assert state.table.used_count == 0


RETRY_TOPICS = 4 * FORGOTTEN_A_SLICE


def retry_topics(world: World, what: str, count: int) -> None:
    """Make a retry topic of the group for many topics, or of the topic for many groups."""
    engine, now_ms = world.engine, world.now_ms
    group_id, topic_id = world.group(), world.topic()
    for n in range(count):
        if what == "group":
            topic_id = engine.administration.put_topic(
                f"topic-{n}", type_=None, queues=1, now_ms=now_ms
            ).id
        else:
            group_id = engine.administration.put_group(f"group-{n}", now_ms=now_ms).id
        name = f"{RETRY_TOPIC_PREFIX}{group_id}+{topic_id}"
        ensure_system_topic(
            engine.catalog, engine.fold, name, now_ms, retry_of=(group_id, topic_id)
        )
    world.commit()


def delete(world: World, what: str) -> None:
    if what == "group":
        world.engine.administration.delete_group(GROUP, world.now_ms)
    else:
        world.engine.administration.delete_topic(TOPIC, world.now_ms)


def assert_no_retry_topic(engine: Engine) -> None:
    catalog = engine.catalog
    assert not catalog.retry_topic_ids
    assert not any(topic.retry_of for topic in catalog.topics.values())
    assert {topic_id for topic_id, _ in catalog.queues} <= catalog.topics.keys()
    assert set(catalog.topic_ids.values()) == catalog.topics.keys()
    assert not any(name.startswith(RETRY_TOPIC_PREFIX) for name in catalog.topic_ids)
    assert not engine.state.progress


@pytest.mark.parametrize("what", ["group", "topic"])
def test_retry_topics_of_deleted_groups_and_topics_are_forgotten_in_slices(what: str) -> None:
    world = World(is_followed=True, segment_bytes=16 << 20, checkpoint_records=1 << 40)
    retry_topics(world, what, RETRY_TOPICS)
    meter, catalog = Meter(world.engine), world.engine.catalog
    delete(world, what)
    assert meter.take().items <= FORGOTTEN_A_SLICE
    assert len(catalog.retry_topic_ids) == RETRY_TOPICS - FORGOTTEN_A_SLICE
    assert not any(map(catalog.is_alive, catalog.retry_topic_ids.values()))
    slices = [one.items for one in each_turn(world.engine, world.now_ms, lambda: None)]
    assert max(slices) <= FORGOTTEN_A_SLICE
    world.commit()
    assert_no_retry_topic(world.engine)
    assert_no_retry_topic(let_follower_forget(world))


@pytest.mark.parametrize("what", ["group", "topic"])
def test_no_snapshot_or_state_record_restores_a_deleted_retry_topic(what: str) -> None:
    world = World(is_followed=True, retention_bytes=1 << 20)
    retry_topics(world, what, RETRY_TOPICS)
    world.topic("other")
    while len(world.engine.log.segments) < 3:
        world.send("filler", topic="other", size=100_000)
    world.checkpoint()
    delete(world, what)
    world.commit()
    assert world.engine.catalog.orphans
    let_follower_forget(world)  # Forgetting is faster.
    world.retire()
    world.follow()
    assert_no_retry_topic(let_follower_forget(world))
    assert world.engine.catalog.orphans
    world.checkpoint()
    world.restart()
    assert world.report.snapshot
    world.run_due()
    assert_no_retry_topic(world.engine)


def test_a_group_created_again_has_new_retry_topics() -> None:
    """The retry topics of the first group still have their names then."""
    world = World(is_followed=True)
    retry_topics(world, "group", RETRY_TOPICS)
    first = dict(world.engine.catalog.retry_topic_ids)
    # In reverse, because the last one is forgotten first.
    kept = world.engine.catalog.topics[next(iter(first.values()))]
    delete(world, "group")
    assert kept.id in world.engine.catalog.topics
    assert kept.retry_of is not None
    retry_of = world.group(), kept.retry_of[1]
    second = ensure_system_topic(
        world.engine.catalog, world.engine.fold, kept.name, world.now_ms, retry_of=retry_of
    )
    world.commit()
    assert second.id not in first.values()
    world.run_due()
    for engine in (world.engine, let_follower_forget(world)):
        assert engine.catalog.find_topic(kept.name) == second
        assert engine.catalog.retry_topic_ids == {retry_of: second.id}
    world.restart()
    assert world.engine.catalog.find_topic(kept.name) == second


QUEUES = FORGOTTEN_A_SLICE + 50


@pytest.mark.parametrize("what", ["group", "topic"])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_deliveries_of_a_deleted_group_are_void_before_they_are_forgotten(
    what: str, is_ordered: bool
) -> None:
    world = World(is_followed=True)
    world.group(is_ordered=is_ordered)
    world.topic(queues=QUEUES)
    for queue_id in range(QUEUES):
        world.send("m", queue_id=queue_id)
    deliveries: list[Delivery] = []
    while popped := world.pop(invisible_ms=30_000):
        deliveries += [one.delivery for one in popped]
    assert len(deliveries) == QUEUES
    administration, state = world.engine.administration, world.engine.state
    if what == "group":
        administration.delete_group(GROUP, world.now_ms)
    else:
        administration.delete_topic(TOPIC, world.now_ms)
    assert len(state.progress) == QUEUES - FORGOTTEN_A_SLICE
    world.commit()
    assert {world.engine.commands.ack(one, world.now_ms) for one in deliveries} == {AckResult.GONE}
    for delivery in deliveries:
        with pytest.raises(InvalidReceiptHandle):
            world.engine.commands.change_invisible(
                delivery, invisible_duration_ms=1, suspend=False, now_ms=world.now_ms
            )
    with pytest.raises((GroupNotFound, TopicNotFound)):
        world.engine.commands.pop(
            deliveries[0].group_id,
            deliveries[0].topic_id,
            max_messages=1,
            invisible_duration_ms=1,
            attempt_id="",
            now_ms=world.now_ms,
        )
    group = world.engine.catalog.find_group(GROUP)
    assert group is None or world.engine.inspection.group_progress(group) == []
    # Deliveries that are due before they are forgotten reach no consumer.
    end = world.engine.log.log_end
    world.advance(31_000)
    assert world.engine.log.log_end == end
    assert state.table.used_count == 0
    assert not state.progress
    world.fail_over()
    world.run_due()
    assert world.engine.state.table.used_count == 0


def test_no_state_record_restores_deleted_progress() -> None:
    world = World(is_followed=True, retention_bytes=1 << 20)
    wide_group(world, 1)
    while len(world.engine.log.segments) < 3:
        world.send("filler", size=100_000)
    world.checkpoint()
    world.engine.administration.delete_group(GROUP, world.now_ms)
    world.commit()
    assert is_forgetting(world.engine.state)
    follower = let_follower_forget(world)  # Forgetting is faster.
    world.retire()
    world.follow()
    world.run_due()
    assert not world.engine.state.progress
    assert not follower.state.progress
    world.restart()
    world.run_due()
    assert not world.engine.state.progress
