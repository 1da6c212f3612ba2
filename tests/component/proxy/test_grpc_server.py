"""The proxy's gRPC server on loopback with a broker in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from tests.support.clients.grpcio_client import REFLECTION, is_serving, read, reflected_services
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import (
    ACCESS_POINT,
    HEADERS,
    ProxyWorld,
    message,
    receive_request,
)
from tidemill.proxy.server.grpc_server import GrpcServer
from tidemill.proxy.server.methods import SERVICE
from tidemill.proxy.settings import ProxySettings
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

METADATA = tuple(HEADERS.items())


class Client:
    """A channel to a served proxy."""

    def __init__(self, world: ProxyWorld, server: GrpcServer, channel: grpc.aio.Channel) -> None:
        self.world = world
        self.server = server
        self.channel = channel
        self.stub = service_pb2_grpc.MessagingServiceStub(channel)

    @contextlib.asynccontextmanager
    async def telemetry(
        self, metadata: tuple[tuple[str, str], ...] = METADATA
    ) -> AsyncIterator[
        grpc.aio.StreamStreamCall[service.TelemetryCommand, service.TelemetryCommand]
    ]:
        call = self.stub.Telemetry(metadata=metadata)
        try:
            yield call
        finally:
            call.cancel()


def run(
    scenario: Callable[[Client], Awaitable[None]],
    *,
    auto_create: bool = True,
    grpc_reflection: bool = True,
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(20),
            MemoryBroker(auto_create=auto_create).serving() as broker,
            ProxyWorld.open(broker) as world,
            GrpcServer(
                world.methods, world.boundary, on_lost=world.client_life.forget_connection
            ).serving(ProxySettings(grpc_port=0, grpc_reflection=grpc_reflection)) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            await scenario(Client(world, server, channel))

    asyncio.run(main())


def settings(language: v2.Language.ValueType = v2.JAVA) -> service.TelemetryCommand:
    return service.TelemetryCommand(
        settings=v2.Settings(
            client_type=v2.PUSH_CONSUMER,
            user_agent=v2.UA(language=language),
            subscription=v2.Subscription(group=v2.Resource(name="group")),
        )
    )


def test_a_message_is_sent_and_received() -> None:
    async def scenario(client: Client) -> None:
        sent = await client.stub.SendMessage(
            service.SendMessageRequest(messages=[message()]), metadata=METADATA
        )
        assert sent.status.code == v2.OK
        call = client.stub.ReceiveMessage(receive_request(), metadata=METADATA)
        items = [item async for item in call]
        assert [item.WhichOneof("content") for item in items] == [
            "status",
            "message",
            "delivery_timestamp",
        ]
        assert await call.code() == grpc.StatusCode.OK

    run(scenario)


def test_a_body_over_the_limit_gets_its_own_code() -> None:
    async def scenario(client: Client) -> None:
        sent = await client.stub.SendMessage(
            service.SendMessageRequest(messages=[message(b"x" * (5 << 20))]), metadata=METADATA
        )
        assert sent.status.code == v2.MESSAGE_BODY_TOO_LARGE

    run(scenario)


def test_a_route_names_the_clients_access_point() -> None:
    async def scenario(client: Client) -> None:
        route = await client.stub.QueryRoute(
            service.QueryRouteRequest(topic=v2.Resource(name="topic"), endpoints=ACCESS_POINT),
            metadata=METADATA,
        )
        assert route.status.code == v2.OK
        assert len(route.message_queues) == 8
        assert route.message_queues[0].broker.endpoints == ACCESS_POINT

    run(scenario)


@pytest.mark.parametrize(("is_ordered", "queue_ids"), [(False, [-1]), (True, list(range(8)))])
def test_an_assignment_depends_on_the_order_of_the_group(
    is_ordered: bool, queue_ids: list[int]
) -> None:
    async def scenario(client: Client) -> None:
        await client.world.put_group(is_ordered=is_ordered)
        answer = await client.stub.QueryAssignment(
            service.QueryAssignmentRequest(
                topic=v2.Resource(name="topic"),
                group=v2.Resource(name="group"),
                endpoints=ACCESS_POINT,
            ),
            metadata=METADATA,
        )
        assert answer.status.code == v2.OK
        assert [entry.message_queue.id for entry in answer.assignments] == queue_ids

    run(scenario)


def test_a_consumer_learns_of_a_wrong_filter_on_every_path() -> None:
    sql = v2.FilterExpression(type=v2.SQL, expression="a LIKE 'x%'")
    topic, group = v2.Resource(name="topic"), v2.Resource(name="group")
    subscription = v2.Subscription(
        group=group, subscriptions=[v2.SubscriptionEntry(topic=topic, expression=sql)]
    )
    settings = v2.Settings(client_type=v2.PUSH_CONSUMER, subscription=subscription)

    async def scenario(client: Client) -> None:
        async with client.telemetry() as call:
            await call.write(service.TelemetryCommand(settings=settings))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "SQL filter, column 3: unexpected LIKE" in await call.details()
        for name, status in (("topic", v2.ILLEGAL_FILTER_EXPRESSION), ("another", v2.OK)):
            answer = await client.stub.QueryAssignment(
                service.QueryAssignmentRequest(
                    topic=v2.Resource(name=name), group=group, endpoints=ACCESS_POINT
                ),
                metadata=METADATA,
            )
            assert answer.status.code == status, name
        assert client.world.metrics.rejected_filters == {"syntax": 2, "limit": 0}

    run(scenario)


def test_heartbeat_and_termination_are_recorded() -> None:
    async def scenario(client: Client) -> None:
        for client_type, code in (
            (v2.CLIENT_TYPE_UNSPECIFIED, v2.UNRECOGNIZED_CLIENT_TYPE),
            (-1, v2.UNRECOGNIZED_CLIENT_TYPE),
            (99, v2.UNRECOGNIZED_CLIENT_TYPE),
            (v2.PRODUCER, v2.OK),
        ):
            answer = await client.stub.Heartbeat(
                service.HeartbeatRequest(client_type=v2.ClientType.ValueType(client_type)),
                metadata=METADATA,
            )
            assert answer.status.code == code
        assert len(client.world.clients) == 1
        ended = await client.stub.NotifyClientTermination(
            service.NotifyClientTerminationRequest(), metadata=METADATA
        )
        assert ended.status.code == v2.OK
        assert len(client.world.clients) == 0
        without_id = await client.stub.Heartbeat(service.HeartbeatRequest())
        assert without_id.status.code == v2.CLIENT_ID_REQUIRED

    run(scenario)


def test_every_settings_command_is_answered_until_the_client_half_closes() -> None:
    async def scenario(client: Client) -> None:
        async with client.telemetry() as call:
            for _ in range(2):
                await call.write(settings())
                answer = await read(call, service.TelemetryCommand)
                assert answer.status.code == v2.OK
                assert answer.settings.subscription.receive_batch_size == 32
            # A command that is not a request gets no answer.
            await call.write(service.TelemetryCommand(status=v2.Status(code=v2.OK)))
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() == grpc.StatusCode.OK

    run(scenario)


def test_the_headers_of_a_telemetry_stream_come_before_anything_is_sent() -> None:
    async def scenario(client: Client) -> None:
        async with client.telemetry() as call:
            await call.initial_metadata()

    run(scenario)


def test_a_telemetry_stream_outlives_a_stack_trace_that_is_too_large() -> None:
    trace = service.ThreadStackTrace(nonce="n", thread_stack_trace="x" * (2 << 20))

    async def scenario(client: Client) -> None:
        async with client.telemetry() as call:
            await call.write(settings())
            first = await call.read()
            await call.write(service.TelemetryCommand(thread_stack_trace=trace))
            await call.write(settings())
            assert await call.read() == first
            await call.done_writing()
            assert await call.code() == grpc.StatusCode.OK

    run(scenario)


def test_a_node_js_client_gets_its_first_settings_twice() -> None:
    async def scenario(client: Client) -> None:
        async with client.telemetry() as call:
            await call.write(settings(v2.NODE_JS))
            first, again = await call.read(), await call.read()
            assert first == again
            await call.done_writing()
            assert await call.code() == grpc.StatusCode.OK

    run(scenario)


@pytest.mark.parametrize(
    "malformed",
    [
        v2.Settings(client_type=v2.PRODUCER),
        v2.Settings(publishing=v2.Publishing()),
        v2.Settings(
            client_type=v2.PRODUCER, publishing=v2.Publishing(topics=[v2.Resource(name="a.b")])
        ),
    ],
)
def test_malformed_settings_end_the_stream(malformed: v2.Settings) -> None:
    async def scenario(client: Client) -> None:
        async with client.telemetry() as call:
            await call.write(service.TelemetryCommand(settings=malformed))
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

    run(scenario)


def test_no_method_is_served_without_a_client_id() -> None:
    async def scenario(client: Client) -> None:
        for name in (*client.world.methods.unary, *client.world.methods.plain):
            answer = await client.world.call(name, b"", service.HeartbeatResponse, headers={})
            assert answer.status.code == v2.CLIENT_ID_REQUIRED, name
        items = await client.world.receive(receive_request(), headers={})
        assert items[0].status.code == v2.CLIENT_ID_REQUIRED
        assert not any(frame.pops or frame.appends.blobs for frame in client.world.broker.frames)

    run(scenario)


def test_a_stream_without_a_client_id_gets_a_status_and_ends() -> None:
    async def scenario(client: Client) -> None:
        async with client.telemetry(metadata=()) as call:
            answer = await read(call, service.TelemetryCommand)
            assert answer.status.code == v2.CLIENT_ID_REQUIRED
            assert await call.read() is grpc.aio.EOF
            assert await call.code() == grpc.StatusCode.OK

    run(scenario)


def test_settings_of_an_unknown_group_are_answered() -> None:
    async def scenario(client: Client) -> None:
        async with client.telemetry() as call:
            await call.write(settings())
            answer = await read(call, service.TelemetryCommand)
            assert answer.status.code == v2.OK
            assert answer.settings.backoff_policy.max_attempts == 17

    run(scenario, auto_create=False)


def test_a_client_that_cancels_its_receive_frees_the_poll() -> None:
    async def scenario(client: Client) -> None:
        call = client.stub.ReceiveMessage(receive_request(poll_ms=20_000), metadata=METADATA)
        await client.world.broker.wait_for_frame("pops")
        call.cancel()
        await client.world.broker.wait_for_frame("cancelled_polls")

    run(scenario)


def test_draining_answers_polls_and_ends_telemetry_with_ok() -> None:
    async def scenario(client: Client) -> None:
        receive = client.stub.ReceiveMessage(receive_request(poll_ms=20_000), metadata=METADATA)
        async with client.telemetry() as telemetry:
            await telemetry.write(settings())
            await telemetry.read()
            await client.world.broker.wait_for_frame("pops")
            client.world.link.release_polls()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(client.server.drain(10_000))
                items = [item async for item in receive]
                assert items[0].status.code == v2.MESSAGE_NOT_FOUND
                assert await telemetry.code() == grpc.StatusCode.OK

    run(scenario)


def test_an_unexpected_fault_is_a_status_without_a_trace() -> None:
    async def scenario(client: Client) -> None:
        # A configuration that no broker sends: a topic without queues.
        await client.world.put_topic(queues=0)
        sent = await client.stub.SendMessage(
            service.SendMessageRequest(messages=[message()]), metadata=METADATA
        )
        assert sent.status.code == v2.INTERNAL_SERVER_ERROR
        assert "Zero" not in sent.status.message
        call = client.stub.ReceiveMessage(receive_request(), metadata=METADATA)
        client.world.link.configuration.broker_name = None  # type: ignore[assignment]  # the fault
        items = [item async for item in call]
        assert items[0].WhichOneof("content") == "status"
        assert items[-1].WhichOneof("content") == "delivery_timestamp"

    run(scenario)


def test_health_and_reflection_are_served() -> None:
    async def scenario(client: Client) -> None:
        for name in ("", SERVICE):
            assert await is_serving(client.channel, name)
        assert SERVICE in await reflected_services(client.channel)

    run(scenario)


def test_reflection_can_be_switched_off() -> None:
    async def scenario(client: Client) -> None:
        assert await is_serving(client.channel, SERVICE)
        # Without a request: grpcio fails if it sends one after the server has ended the call.
        info: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = client.channel.stream_stream(
            REFLECTION
        )
        call = info()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED

    run(scenario, grpc_reflection=False)


def test_changes_of_the_configuration_reach_the_proxy() -> None:
    async def scenario(client: Client) -> None:
        topic = await client.world.put_topic(kind=link_pb2.TOPIC_TYPE_FIFO)
        assert client.world.link.configuration.topics["topic"] == topic

    run(scenario)
