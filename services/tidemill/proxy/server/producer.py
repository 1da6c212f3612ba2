"""SendMessage, and what else producers call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidemill.common.errors import (
    BadRequest,
    Forbidden,
    MessageCorrupted,
    Overloaded,
    ServiceError,
)
from tidemill.common.message_encoding import encode_stored
from tidemill.common.message_rules import check_message, check_type, message_type
from tidemill.common.queue_choice import RoundRobin, queue_of_group
from tidemill.common.rpc.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.common.rpc.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.common.wire import bytes_header, varint, varint_field
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.proxy.server.call import Status, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tidemill.common.clock import Clock
    from tidemill.common.rpc.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
    from tidemill.proxy.backend import Backend
    from tidemill.proxy.server.call import Call

_ENCODINGS = frozenset({v2.ENCODING_UNSPECIFIED, v2.IDENTITY, v2.GZIP})
_OK = Status(v2.OK, "OK")
# Headers of SendMessageResponse.entries and SendResultEntry.message_id.
_ENTRY = bytes_header(2)
_ENTRY_MESSAGE_ID = bytes_header(2)


class Producer:
    """Answers producers."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._queues = RoundRobin()

    def send_message(self, call: Call, request: bytes) -> Awaitable[bytes]:
        """Store the messages of a request; OK means that they are durable.

        A request is refused as a whole when one of its messages is: nothing of it is stored then.
        """
        messages = service.SendMessageRequest.FromString(request).messages
        if len(messages) == 1:
            return self._send_one(call, messages)
        return self._send_batch(call, messages)

    async def _send_batch(self, call: Call, messages: Sequence[v2.Message]) -> bytes:
        """Store several messages, or none."""
        try:
            _ = call.client_id
            appends = await self._begin(call, messages)
        except ServiceError as error:
            return _refusal(call, messages, status_of(error))
        # Every append ends by itself, at the latest by its timeout.
        await asyncio.wait(appends)
        return _response(call, messages, [_outcome(append) for append in appends])

    async def _send_one(self, call: Call, messages: Sequence[v2.Message]) -> bytes:
        """Store the one message of nearly every request."""
        message = messages[0]
        backend = self._backend
        try:
            _ = call.client_id
            name = message.topic.name
            topic = backend.known_topic(name)
            if topic is None or topic.is_system:
                topic = await self._use_topic(name, call)
            blob = _encode(message, topic, self._clock.wall_ms())
            queue_id = self._queue(message, topic)
            queue_offset = await backend.link.append(
                topic.id, queue_id, blob, timeout_ms=backend.timeout_ms(call)
            )
        except ServiceError as error:
            return _refusal(call, messages, status_of(error))
        return _ok_response(message.system_properties.message_id, queue_offset)

    async def _use_topic(self, name: str, call: Call) -> link_pb2.TopicConfig:
        topic = self._backend.known_topic(name) or await self._backend.use_topic(name, call)
        if topic.is_system:
            raise Forbidden(f"messages get to {name} by the broker only")
        return topic

    async def _begin(self, call: Call, messages: Sequence[v2.Message]) -> list[asyncio.Future[int]]:
        if not messages:
            raise MessageCorrupted("the request holds no message")
        name = messages[0].topic.name
        for message in messages[1:]:
            if message.topic.name != name:
                raise MessageCorrupted("the messages of one request belong to one topic")
        topic = await self._use_topic(name, call)
        now_ms = self._clock.wall_ms()
        stored = [_encode(message, topic, now_ms) for message in messages]
        timeout_ms = self._backend.timeout_ms(call)
        appends = []
        refused_groups: set[str] = set()
        for message, blob in zip(messages, stored, strict=True):
            message_group = message.system_properties.message_group
            if message_group in refused_groups:
                # Nothing of a message group may overtake what was refused of it.
                appends.append(_refused(Overloaded("the message before it was refused")))
                continue
            append = self._append(topic, message, blob, timeout_ms)
            if message_group and append.done():
                refused_groups.add(message_group)
            appends.append(append)
        return appends

    def _append(
        self, topic: link_pb2.TopicConfig, message: v2.Message, blob: bytes, timeout_ms: int
    ) -> asyncio.Future[int]:
        """Begin to store one message; a link that is full refuses it, not those before it."""
        queue_id = self._queue(message, topic)
        try:
            return self._backend.link.append(topic.id, queue_id, blob, timeout_ms=timeout_ms)
        except ServiceError as error:
            return _refused(error)

    def _queue(self, message: v2.Message, topic: link_pb2.TopicConfig) -> int:
        """Choose the queue; the client's own choice is not a promise that clients keep alike."""
        message_group = message.system_properties.message_group
        if message_group:
            return queue_of_group(message_group, queues=topic.queues)
        return self._queues.choose_queue(topic.queues)


def _refused(error: ServiceError) -> asyncio.Future[int]:
    """Return an append that has ended before it began."""
    refused: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    refused.set_exception(error)
    return refused


def _encode(message: v2.Message, topic: link_pb2.TopicConfig, now_ms: int) -> bytes:
    check_message(message)
    properties = message.system_properties
    kind = message_type(properties)
    check_type(kind, topic.name, topic.type)
    if properties.body_encoding not in _ENCODINGS:
        raise BadRequest(f"the body encoding {properties.body_encoding} is unknown")
    return encode_stored(message, message_type=kind, now_ms=now_ms)


def _outcome(append: asyncio.Future[int]) -> tuple[Status, int]:
    error = append.exception()
    if error is None:
        return _OK, append.result()
    if isinstance(error, ServiceError):
        return status_of(error), 0
    raise error


def _refusal(call: Call, messages: Sequence[v2.Message], status: Status) -> bytes:
    """Build the answer to a request of which nothing was stored, or nobody knows."""
    return _encode_response(call, messages, status, [(status, 0)] * len(messages))


def _response(
    call: Call, messages: Sequence[v2.Message], outcomes: list[tuple[Status, int]]
) -> bytes:
    """Build the answer to a request whose messages may have ended differently."""
    if len({status.code for status, _ in outcomes}) == 1:
        overall = outcomes[0][0]
    else:
        overall = Status(v2.MULTIPLE_RESULTS, "the messages ended differently; see each entry")
    return _encode_response(call, messages, overall, outcomes)


def _encode_response(
    call: Call,
    messages: Sequence[v2.Message],
    overall: Status,
    outcomes: list[tuple[Status, int]],
) -> bytes:
    call.response_code = overall.code
    entries = [
        service.SendResultEntry(
            status=v2.Status(code=status.code, message=status.message),
            message_id=message.system_properties.message_id,
            offset=queue_offset,
        )
        for message, (status, queue_offset) in zip(messages, outcomes, strict=True)
    ]
    status = v2.Status(code=overall.code, message=overall.message)
    return service.SendMessageResponse(status=status, entries=entries).SerializeToString()


def _ok_response(message_id: str, queue_offset: int) -> bytes:
    """Join the answer to the one message of most requests."""
    encoded_id = message_id.encode()
    entry = b"".join(
        (OK_STATUS, _ENTRY_MESSAGE_ID, varint(len(encoded_id)), encoded_id,
         varint_field(4, queue_offset))
    )  # fmt: skip
    return b"".join((OK_STATUS, _ENTRY, varint(len(entry)), entry))
