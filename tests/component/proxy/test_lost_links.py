"""A broker that disconnects and returns: waiting calls, retried calls, and the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from tests.support.worlds.proxy_world import (
    ProxyWorld,
    Response,
    ack_request,
    eventually,
    message,
    milliseconds,
    receive_request,
    run,
)
from tidemill.broker.engine.engine import Engine
from tidemill.broker.server.link import proxy_link
from tidemill.broker.server.wire.config_frames import complete_config
from tidemill.common.errors import BrokerUnreachable, Overloaded
from tidemill.proxy.link import batching, broker_link, commands
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

SOON_S = 0.1


async def lose(world: ProxyWorld) -> None:
    """Disconnect the broker, and wait until the proxy notices."""
    world.broker.go()
    await eventually(lambda: not world.link.is_connected)


def test_calls_wait_for_a_broker_that_is_down() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message(b"first"))
        [first] = await world.receive_messages()
        handle = first.system_properties.receipt_handle
        await lose(world)
        async with asyncio.TaskGroup() as tasks:
            sends = [
                tasks.create_task(world.send(message(b"second"))),
                tasks.create_task(world.send(message(b"third", message_group="one"))),
            ]
            ack = tasks.create_task(
                world.call("AckMessage", ack_request(handle), service.AckMessageResponse)
            )
            new = tasks.create_task(world.send(message(topic="made-by-use")))
            poll = tasks.create_task(world.receive(receive_request(poll_ms=10_000)))
            await eventually(lambda: len(world.link.pending) == 5)
            world.broker.is_up.set()
        assert {send.result().status.code for send in (*sends, new)} == {v2.OK}
        assert ack.result().status.code == v2.OK
        assert poll.result()[0].status.code == v2.OK
        assert len(world.link.pending) == world.link.pending.bytes == 0

    run(scenario)


def test_a_waiting_request_ends_at_its_deadline_and_is_never_sent() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        await lose(world)
        late = await world.send(message(b"late"), deadline_s=SOON_S)
        assert late.status.code == v2.PROXY_TIMEOUT
        assert "not sent" in late.status.message
        assert world.link.pending.bytes == 0
        world.broker.is_up.set()
        assert (await world.send(message(b"next"))).status.code == v2.OK
        assert not any(b"late" in stored.blob for stored in world.broker.engine.log)

    run(scenario)


def test_waiting_requests_are_limited() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        await lose(world)
        world.link.pending.bytes_max = 1_000
        waiting = asyncio.create_task(world.link.append(1, 0, bytes(900), timeout_ms=10_000))
        with pytest.raises(Overloaded):
            await world.link.append(1, 0, bytes(900), timeout_ms=10_000)
        world.link.pending.fail_all("the test is over")
        with pytest.raises(BrokerUnreachable):
            await waiting

    run(scenario)


def test_requests_are_rejected_after_a_long_outage() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        await lose(world)
        world.link.pending.closed_at_s -= 10.0
        began_s = time.monotonic()
        refused = await world.send(message(), deadline_s=15)
        assert refused.status.code == v2.INTERNAL_SERVER_ERROR
        assert "no connection" in refused.status.message
        assert time.monotonic() - began_s < 10, "at once"
        world.broker.is_up.set()
        await eventually(lambda: world.link.is_connected)
        assert (await world.send(message())).status.code == v2.OK

    run(scenario)


def test_repeatable_requests_are_sent_again_after_a_lost_stream() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        await world.send(message(b"first"))
        [first] = await world.receive_messages()
        handle = first.system_properties.receipt_handle
        world.broker.holds.update({"append", "ack"})
        async with asyncio.TaskGroup() as tasks:
            send = tasks.create_task(world.send(message(b"again")))
            ack = tasks.create_task(
                world.call("AckMessage", ack_request(handle), service.AckMessageResponse)
            )
            poll = tasks.create_task(world.receive(receive_request(poll_ms=10_000)))
            counts = {"appends": 2, "acks": 1, "pops": 2}
            await eventually(
                lambda: all(world.broker.count_of(name) == n for name, n in counts.items())
            )
            world.broker.holds.clear()
            world.broker.drop_links()
        assert send.result().status.code == ack.result().status.code == v2.OK
        assert [item.message.body for item in poll.result() if item.HasField("message")] == [
            b"again"
        ]
        assert not world.link.pending.repeatable

    run(scenario)


def test_a_send_with_a_lost_reply_is_stored_once() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message(b"first"))
        world.broker.is_mute = True
        async with asyncio.TaskGroup() as tasks:
            send = tasks.create_task(world.send(message(b"once")))
            await eventually(lambda: len(world.broker.engine.log) == 2)
            world.broker.is_mute = False
            world.broker.drop_links()
        assert send.result().status.code == v2.OK
        assert world.broker.count_of("appends") == 3
        assert len(world.broker.engine.log) == 2
        assert send.result().entries[0].offset == world.broker.engine.log[1].queue_offset
        # The next send of the same bytes is a different message.
        assert (await world.send(message(b"once"))).status.code == v2.OK
        assert len(world.broker.engine.log) == 3

    run(scenario)


def test_a_repeated_ack_of_an_expired_delivery_has_an_unknown_outcome() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        await world.send(message())
        [only] = await world.receive_messages()
        request = ack_request(only.system_properties.receipt_handle)
        world.broker.is_mute = True
        async with asyncio.TaskGroup() as tasks:
            ack = tasks.create_task(world.call("AckMessage", request, service.AckMessageResponse))
            await eventually(lambda: world.broker.count_of("acks") == 1)
            world.broker.engine.forget_deliveries()
            world.broker.is_mute = False
            world.broker.drop_links()
        [entry] = ack.result().entries
        assert entry.status.code == ack.result().status.code == v2.INTERNAL_SERVER_ERROR
        assert "the first ack settled" in entry.status.message
        # A new ack gets the answer for an unknown delivery.
        response = await world.call("AckMessage", request, service.AckMessageResponse)
        assert response.status.code == v2.INVALID_RECEIPT_HANDLE

    run(scenario)


@pytest.mark.parametrize("does_first", [False, True])
def test_a_changed_invisible_duration_is_sent_again_after_a_lost_stream(does_first: bool) -> None:
    """The client gets a handle that settles the message, whether the first request was done."""

    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        await world.send(message())
        [only] = await world.receive_messages()
        request = service.ChangeInvisibleDurationRequest(
            group=v2.Resource(name="group"),
            topic=v2.Resource(name="topic"),
            receipt_handle=only.system_properties.receipt_handle,
            invisible_duration=milliseconds(60_000),
        )
        changed = await _answer_of_repeated(
            world,
            "ChangeInvisibleDuration",
            request,
            service.ChangeInvisibleDurationResponse,
            field="changes",
            holds="" if does_first else "change_invisible",
            is_done=lambda: bool(world.broker.engine.replacements),
        )
        assert changed.status.code == v2.OK, changed.status
        assert changed.receipt_handle != request.receipt_handle
        response = await world.call(
            "AckMessage", ack_request(changed.receipt_handle), service.AckMessageResponse
        )
        assert response.status.code == v2.OK, response.status

    run(scenario)


@pytest.mark.parametrize("does_first", [False, True])
def test_a_dead_letter_is_sent_again_after_a_lost_stream_and_stored_once(does_first: bool) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        await world.send(message(b"dead"))
        [only] = await world.receive_messages()
        request = service.ForwardMessageToDeadLetterQueueRequest(
            group=v2.Resource(name="group"),
            topic=v2.Resource(name="topic"),
            receipt_handle=only.system_properties.receipt_handle,
        )
        moved = await _answer_of_repeated(
            world,
            "ForwardMessageToDeadLetterQueue",
            request,
            service.ForwardMessageToDeadLetterQueueResponse,
            field="dead_letters",
            holds="" if does_first else "dead_letter",
            is_done=lambda: len(world.broker.engine.log) == 2,
        )
        assert moved.status.code == v2.OK, moved.status
        assert len(world.broker.engine.log) == 2, "the message and one copy"

    run(scenario)


async def _answer_of_repeated(
    world: ProxyWorld,
    method: str,
    request: Message,
    response: type[Response],
    *,
    field: str,
    holds: str,
    is_done: Callable[[], bool],
) -> Response:
    """Return the answer to a request whose first answer the proxy loses.

    If the broker `holds` the first request, it is not done. Else `is_done` becomes true.
    """
    if holds:
        world.broker.holds.add(holds)
    else:
        world.broker.is_mute = True
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(world.call(method, request, response))
        await eventually(lambda: world.broker.count_of(field) == 1 and (bool(holds) or is_done()))
        world.broker.holds.clear()
        world.broker.is_mute = False
        world.broker.drop_links()
    assert world.broker.count_of(field) == 2
    return call.result()


def test_a_delayed_send_may_not_be_repeated() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        world.broker.holds.add("append")
        one = message(b"once")
        one.system_properties.delivery_timestamp.FromSeconds(int(time.time()) + 3_600)
        async with asyncio.TaskGroup() as tasks:
            send = tasks.create_task(world.send(one))
            await eventually(lambda: world.broker.count_of("appends") == 2)
            world.broker.holds.clear()
            world.broker.drop_links()
        assert send.result().status.code == v2.INTERNAL_SERVER_ERROR
        assert "unknown" in send.result().status.message
        await eventually(lambda: world.link.is_connected)
        assert (await world.send(message(b"next"))).status.code == v2.OK
        assert world.broker.count_of("appends") == 3, "the one that was lost came once"

    run(scenario)


def test_a_message_group_keeps_its_order_over_a_lost_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "FRAME_BYTES", 2_500)

    async def scenario(world: ProxyWorld) -> None:
        bodies = [bytes([65 + n]) * 1_000 for n in range(6)]
        await world.send(message())
        world.broker.is_reading.clear()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(
                world.send(*(message(body, message_group="g") for body in bodies[:5]))
            )
            # The link has sent a part of the request in an unanswered frame, and not the others.
            await eventually(lambda: world.link.batching.unanswered == 1)
            assert len(world.link.batching.rows_of(commands.APPEND)) == 3
            world.broker.go()
            world.broker.is_reading.set()
            await eventually(lambda: not world.link.is_connected)
            last = tasks.create_task(world.send(message(bodies[5], message_group="g")))
            await eventually(lambda: len(world.link.pending) == 6)
            world.broker.is_up.set()
        assert first.result().status.code == last.result().status.code == v2.OK
        stored = b"".join(one.blob for one in world.broker.engine.log[1:])
        places = [stored.index(body) for body in bodies]
        assert places == sorted(places)
        assert len(world.broker.engine.log) == 7

    run(scenario)


def test_a_hanging_broker_is_down_since_its_last_reply() -> None:
    async def scenario(world: ProxyWorld) -> None:
        world.link.pending.open()
        heard_at_s = time.monotonic() - 20
        world.link.pending.close(set(), silent_since_s=heard_at_s)
        assert world.link.state().since_s >= 20
        with pytest.raises(BrokerUnreachable):
            await world.link.append(1, 0, b"", timeout_ms=1_000)

    run(scenario)


def test_a_sent_request_has_an_unknown_outcome_at_its_deadline() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        world.broker.holds.add("append")
        async with asyncio.TaskGroup() as tasks:
            send = tasks.create_task(world.send(message(), deadline_s=2))
            await eventually(lambda: world.broker.count_of("appends") == 2)
            await lose(world)
        assert send.result().status.code == v2.PROXY_TIMEOUT
        assert "unknown" in send.result().status.message

    run(scenario)


def test_a_repeated_poll_waits_for_the_remaining_time() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        await world.put_topic()
        poll = asyncio.ensure_future(world.receive(receive_request(poll_ms=20_000)))
        await world.broker.wait_for_frame("pops")
        waiting = world.link.pending._requests
        [request_id] = waiting
        waiting[request_id] = waiting[request_id]._replace(started_s=time.monotonic() - 15)
        world.broker.drop_links()
        await eventually(lambda: world.broker.count_of("pops") == 2)
        first, second = (pop for frame in world.broker.frames for pop in frame.pops)
        assert 19_900 <= first.poll_duration_ms <= 20_000
        assert second.poll_duration_ms <= 5_000
        assert second.request_id == first.request_id
        poll.cancel()
        await asyncio.wait([poll])

    run(scenario)


def test_a_poll_cancelled_during_an_outage_is_never_sent() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_group()
        await world.put_topic()
        await lose(world)
        poll = asyncio.ensure_future(world.receive(receive_request(poll_ms=20_000)))
        await eventually(lambda: len(world.link.pending) == 1)
        poll.cancel()
        await asyncio.wait([poll])
        assert len(world.link.pending) == 0
        world.broker.is_up.set()
        assert (await world.send(message())).status.code == v2.OK
        assert world.broker.count_of("pops") == 0
        assert not any(frame.cancelled_polls for frame in world.broker.frames)

    run(scenario)


def test_waiting_requests_are_not_sent_to_another_store() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        await lose(world)
        async with asyncio.TaskGroup() as tasks:
            send = tasks.create_task(world.send(message(b"of another store")))
            await eventually(lambda: len(world.link.pending) == 1)
            world.broker.engine.catalog.handle_secret = bytes(32)
            world.broker.is_up.set()
        assert send.result().status.code == v2.INTERNAL_SERVER_ERROR
        assert (await world.send(message(b"next"))).status.code == v2.OK
        assert not any(b"another store" in stored.blob for stored in world.broker.engine.log)

    run(scenario)


def test_a_link_reports_whether_its_broker_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ProxyWorld) -> None:
        assert world.link.state().word == "up"
        monkeypatch.setattr(broker_link, "SILENT_S", -1.0)
        assert world.link.state().word == "silent"
        monkeypatch.undo()
        await lose(world)
        state = world.link.state()
        assert state.word == "down"
        assert state.since_s > 0
        assert state.reason

    run(scenario)


def older_config(engine: Engine) -> pb.ConfigUpdate:
    """Return the configuration as a broker sends it that knows no SQL filters or transactions."""
    config = complete_config(engine)
    config.ClearField("serves_sql_filters")
    config.ClearField("serves_transactions")
    return config


def sql_request(poll_ms: int = 0) -> service.ReceiveMessageRequest:
    request = receive_request(poll_ms=poll_ms)
    request.filter_expression.type = v2.SQL
    request.filter_expression.expression = "region='eu'"
    return request


def test_a_poll_with_an_sql_filter_is_refused_at_an_older_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would ignore the filter and deliver every message."""

    async def scenario(world: ProxyWorld) -> None:
        poll = asyncio.create_task(world.receive(sql_request(poll_ms=10_000)))
        frame = await world.broker.wait_for_frame("pops")
        assert frame.pops[0].sql == "region = 'eu'"
        monkeypatch.setattr(proxy_link, "complete_config", older_config)
        await lose(world)
        world.broker.is_up.set()
        # The poll that was sent is not repeated, and the next one is not sent.
        for items in (await poll, await world.receive(sql_request())):
            assert items[0].status.code == v2.VERSION_UNSUPPORTED
            assert "needs a newer version for SQL filters" in items[0].status.message
        assert (await world.send(message())).status.code == v2.OK
        assert (await world.receive(receive_request()))[0].status.code == v2.OK

    run(scenario)


def test_a_half_message_is_refused_at_an_older_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not answer."""

    async def scenario(world: ProxyWorld) -> None:
        half = message(message_type=v2.TRANSACTION)
        assert (await world.send(half)).status.code == v2.OK
        monkeypatch.setattr(proxy_link, "complete_config", older_config)
        await lose(world)
        world.broker.is_up.set()
        configuration = world.cluster.brokers[0].link.configuration
        await eventually(lambda: not configuration.serves_transactions)
        answer = await world.send(half)
        assert answer.status.code == v2.VERSION_UNSUPPORTED
        assert "serves no transactions; upgrade it" in answer.status.message
        assert (await world.send(message())).status.code == v2.OK

    run(scenario)
