"""Calls of the public API over gRPC, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping

import grpc
from google.protobuf.duration_pb2 import Duration

from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

METADATA = (
    ("x-mq-client-id", "tests"),
    ("x-mq-language", "PYTHON"),
    ("x-mq-client-version", "5.1.2"),
)
CALL_S = 3.0  # like the request timeout of the official clients
POLL_MS_MIN = 5_000  # the proxy's shortest long poll


@contextlib.asynccontextmanager
async def api(
    endpoint: str, *, call_s: float = CALL_S, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Api]:
    """Connect with a separate connection, so that several proxies on one port share the clients.

    `call_s` is the timeout of a call. Use a longer one if an election comes first. Each call has
    these additional `headers`.
    """
    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # This is also the timeout of an attempt, so a busy machine needs more than a back-off.
        ("grpc.min_reconnect_backoff_ms", round(CALL_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", 200),
        ("grpc.max_receive_message_length", -1),
    )
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        yield Api(channel, call_s, headers)


class Api:
    """One client's calls."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call_s: float = CALL_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._metadata = (*METADATA, *(headers or {}).items())
        self.channel = channel
        self._call_s = call_s
        self.stub = service_pb2_grpc.MessagingServiceStub(channel)

    async def send(self, *messages: v2.Message) -> service.SendMessageResponse:
        request = service.SendMessageRequest(messages=messages)
        answer: service.SendMessageResponse = await self.stub.SendMessage(
            request, metadata=self._metadata, timeout=self._call_s
        )
        return answer

    async def receive(
        self,
        topic: str,
        group: str,
        *,
        poll_ms: int = 0,
        invisible_ms: int = 30_000,
        batch_size: int = 32,
        renews: bool = False,
    ) -> list[v2.Message]:
        """Return the received messages, or an empty list. Raises AssertionError for any error.

        If `renews`, receive as a push consumer does.
        """
        request = receive_request(
            topic, group, poll_ms=poll_ms, invisible_ms=invisible_ms, batch_size=batch_size
        )
        if renews:
            request.auto_renew = True
            request.ClearField("invisible_duration")
        call = self.stub.ReceiveMessage(
            request, metadata=self._metadata, timeout=poll_ms / 1000 + self._call_s
        )
        items = [item async for item in call]
        assert items[0].status.code in {v2.OK, v2.MESSAGE_NOT_FOUND}, items[0].status
        return [item.message for item in items if item.HasField("message")]

    async def ack(
        self, topic: str, group: str, handles: Iterable[str]
    ) -> service.AckMessageResponse:
        answer: service.AckMessageResponse = await self.stub.AckMessage(
            ack_request(topic, group, handles), metadata=self._metadata, timeout=self._call_s
        )
        return answer

    async def heartbeat(self, group: str) -> service.HeartbeatResponse:
        request = service.HeartbeatRequest(
            client_type=v2.PUSH_CONSUMER, group=v2.Resource(name=group)
        )
        answer: service.HeartbeatResponse = await self.stub.Heartbeat(
            request, metadata=self._metadata, timeout=self._call_s
        )
        return answer

    async def end(self, group: str) -> service.NotifyClientTerminationResponse:
        """End the client, as it does when it stops."""
        request = service.NotifyClientTerminationRequest(group=v2.Resource(name=group))
        answer: service.NotifyClientTerminationResponse = await self.stub.NotifyClientTermination(
            request, metadata=self._metadata, timeout=self._call_s
        )
        return answer

    async def recall(self, topic: str, handle: str) -> service.RecallMessageResponse:
        request = service.RecallMessageRequest(topic=v2.Resource(name=topic), recall_handle=handle)
        answer: service.RecallMessageResponse = await self.stub.RecallMessage(
            request, metadata=self._metadata, timeout=self._call_s
        )
        return answer

    async def change_invisible(
        self, topic: str, group: str, handle: str, invisible_ms: int
    ) -> service.ChangeInvisibleDurationResponse:
        answer: service.ChangeInvisibleDurationResponse = await self.stub.ChangeInvisibleDuration(
            change_request(topic, group, handle, invisible_ms),
            metadata=self._metadata,
            timeout=self._call_s,
        )
        return answer


def message(
    topic: str,
    body: bytes,
    *,
    message_group: str = "",
    message_id: str = "",
    due_at_ms: int = 0,
    tag: str = "",
    priority: int | None = None,
    properties: Mapping[str, str] | None = None,
) -> v2.Message:
    """Return a message as a client sends it. With a due time, it is delayed."""
    system = v2.SystemProperties(message_id=message_id or body.hex()[:64])
    if message_group:
        system.message_group = message_group
    if due_at_ms:
        system.delivery_timestamp.FromMilliseconds(due_at_ms)
    if tag:
        system.tag = tag
    if priority is not None:
        system.priority = priority
    return v2.Message(
        topic=v2.Resource(name=topic),
        body=body,
        system_properties=system,
        user_properties=properties,
    )


def receive_request(
    topic: str, group: str, *, poll_ms: int = 0, invisible_ms: int = 30_000, batch_size: int = 32
) -> service.ReceiveMessageRequest:
    return service.ReceiveMessageRequest(
        group=v2.Resource(name=group),
        message_queue=v2.MessageQueue(topic=v2.Resource(name=topic)),
        filter_expression=v2.FilterExpression(type=v2.TAG, expression="*"),
        batch_size=batch_size,
        invisible_duration=milliseconds(invisible_ms),
        long_polling_timeout=milliseconds(poll_ms),
    )


def ack_request(topic: str, group: str, handles: Iterable[str]) -> service.AckMessageRequest:
    entries = [service.AckMessageEntry(message_id="id", receipt_handle=each) for each in handles]
    return service.AckMessageRequest(
        group=v2.Resource(name=group), topic=v2.Resource(name=topic), entries=entries
    )


def change_request(
    topic: str, group: str, handle: str, invisible_ms: int
) -> service.ChangeInvisibleDurationRequest:
    return service.ChangeInvisibleDurationRequest(
        group=v2.Resource(name=group),
        topic=v2.Resource(name=topic),
        receipt_handle=handle,
        invisible_duration=milliseconds(invisible_ms),
        message_id="id",
    )


def milliseconds(value_ms: int) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(value_ms)
    return duration
