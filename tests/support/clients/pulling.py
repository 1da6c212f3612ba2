"""A pull client: the stubs of the public protocol with a real proxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

METADATA: tuple[tuple[str, str], ...] = (("x-mq-client-id", "puller"), ("x-mq-language", "PYTHON"))
TIMEOUT_S = 30.0
SENT_AT_ONCE = 256  # the most messages of a request


@dataclass
class PullAnswer:
    """The answer to one pull."""

    code: int = 0
    text: str = ""
    next_offset: int = -1
    messages: list[v2.Message] = field(default_factory=list)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    @property
    def offsets(self) -> list[int]:
        return [message.system_properties.queue_offset for message in self.messages]


class PullClient:
    """A client for pulls, offsets and sends."""

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        broker: str = "broker-0",
        namespace: str = "",
        header_namespace: str = "",
    ) -> None:
        self.stub = service_pb2_grpc.MessagingServiceStub(channel)
        self._broker = broker
        self._namespace = namespace
        self._metadata = METADATA
        if header_namespace:
            self._metadata += (("x-mq-namespace", header_namespace),)

    def resource(self, name: str) -> v2.Resource:
        return v2.Resource(resource_namespace=self._namespace, name=name)

    def queue(self, topic: str, queue_id: int = 0, broker: str = "") -> v2.MessageQueue:
        return v2.MessageQueue(
            topic=self.resource(topic), id=queue_id, broker=v2.Broker(name=broker or self._broker)
        )

    def pull(
        self,
        topic: str,
        offset: int,
        *,
        queue_id: int = 0,
        broker: str = "",
        batch_size: int = 32,
        tags: str = "*",
        wait_s: int = 0,
        group: str = "",
    ) -> PullAnswer:
        request = service.PullMessageRequest(
            group=self.resource(group) if group else None,
            message_queue=self.queue(topic, queue_id, broker),
            offset=offset,
            batch_size=batch_size,
            filter_expression=v2.FilterExpression(type=v2.TAG, expression=tags),
            long_polling_timeout=Duration(seconds=wait_s),
        )
        pulled = PullAnswer()
        for item in self.stub.PullMessage(request, metadata=self._metadata, timeout=TIMEOUT_S):
            match item.WhichOneof("content"):
                case "status":
                    pulled.code, pulled.text = item.status.code, item.status.message
                case "message":
                    pulled.messages.append(item.message)
                case "next_offset":
                    pulled.next_offset = item.next_offset
        return pulled

    def query(
        self,
        topic: str,
        policy: v2.QueryOffsetPolicy.ValueType,
        *,
        queue_id: int = 0,
        at_ms: int | None = None,
    ) -> service.QueryOffsetResponse:
        request = service.QueryOffsetRequest(
            message_queue=self.queue(topic, queue_id), query_offset_policy=policy
        )
        if at_ms is not None:
            request.timestamp.CopyFrom(
                Timestamp(seconds=at_ms // 1000, nanos=at_ms % 1000 * 1_000_000)
            )
        return self.stub.QueryOffset(request, metadata=self._metadata, timeout=TIMEOUT_S)

    def get_offset(self, group: str, topic: str, *, queue_id: int = 0) -> service.GetOffsetResponse:
        request = service.GetOffsetRequest(
            group=self.resource(group), message_queue=self.queue(topic, queue_id)
        )
        return self.stub.GetOffset(request, metadata=self._metadata, timeout=TIMEOUT_S)

    def update_offset(
        self, group: str, topic: str, offset: int, *, queue_id: int = 0, broker: str = ""
    ) -> service.UpdateOffsetResponse:
        request = service.UpdateOffsetRequest(
            group=self.resource(group),
            message_queue=self.queue(topic, queue_id, broker),
            offset=offset,
        )
        return self.stub.UpdateOffset(request, metadata=self._metadata, timeout=TIMEOUT_S)

    def send(self, topic: str, body: bytes, **properties: Any) -> service.SendResultEntry:
        """Send one message with the properties of `message_of`."""
        [entry] = self.send_all([message_of(topic, body, **properties)])
        return entry

    def send_all(self, messages: Sequence[v2.Message]) -> list[service.SendResultEntry]:
        """Send messages, many per request."""
        entries: list[service.SendResultEntry] = []
        for message in messages if self._namespace else ():
            message.topic.resource_namespace = self._namespace
        for first in range(0, len(messages), SENT_AT_ONCE):
            request = service.SendMessageRequest(messages=messages[first : first + SENT_AT_ONCE])
            response = self.stub.SendMessage(request, metadata=self._metadata, timeout=TIMEOUT_S)
            assert response.status.code == v2.OK, response
            entries += response.entries
        return entries

    def receive(
        self, topic: str, group: str, *, wait_s: int = 0, invisible_s: int = 30
    ) -> list[v2.Message]:
        request = service.ReceiveMessageRequest(
            group=self.resource(group),
            message_queue=self.queue(topic),
            batch_size=32,
            invisible_duration=Duration(seconds=invisible_s),
            long_polling_timeout=Duration(seconds=wait_s),
        )
        answer = self.stub.ReceiveMessage(request, metadata=self._metadata, timeout=TIMEOUT_S)
        return [item.message for item in answer if item.HasField("message")]

    def announce(self, topic: str, group: str) -> None:
        """Announce the settings of a consumer that has not polled yet."""
        entry = v2.SubscriptionEntry(
            topic=self.resource(topic), expression=v2.FilterExpression(type=v2.TAG, expression="*")
        )
        settings = v2.Settings(
            client_type=v2.PUSH_CONSUMER,
            subscription=v2.Subscription(group=self.resource(group), subscriptions=[entry]),
        )
        commands = iter([service.TelemetryCommand(settings=settings)])
        for answer in self.stub.Telemetry(commands, metadata=self._metadata, timeout=TIMEOUT_S):
            assert answer.status.code == v2.OK, answer

    def forward_to_dead_letters(self, topic: str, group: str, message: v2.Message) -> None:
        request = service.ForwardMessageToDeadLetterQueueRequest(
            group=self.resource(group),
            topic=self.resource(topic),
            receipt_handle=message.system_properties.receipt_handle,
            message_id=message.system_properties.message_id,
        )
        response = self.stub.ForwardMessageToDeadLetterQueue(request, metadata=self._metadata)
        assert response.status.code == v2.OK, response


def message_of(
    topic: str,
    body: bytes,
    *,
    tag: str = "",
    message_id: str = "",
    due_at_ms: int = 0,
    keys: tuple[str, ...] = (),
    properties: dict[str, str] | None = None,
) -> v2.Message:
    """Return a message as a producer sends it."""
    message = v2.Message(topic=v2.Resource(name=topic), body=body, user_properties=properties or {})
    system = message.system_properties
    system.message_id = message_id or f"id-{body[:40].hex()}"
    system.keys.extend(keys)
    system.born_host = "here"
    system.body_encoding = v2.IDENTITY
    system.message_type = v2.DELAY if due_at_ms else v2.NORMAL
    if tag:
        system.tag = tag
    if due_at_ms:
        system.delivery_timestamp.FromMilliseconds(due_at_ms)
    return message
