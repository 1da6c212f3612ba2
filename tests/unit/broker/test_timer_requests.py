"""Delayed messages through the broker's shell: the link of a proxy, and admin calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from zlib import crc32

import pytest

from tests.support.worlds.round_world import Proxy, RoundWorld
from tidemill.broker.engine.timer.search import PAGE_SIZE_MAX
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.admin.messages import MessageAdmin
from tidemill.broker.server.admin.timers import TimerAdmin
from tidemill.broker.server.round.rpc import ERROR_KEY
from tidemill.broker.server.wire.config_frames import complete_config
from tidemill.message.encoding import encode_stored
from tidemill.message.queue_choice import queue_of_message_group
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

HOUR_MS = 3_600_000
TOPIC = "mixed"


def in_world(scenario: Callable[[RoundWorld, Proxy], Awaitable[None]]) -> None:
    """Run `scenario` with a broker in memory and one proxy."""

    async def main() -> None:
        world = RoundWorld()
        engine = world.world.engine
        engine.administration.put_topic(TOPIC, type_=None, queues=2, now_ms=world.clock.wall_ms())
        async with asyncio.timeout(20), world.running(), world.proxy() as proxy:
            await scenario(world, proxy)

    asyncio.run(main())


def stored(
    text: str, *, due_at_ms: int | None = None, group: str = "", keys: tuple[str, ...] = ()
) -> bytes:
    message = v2.Message(body=text.encode())
    properties = message.system_properties
    properties.message_id = f"id-{text}"
    properties.keys.extend(keys)
    kind: v2.MessageType.ValueType = v2.NORMAL
    if group:
        properties.message_group, kind = group, v2.FIFO
    if due_at_ms is not None:
        properties.delivery_timestamp.FromMilliseconds(due_at_ms)
        kind = v2.DELAY
    return encode_stored(message, message_type=kind, now_ms=0)


def append_frame(world: RoundWorld, *blobs: bytes) -> pb.RequestFrame:
    frame = pb.RequestFrame()
    frame.appends.request_ids.extend(range(1, len(blobs) + 1))
    frame.appends.topic_ids.extend([world.topic_id] * len(blobs))
    frame.appends.queue_ids.extend([0] * len(blobs))
    frame.appends.crcs.extend(map(crc32, blobs))
    frame.appends.blobs.extend(blobs)
    return frame


def cancel_frame(world: RoundWorld, *timer_ids: int, topic_id: int = 0) -> pb.RequestFrame:
    cancels = [
        pb.RecallRequest(request_id=100 + n, timer_id=timer_id, topic_id=topic_id or world.topic_id)
        for n, timer_id in enumerate(timer_ids)
    ]
    return pb.RequestFrame(timer_cancels=cancels)


async def rpc_error(call: Awaitable[object]) -> str:
    """Return the name of the error that `call` raises."""
    with pytest.raises(RpcError) as raised:
        await call
    return dict(raised.value.trailers)[ERROR_KEY]


# ------------------------------------------------------------ the link


def test_a_reply_has_due_times_if_a_message_was_scheduled() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        due_at_ms = world.clock.wall_ms() + HOUR_MS
        await proxy.send(
            append_frame(
                world,
                stored("a"),
                stored("b", due_at_ms=due_at_ms),
                stored("c"),
                stored("d", due_at_ms=due_at_ms + 1),
            )
        )
        appends = (await proxy.reply()).appends
        assert list(appends.request_ids) == [1, 2, 3, 4]
        assert list(appends.due_at_ms) == [0, due_at_ms, 0, due_at_ms + 1]
        assert [appends.queue_offsets[0], appends.queue_offsets[2]] == [0, 1]

    in_world(scenario)


def test_a_reply_without_scheduled_messages_has_no_due_times() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        past_ms = world.clock.wall_ms() - 1
        await proxy.send(append_frame(world, stored("a"), stored("b", due_at_ms=past_ms)))
        appends = (await proxy.reply()).appends
        assert list(appends.queue_offsets) == [0, 1]
        assert list(appends.due_at_ms) == []

    in_world(scenario)


def test_a_delay_beyond_the_limit_is_rejected() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        due_at_ms = world.clock.wall_ms() + 401 * 24 * HOUR_MS
        await proxy.send(append_frame(world, stored("a", due_at_ms=due_at_ms), stored("b")))
        reply = await proxy.reply()
        assert [failure.error for failure in reply.failures] == ["IllegalDeliveryTime"]
        assert list(reply.appends.request_ids) == [2]

    in_world(scenario)


@pytest.mark.parametrize("blob", [b"", b"\1", b"\1\3", b"\2\3" + bytes(100)])
def test_bytes_that_are_not_a_message_are_rejected(blob: bytes) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(append_frame(world, blob))
        reply = await proxy.reply()
        assert [failure.error for failure in reply.failures] == ["MessageCorrupted"]

    in_world(scenario)


def test_a_timer_can_be_cancelled_twice() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        due_at_ms = world.clock.wall_ms() + HOUR_MS
        await proxy.send(append_frame(world, stored("a", due_at_ms=due_at_ms)))
        timer_id = (await proxy.reply()).appends.queue_offsets[0]
        await proxy.send(cancel_frame(world, timer_id, timer_id, timer_id + 1))
        reply = await proxy.reply()
        assert list(reply.cancelled_timers) == [100, 101]
        assert [(each.request_id, each.error) for each in reply.failures] == [
            (102, "MessageNotFound")
        ]
        await proxy.send(cancel_frame(world, timer_id, topic_id=world.topic_id + 1000))
        [failure] = (await proxy.reply()).failures
        assert failure.error == "MessageNotFound"

    in_world(scenario)


def test_the_hidden_topic_is_not_sent_to_proxies() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(
            append_frame(world, stored("a", due_at_ms=world.clock.wall_ms() + HOUR_MS))
        )
        reply = await proxy.reply()
        hidden = [name for name in world.world.engine.catalog.topic_ids if name.startswith("%SYS%")]
        assert hidden, "the schedule creates it"
        assert [topic.name for topic in reply.config.topics] == []
        config = complete_config(world.world.engine)
        assert TOPIC in {topic.name for topic in config.topics}
        assert not [topic for topic in config.topics if topic.name.startswith("%SYS%")]

    in_world(scenario)


# ------------------------------------------------------------ admin calls


def test_a_stored_message_goes_to_the_queue_of_its_group_or_round_robin() -> None:
    async def scenario(world: RoundWorld, _proxy: Proxy) -> None:
        admin = MessageAdmin(world.rounds, Traffic())
        made = world.world.engine.administration.put_topic(
            "wide", type_=None, queues=8, now_ms=world.clock.wall_ms()
        )
        for n in range(2):
            request = pb.StoreMessageRequest(topic=made.name, blob=stored("a", group="group"))
            reply = await admin.StoreMessage(request)
            assert reply.queue_id == queue_of_message_group("group", queues=8)
            assert (reply.queue_offset, reply.due_at_ms) == (n, 0)
        request = pb.StoreMessageRequest(topic=made.name, blob=stored("a"))
        queues = [(await admin.StoreMessage(request)).queue_id for _ in range(8)]
        assert sorted(queues) == list(range(8))
        chosen = pb.StoreMessageRequest(topic=made.name, blob=stored("a"), queue_id=5)
        assert (await admin.StoreMessage(chosen)).queue_id == 5

    in_world(scenario)


def test_a_relative_delay_counts_from_the_time_of_the_broker() -> None:
    async def scenario(world: RoundWorld, _proxy: Proxy) -> None:
        admin, timers = MessageAdmin(world.rounds, Traffic()), TimerAdmin(world.rounds)
        request = pb.StoreMessageRequest(
            topic=TOPIC, blob=stored("a", due_at_ms=0), delay_ms=HOUR_MS
        )
        reply = await admin.StoreMessage(request)
        assert reply.due_at_ms == world.clock.wall_ms() + HOUR_MS
        shown = await timers.GetTimer(pb.GetTimerRequest(timer_id=reply.queue_offset))
        assert (shown.state, shown.due_at_ms) == (pb.TIMER_STATE_PENDING, reply.due_at_ms)

    in_world(scenario)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.StoreMessageRequest(topic=TOPIC, blob=b"x"), "MessageCorrupted"),
        (
            pb.StoreMessageRequest(
                topic=TOPIC, blob=stored("a", group="group").replace(b"group", b"gr\xffup")
            ),
            "MessageCorrupted",
        ),
        (pb.StoreMessageRequest(topic=TOPIC, blob=stored("a"), delay_ms=1), "BadRequest"),
        (pb.StoreMessageRequest(topic=TOPIC, blob=stored("a"), queue_id=99), "BadRequest"),
        (pb.StoreMessageRequest(topic="a.b", blob=stored("a")), "IllegalTopic"),
        (pb.StoreMessageRequest(topic="%SYS%TIMER", blob=stored("a")), "IllegalTopic"),
        (pb.StoreMessageRequest(topic="%DLQ%g", blob=stored("a")), "IllegalTopic"),
        (
            pb.StoreMessageRequest(topic=TOPIC, blob=stored("a", due_at_ms=1), delay_ms=-1),
            "IllegalDeliveryTime",
        ),
    ],
)
def test_an_invalid_message_is_rejected(request_: pb.StoreMessageRequest, error: str) -> None:
    async def scenario(world: RoundWorld, _proxy: Proxy) -> None:
        admin = MessageAdmin(world.rounds, Traffic())
        assert await rpc_error(admin.StoreMessage(request_)) == error

    in_world(scenario)


def test_a_page_of_timers_continues_after_the_previous_page() -> None:
    async def scenario(world: RoundWorld, _proxy: Proxy) -> None:
        admin, timers = MessageAdmin(world.rounds, Traffic()), TimerAdmin(world.rounds)
        due_at_ms = world.clock.wall_ms() + HOUR_MS
        for n in range(5):
            blob = stored(str(n), due_at_ms=due_at_ms + n // 2, keys=(f"k{n % 2}",))
            await admin.StoreMessage(pb.StoreMessageRequest(topic=TOPIC, blob=blob))
        first = await timers.ListTimers(pb.ListTimersRequest(page_size=3))
        assert first.has_more
        last = first.timers[-1]
        second = await timers.ListTimers(
            pb.ListTimersRequest(
                page_size=3, after_due_ms=last.due_at_ms, after_timer_id=last.timer_id
            )
        )
        assert not second.has_more
        found = [timer.timer_id for timer in (*first.timers, *second.timers)]
        assert found == sorted(found)
        assert len(found) == 5
        by_key = await timers.ListTimers(pb.ListTimersRequest(page_size=9, key="k1"))
        assert [timer.timer_id for timer in by_key.timers] == [found[1], found[3]]

    in_world(scenario)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.ListTimersRequest(), "BadRequest"),
        (pb.ListTimersRequest(page_size=PAGE_SIZE_MAX + 1), "BadRequest"),
        (pb.ListTimersRequest(page_size=1, after_due_ms=1), "BadRequest"),
        (pb.ListTimersRequest(page_size=1, topic="none"), "TopicNotFound"),
        (pb.ListTimersRequest(page_size=1, topic="%SYS%TIMER"), "TopicNotFound"),
    ],
)
def test_an_invalid_list_request_is_rejected(request_: pb.ListTimersRequest, error: str) -> None:
    async def scenario(world: RoundWorld, _proxy: Proxy) -> None:
        assert await rpc_error(TimerAdmin(world.rounds).ListTimers(request_)) == error

    in_world(scenario)


def test_a_timer_is_rescheduled_under_a_condition_and_fired() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        admin, timers = MessageAdmin(world.rounds, Traffic()), TimerAdmin(world.rounds)
        due_at_ms = world.clock.wall_ms() + HOUR_MS
        blob = stored("a", due_at_ms=due_at_ms)
        sent = await admin.StoreMessage(pb.StoreMessageRequest(topic=TOPIC, blob=blob))
        timer = pb.FireTimerRequest(timer_id=sent.queue_offset)
        move = pb.RescheduleTimerRequest(
            timer_id=sent.queue_offset, due_at_ms=due_at_ms + 1, expected_due_at_ms=due_at_ms + 1
        )
        assert await rpc_error(timers.RescheduleTimer(move)) == "Conflict"
        look = pb.CancelTimerRequest(timer_id=sent.queue_offset, dry_run=True)
        assert (await timers.CancelTimer(look)).state == pb.TIMER_STATE_PENDING
        move.expected_due_at_ms = due_at_ms
        assert (await timers.RescheduleTimer(move)).due_at_ms == due_at_ms + 1
        await timers.FireTimer(timer)
        assert (
            await proxy.reply()
        ).config.topics == []  # The hidden topic was created, and is not sent.
        frame = world.pop_frame(1, poll_ms=5_000)
        frame.pops[0].topic_id = world.world.engine.catalog.topic_ids[TOPIC]
        await proxy.send(frame)
        assert len((await proxy.reply()).pops[0].batches) == 1
        get = pb.GetTimerRequest(timer_id=timer.timer_id)
        assert (await timers.GetTimer(get)).state == pb.TIMER_STATE_DELIVERED
        cancel = pb.CancelTimerRequest(timer_id=timer.timer_id)
        assert await rpc_error(timers.CancelTimer(cancel)) == "MessageNotFound"
        assert await rpc_error(timers.CancelTimer(look)) == "MessageNotFound"

    in_world(scenario)
