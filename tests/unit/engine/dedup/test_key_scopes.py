"""The scope of a dedup key: its message group counts, and the level of its message does not."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from tests.support.worlds.dedup_world import DedupWorld
from tests.support.worlds.engine_world import TOPIC
from tidemill.broker.engine.dedup.deduplication import RepeatedSend
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.metadata.dedup_policy import DedupChange
from tidemill.common.errors import DedupKeyNotFound
from tidemill.message.dedup_key import DEDUP_PROPERTY
from tidemill.message.encoding import encode_stored
from tidemill.message.rules import message_type
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

QUEUES = 8


def world_of(type_: TopicType) -> DedupWorld:
    world = DedupWorld(is_followed=True)
    world.note_round()
    world.engine.administration.put_topic(
        TOPIC, type_=type_, queues=QUEUES, dedup=DedupChange(is_on=True), now_ms=world.wall_ms
    )
    world.commit()
    return world


def send(
    world: DedupWorld, body: str, *, queue: int, group: str = "", priority: int | None = None
) -> int:
    """Send a message with the key `k`, and return its queue offset. Raises RepeatedSend."""
    system = v2.SystemProperties(message_id=f"id-{body}")
    if group:
        system.message_group = group
    if priority is not None:
        system.priority = priority
    message = v2.Message(
        topic=v2.Resource(name=TOPIC),
        user_properties={DEDUP_PROPERTY: "k"},
        system_properties=system,
        body=body.encode(),
    )
    data = encode_stored(message, message_type=message_type(system), now_ms=world.now_ms)
    world.note_round()
    try:
        offset, _ = world.engine.commands.send(
            world.engine.catalog.topic_ids[TOPIC],
            QueueId(queue),
            data,
            crc32(data),
            now_ms=world.wall_ms,
            firing_ms=world.now_ms,
        )
    finally:
        world.commit()
    return offset


def test_a_message_of_another_level_is_a_repeat() -> None:
    world = world_of(TopicType.PRIORITY)
    offset = send(world, "low", queue=1, priority=1)
    with pytest.raises(RepeatedSend) as repeat:
        send(world, "high", queue=7, priority=7)
    assert repeat.value.first[:2] == ("id-low", offset)
    assert repeat.value.is_mismatch
    assert len(world.rows()) == 1


def test_each_message_group_has_its_own_keys() -> None:
    world = world_of(TopicType.FIFO)
    # Also a group whose name and key could be read as those of another group.
    for n, group in enumerate(("a", "b", "ak")):
        send(world, f"first of {group}", queue=n, group=group)
    for n, group in enumerate(("a", "b", "ak")):
        with pytest.raises(RepeatedSend) as repeat:
            send(world, f"first of {group}", queue=n, group=group)
        assert repeat.value.first.message_id == f"id-first of {group}"
        assert not repeat.value.is_mismatch
    assert len(world.rows()) == 3


def test_the_keys_of_message_groups_are_known_after_a_restart() -> None:
    world = world_of(TopicType.FIFO)
    send(world, "one", queue=0, group="a")
    world.restart()
    with pytest.raises(RepeatedSend):
        send(world, "one", queue=0, group="a")
    send(world, "one", queue=0, group="b")


@pytest.mark.parametrize("id_first", [True, False])
def test_a_property_and_a_message_id_with_the_same_text_are_two_keys(id_first: bool) -> None:
    world = DedupWorld(is_followed=True)
    world.turn_on()
    created: dict[str, Any] = {"message_id": "0102FC000001"}
    shipped: dict[str, Any] = {"message_id": "0102FC000002", "key": "0102FC000001"}
    sends = [("created", created), ("shipped", shipped)]
    for text, options in sends if id_first else reversed(sends):
        world.store(text, **options)
    world.restart()
    assert world.repeat("created", **created).message_id == "0102FC000001"
    assert world.repeat("shipped", **shipped).message_id == "0102FC000002"
    assert len(world.rows()) == 2


def test_an_operator_frees_the_property_before_the_message_id() -> None:
    world = DedupWorld(is_followed=True)
    world.turn_on()
    world.store("created", message_id="id-1")
    world.store("shipped", message_id="id-2", key="id-1")
    inspection, catalog = world.engine.key_inspection, world.engine.catalog
    topic = catalog.topics[catalog.topic_ids[TOPIC]]
    for message_id in ("id-2", "id-1"):
        known = inspection.find(topic, b"id-1", "")
        assert known.first_id == message_id
        inspection.free(topic, known, world.now_ms)
        world.commit()
    with pytest.raises(DedupKeyNotFound):
        inspection.find(topic, b"id-1", "")
