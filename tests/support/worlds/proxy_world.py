"""A proxy's methods on a broker in memory. Tests call them without the proxy's gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from tests.support.plain_calls import answer_of
from tests.support.worlds.memory_broker import MemoryBroker
from tidemill.common.clock import SystemClock
from tidemill.proxy.app import cluster_of, telemetry_of, wire
from tidemill.proxy.clients.clients import Clients
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.metrics import ProxyMetrics
from tidemill.proxy.polling.shell import PollingShell
from tidemill.proxy.quotas.deliveries import DeliveryQuotas
from tidemill.proxy.server.boundary import Boundary
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.client_lifecycle import ClientLifecycle
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.proxy.settings import ProxySettings
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

Response = TypeVar("Response", bound=Message)

HEADERS = {"x-mq-client-id": "client-1", "x-mq-language": "PYTHON", "x-mq-client-version": "5.1.2"}
ACCESS_POINT = v2.Endpoints(scheme=v2.IPv4, addresses=[v2.Address(host="10.0.0.9", port=8081)])


def run(
    scenario: Callable[[ProxyWorld], Awaitable[None]], *, auto_create: bool = True, **settings: int
) -> None:
    """Run `scenario` with a new broker and a new proxy with `settings`."""

    async def main() -> None:
        async with (
            asyncio.timeout(20),
            MemoryBroker(auto_create=auto_create).serving() as broker,
            ProxyWorld.open(broker, calls=None, **settings) as world,
        ):
            await scenario(world)

    asyncio.run(main())


class ProxyWorld:
    """The methods of a proxy by their public names."""

    def __init__(
        self,
        broker: MemoryBroker,
        settings: ProxySettings,
        calls: BrokerCalls | None = None,
        quotas: DeliveryQuotas | None = None,
    ) -> None:
        self.broker = broker
        self.metrics = ProxyMetrics()
        clock = SystemClock()
        self.clients = Clients(clients_max=settings.clients_max, monotonic_ms=clock.monotonic_ms)
        self.cluster = cluster_of(settings, self.metrics)
        self.link = self.cluster.brokers[0].link
        self.polling = PollingShell(
            self.cluster, clock, pop_timeout_ms=settings.request_timeout_ms, quotas=quotas
        )
        telemetry = telemetry_of(settings, self.cluster, self.clients, clock)
        calls = calls or BrokerCalls()
        self.client_life = ClientLifecycle(self.cluster, self.clients, self.polling, clock)
        self.methods = wire(
            settings,
            self.cluster,
            self.polling,
            self.clients,
            telemetry,
            self.client_life,
            clock,
            calls,
            PullPages(calls),
        )
        self.boundary = Boundary(self.metrics, clock)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, broker: MemoryBroker, *, calls: BrokerCalls | None = None, **settings: int
    ) -> AsyncIterator[ProxyWorld]:
        """Connect a proxy to `broker`; `calls` go to another one."""
        values = {"brokers": [broker.address], **settings}
        world = cls(broker, ProxySettings.model_validate(values), calls)
        async with world.cluster.running():
            await world.cluster.configured()
            yield world

    async def put_topic(self, name: str = "topic", **fields: int) -> link_pb2.TopicConfig:
        """Create a topic, and wait until the proxy knows it."""
        topic = self.broker.put_topic(name, **fields)
        await eventually(lambda: name in self.link.configuration.topics)
        return topic

    async def put_group(self, name: str = "group", **fields: bool) -> link_pb2.GroupConfig:
        """Create a consumer group, and wait until the proxy knows it."""
        group = self.broker.put_group(name, **fields)
        await eventually(lambda: name in self.link.configuration.groups)
        return group

    async def call(
        self,
        method: str,
        request: Message | bytes,
        response: type[Response],
        *,
        headers: dict[str, str] = HEADERS,
        deadline_s: float | None = 10,
        connection: str = "test",
    ) -> Response:
        """Call a unary method on the connection with this key."""
        encoded = request if isinstance(request, bytes) else request.SerializeToString()
        call = Call(
            headers, peer=lambda: "test", connection=connection, time_remaining_s=deadline_s
        )
        answer = await answer_of(self.boundary, self.methods, method, call, encoded)
        return response.FromString(answer)

    async def send(
        self, *messages: v2.Message, deadline_s: float | None = 10
    ) -> service.SendMessageResponse:
        return await self.call(
            "SendMessage",
            service.SendMessageRequest(messages=messages),
            service.SendMessageResponse,
            deadline_s=deadline_s,
        )

    async def receive(
        self,
        request: service.ReceiveMessageRequest,
        *,
        headers: dict[str, str] = HEADERS,
        deadline_s: float | None = 30,
        send: Callable[[service.ReceiveMessageResponse], Awaitable[None]] | None = None,
        responses: ResponseCollector | None = None,
    ) -> list[service.ReceiveMessageResponse]:
        """Call ReceiveMessage and collect its items."""
        responses = responses or ResponseCollector(send)
        call = Call(headers, peer=lambda: "test", connection="test", time_remaining_s=deadline_s)
        method = self.methods.streaming["ReceiveMessage"]
        await self.boundary.streaming(
            "receive_message", method, call, request.SerializeToString(), responses
        )
        return responses.items

    async def receive_messages(
        self, topic: str = "topic", group: str = "group"
    ) -> list[v2.Message]:
        """Receive the available messages without waiting."""
        items = await self.receive(receive_request(topic, group))
        return [item.message for item in items if item.HasField("message")]


class ResponseCollector:
    """The collected responses of a receive. `send` counts a response as handed over."""

    def __init__(
        self, send: Callable[[service.ReceiveMessageResponse], Awaitable[None]] | None = None
    ) -> None:
        self.items: list[service.ReceiveMessageResponse] = []
        self._send = send
        self.room_bytes = self.room_at_first_bytes = 24 << 20  # of `hold`; of `has_room`
        # Room after a wait; None: the wait times out.
        self.room_later_bytes: int | None = None
        self.waits: list[tuple[int, float]] = []  # bytes, seconds
        self.is_read = True  # whether the client reads its responses

    @property
    def connection(self) -> Hashable:
        return self

    def drain_connection(self) -> None:
        pass

    @property
    def sent_count(self) -> int:
        return len(self.items)

    def has_room(self, size_bytes: int) -> bool:
        return self.room_at_first_bytes >= size_bytes

    def hold(self, size_bytes: int) -> bool:
        if self.room_bytes < size_bytes:
            return False
        self.room_bytes -= size_bytes
        return True

    async def hold_in_turn(self, size_bytes: int, *, timeout_s: float) -> bool:
        self.waits.append((size_bytes, timeout_s))
        if self.room_later_bytes is None:
            return False
        self.room_bytes, self.room_later_bytes = self.room_later_bytes, None
        return self.hold(size_bytes)

    def release(self, size_bytes: int) -> None:
        self.room_bytes += size_bytes

    def when_read(self, tell: Callable[[], None]) -> None:
        if self.is_read:
            tell()

    async def send(self, message: bytes) -> None:
        parsed = service.ReceiveMessageResponse.FromString(message)
        if self._send:
            await self._send(parsed)
        self.items.append(parsed)

    async def send_all(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            await self.send(message)


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until `check` holds, within the time limit of `run`."""
    while not check():  # noqa: ASYNC110 - the other side has no event to wait for
        await asyncio.sleep(0.001)


def message(body: bytes = b"body", *, topic: str = "topic", **properties: object) -> v2.Message:
    """Return a message as a producer sends it."""
    values = {"message_id": "id-1", "body_encoding": v2.IDENTITY, **properties}
    return v2.Message(
        topic=v2.Resource(name=topic),
        body=body,
        system_properties=v2.SystemProperties(**values),  # type: ignore[arg-type]  # by name
    )


def receive_request(
    topic: str = "topic",
    group: str = "group",
    *,
    poll_ms: int = 0,
    invisible_ms: int = 30_000,
    batch_size: int = 32,
) -> service.ReceiveMessageRequest:
    """Return the request of a simple consumer's receive."""
    return service.ReceiveMessageRequest(
        group=v2.Resource(name=group),
        message_queue=v2.MessageQueue(topic=v2.Resource(name=topic)),
        filter_expression=v2.FilterExpression(type=v2.TAG, expression="*"),
        batch_size=batch_size,
        invisible_duration=milliseconds(invisible_ms),
        long_polling_timeout=milliseconds(poll_ms),
    )


def ack_request(
    *handles: str, topic: str = "topic", group: str = "group"
) -> service.AckMessageRequest:
    """Return an ack of several handles."""
    return service.AckMessageRequest(
        group=v2.Resource(name=group),
        topic=v2.Resource(name=topic),
        entries=[
            service.AckMessageEntry(message_id=f"id-{n}", receipt_handle=handle)
            for n, handle in enumerate(handles)
        ],
    )


def milliseconds(value_ms: int) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(value_ms)
    return duration
