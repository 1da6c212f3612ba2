"""Sends to topics of type PRIORITY: their queues, their types, and the delivered priority."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tests.support.worlds.proxy_world import ProxyWorld, message, run
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

LARGEST = (1 << 31) - 1
DUE_AT_MS = 3_000_000_000_000


def test_the_queue_of_a_message_is_its_level() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(kind=pb.TOPIC_TYPE_PRIORITY)
        for priority in (0, 1, 7, 8, LARGEST):
            response = await world.send(message(priority=priority, queue_id=3))
            assert response.status.code == v2.OK
        assert (await world.send(message(queue_id=3))).status.code == v2.OK
        assert [each.queue_id for each in world.broker.engine.log] == [0, 1, 7, 7, 7, 0]

    run(scenario)


def test_a_delayed_message_waits_for_the_queue_of_its_level() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(kind=pb.TOPIC_TYPE_PRIORITY)
        due = Timestamp(seconds=DUE_AT_MS // 1_000)
        for sent in (message(delivery_timestamp=due, priority=6), message(delivery_timestamp=due)):
            assert (await world.send(sent)).status.code == v2.OK
        timers = world.broker.engine.timers.messages
        assert [timer.queue_id for timer in timers if timer] == [6, 0]

    run(scenario)


@pytest.mark.parametrize("priority", [None, 0, 3, LARGEST])
def test_a_message_is_delivered_with_the_priority_as_sent(priority: int | None) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(kind=pb.TOPIC_TYPE_PRIORITY)
        fields: dict[str, Any] = {} if priority is None else {"priority": priority}
        await world.send(message(**fields))
        [received] = await world.receive_messages()
        properties = received.system_properties
        assert properties.HasField("priority") == (priority is not None)
        assert properties.priority == (priority or 0)
        expected = v2.NORMAL if priority is None else v2.PRIORITY
        assert properties.message_type == expected

    run(scenario)


def test_a_negative_priority_is_a_bad_request() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(kind=pb.TOPIC_TYPE_PRIORITY)
        response = await world.send(message(priority=-1))
        assert response.status.code == v2.BAD_REQUEST
        assert world.broker.engine.log == []

    run(scenario)


def test_a_rejected_priority_does_not_create_a_topic() -> None:
    async def scenario(world: ProxyWorld) -> None:
        response = await world.send(message(topic="new", priority=1))
        assert response.status.code == v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        assert "tidemill topic create new --type PRIORITY" in response.status.message
        assert "new" not in world.broker.engine.catalog.topics

    run(scenario)
