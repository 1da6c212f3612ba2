"""Refused calls over a real gRPC server: the answers that the clients see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple

import grpc
import pytest

from tests.support.clients.grpcio_client import reflected_services
from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import HEADERS, ProxyWorld, message, receive_request
from tidemill.common.metrics import Registry
from tidemill.proxy.clients.metrics import ClientMetrics
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.metrics import ProxyMetrics
from tidemill.proxy.server import access
from tidemill.proxy.server.grpc_server import GrpcServer
from tidemill.proxy.server.metrics_receiver import EXPORT, MetricsReceiver
from tidemill.proxy.server.pipeline_source import pipeline_methods
from tidemill.proxy.server.pipeline_table import pipeline_table
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.proxy.settings import ProxySettings
from tidemill.security.acl import parse_entry
from tidemill.security.table import Mode
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pipeline
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc


class Wire(NamedTuple):
    """A served proxy, and a channel to it."""

    users: AccessWorld
    channel: grpc.aio.Channel
    world: ProxyWorld
    revoked: list[str]  # ids of clients that have lost a right


Scenario = Callable[[Wire], Awaitable[None]]


def metadata(user: str = "") -> tuple[tuple[str, str], ...]:
    return tuple({**HEADERS, **(signed(user) if user else {})}.items())


def run(scenario: Scenario, seconds: float = 30) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(seconds),
            MemoryBroker().serving() as broker,
            ProxyWorld.open(broker) as world,
        ):
            await world.put_topic()
            await world.put_group()
            users, calls, revoked = AccessWorld(), BrokerCalls(), list[str]()
            users.gate.revoked.on_revoked = lambda client, _lost: revoked.append(client.client_id)
            measures = ClientMetrics(
                Registry(cluster="c", node_type="proxy", node_id="p"),
                lambda: 0,
                knows_topic=world.cluster.knows_topic,
                knows=world.cluster.knows,
            )
            table = pipeline_table(world.cluster, calls, PullPages(calls))
            server = GrpcServer(
                world.methods,
                world.boundary,
                MetricsReceiver(measures),
                pipeline_methods(table, ProxyMetrics(), users.gate),
                on_lost=world.client_life.forget_connection,
                gate=users.gate,
            )
            async with (
                server.serving(ProxySettings(grpc_port=0)),
                grpc.aio.insecure_channel(server.address) as channel,
            ):
                await scenario(Wire(users, channel, world, revoked))

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "REFUSAL_DELAY_S", 0)


def test_clients_see_a_status_and_never_a_grpc_error() -> None:
    """The clients would take the proxy for broken and isolate it."""

    async def scenario(wire: Wire) -> None:
        stub = service_pb2_grpc.MessagingServiceStub(wire.channel)
        sent = await stub.SendMessage(
            service.SendMessageRequest(messages=[message()]), metadata=metadata()
        )
        assert sent.status.code == v2.UNAUTHORIZED
        items = [item async for item in stub.ReceiveMessage(receive_request(), metadata=metadata())]
        assert items[0].status.code == v2.UNAUTHORIZED
        assert items[-1].WhichOneof("content") == "delivery_timestamp"

        def commands() -> Iterator[service.TelemetryCommand]:
            yield service.TelemetryCommand(
                settings=v2.Settings(client_type=v2.PRODUCER, publishing=v2.Publishing())
            )

        stream = stub.Telemetry(commands(), metadata=metadata())
        answers = [command async for command in stream]
        assert [(answer.status.code, answer.WhichOneof("command")) for answer in answers] == [
            (v2.UNAUTHORIZED, None)
        ]
        assert await stream.code() == grpc.StatusCode.OK

    run(scenario)


def test_other_services_refuse_with_a_grpc_status() -> None:
    async def scenario(wire: Wire) -> None:
        users, channel = wire.users, wire.channel
        source = pipeline_pb2_grpc.PipelineSourceStub(channel)
        users.put_user("spark")
        for user in ("", "spark"):
            call = source.GetQueues(pipeline.GetQueuesRequest(), metadata=metadata(user))
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await anext(aiter(call))
            assert refusal.value.code() == grpc.StatusCode.PERMISSION_DENIED
        export: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await export(b"", metadata=metadata())
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
        await export(b"", metadata=metadata("spark"))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await reflected_services(channel)
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED

    run(scenario)


def test_a_signed_call_of_a_user_with_the_right_is_served() -> None:
    async def scenario(wire: Wire) -> None:
        users, channel = wire.users, wire.channel
        users.put_user("orders", parse_entry("Topic:topic", ["Pub"], sources=["127.0.0.0/8"]))
        stub = service_pb2_grpc.MessagingServiceStub(channel)
        sent = await stub.SendMessage(
            service.SendMessageRequest(messages=[message()]), metadata=metadata("orders")
        )
        assert sent.status.code == v2.OK
        users.put_user("orders", parse_entry("Topic:topic", ["Pub"], sources=["10.0.0.0/8"]))
        sent = await stub.SendMessage(
            service.SendMessageRequest(messages=[message()]), metadata=metadata("orders")
        )
        assert sent.status.message == "user orders may not Pub on Topic:topic from 127.0.0.1"

    run(scenario)


def test_a_call_with_the_headers_of_two_users_is_refused() -> None:
    """The Go client adds its headers again for each repeated send, so those of one user are not."""

    async def scenario(wire: Wire) -> None:
        stub = service_pb2_grpc.MessagingServiceStub(wire.channel)
        request = service.SendMessageRequest(messages=[message()])
        for name in ("orders", "billing"):
            wire.users.put_user(name, parse_entry("Topic:topic", ["Pub"]))

        async def status(*users: str) -> v2.Status:
            headers = [pair for user in users for pair in signed(user).items()]
            sent = await stub.SendMessage(request, metadata=[*HEADERS.items(), *headers])
            return sent.status

        assert (await status("orders", "orders")).code == v2.OK
        refused = await status("orders", "billing")
        assert refused.code == v2.UNAUTHORIZED
        assert "the access keys billing and orders" in refused.message

    run(scenario)


CONSUMER = [parse_entry("Group:group", ["Sub"]), parse_entry("Topic:topic", ["Sub"])]


def test_a_waiting_poll_ends_when_its_user_loses_a_right() -> None:
    async def scenario(wire: Wire) -> None:
        users = wire.users
        users.put_user("billing", *CONSUMER)
        users.put_user("others", *CONSUMER)
        stub = service_pb2_grpc.MessagingServiceStub(wire.channel)
        polls = [
            stub.ReceiveMessage(receive_request(poll_ms=20_000), metadata=metadata(name))
            for name in ("billing", "others")
        ]
        for _ in polls:
            await wire.world.broker.wait_for_frame("pops")
        users.put_user("billing", CONSUMER[0], is_same=True)
        items = [item async for item in polls[0]]
        assert items[0].status.code == v2.UNAUTHORIZED
        assert items[0].status.message.startswith("user billing may not Sub on Topic:topic")
        assert items[-1].WhichOneof("content") == "delivery_timestamp"
        assert not polls[1].done()
        users.delete_user("others")
        items = [item async for item in polls[1]]
        assert items[0].status.code == v2.UNAUTHORIZED
        assert not users.gate.streams._watches

    run(scenario)


def test_a_waiting_poll_of_the_mode_off_ends_when_the_mode_needs_credentials() -> None:
    async def scenario(wire: Wire) -> None:
        wire.users.set_mode(Mode.OFF)
        stub = service_pb2_grpc.MessagingServiceStub(wire.channel)
        poll = stub.ReceiveMessage(receive_request(poll_ms=20_000), metadata=metadata())
        await wire.world.broker.wait_for_frame("pops")
        wire.users.set_mode(Mode.PERMISSIVE)
        wire.users.set_mode(Mode.ON)
        items = [item async for item in poll]
        assert items[0].status.message == "no credentials"

    run(scenario)


def test_a_telemetry_stream_ends_when_its_user_loses_a_right() -> None:
    async def scenario(wire: Wire) -> None:
        users = wire.users
        users.put_user("billing", *CONSUMER)
        stub = service_pb2_grpc.MessagingServiceStub(wire.channel)
        may_end = asyncio.Event()

        async def commands() -> AsyncIterator[service.TelemetryCommand]:
            yield service.TelemetryCommand(
                settings=v2.Settings(
                    client_type=v2.PUSH_CONSUMER,
                    subscription=v2.Subscription(
                        group=v2.Resource(name="group"),
                        subscriptions=[v2.SubscriptionEntry(topic=v2.Resource(name="topic"))],
                    ),
                )
            )
            await may_end.wait()

        stream = stub.Telemetry(commands(), metadata=metadata("billing"))
        answers = []
        async for answer in stream:
            if answer.WhichOneof("command") == "settings":
                users.put_user("billing", CONSUMER[1], is_same=True)
            else:
                answers.append(answer)
        assert [answer.status.code for answer in answers] == [v2.UNAUTHORIZED]
        assert await stream.code() == grpc.StatusCode.OK
        assert wire.revoked == [HEADERS["x-mq-client-id"]]
        may_end.set()

    run(scenario)


def test_the_stream_of_a_call_without_a_user_ends_no_client_of_a_user() -> None:
    """The owner 0 would match the clients of all users with this id."""

    async def scenario(wire: Wire) -> None:
        wire.users.set_mode(Mode.PERMISSIVE)
        stub = service_pb2_grpc.MessagingServiceStub(wire.channel)
        may_end = asyncio.Event()

        async def commands() -> AsyncIterator[service.TelemetryCommand]:
            yield service.TelemetryCommand(
                settings=v2.Settings(
                    client_type=v2.PUSH_CONSUMER,
                    subscription=v2.Subscription(group=v2.Resource(name="group")),
                )
            )
            await may_end.wait()

        codes = []
        async for answer in stub.Telemetry(commands(), metadata=metadata()):
            if answer.WhichOneof("command") == "settings":
                wire.users.set_mode(Mode.ON)
            else:
                codes.append(answer.status.code)
        assert codes == [v2.UNAUTHORIZED]
        assert not wire.revoked
        may_end.set()

    run(scenario)


def test_a_refused_stream_takes_no_messages_from_the_client_whose_id_it_shows() -> None:
    async def scenario(wire: Wire) -> None:
        wire.users.put_user("stranger")
        stub = service_pb2_grpc.MessagingServiceStub(wire.channel)

        def commands() -> Iterator[service.TelemetryCommand]:
            yield service.TelemetryCommand(
                settings=v2.Settings(
                    client_type=v2.PUSH_CONSUMER,
                    subscription=v2.Subscription(group=v2.Resource(name="group")),
                )
            )

        stream = stub.Telemetry(commands(), metadata=metadata("stranger"))
        answers = [command async for command in stream]
        assert [answer.status.code for answer in answers] == [v2.UNAUTHORIZED]
        assert not wire.revoked

    run(scenario)
