"""Topics and groups: what may be changed, and what is made by use."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import GROUP, World
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.common.errors import Conflict, GroupNotFound, TopicNotFound


def test_a_dead_letter_topic_can_be_watched_before_the_first_dead_letter() -> None:
    world = World(auto_create=False)
    world.group(max_attempts=1)
    world.engine.administration.ensure(f"%DLQ%{GROUP}", "", world.now_ms)
    assert world.bodies(group="auditor", topic=f"%DLQ%{GROUP}") == []
    world.send("m0")
    world.pop(1, invisible_ms=1_000)
    world.advance(1_001)
    assert world.bodies(group="auditor", topic=f"%DLQ%{GROUP}") == ["m0"]


def test_the_dead_letter_topic_of_no_group_is_not_made() -> None:
    world = World()
    with pytest.raises(TopicNotFound, match="no consumer group"):
        world.engine.administration.ensure("%DLQ%nobody", "", world.now_ms)
    assert world.engine.catalog.find_topic("%DLQ%nobody") is None


def test_nothing_is_made_by_use_where_that_is_switched_off() -> None:
    world = World(auto_create=False)
    with pytest.raises(TopicNotFound):
        world.engine.administration.ensure("orders", "", world.now_ms)
    with pytest.raises(GroupNotFound):
        world.engine.administration.ensure("", "billing", world.now_ms)
    assert not world.engine.catalog.topics
    assert not world.engine.catalog.groups


@pytest.mark.parametrize("type_", [TopicType.FIFO, TopicType.MIXED])
def test_the_queues_of_a_topic_with_message_groups_are_fixed(type_: TopicType) -> None:
    world = World()
    world.engine.administration.put_topic("t", type_=type_, queues=2, now_ms=world.now_ms)
    with pytest.raises(Conflict, match="order would break"):
        world.engine.administration.put_topic("t", type_=None, queues=3, now_ms=world.now_ms)


def test_the_queues_of_a_normal_topic_can_grow_and_not_shrink() -> None:
    world = World()
    world.engine.administration.put_topic(
        "t", type_=TopicType.NORMAL, queues=2, now_ms=world.now_ms
    )
    grown = world.engine.administration.put_topic("t", type_=None, queues=3, now_ms=world.now_ms)
    assert (grown.queues, grown.version) == (3, 2)
    with pytest.raises(Conflict, match="only grow"):
        world.engine.administration.put_topic("t", type_=None, queues=2, now_ms=world.now_ms)


def test_a_group_has_its_delivery_order_for_life() -> None:
    world = World()
    world.group(is_ordered=True)
    with pytest.raises(Conflict, match="for life"):
        world.engine.administration.put_group(GROUP, is_ordered=False, now_ms=world.now_ms)


def test_a_put_that_changes_nothing_leaves_the_version() -> None:
    world = World()
    world.group(max_attempts=5)
    group = world.engine.administration.put_group(GROUP, max_attempts=5, now_ms=world.now_ms)
    assert group.version == 1


def test_the_type_of_a_topic_in_use_changes_only_when_it_is_forced() -> None:
    world = World()
    put = world.engine.administration.put_topic
    put("unused", type_=TopicType.NORMAL, queues=1, now_ms=world.now_ms)
    assert put("unused", type_=TopicType.FIFO, queues=0, now_ms=world.now_ms).queues == 1
    world.send("m0")
    world.group()
    assert world.pop(1)
    [topic] = [each for each in world.engine.catalog.topics.values() if not each.is_system][1:]
    use = world.engine.inspection.use_of(topic)
    assert (use.message_count, use.groups) == (1, [GROUP])
    with pytest.raises(Conflict, match="from NORMAL to FIFO only with force"):
        put(topic.name, type_=TopicType.FIFO, queues=0, now_ms=world.now_ms)
    forced = put(topic.name, type_=TopicType.FIFO, queues=0, is_forced=True, now_ms=world.now_ms)
    assert forced.type is TopicType.FIFO
