"""Topics and groups: what may be changed, and what is made by use."""

from __future__ import annotations

import contextlib

import pytest

from tests.support.worlds.engine_world import GROUP, World
from tidemill.broker.engine.metadata.catalog import TopicType, decode_group, group_item
from tidemill.common.errors import BadRequest, Conflict, GroupNotFound, TopicNotFound


def test_a_dead_letter_topic_can_be_watched_before_the_first_dead_letter() -> None:
    world = World(auto_create_topics=False, auto_create_groups=False)
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
    world = World(auto_create_topics=False, auto_create_groups=False)
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


BLOCK_MS = 600_000


@pytest.mark.parametrize("life", ["running", "after a restart", "after retention", "by a snapshot"])
def test_a_deleted_name_is_not_created_again_by_its_use(life: str) -> None:
    world = World(recreate_block_ms=BLOCK_MS, segment_bytes=64 << 10, retention_ms=60_000)
    administration = world.engine.administration
    world.send("m", topic="orders")
    world.pop(1, group="billing", topic="orders")
    administration.delete_topic("orders", world.now_ms)
    administration.delete_group("billing", world.now_ms)
    world.commit()
    if life == "after a restart":
        world.restart()
    elif life == "by a snapshot":
        world.checkpoint()
        world.restart()
        assert world.report.snapshot
    elif life == "after retention":
        begin = world.engine.log.min_offset
        for _ in range(3):  # the record of the deletion expires, and then its copy
            world.advance(60_000)
            world.send(*["filler"] * 16, topic="filler", size=12_000)
            world.checkpoint()
            world.retire()
        assert world.engine.log.min_offset > begin
        world.restart()
    ensure = world.engine.administration.ensure
    with pytest.raises(TopicNotFound, match=r"deleted .* s ago.*tidemill topic create orders"):
        ensure("orders", "", world.now_ms)
    with pytest.raises(GroupNotFound, match=r"deleted .* s ago.*tidemill group create billing"):
        ensure("", "billing", world.now_ms)
    ensure("others", "others", world.now_ms)
    world.advance(BLOCK_MS)
    ensure("orders", "billing", world.now_ms)
    assert world.engine.catalog.find_topic("orders")
    assert world.engine.catalog.find_group("billing")


def test_a_rejected_use_creates_nothing() -> None:
    world = World(recreate_block_ms=BLOCK_MS)
    world.group("billing")
    world.engine.administration.delete_group("billing", world.now_ms)
    with pytest.raises(GroupNotFound):
        world.engine.administration.ensure("misspelt", "billing", world.now_ms)
    assert world.engine.catalog.find_topic("misspelt") is None


def test_a_deletion_with_a_clock_far_ahead_does_not_block_for_days() -> None:
    world = World(recreate_block_ms=BLOCK_MS)
    world.group("billing")
    world.engine.administration.delete_group("billing", world.now_ms + 4 * 24 * 3_600_000)
    world.engine.administration.ensure("", "billing", world.now_ms)
    assert world.engine.catalog.find_group("billing")


def test_an_operator_creates_a_deleted_name_at_once() -> None:
    world = World(recreate_block_ms=BLOCK_MS)
    administration = world.engine.administration
    for kind in (TopicType.MIXED, TopicType.FIFO):
        administration.put_topic("orders", type_=kind, queues=2, now_ms=world.now_ms)
        administration.put_group("billing", is_ordered=True, now_ms=world.now_ms)
        administration.ensure("orders", "billing", world.now_ms)
        administration.delete_topic("orders", world.now_ms)
        administration.delete_group("billing", world.now_ms)
        with pytest.raises(TopicNotFound):
            administration.ensure("orders", "", world.now_ms)


def test_the_type_of_an_empty_topic_changes_while_a_group_reads_it() -> None:
    world = World()
    put = world.engine.administration.put_topic
    put("orders", type_=TopicType.MIXED, queues=4, now_ms=world.now_ms)
    assert not world.pop(1, group="billing", topic="orders")
    assert put("orders", type_=TopicType.FIFO, queues=0, now_ms=world.now_ms).type is TopicType.FIFO
    world.send("m", topic="orders")
    with pytest.raises(Conflict, match="has 1 messages and 0 delayed ones"):
        put("orders", type_=TopicType.NORMAL, queues=0, now_ms=world.now_ms)


@pytest.mark.parametrize(
    ("topics", "groups"), [(True, False), (False, True)], ids=["only topics", "only groups"]
)
def test_topics_and_groups_are_created_by_their_use_as_each_setting_says(
    topics: bool, groups: bool
) -> None:
    world = World(auto_create_topics=topics, auto_create_groups=groups)
    ensure = world.engine.administration.ensure
    for missing, error, is_allowed in (
        (("orders", ""), TopicNotFound, topics),
        (("", "billing"), GroupNotFound, groups),
    ):
        with contextlib.nullcontext() if is_allowed else pytest.raises(error):
            ensure(*missing, world.now_ms)


def test_a_priority_topic_has_eight_levels_by_default_and_at_most_32() -> None:
    world = World(default_queues=16)
    administration, now_ms = world.engine.administration, world.now_ms
    priority = TopicType.PRIORITY
    assert administration.put_topic("t", type_=priority, queues=0, now_ms=now_ms).queues == 8
    assert administration.put_topic("t", type_=None, queues=32, now_ms=now_ms).queues == 32
    with pytest.raises(Conflict, match="at most 32 queues, one for each level, not 33"):
        administration.put_topic("t", type_=None, queues=33, now_ms=now_ms)
    with pytest.raises(Conflict, match="only grow"):
        administration.put_topic("t", type_=None, queues=8, now_ms=now_ms)
    administration.put_topic("wide", type_=TopicType.NORMAL, queues=33, now_ms=now_ms)
    with pytest.raises(Conflict, match="at most 32 queues"):
        administration.put_topic("wide", type_=priority, queues=0, now_ms=now_ms)


def test_a_priority_factor_survives_a_restart_and_a_default_is_not_written() -> None:
    world = World()
    administration = world.engine.administration
    group = administration.put_group("g", now_ms=world.now_ms)
    assert group.priority_factor == 90
    assert "priority_factor" not in group_item(group)["group"]
    group = administration.put_group("g", priority_factor=0, now_ms=world.now_ms)
    assert decode_group(group_item(group)["group"]) == group
    world.commit()
    world.restart()
    assert world.engine.catalog.find_group("g") == group
    with pytest.raises(BadRequest, match="a priority factor is 0 to 100, not 101"):
        world.engine.administration.put_group("g", priority_factor=101, now_ms=world.now_ms)


def test_priorities_need_level_4_at_all_broker_groups() -> None:
    world = World(feature_level=3)
    administration, now_ms = world.engine.administration, world.now_ms
    with pytest.raises(Conflict, match="needs feature level 4, and these broker groups are below"):
        administration.put_topic("t", type_=TopicType.PRIORITY, queues=0, now_ms=now_ms)
    with pytest.raises(Conflict, match="needs feature level 4, and these broker groups are below"):
        administration.put_group("g", priority_factor=50, now_ms=now_ms)
    assert not world.engine.catalog.groups
    administration.put_group("g", priority_factor=90, now_ms=now_ms)
