"""Reads of queues by BrokerAdmin: limits of messages and bytes, and rejected requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.bodies import body_of
from tests.support.worlds.engine_world import blob
from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.admin.messages import READ_BYTES_MAX, READ_MAX, MessageAdmin
from tidemill.broker.server.round.rpc import ERROR_KEY
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

TOPIC = "read"
LARGE = 1 << 20  # bytes of a message: five exceed one reply


def with_messages(
    scenario: Callable[[MessageAdmin], Awaitable[None]], *, count: int, size: int = 0
) -> None:
    """Run `scenario` over a broker in memory with `count` messages in queue 1."""

    async def main() -> None:
        world = RoundWorld(segment_bytes=16 << 20)
        now_ms = world.clock.wall_ms()
        world.world.engine.administration.put_topic(TOPIC, type_=None, queues=2, now_ms=now_ms)
        async with asyncio.timeout(20), world.running():
            admin = MessageAdmin(world.rounds, Traffic())
            for n in range(count):
                data = blob(f"m{n}", size=size)
                request = pb.StoreMessageRequest(topic=TOPIC, blob=data, queue_id=1)
                await admin.StoreMessage(request)
            await scenario(admin)

    asyncio.run(main())


def bodies(reply: pb.ReadMessagesReply) -> list[bytes]:
    return [body_of(message.blob) for message in reply.messages]


def test_a_queue_is_read_from_an_offset() -> None:
    async def scenario(admin: MessageAdmin) -> None:
        request = pb.ReadMessagesRequest(topic=TOPIC, queue_id=1, from_offset=1, max_messages=2)
        reply = await admin.ReadMessages(request)
        assert bodies(reply) == [b"m1", b"m2"]
        assert (reply.next_offset, reply.min_offset, reply.max_offset) == (3, 0, 4)
        assert [message.queue_offset for message in reply.messages] == [1, 2]
        empty = await admin.ReadMessages(pb.ReadMessagesRequest(topic=TOPIC, queue_id=0))
        assert (bodies(empty), empty.next_offset, empty.max_offset) == ([], 0, 0)

    with_messages(scenario, count=4)


def test_a_reply_is_limited_in_messages_and_bytes() -> None:
    async def many(admin: MessageAdmin) -> None:
        request = pb.ReadMessagesRequest(topic=TOPIC, queue_id=1, max_messages=1_000_000)
        assert len((await admin.ReadMessages(request)).messages) == READ_MAX

    async def large(admin: MessageAdmin) -> None:
        request = pb.ReadMessagesRequest(topic=TOPIC, queue_id=1, max_bytes=1 << 31)
        reply = await admin.ReadMessages(request)
        # A record is a little larger than its body, so one fewer fits.
        assert len(reply.messages) == READ_BYTES_MAX // LARGE - 1
        assert reply.next_offset == len(reply.messages)
        request.max_bytes = 1
        assert len((await admin.ReadMessages(request)).messages) == 1

    with_messages(many, count=READ_MAX + 1)
    with_messages(large, count=6, size=LARGE)


def test_a_read_returns_committed_messages_without_waiting_for_a_sync() -> None:
    async def main() -> None:
        world = RoundWorld()
        now_ms = world.clock.wall_ms()
        world.world.engine.administration.put_topic(TOPIC, type_=None, queues=1, now_ms=now_ms)
        async with asyncio.timeout(20), world.running(), asyncio.TaskGroup() as tasks:
            admin = MessageAdmin(world.rounds, Traffic())
            await admin.StoreMessage(pb.StoreMessageRequest(topic=TOPIC, blob=blob("committed")))
            world.syncs.gate.clear()
            store = admin.StoreMessage(pb.StoreMessageRequest(topic=TOPIC, blob=blob("pending")))
            stored = tasks.create_task(store)
            await idle()
            assert not stored.done()
            reply = await admin.ReadMessages(pb.ReadMessagesRequest(topic=TOPIC))
            assert (bodies(reply), reply.next_offset, reply.max_offset) == ([b"committed"], 1, 1)
            request = pb.FindMessagesRequest(topic=TOPIC, message_id="id-pending")
            assert not (await admin.FindMessages(request)).messages
            world.syncs.gate.set()
            await stored
            assert bodies(await admin.ReadMessages(pb.ReadMessagesRequest(topic=TOPIC))) == [
                b"committed",
                b"pending",
            ]
            assert len((await admin.FindMessages(request)).messages) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.ReadMessagesRequest(topic="none"), "TopicNotFound"),
        (pb.ReadMessagesRequest(topic=TOPIC, queue_id=2), "QueueNotFound"),
        (pb.ReadMessagesRequest(topic=TOPIC, from_offset=-1), "IllegalOffset"),
    ],
)
def test_a_missing_queue_or_offset_is_rejected(
    request_: pb.ReadMessagesRequest, error: str
) -> None:
    async def scenario(admin: MessageAdmin) -> None:
        with pytest.raises(RpcError) as raised:
            await admin.ReadMessages(request_)
        assert dict(raised.value.trailers)[ERROR_KEY] == error

    with_messages(scenario, count=1)
