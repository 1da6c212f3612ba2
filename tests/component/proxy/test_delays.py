"""Delayed messages and RecallMessage through the seam, on a broker in memory."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tests.support.worlds.memory_engine import NOW_MS, SECRET
from tests.support.worlds.proxy_world import HEADERS, ProxyWorld, eventually, message, run
from tidemill.message import stored_message
from tidemill.message.recall_handle import RecallFields, RecallSigner
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

DUE_AT_MS = NOW_MS + 60_000
SIGNER = RecallSigner(SECRET, "broker-0")


def delayed(due_at_ms: int = DUE_AT_MS, *, message_id: str = "id-1") -> v2.Message:
    due = Timestamp()
    due.FromMilliseconds(due_at_ms)
    return message(message_id=message_id, delivery_timestamp=due)


async def recall(
    world: ProxyWorld, handle: str, *, topic: str = "topic", deadline_s: float = 10
) -> service.RecallMessageResponse:
    request = service.RecallMessageRequest(topic=v2.Resource(name=topic), recall_handle=handle)
    return await world.call(
        "RecallMessage", request, service.RecallMessageResponse, deadline_s=deadline_s
    )


async def scheduled(world: ProxyWorld) -> str:
    """Send a delayed message; return its recall handle."""
    if "topic" not in world.link.configuration.topics:
        await world.put_topic()
    response = await world.send(delayed())
    assert response.status.code == v2.OK
    return response.entries[0].recall_handle


def test_the_response_to_a_delayed_message_has_a_recall_handle_and_no_offset() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(kind=link_pb2.TOPIC_TYPE_DELAY)
        for timer_id in range(2):
            response = await world.send(delayed())
            [entry] = response.entries
            assert (entry.status.code, entry.message_id, entry.offset) == (v2.OK, "id-1", 0)
            opened = SIGNER.open(entry.recall_handle, "topic")
            assert opened == RecallFields(timer_id, DUE_AT_MS, "id-1")
        timer = world.broker.engine.timers.messages[0]
        assert timer is not None
        assert stored_message.decode(timer.blob).message_type == v2.DELAY

    run(scenario)


def test_an_overdue_message_is_stored_and_has_no_recall_handle() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(queues=1)
        await world.send(delayed(NOW_MS - 1))
        response = await world.send(delayed(NOW_MS - 1))
        assert (response.entries[0].offset, response.entries[0].recall_handle) == (1, "")
        [first, _] = await world.receive_messages()
        assert first.system_properties.delivery_timestamp.ToMilliseconds() == NOW_MS - 1
        assert first.system_properties.message_type == v2.DELAY

    run(scenario)


def test_a_delivered_message_has_its_due_time() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await scheduled(world)
        assert await world.receive_messages() == []
        world.broker.deliver_timer(0)
        [received] = await world.receive_messages()
        assert received.system_properties.delivery_timestamp.ToMilliseconds() == DUE_AT_MS

    run(scenario)


def test_every_message_of_a_batch_gets_its_own_entry() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(queues=1)
        response = await world.send(
            message(message_id="a"), delayed(message_id="b"), message(message_id="c")
        )
        assert response.status.code == v2.OK
        assert [entry.message_id for entry in response.entries] == ["a", "b", "c"]
        assert [entry.offset for entry in response.entries] == [0, 0, 1]
        assert [bool(entry.recall_handle) for entry in response.entries] == [False, True, False]

    run(scenario)


def test_plain_and_delayed_messages_of_one_moment_are_not_mixed_up() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(queues=1)
        sent = [delayed() if n % 3 == 0 else message() for n in range(30)]
        responses = await asyncio.gather(*(world.send(each) for each in sent))
        for n, response in enumerate(responses):
            assert bool(response.entries[0].recall_handle) == (n % 3 == 0)
        assert len(world.broker.engine.timers.messages) == 10

    run(scenario)


@pytest.mark.parametrize(
    ("topic_type", "code"),
    [
        (link_pb2.TOPIC_TYPE_MIXED, v2.OK),
        (link_pb2.TOPIC_TYPE_DELAY, v2.OK),
        (link_pb2.TOPIC_TYPE_NORMAL, v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (link_pb2.TOPIC_TYPE_FIFO, v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ],
)
def test_a_delayed_message_must_fit_the_type_of_its_topic(topic_type: int, code: int) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(kind=topic_type)
        assert (await world.send(delayed())).status.code == code

    run(scenario)


def test_the_error_of_a_delivery_time_reaches_the_client() -> None:
    async def scenario(world: ProxyWorld) -> None:
        world.broker.failures["append"] = link_pb2.Failure(
            error="IllegalDeliveryTime", message="at most 400 days"
        )
        response = await world.send(delayed())
        assert response.status == v2.Status(
            code=v2.ILLEGAL_DELIVERY_TIME, message="at most 400 days"
        )

    run(scenario)


def test_a_recall_returns_the_message_id_and_may_be_repeated() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await scheduled(world)
        for _ in range(2):
            response = await recall(world, handle)
            assert (response.status.code, response.message_id) == (v2.OK, "id-1")
        assert world.broker.engine.timers.cancelled == {0}

    run(scenario)


def test_a_late_recall_finds_nothing() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await scheduled(world)
        world.broker.deliver_timer(0)
        response = await recall(world, handle)
        assert (response.status.code, response.message_id) == (v2.MESSAGE_NOT_FOUND, "")

    run(scenario)


@pytest.mark.parametrize("handle", ["", "x", "A" * 100, "ä", "A" * 5000])
def test_a_broken_handle_is_a_bad_request(handle: str) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic()
        assert (await recall(world, handle)).status.code == v2.BAD_REQUEST

    run(scenario)


def test_a_handle_of_another_topic_or_broker_is_a_bad_request() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await scheduled(world)
        await world.put_topic("other")
        assert (await recall(world, handle, topic="other")).status.code == v2.BAD_REQUEST
        foreign = RecallSigner(SECRET, "broker-1").sign("topic", RecallFields(0, DUE_AT_MS, "id-1"))
        refused = await recall(world, foreign)
        assert (refused.status.code, refused.status.message) == (
            v2.BAD_REQUEST,
            "the recall handle belongs to another broker",
        )
        assert world.broker.engine.timers.cancelled == set()

    run(scenario)


def test_a_handle_of_a_topic_that_was_created_again_finds_nothing() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await scheduled(world)
        first = world.link.configuration.topics["topic"]
        world.broker.put_topic("topic")
        await eventually(lambda: world.link.configuration.topics["topic"].id != first.id)
        assert (await recall(world, handle)).status.code == v2.MESSAGE_NOT_FOUND

    run(scenario)


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ("normal", v2.BAD_REQUEST),
        ("none", v2.TOPIC_NOT_FOUND),
        ("a.b", v2.ILLEGAL_TOPIC),
        ("%SYS%TIMER", v2.ILLEGAL_TOPIC),
    ],
)
def test_a_recall_needs_a_topic_of_delayed_messages(topic: str, code: int) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic("normal", kind=link_pb2.TOPIC_TYPE_NORMAL)
        handle = SIGNER.sign(topic, RecallFields(0, DUE_AT_MS, "id-1"))
        assert (await recall(world, handle, topic=topic)).status.code == code

    run(scenario, auto_create=False)


def test_a_recall_without_a_client_id_is_rejected() -> None:
    async def scenario(world: ProxyWorld) -> None:
        response = await world.call(
            "RecallMessage",
            service.RecallMessageRequest(),
            service.RecallMessageResponse,
            headers={name: value for name, value in HEADERS.items() if "id" not in name},
        )
        assert response.status.code == v2.CLIENT_ID_REQUIRED

    run(scenario)


def test_an_unanswered_recall_ends_before_the_deadline() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await scheduled(world)
        world.broker.holds.add("cancel_timer")
        response = await recall(world, handle, deadline_s=0.5)
        assert response.status.code == v2.PROXY_TIMEOUT
        world.broker.holds.clear()
        assert (await recall(world, handle)).status.code == v2.OK

    run(scenario)
