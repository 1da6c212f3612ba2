"""Receive, ack, change-invisible and dead letters through the seam, on a broker in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.worlds.memory_engine import NOW_MS
from tests.support.worlds.proxy_world import (
    HEADERS,
    ProxyWorld,
    ResponseCollector,
    ack_request,
    eventually,
    message,
    milliseconds,
    receive_request,
    run,
)
from tidemill.common.errors import Overloaded
from tidemill.proxy.server import receive
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.receive import REPLY_ROOM_BYTES, ROOM_POLL_MS
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.aio.call import DisconnectError

OLD_CLIENT = {**HEADERS, "x-mq-client-version": "5.0.2"}


def kinds(items: list[service.ReceiveMessageResponse]) -> list[str | None]:
    return [item.WhichOneof("content") for item in items]


async def handle_of(world: ProxyWorld) -> str:
    """Send and receive one message."""
    await world.send(message())
    [received] = await world.receive_messages()
    return received.system_properties.receipt_handle


async def ack(world: ProxyWorld, request: service.AckMessageRequest) -> service.AckMessageResponse:
    return await world.call("AckMessage", request, service.AckMessageResponse)


async def change(
    world: ProxyWorld, handle: str, invisible_ms: int, *, suspend: bool = False
) -> service.ChangeInvisibleDurationResponse:
    return await world.call(
        "ChangeInvisibleDuration",
        service.ChangeInvisibleDurationRequest(
            group=v2.Resource(name="group"),
            topic=v2.Resource(name="topic"),
            receipt_handle=handle,
            invisible_duration=milliseconds(invisible_ms),
            message_id="id-1",
            suspend=suspend,
        ),
        service.ChangeInvisibleDurationResponse,
    )


async def forward(world: ProxyWorld, handle: str) -> v2.Status:
    """Forward a message to the dead letters; return the status."""
    request = service.ForwardMessageToDeadLetterQueueRequest(
        group=v2.Resource(name="group"),
        topic=v2.Resource(name="topic"),
        receipt_handle=handle,
        message_id="id-1",
    )
    response = await world.call(
        "ForwardMessageToDeadLetterQueue", request, service.ForwardMessageToDeadLetterQueueResponse
    )
    return response.status


def test_a_receive_is_a_status_then_messages_then_the_time() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message(b"one", tag="tag"), message(b"two"))
        items = await world.receive(receive_request())
        assert kinds(items) == ["status", "message", "message", "delivery_timestamp"]
        assert items[0].status.code == v2.OK
        first = items[1].message
        assert (first.body, first.topic.name) == (b"one", "topic")
        assert first.system_properties.tag == "tag"
        assert first.system_properties.delivery_attempt == 1
        assert first.system_properties.invisible_duration.seconds == 30
        assert first.system_properties.store_timestamp.ToMilliseconds() == NOW_MS

    run(scenario)


LARGE = bytes(1 << 20)


def test_a_poll_waits_until_its_client_has_read_enough() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message(LARGE))
        full = ResponseCollector()
        full.room_bytes = full.room_at_first_bytes = 0
        full.room_later_bytes = 24 << 20
        items = await world.receive(receive_request(poll_ms=20_000), responses=full)
        assert kinds(items) == ["status", "message", "delivery_timestamp"]
        [(waited_bytes, waited_s)] = full.waits
        assert waited_bytes == REPLY_ROOM_BYTES
        assert 9.9 <= waited_s <= 10, "half of the poll; the other half is for reading"
        taken_bytes = (24 << 20) - full.room_bytes
        assert len(LARGE) < taken_bytes < len(LARGE) + 1_000, "only the room of the reply is held"

    run(scenario)


def test_messages_without_room_go_back_and_the_poll_waits_for_room() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message(LARGE))
        responses = ResponseCollector()
        # There is room at first; then other streams of the connection take it.
        responses.room_at_first_bytes = 24 << 20
        responses.room_bytes, responses.room_later_bytes = 1_000, 24 << 20
        poll = asyncio.create_task(
            world.receive(receive_request(poll_ms=20_000), responses=responses)
        )
        await eventually(lambda: world.metrics.messages_returned == 1)
        await world.send(message(LARGE, message_id="id-2"))
        items = await poll
        assert kinds(items) == ["status", "message", "delivery_timestamp"]
        assert items[1].message.body == LARGE
        [(waited_bytes, _)] = responses.waits
        assert len(LARGE) < waited_bytes < len(LARGE) + 1_000

    run(scenario)


@pytest.mark.parametrize("poll_ms", [20_000, 0])
def test_a_poll_that_meets_a_full_link_with_room_in_hand_waits_on_without(poll_ms: int) -> None:
    """The poll holds room only for a short pop, and has time for further pops."""

    async def scenario(world: ProxyWorld) -> None:
        await world.send(message(b"one"))
        responses = ResponseCollector()
        responses.room_bytes = responses.room_at_first_bytes = 0
        responses.room_later_bytes = 24 << 20
        ask, asked_ms, held_bytes = world.link.pop, [], []

        async def pop(request: link_pb2.PopRequest, *, timeout_ms: int) -> link_pb2.PopReply:
            asked_ms.append(request.poll_duration_ms)
            held_bytes.append((24 << 20) - responses.room_bytes)
            if len(asked_ms) == 1:
                raise Overloaded("the proxy reads too slowly; poll again after a pause")
            return await ask(request, timeout_ms=timeout_ms)

        world.link.pop = pop  # type: ignore[method-assign]  # A link without room for some time.
        items = await world.receive(receive_request(poll_ms=poll_ms), responses=responses)
        if poll_ms == 0:
            assert items[0].status.code == v2.TOO_MANY_REQUESTS, "the broker was not asked"
            return
        assert kinds(items) == ["status", "message", "delivery_timestamp"]
        assert asked_ms[0] == ROOM_POLL_MS < asked_ms[1]
        assert held_bytes == [REPLY_ROOM_BYTES, 0]

    run(scenario)


def test_a_poll_without_a_wait_is_rejected_without_room() -> None:
    async def scenario(world: ProxyWorld) -> None:
        full = ResponseCollector()
        full.room_bytes = full.room_at_first_bytes = 0
        items = await world.receive(receive_request(), responses=full)
        assert items[0].status.code == v2.TOO_MANY_REQUESTS
        assert [timeout_s for _, timeout_s in full.waits] == [0]

    run(scenario)


def test_an_empty_receive_is_message_not_found_and_the_time() -> None:
    async def scenario(world: ProxyWorld) -> None:
        items = await world.receive(receive_request())
        assert kinds(items) == ["status", "delivery_timestamp"]
        assert items[0].status.code == v2.MESSAGE_NOT_FOUND

    run(scenario)


def test_a_message_that_arrives_ends_a_waiting_poll() -> None:
    async def scenario(world: ProxyWorld) -> None:
        async with asyncio.TaskGroup() as tasks:
            poll = tasks.create_task(world.receive(receive_request(poll_ms=20_000)))
            await world.broker.wait_for_frame("pops")
            await world.send(message())
        assert kinds(poll.result()) == ["status", "message", "delivery_timestamp"]

    run(scenario)


@pytest.mark.parametrize(
    ("poll_ms", "deadline_s", "asked_ms"),
    [
        (0, 30, 0),
        (0, None, 0),
        (1, 30, 5_000),
        (7_000, 30, 7_000),
        (60_000, None, 20_000),
        (40_000, 40, 20_000),
        # The remaining time until the deadline, less the reserve.
        (20_000, 10, 9_800),
        # Without a poll duration: the remaining time, less half of the request timeout.
        (None, 10, 8_500),
        (None, 30, 20_000),
        (None, None, 20_000),
    ],
)
def test_a_poll_waits_as_long_as_the_client_and_the_limits_allow(
    poll_ms: int | None, deadline_s: float | None, asked_ms: int
) -> None:
    async def scenario(world: ProxyWorld) -> None:
        request = receive_request(poll_ms=poll_ms or 0)
        if poll_ms is None:
            request.ClearField("long_polling_timeout")
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.receive(request, deadline_s=deadline_s))
            frame = await world.broker.wait_for_frame("pops")
            passed_ms = (time.monotonic() - began_s) * 1000
            await world.send(message())
        # The remaining time has decreased since the deadline was set.
        assert asked_ms - passed_ms - 1 <= frame.pops[0].poll_duration_ms <= asked_ms

    run(scenario)


class Commands(ResponseCollector):
    """The commands of a telemetry stream."""

    async def send(self, message: bytes) -> None:
        assert service.TelemetryCommand.FromString(message).HasField("settings")


async def announce(world: ProxyWorld, settings: v2.Settings) -> None:
    """Report the settings of a client on a telemetry stream, and end the stream."""

    async def commands() -> AsyncIterator[bytes]:
        yield service.TelemetryCommand(settings=settings).SerializeToString()

    call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=30)
    await world.methods.bidirectional["Telemetry"](call, commands(), Commands())


@pytest.mark.parametrize(
    ("timeout_s", "asked_ms"),
    [
        (10, 15_000),
        (1, 18_500),  # The request timeout of the proxy is longer.
        (100, 5_000),
    ],
)
def test_a_poll_without_a_duration_leaves_half_of_the_request_timeout_of_the_client(
    timeout_s: int, asked_ms: int
) -> None:
    """Java 5.0.3 sends no duration, and neither do simple consumers of Go."""

    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        subscription = v2.Subscription(group=v2.Resource(name="group"))
        await announce(
            world,
            v2.Settings(
                client_type=v2.SIMPLE_CONSUMER,
                subscription=subscription,
                request_timeout=Duration(seconds=timeout_s),
            ),
        )
        request = receive_request()
        request.ClearField("long_polling_timeout")
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.receive(request, deadline_s=20))
            frame = await world.broker.wait_for_frame("pops")
            passed_ms = (time.monotonic() - began_s) * 1000
            await world.send(message())
        assert asked_ms - passed_ms - 1 <= frame.pops[0].poll_duration_ms <= asked_ms

    run(scenario)


@pytest.mark.parametrize(
    ("headers", "code"), [(HEADERS, v2.ILLEGAL_POLLING_TIME), (OLD_CLIENT, v2.BAD_REQUEST)]
)
def test_a_deadline_without_room_for_a_poll_is_refused(
    headers: dict[str, str], code: v2.Code.ValueType
) -> None:
    async def scenario(world: ProxyWorld) -> None:
        items = await world.receive(receive_request(poll_ms=5_000), headers=headers, deadline_s=3)
        assert kinds(items) == ["status", "delivery_timestamp"]
        assert items[0].status.code == code

    run(scenario)


@pytest.mark.parametrize(("asked", "popped"), [(-1, 1), (0, 1), (1, 1), (32, 32), (100, 32)])
def test_the_batch_size_is_limited(asked: int, popped: int) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.receive(receive_request(batch_size=asked))
        frame = await world.broker.wait_for_frame("pops")
        assert frame.pops[0].max_messages == popped

    run(scenario)


def test_a_push_consumer_gets_its_messages_for_a_minute() -> None:
    async def scenario(world: ProxyWorld) -> None:
        request = receive_request(invisible_ms=0)
        request.auto_renew = True
        await world.receive(request)
        frame = await world.broker.wait_for_frame("pops")
        assert frame.pops[0].invisible_duration_ms == 60_000

    run(scenario)


def test_filter_and_attempt_reach_the_broker() -> None:
    async def scenario(world: ProxyWorld) -> None:
        request = receive_request()
        request.filter_expression.expression = "a || b"
        request.attempt_id = "attempt"
        await world.receive(request)
        frame = await world.broker.wait_for_frame("pops")
        assert list(frame.pops[0].tags) == ["a", "b"]
        assert frame.pops[0].attempt_id == "attempt"

    run(scenario)


@pytest.mark.parametrize(
    ("topic", "group", "invisible_ms", "filter_type", "expression", "code"),
    [
        ("", "group", 30_000, v2.TAG, "*", v2.ILLEGAL_TOPIC),
        ("a.b", "group", 30_000, v2.TAG, "*", v2.ILLEGAL_TOPIC),
        ("topic", "", 30_000, v2.TAG, "*", v2.ILLEGAL_CONSUMER_GROUP),
        ("topic", "a.b", 30_000, v2.TAG, "*", v2.ILLEGAL_CONSUMER_GROUP),
        ("topic", "group", 0, v2.TAG, "*", v2.ILLEGAL_INVISIBLE_TIME),
        ("topic", "group", 999, v2.TAG, "*", v2.ILLEGAL_INVISIBLE_TIME),
        ("topic", "group", 43_200_001, v2.TAG, "*", v2.ILLEGAL_INVISIBLE_TIME),
        ("topic", "group", 30_000, v2.TAG, "||", v2.ILLEGAL_FILTER_EXPRESSION),
        ("topic", "group", 30_000, v2.SQL, "a", v2.ILLEGAL_FILTER_EXPRESSION),
    ],
)
def test_a_receive_is_refused_with_its_code(
    topic: str,
    group: str,
    invisible_ms: int,
    filter_type: v2.FilterType.ValueType,
    expression: str,
    code: v2.Code.ValueType,
) -> None:
    async def scenario(world: ProxyWorld) -> None:
        request = receive_request(topic, group, invisible_ms=invisible_ms)
        request.filter_expression.type = filter_type
        request.filter_expression.expression = expression
        items = await world.receive(request)
        assert kinds(items) == ["status", "delivery_timestamp"]
        assert items[0].status.code == code

    run(scenario)


@pytest.mark.parametrize(
    ("filter_type", "expression", "reason"),
    [
        (v2.TAG, "||", "syntax"),
        (v2.TAG, "||".join(map(str, range(129))), "limit"),
        (v2.TAG, "a" * 20_000, "limit"),
        (v2.SQL, "a LIKE 'x'", "syntax"),
        (v2.SQL, "(" * 33, "limit"),
        (v2.SQL, " OR ".join(["a = 1"] * 129), "limit"),
        (v2.SQL, f"a IN ({','.join(['$'] * 1_001)})".replace("$", "''"), "limit"),
        (v2.SQL, f"a = '{'x' * 4_096}'", "limit"),
    ],
)
def test_rejected_filters_are_counted_with_their_reason(
    filter_type: v2.FilterType.ValueType, expression: str, reason: str
) -> None:
    async def scenario(world: ProxyWorld) -> None:
        request = receive_request()
        request.filter_expression.type = filter_type
        request.filter_expression.expression = expression
        items = await world.receive(request)
        assert items[0].status.code == v2.ILLEGAL_FILTER_EXPRESSION
        assert world.metrics.rejected_filters == {"syntax": 0, "limit": 0, reason: 1}

    run(scenario)


def test_unknown_names_are_not_found_where_use_does_not_create() -> None:
    async def scenario(world: ProxyWorld) -> None:
        items = await world.receive(receive_request())
        assert items[0].status.code == v2.CONSUMER_GROUP_NOT_FOUND
        await world.put_group()
        items = await world.receive(receive_request())
        assert items[0].status.code == v2.TOPIC_NOT_FOUND

    run(scenario, auto_create=False)


def test_a_disconnect_cancels_the_poll_at_the_broker() -> None:
    async def scenario(world: ProxyWorld) -> None:
        async with asyncio.TaskGroup() as tasks:
            poll = tasks.create_task(world.receive(receive_request(poll_ms=20_000)))
            popped = await world.broker.wait_for_frame("pops")
            poll.cancel()
        cancelled = await world.broker.wait_for_frame("cancelled_polls")
        assert list(cancelled.cancelled_polls) == [popped.pops[0].request_id]
        assert len(world.link.pending) == 0

    run(scenario)


def test_messages_popped_after_a_disconnect_go_back() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        group = await world.put_group()
        world.broker.holds.add("pop")
        async with asyncio.TaskGroup() as tasks:
            poll = tasks.create_task(world.receive(receive_request(poll_ms=20_000)))
            popped = (await world.broker.wait_for_frame("pops")).pops[0]
            poll.cancel()
        await world.broker.wait_for_frame("cancelled_polls")
        world.broker.answer_late(popped)
        frame = await world.broker.wait_for_frame("changes")
        [given_back] = frame.changes
        assert given_back.group_id == group.id
        assert given_back.invisible_duration_ms == 1_000
        assert world.metrics.messages_returned == 1

    run(scenario)


@pytest.mark.parametrize("failing_item", [0, 1, 3])
def test_unsent_messages_go_back(failing_item: int) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(queues=1)
        await world.send(*(message() for _ in range(4)))
        count = 0

        async def send(item: service.ReceiveMessageResponse) -> None:
            nonlocal count
            if count == failing_item:
                raise DisconnectError
            count += 1

        with pytest.raises(DisconnectError):
            await world.receive(receive_request(), send=send)
        frame = await world.broker.wait_for_frame("changes")
        # The first item is the status.
        assert [change.index for change in frame.changes] == list(
            range(max(failing_item - 1, 0), 4)
        )

    run(scenario)


def test_messages_that_cannot_be_encoded_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> list[bytes]:
        raise ValueError("a defect")

    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic(queues=1)
        await world.send(message(), message())
        monkeypatch.setattr(receive, "encode_received", broken)
        answer, *_ = await world.receive(receive_request())
        assert answer.status.code == v2.INTERNAL_SERVER_ERROR
        frame = await world.broker.wait_for_frame("changes")
        assert [change.index for change in frame.changes] == [0, 1]

    run(scenario)


def test_polls_are_answered_empty_when_the_proxy_is_about_to_stop() -> None:
    async def scenario(world: ProxyWorld) -> None:
        async with asyncio.TaskGroup() as tasks:
            poll = tasks.create_task(world.receive(receive_request(poll_ms=20_000)))
            await world.broker.wait_for_frame("pops")
            world.link.release_polls()
        assert poll.result()[0].status.code == v2.MESSAGE_NOT_FOUND
        await world.broker.wait_for_frame("cancelled_polls")

    run(scenario)


def test_polls_that_come_while_the_proxy_is_about_to_stop_ask_once() -> None:
    async def scenario(world: ProxyWorld) -> None:
        world.link.release_polls()
        async with asyncio.timeout(5):
            items = await world.receive(receive_request(poll_ms=20_000))
        assert items[0].status.code == v2.MESSAGE_NOT_FOUND
        await world.send(message())
        items = await world.receive(receive_request(poll_ms=20_000))
        assert kinds(items) == ["status", "message", "delivery_timestamp"]

    run(scenario)


def test_a_receive_that_the_broker_does_not_answer_ends_before_its_deadline() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        await world.put_topic()
        world.broker.holds.add("pop")
        async with asyncio.timeout(2):
            items = await world.receive(receive_request(), deadline_s=2)
        assert kinds(items) == ["status", "delivery_timestamp"]
        assert items[0].status.code == v2.PROXY_TIMEOUT

    # The test tolerates stalls of the machine that are shorter than the reserve.
    run(scenario, deadline_reserve_ms=2_000)


def test_an_ack_settles_a_delivery_and_may_be_repeated() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        for _ in range(2):
            response = await ack(world, ack_request(handle))
            assert response.status.code == v2.OK
            [entry] = response.entries
            assert (entry.message_id, entry.receipt_handle) == ("id-0", handle)
            assert entry.status.code == v2.OK

    run(scenario)


def test_each_entry_of_an_ack_has_its_own_result() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        response = await ack(world, ack_request("broken", handle))
        assert response.status.code == v2.MULTIPLE_RESULTS
        assert [entry.status.code for entry in response.entries] == [
            v2.INVALID_RECEIPT_HANDLE,
            v2.OK,
        ]
        response = await ack(world, ack_request("broken", "too"))
        assert response.status.code == v2.INVALID_RECEIPT_HANDLE

    run(scenario)


def test_the_handle_of_another_group_or_topic_is_invalid() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        await world.put_group("other")
        await world.put_topic("other")
        for request in (ack_request(handle, group="other"), ack_request(handle, topic="other")):
            response = await ack(world, request)
            assert response.status.code == v2.INVALID_RECEIPT_HANDLE

    run(scenario)


def test_an_empty_ack_and_unknown_names_are_rejected() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        for request, code in (
            (ack_request(), v2.BAD_REQUEST),
            (ack_request(handle, topic="unknown"), v2.TOPIC_NOT_FOUND),
            (ack_request(handle, group="unknown"), v2.CONSUMER_GROUP_NOT_FOUND),
            (ack_request(handle, topic="a.b"), v2.ILLEGAL_TOPIC),
        ):
            assert (await ack(world, request)).status.code == code

    run(scenario)


def test_change_invisible_gives_a_new_handle_and_voids_the_old_one() -> None:
    async def scenario(world: ProxyWorld) -> None:
        old = await handle_of(world)
        response = await change(world, old, 60_000)
        assert response.status.code == v2.OK
        gone = await ack(world, ack_request(old))
        assert gone.entries[0].status.code == v2.INVALID_RECEIPT_HANDLE
        again = await change(world, old, 60_000)
        assert again.status.code == v2.INVALID_RECEIPT_HANDLE
        settled = await ack(world, ack_request(response.receipt_handle))
        assert settled.status.code == v2.OK

    run(scenario)


def test_an_invisible_duration_of_zero_returns_the_message_at_once() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        assert (await change(world, handle, 0, suspend=True)).status.code == v2.OK
        frame = await world.broker.wait_for_frame("changes")
        assert frame.changes[0].suspend
        [again] = await world.receive_messages()
        assert again.system_properties.delivery_attempt == 1, "a suspended attempt does not count"

    run(scenario)


def test_change_invisible_is_refused_beyond_its_limits() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        for invisible_ms, words in (
            (-1000, "the invisibleTime is too small"),
            (43_200_001, "the invisibleTime is too large"),
        ):
            response = await change(world, handle, invisible_ms)
            assert response.status.code == v2.ILLEGAL_INVISIBLE_TIME
            assert words in response.status.message
        response = await change(world, "broken", 0)
        assert response.status.code == v2.INVALID_RECEIPT_HANDLE
        assert "INVALID_RECEIPT_HANDLE" in response.status.message

    run(scenario)


def test_an_overloaded_change_invisible_echoes_the_handle() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        world.broker.failures["change_invisible"] = link_pb2.Failure(
            error="Overloaded", message="full"
        )
        response = await change(world, handle, 1_000)
        assert response.status.code == v2.TOO_MANY_REQUESTS
        assert response.receipt_handle == handle

    run(scenario)


def test_a_message_is_forwarded_to_the_dead_letter_queue_once() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        assert (await forward(world, handle)).code == v2.OK
        # A Java client repeats the forward until the status is OK.
        again = await forward(world, handle)
        assert again.code == v2.OK
        assert again.message.startswith("nothing was moved: ")
        assert (await forward(world, "broken")).code == v2.INVALID_RECEIPT_HANDLE

    run(scenario)


@pytest.mark.parametrize("deleted", ["topic", "group"])
def test_a_delivery_ends_with_its_topic_and_its_group(deleted: str) -> None:
    """Push consumers repeat an ack and a change until the status is INVALID_RECEIPT_HANDLE."""

    async def scenario(world: ProxyWorld) -> None:
        handle = await handle_of(world)
        configuration = world.link.configuration
        if deleted == "topic":
            world.broker.delete_topic("topic")
            await eventually(lambda: "topic" not in configuration.topics)
            missing: v2.Code.ValueType = v2.TOPIC_NOT_FOUND
        else:
            world.broker.delete_group("group")
            await eventually(lambda: "group" not in configuration.groups)
            missing = v2.CONSUMER_GROUP_NOT_FOUND
        acked = await ack(world, ack_request(handle))
        assert acked.status.code == v2.INVALID_RECEIPT_HANDLE
        assert (await change(world, handle, 60_000)).status.code == v2.INVALID_RECEIPT_HANDLE
        assert (await forward(world, handle)).message.startswith("nothing was moved: ")
        # A handle of another topic says nothing about this one.
        assert (await ack(world, ack_request("broken"))).status.code == missing
        assert (await change(world, "broken", 60_000)).status.code == missing
        assert (await forward(world, "broken")).code == missing

    run(scenario)
