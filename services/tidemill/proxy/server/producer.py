"""SendMessage, and what else producers call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from tidemill.common.errors import (
    BadRequest,
    Forbidden,
    MessageCorrupted,
    Overloaded,
    ServiceError,
)
from tidemill.message.encoding import encode_stored
from tidemill.message.queue_choice import RoundRobin, queue_of_group
from tidemill.message.recall_handle import Recall
from tidemill.message.rules import accepted_types, check_message, check_type, message_type
from tidemill.message.wire import bytes_field, bytes_header, varint, varint_field
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.proxy.server.call import Status, status_of
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tidemill.common.clock import Clock
    from tidemill.proxy.backend import Backend
    from tidemill.proxy.broker_link import Appended
    from tidemill.proxy.server.call import Call
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

_ENCODINGS = frozenset({v2.ENCODING_UNSPECIFIED, v2.IDENTITY, v2.GZIP})
_OK = Status(v2.OK, "OK")
# Headers of SendMessageResponse.entries and SendResultEntry.message_id.
_ENTRY = bytes_header(2)
_ENTRY_MESSAGE_ID = bytes_header(2)


class _Outcome(NamedTuple):
    """What became of one message of a request."""

    status: Status
    queue_offset: int = 0
    recall_handle: str = ""


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

    async def recall_message(self, call: Call, request: bytes) -> bytes:
        """Cancel a delayed message; OK means that it will never be delivered."""
        recall = service.RecallMessageRequest.FromString(request)
        _ = call.client_id
        topic = self._backend.find_topic(recall.topic.name)
        if v2.DELAY not in accepted_types(topic.type):
            raise BadRequest(f"the topic {topic.name} takes no delayed messages")
        signer = self._backend.link.configuration.recall_signer
        recalled = signer.open(recall.recall_handle, topic.name)
        await self._backend.link.cancel_timer(
            recalled.timer_id, topic.id, timeout_ms=self._backend.timeout_ms(call)
        )
        response = service.RecallMessageResponse(
            status=v2.Status(code=v2.OK, message="OK"), message_id=recalled.message_id
        )
        return response.SerializeToString()

    async def _send_batch(self, call: Call, messages: Sequence[v2.Message]) -> bytes:
        """Store several messages, or none."""
        try:
            _ = call.client_id
            appends = await self._begin(call, messages)
        except ServiceError as error:
            return _refusal(call, messages, status_of(error))
        # Every append ends by itself, at the latest by its timeout.
        await asyncio.wait(appends)
        outcomes = [
            self._outcome(message, append)
            for message, append in zip(messages, appends, strict=True)
        ]
        return _response(call, messages, outcomes)

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
            appended = await backend.link.append(
                topic.id, queue_id, blob, timeout_ms=backend.timeout_ms(call)
            )
        except ServiceError as error:
            return _refusal(call, messages, status_of(error))
        message_id = message.system_properties.message_id
        queue_offset, due_at_ms = appended
        if due_at_ms:
            return _ok_response(message_id, 0, self._recall_handle(message, appended))
        return _ok_response(message_id, queue_offset)

    async def _use_topic(self, name: str, call: Call) -> link_pb2.TopicConfig:
        topic = self._backend.known_topic(name) or await self._backend.use_topic(name, call)
        if topic.is_system:
            raise Forbidden(f"messages get to {name} by the broker only")
        return topic

    async def _begin(
        self, call: Call, messages: Sequence[v2.Message]
    ) -> list[asyncio.Future[Appended]]:
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
    ) -> asyncio.Future[Appended]:
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

    def _outcome(self, message: v2.Message, append: asyncio.Future[Appended]) -> _Outcome:
        error = append.exception()
        if error is None:
            queue_offset, due_at_ms = append.result()
            if due_at_ms:
                return _Outcome(_OK, recall_handle=self._recall_handle(message, append.result()))
            return _Outcome(_OK, queue_offset)
        if isinstance(error, ServiceError):
            return _Outcome(status_of(error))
        raise error

    def _recall_handle(self, message: v2.Message, scheduled: Appended) -> str:
        recall = Recall(*scheduled, message.system_properties.message_id)
        signer = self._backend.link.configuration.recall_signer
        return signer.sign(message.topic.name, recall)


def _refused(error: ServiceError) -> asyncio.Future[Appended]:
    """Return an append that has ended before it began."""
    refused: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
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


def _refusal(call: Call, messages: Sequence[v2.Message], status: Status) -> bytes:
    """Build the answer to a request of which nothing was stored, or nobody knows."""
    return _encode_response(call, messages, status, [_Outcome(status)] * len(messages))


def _response(call: Call, messages: Sequence[v2.Message], outcomes: list[_Outcome]) -> bytes:
    """Build the answer to a request whose messages may have ended differently."""
    if len({outcome.status.code for outcome in outcomes}) == 1:
        overall = outcomes[0].status
    else:
        overall = Status(v2.MULTIPLE_RESULTS, "the messages ended differently; see each entry")
    return _encode_response(call, messages, overall, outcomes)


def _encode_response(
    call: Call,
    messages: Sequence[v2.Message],
    overall: Status,
    outcomes: list[_Outcome],
) -> bytes:
    call.response_code = overall.code
    entries = [
        service.SendResultEntry(
            status=v2.Status(code=outcome.status.code, message=outcome.status.message),
            message_id=message.system_properties.message_id,
            offset=outcome.queue_offset,
            recall_handle=outcome.recall_handle,
        )
        for message, outcome in zip(messages, outcomes, strict=True)
    ]
    status = v2.Status(code=overall.code, message=overall.message)
    return service.SendMessageResponse(status=status, entries=entries).SerializeToString()


def _ok_response(message_id: str, queue_offset: int, recall_handle: str = "") -> bytes:
    """Join the answer to the one message of most requests."""
    encoded_id = message_id.encode()
    entry = b"".join(
        (OK_STATUS, _ENTRY_MESSAGE_ID, varint(len(encoded_id)), encoded_id,
         varint_field(4, queue_offset))
    )  # fmt: skip
    if recall_handle:
        entry += bytes_field(5, recall_handle.encode())
    return b"".join((OK_STATUS, _ENTRY, varint(len(entry)), entry))
