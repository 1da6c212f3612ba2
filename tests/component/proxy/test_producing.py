"""SendMessage through the seam, on a broker in memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tests.support.bodies import body_of
from tests.support.plain_calls import answer_of
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import (
    HEADERS,
    ProxyWorld,
    eventually,
    message,
    milliseconds,
    run,
)
from tidemill.common.clock import SystemClock
from tidemill.common.errors import Overloaded
from tidemill.proxy.clients.publishers import Publishers
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.producer import Producer
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

ITEM_BYTES_MAX = 4 << 20


def codes(response: service.SendMessageResponse) -> list[int]:
    return [response.status.code, *(entry.status.code for entry in response.entries)]


def bodies(broker: MemoryBroker) -> list[bytes]:
    return [body_of(stored.blob) for stored in broker.engine.log]


def test_a_stored_message_gets_its_id_and_offset() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(queues=1)
        for queue_offset in range(2):
            response = await world.send(message(message_id="id-7"))
            assert response == service.SendMessageResponse(
                status=v2.Status(code=v2.OK, message="OK"),
                entries=[
                    service.SendResultEntry(
                        status=v2.Status(code=v2.OK, message="OK"),
                        message_id="id-7",
                        offset=queue_offset,
                    )
                ],
            )
        assert bodies(world.broker) == [b"body", b"body"]

    run(scenario)


def test_a_batch_gets_one_entry_per_message_in_order() -> None:
    async def scenario(world: ProxyWorld) -> None:
        response = await world.send(*(message(message_id=f"id-{n}") for n in range(5)))
        assert codes(response) == [v2.OK] * 6
        assert [entry.message_id for entry in response.entries] == [f"id-{n}" for n in range(5)]

    run(scenario)


def test_a_batch_with_one_bad_message_stores_nothing() -> None:
    async def scenario(world: ProxyWorld) -> None:
        response = await world.send(message(), message(tag="a|b"))
        assert codes(response) == [v2.ILLEGAL_MESSAGE_TAG] * 3
        assert world.broker.engine.log == []

    run(scenario)


def test_messages_of_different_topics_are_rejected() -> None:
    async def scenario(world: ProxyWorld) -> None:
        response = await world.send(message(), message(topic="other"))
        assert response.status.code == v2.MESSAGE_CORRUPTED
        assert (await world.send()).status.code == v2.MESSAGE_CORRUPTED

    run(scenario)


def test_a_message_group_shares_a_queue_and_other_messages_rotate() -> None:
    async def scenario(world: ProxyWorld) -> None:
        for _ in range(8):
            await world.send(message(message_group="group", queue_id=3))
        assert len({stored.queue_id for stored in world.broker.engine.log}) == 1
        world.broker.engine.log.clear()
        for _ in range(8):
            await world.send(message(queue_id=3))
        assert {stored.queue_id for stored in world.broker.engine.log} == set(range(8))

    run(scenario)


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (message(topic=""), v2.ILLEGAL_TOPIC),
        (message(topic="a.b"), v2.ILLEGAL_TOPIC),
        (message(topic="TBW102"), v2.ILLEGAL_TOPIC),
        (message(topic="%DLQ%group"), v2.TOPIC_NOT_FOUND),
        (message(message_id=" "), v2.ILLEGAL_MESSAGE_ID),
        (message(tag=" "), v2.ILLEGAL_MESSAGE_TAG),
        (message(keys=[""]), v2.ILLEGAL_MESSAGE_KEY),
        (message(message_group="g" * 64), v2.ILLEGAL_MESSAGE_GROUP),
        (message(b""), v2.MESSAGE_BODY_EMPTY),
        (message(b"x" * 4_194_305), v2.MESSAGE_BODY_TOO_LARGE),
        (message(keys=["k" * 16_385]), v2.MESSAGE_PROPERTIES_TOO_LARGE),
        (message(body_encoding=7), v2.BAD_REQUEST),
        (message(message_type=v2.FIFO), v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (
            message(message_type=v2.NORMAL, message_group="g"),
            v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        (message(message_group="g", priority=1), v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (message(message_type=99), v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (message(priority=1), v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (message(lite_topic="lite"), v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (
            message(delivery_timestamp=Timestamp(seconds=1), message_group="g"),
            v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        (message(delivery_timestamp=Timestamp(seconds=-1)), v2.ILLEGAL_DELIVERY_TIME),
        (message(delivery_timestamp=Timestamp(nanos=-1)), v2.ILLEGAL_DELIVERY_TIME),
        (message(delivery_timestamp=Timestamp(nanos=10**9)), v2.ILLEGAL_DELIVERY_TIME),
        (message(delivery_timestamp=Timestamp(seconds=253_402_300_800)), v2.ILLEGAL_DELIVERY_TIME),
        (
            message(message_type=v2.TRANSACTION, message_group="g"),
            v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        *[
            (
                message(
                    message_type=v2.TRANSACTION,
                    orphaned_transaction_recovery_duration=milliseconds(duration_ms),
                ),
                v2.BAD_REQUEST,
            )
            for duration_ms in (-1, 0, 3_600_001)
        ],
        (
            message(orphaned_transaction_recovery_duration=milliseconds(1_000)),
            v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        (message(body_digest=v2.Digest(type=v2.MD5, checksum="0" * 32)), v2.MESSAGE_CORRUPTED),
        (message(body_digest={"type": 9, "checksum": "0"}), v2.BAD_REQUEST),
    ],
)
def test_an_invalid_message_is_rejected_with_its_code(
    refused: v2.Message, code: v2.Code.ValueType
) -> None:
    async def scenario(world: ProxyWorld) -> None:
        response = await world.send(refused)
        assert codes(response) == [code, code]
        assert response.status.message
        assert world.broker.engine.log == []

    run(scenario)


@pytest.mark.parametrize(
    ("topic_type", "accepted", "refused"),
    [
        (link_pb2.TOPIC_TYPE_NORMAL, message(), message(message_group="g")),
        (link_pb2.TOPIC_TYPE_FIFO, message(message_group="g"), message()),
        (link_pb2.TOPIC_TYPE_UNSPECIFIED, message(), message(message_group="g")),
    ],
)
def test_a_message_must_fit_the_type_of_its_topic(
    topic_type: int, accepted: v2.Message, refused: v2.Message
) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(kind=topic_type)
        assert (await world.send(accepted)).status.code == v2.OK
        response = await world.send(refused)
        assert response.status.code == v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE

    run(scenario)


@pytest.mark.parametrize(
    "rejected",
    [
        message(tag="a|b"),
        message(body=b"x" * (4 * 1024 * 1024 + 1)),
        message(topic="%DLQ%group"),
        message(topic="not a name"),
    ],
)
def test_a_rejected_first_message_creates_no_topic(rejected: v2.Message) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        before = set(world.broker.engine.catalog.topics)
        response = await world.send(rejected)
        assert response.status.code not in {v2.OK, v2.TOPIC_NOT_FOUND}
        assert set(world.broker.engine.catalog.topics) == before

    run(scenario)


def test_a_first_message_over_a_quota_creates_no_topic() -> None:
    class Empty:
        """Quotas without a permit, until the test gives some."""

        is_active = True

        def __init__(self) -> None:
            self.permits = 0

        async def admit(self, *, messages: int, **_sender: object) -> None:
            if self.permits < messages:
                raise Overloaded("publish messages/s of Topic:topic is used up")
            self.permits -= messages

    async def scenario(world: ProxyWorld) -> None:
        quotas = Empty()
        producer = Producer(
            world.cluster,
            SystemClock(),
            item_bytes_max=ITEM_BYTES_MAX,
            publishers=Publishers(),
            quotas=quotas,  # type: ignore[arg-type]  # only admits
        )

        async def send(*messages: v2.Message) -> list[int]:
            call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=10)
            request = service.SendMessageRequest(messages=messages).SerializeToString()
            methods = replace(world.methods, plain={"SendMessage": producer.send_message})
            answer = await answer_of(world.boundary, methods, "SendMessage", call, request)
            return codes(service.SendMessageResponse.FromString(answer))

        assert await send(message()) == [v2.TOO_MANY_REQUESTS] * 2
        assert not world.broker.engine.catalog.topics
        quotas.permits = 2
        assert await send(message(), message()) == [v2.OK] * 3
        assert quotas.permits == 0, "the first request takes its permits once"

    run(scenario)


def test_an_unknown_topic_is_not_found_without_auto_create() -> None:
    async def scenario(world: ProxyWorld) -> None:
        assert (await world.send(message())).status.code == v2.TOPIC_NOT_FOUND

    run(scenario, auto_create=False)


def test_a_send_to_a_system_topic_is_rejected() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic("%DLQ%group")
        response = await world.send(message(topic="%DLQ%group"))
        assert response.status.code == v2.FORBIDDEN

    run(scenario)


def test_a_call_without_a_client_id_is_rejected() -> None:
    async def scenario(world: ProxyWorld) -> None:
        response = await world.call(
            "SendMessage",
            service.SendMessageRequest(messages=[message()]),
            service.SendMessageResponse,
            headers={name: value for name, value in HEADERS.items() if "id" not in name},
        )
        assert response.status.code == v2.CLIENT_ID_REQUIRED
        assert world.broker.engine.log == []

    run(scenario)


def test_invalid_bytes_are_a_bad_request() -> None:
    async def scenario(world: ProxyWorld) -> None:
        response = await world.call("SendMessage", b"\xff\xff", service.SendMessageResponse)
        assert response.status.code == v2.BAD_REQUEST

    run(scenario)


def test_an_unanswered_send_times_out_before_the_deadline() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        world.broker.holds.add("append")
        async with asyncio.timeout(2.0):
            response = await world.send(message(), deadline_s=2.0)
        assert codes(response) == [v2.PROXY_TIMEOUT] * 2

    run(scenario)


def test_a_send_over_a_broken_connection_is_not_ok() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        world.broker.holds.add("append")
        async with asyncio.TaskGroup() as tasks:
            delayed = [message(), message()]
            for one in delayed:
                one.system_properties.delivery_timestamp.FromSeconds(int(time.time()) + 3_600)
            send = tasks.create_task(world.send(*delayed, deadline_s=None))
            await eventually(lambda: world.broker.count_of("appends") == 3)
            world.broker.drop_links()
        assert codes(send.result()) == [v2.INTERNAL_SERVER_ERROR] * 3
        assert "unknown" in send.result().status.message

    run(scenario)


def test_the_link_reconnects() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        world.broker.drop_links()
        await eventually(lambda: not world.link.is_connected)
        await eventually(lambda: world.link.is_connected)
        assert (await world.send(message())).status.code == v2.OK

    run(scenario)


def test_the_overload_of_a_broker_reaches_the_client() -> None:
    async def scenario(world: ProxyWorld) -> None:
        world.broker.failures["append"] = link_pb2.Failure(error="Overloaded", message="full")
        response = await world.send(message())
        assert codes(response) == [v2.TOO_MANY_REQUESTS] * 2
        assert response.status.message == "full"

    run(scenario)


def test_messages_of_one_request_may_have_different_results() -> None:
    async def scenario(world: ProxyWorld) -> None:
        topic = await world.put_topic(queues=2)
        world.broker.engine.refused_queues = {1}
        response = await world.send(message(), message())
        assert codes(response) == [v2.MULTIPLE_RESULTS, v2.OK, v2.TOO_MANY_REQUESTS]
        assert topic.queues == 2

    run(scenario)


def test_concurrent_requests_share_a_frame() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        frames = len(world.broker.frames)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(64):
                tasks.create_task(world.send(message()))
        assert len(world.broker.frames) - frames <= 3
        assert len(world.broker.engine.log) == 65

    run(scenario)


def test_requests_beyond_the_limit_are_rejected() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        world.link.pending.bytes_max = 2000
        world.broker.holds.add("append")
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(world.send(message(b"x" * 1500), deadline_s=0.5))
            await eventually(lambda: len(world.link.pending) > 0)
            second = await world.send(message(b"x" * 1500))
            assert second.status.code == v2.TOO_MANY_REQUESTS
        assert first.result().status.code == v2.PROXY_TIMEOUT
        assert world.link.pending.bytes == 0

    run(scenario)


def test_a_full_link_rejects_the_messages_that_do_not_fit() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic()
        world.link.pending.bytes_max = 2000
        response = await world.send(message(b"x" * 1500), message(b"x" * 1500))
        assert codes(response) == [v2.MULTIPLE_RESULTS, v2.OK, v2.TOO_MANY_REQUESTS]
        assert len(world.broker.engine.log) == 1

    run(scenario)


def test_an_error_that_only_a_newer_broker_knows_is_a_server_error() -> None:
    async def scenario(world: ProxyWorld) -> None:
        world.broker.failures["append"] = link_pb2.Failure(error="Unheard", message="of")
        response = await world.send(message())
        assert codes(response) == [v2.INTERNAL_SERVER_ERROR] * 2

    run(scenario)
