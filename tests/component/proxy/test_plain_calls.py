"""Plain calls: sends, acks and changes that wait for one broker without a task (ADR 0106)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest

from tests.support.plain_calls import FutureReply
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import HEADERS, ProxyWorld, eventually, message
from tests.support.worlds.proxy_world import run as run_world
from tidemill.common.errors import BrokerTimeout
from tidemill.proxy.link.commands import ENSURE
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.grpc_server import GrpcServer
from tidemill.proxy.server.link_answers import LinkAnswer
from tidemill.proxy.settings import ProxySettings
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

METADATA = tuple(HEADERS.items())
SEND = service.SendMessageRequest(messages=[message()])


def run_served(
    scenario: Callable[[ProxyWorld, service_pb2_grpc.MessagingServiceAsyncStub], Awaitable[None]],
) -> None:
    """Run `scenario` with a client of a served proxy, which knows the topic."""

    async def main() -> None:
        async with (
            asyncio.timeout(20),
            MemoryBroker().serving() as broker,
            ProxyWorld.open(broker) as world,
            GrpcServer(
                world.methods, world.boundary, on_lost=world.client_life.forget_connection
            ).serving(ProxySettings(grpc_port=0)) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            await world.put_topic()
            await scenario(world, service_pb2_grpc.MessagingServiceStub(channel))

    asyncio.run(main())


def requests(world: ProxyWorld, handle: str) -> Iterator[tuple[str, bytes]]:
    topic, group = v2.Resource(name="topic"), v2.Resource(name="group")
    yield "SendMessage", SEND.SerializeToString()
    entry = service.AckMessageEntry(message_id="m", receipt_handle=handle)
    ack = service.AckMessageRequest(group=group, topic=topic, entries=[entry])
    yield "AckMessage", ack.SerializeToString()
    change = service.ChangeInvisibleDurationRequest(
        group=group, topic=topic, receipt_handle=handle, message_id="m"
    )
    change.invisible_duration.FromSeconds(30)
    yield "ChangeInvisibleDuration", change.SerializeToString()


def result_counts(world: ProxyWorld, method: str) -> dict[str, int]:
    """Return the finished calls of a method by result."""
    found: dict[str, int] = {}
    for labels, count in world.metrics.rpcs.totals().items():
        if labels[1] == method:
            found[labels[3]] = found.get(labels[3], 0) + count
    return found


async def delivered(world: ProxyWorld) -> str:
    """Send and receive a message; return its receipt handle."""
    await world.put_topic()
    await world.put_group()
    await world.send(message())
    [received] = await world.receive_messages()
    return received.system_properties.receipt_handle


def test_a_plain_call_waits_without_a_task() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await delivered(world)
        world.broker.is_reading.clear()
        before = asyncio.all_tasks()
        replies = []
        for name, request in requests(world, handle):
            call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=10)
            call.reply = reply = FutureReply()
            replies.append(reply)
            assert world.boundary.begin(name, world.methods.plain[name], call, request) is None
        assert len(world.link.pending) == len(replies)
        assert asyncio.all_tasks() == before
        world.broker.is_reading.set()
        for reply in replies:
            await reply.read()
        assert result_counts(world, "AckMessage") == {"success": 1}

    run_world(scenario)


def test_a_cancelled_call_is_forgotten_and_never_sent() -> None:
    async def scenario(world: ProxyWorld) -> None:
        handle = await delivered(world)
        stored = len(world.broker.engine.log)
        for name, request in requests(world, handle):
            call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=10)
            call.reply = reply = FutureReply()
            world.boundary.begin(name, world.methods.plain[name], call, request)
            assert reply.on_cancel is not None
            reply.on_cancel()
            assert len(world.link.pending) == 0
            assert result_counts(world, name).pop("cancelled") == 1
        await world.send(message())
        assert len(world.broker.engine.log) == stored + 1

    run_world(scenario)


def test_a_client_that_cancels_ends_its_call() -> None:
    async def scenario(world: ProxyWorld, stub: service_pb2_grpc.MessagingServiceAsyncStub) -> None:
        world.broker.is_reading.clear()
        call = stub.SendMessage(SEND, metadata=METADATA)
        await eventually(lambda: len(world.link.pending) == 1)
        call.cancel()
        await eventually(lambda: len(world.link.pending) == 0)
        await eventually(lambda: result_counts(world, "send_message") == {"cancelled": 1})
        world.broker.is_reading.set()
        assert (await stub.SendMessage(SEND, metadata=METADATA)).status.code == v2.OK

    run_served(scenario)


def test_a_broker_that_does_not_answer_gives_a_status_before_the_deadline() -> None:
    async def scenario(world: ProxyWorld, stub: service_pb2_grpc.MessagingServiceAsyncStub) -> None:
        world.broker.is_reading.clear()
        sent = await stub.SendMessage(SEND, metadata=METADATA, timeout=1)
        assert sent.status.code == v2.PROXY_TIMEOUT
        assert "the outcome is unknown" in sent.status.message
        assert len(world.link.pending) == 0

    run_served(scenario)


@pytest.mark.parametrize("error", [BrokerTimeout("it is late"), ValueError("a defect")])
def test_an_answer_that_fails_answers_its_call(error: Exception) -> None:
    class Failing(LinkAnswer):
        def encode(self, result: object) -> bytes:
            raise error

    async def scenario(world: ProxyWorld) -> None:
        call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=10)
        call.reply = reply = FutureReply()
        call.boundary, call.method = world.boundary, "SendMessage"
        answer = Failing(call, world.link)
        answer.wait(
            world.link.ask_for(
                answer, ENSURE, link_pb2.EnsureRequest(topic="other"), timeout_ms=5_000
            )
        )
        status = service.NotifyClientTerminationResponse.FromString(await reply.read()).status
        is_defect = isinstance(error, ValueError)
        assert status.code == (v2.INTERNAL_SERVER_ERROR if is_defect else v2.PROXY_TIMEOUT)
        # The link goes on.
        await world.put_topic()
        assert (await world.send(message())).status.code == v2.OK

    run_world(scenario)
