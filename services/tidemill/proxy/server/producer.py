"""SendMessage, and what else producers call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from tidemill.common.errors import (
    BadRequest,
    BrokerTimeout,
    BrokerUnreachable,
    Forbidden,
    MessageCorrupted,
    MessageNotFound,
    Overloaded,
    ServiceError,
    UnavailableError,
)
from tidemill.message import limits
from tidemill.message.encoding import encode_stored
from tidemill.message.outline import check_send
from tidemill.message.recall_handle import RecallFields
from tidemill.message.rules import accepted_types, check_message, check_type, message_type
from tidemill.message.wire import bytes_field, bytes_header, varint, varint_field
from tidemill.proxy.link.commands import CANCEL_TIMER
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.proxy.server.call import CallStatus, status_of
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tidemill.common.clock import Clock
    from tidemill.proxy.cluster.cluster import BrokerGroup, Cluster, Place
    from tidemill.proxy.link.commands import Appended
    from tidemill.proxy.server.call import Call

_ENCODINGS = frozenset({v2.ENCODING_UNSPECIFIED, v2.IDENTITY, v2.GZIP})
_OK = CallStatus(v2.OK, "OK")
# Headers of SendMessageResponse.entries and SendResultEntry.message_id.
_ENTRY = bytes_header(2)
_ENTRY_MESSAGE_ID = bytes_header(2)


class _Outcome(NamedTuple):
    """What became of one message of a request."""

    status: CallStatus
    queue_offset: int = 0
    recall_handle: str = ""


class _Stored(NamedTuple):
    """Who has stored a message, and what it is there."""

    broker: BrokerGroup
    appended: Appended
    # Whether another broker group, which was asked before, may have it as well.
    may_be_elsewhere: bool = False


if TYPE_CHECKING:
    # Of one message: who stores it, and what becomes of it; or what says both in the end.
    Append = tuple[BrokerGroup, asyncio.Future[Appended]] | tuple[None, asyncio.Future[_Stored]]


class Producer:
    """Answers producers."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock

    def send_message(self, call: Call, request: bytes) -> Awaitable[bytes]:
        """Store the messages of a request; OK means that they are durable.

        A request is refused as a whole when one of its messages is: nothing of it is stored then.
        """
        check_send(request)
        messages = service.SendMessageRequest.FromString(request).messages
        if len(messages) == 1:
            return self._send_one(call, messages)
        return self._send_batch(call, messages)

    async def recall_message(self, call: Call, request: bytes) -> bytes:
        """Cancel a delayed message; OK means that it will never be delivered."""
        recall = service.RecallMessageRequest.FromString(request)
        topic = self._cluster.find_topic(recall.topic.name)
        if v2.DELAY not in accepted_types(topic.type):
            raise BadRequest(f"the topic {topic.name} takes no delayed messages")
        broker, recalled = self._cluster.open_recall(recall.recall_handle, topic.name)
        own_topic = broker.find_topic(topic)
        if own_topic is None:
            raise MessageNotFound("the topic that the message was sent to is gone")
        await broker.link.ask(
            CANCEL_TIMER,
            link_pb2.RecallRequest(timer_id=recalled.timer_id, topic_id=own_topic.id),
            timeout_ms=self._cluster.timeout_ms(call),
        )
        response = service.RecallMessageResponse(
            status=v2.Status(code=v2.OK, message="OK"), message_id=recalled.message_id
        )
        return response.SerializeToString()

    async def _send_batch(self, call: Call, messages: Sequence[v2.Message]) -> bytes:
        """Store several messages, or none."""
        limits.MESSAGES.check_count(len(messages))
        ids = [message.system_properties.message_id for message in messages]
        try:
            topic_name, appends = await self._begin(call, messages)
        except ServiceError as error:
            return _refusal(call, ids, status_of(error))
        del messages  # The link's from here on.
        # Every append ends by itself, at the latest by its timeout.
        try:
            await asyncio.wait([append[1] for append in appends])
        except asyncio.CancelledError:
            for broker, append in appends:
                if broker is None:
                    append.cancel()
            raise
        outcomes = [
            _outcome(topic_name, message_id, append)
            for message_id, append in zip(ids, appends, strict=True)
        ]
        return _response(call, ids, outcomes)

    async def _send_one(self, call: Call, messages: Sequence[v2.Message]) -> bytes:
        """Store the one message of nearly every request."""
        message = messages[0]
        del messages
        cluster = self._cluster
        message_id = message.system_properties.message_id
        try:
            name = message.topic.name
            call.topic = name
            topic = cluster.known_topic(name)
            if topic is None or topic.is_system:
                topic = await self._use_topic(name, call)
            blob = _encode(message, topic, self._clock.wall_ms())
            properties = message.system_properties
            place = cluster.place(topic, properties.message_group)
            may_move = place.may_move and not _has_order(properties)
            may_repeat = _may_repeat(properties)
            # The link's from here on: nothing of the message is kept while it is stored.
            del message, properties
            if may_move:
                anywhere = self._store_anywhere(call, topic, place, blob)
                del blob
                broker, appended, may_be_elsewhere = await anywhere
            else:
                broker, topic_id, queue_id, _ = place
                if not topic_id:
                    topic_id = await cluster.topic_id_at(broker, name, call)
                storing = broker.link.store(
                    topic_id,
                    queue_id,
                    blob,
                    timeout_ms=cluster.timeout_ms(call),
                    may_repeat=may_repeat,
                )
                del blob
                appended, may_be_elsewhere = await storing, False
        except ServiceError as error:
            return _refusal(call, (message_id,), status_of(error))
        queue_offset, due_at_ms = appended
        if due_at_ms:
            stored = _Stored(broker, appended, may_be_elsewhere)
            return _ok_response(message_id, 0, _recall_handle(name, message_id, stored))
        return _ok_response(message_id, queue_offset)

    async def _store_anywhere(
        self, call: Call, topic: link_pb2.TopicConfig, place: Place, blob: bytes
    ) -> _Stored:
        """Store a message at one broker group or, where that fails, at another, within its time.

        A broker that has taken a message and does not say so may have stored it: it is then there
        twice, which is better than a producer that waits for a broker that hangs.
        """
        now_ms = self._clock.monotonic_ms
        end_ms = now_ms() + self._cluster.timeout_ms(call)
        tried: list[BrokerGroup] = []
        unknown: UnavailableError | None = None
        while True:
            left_ms = max(end_ms - now_ms(), 0)
            try:
                appended = await place.broker.link.store(
                    place.topic_id,
                    place.queue_id,
                    blob,
                    timeout_ms=left_ms // 2 if place.may_move else left_ms,
                    may_move=place.may_move,
                )
            except UnavailableError as error:
                tried.append(place.broker)
                if isinstance(error, BrokerTimeout | BrokerUnreachable):
                    unknown = unknown or error
                if not place.may_move or end_ms <= now_ms():
                    # That the last one refused it does not say that nobody has it.
                    raise unknown or error from None
            else:
                return _Stored(place.broker, appended, may_be_elsewhere=unknown is not None)
            try:
                place = self._cluster.place(topic, "", tried=tried)
            except BrokerUnreachable as error:
                # Nobody is left who could take it; one that was asked may have it all the same.
                raise unknown or error from None

    async def _use_topic(self, name: str, call: Call) -> link_pb2.TopicConfig:
        call.topic = name
        topic = self._cluster.known_topic(name) or await self._cluster.use_topic(name, call)
        if topic.is_system:
            raise Forbidden(f"messages get to {name} by the broker only")
        return topic

    async def _find_place(
        self, call: Call, topic: link_pb2.TopicConfig, message: v2.Message
    ) -> Place:
        """Return where a message goes, at a broker group that knows the topic."""
        properties = message.system_properties
        place = self._cluster.place(topic, properties.message_group)
        if not place.topic_id:
            topic_id = await self._cluster.topic_id_at(place.broker, topic.name, call)
            return place._replace(topic_id=topic_id)
        return place._replace(may_move=place.may_move and not _has_order(properties))

    async def _begin(self, call: Call, messages: Sequence[v2.Message]) -> tuple[str, list[Append]]:
        """Begin to store messages; return their topic, and an append for each."""
        if not messages:
            raise MessageCorrupted("the request holds no message")
        name = messages[0].topic.name
        for message in messages[1:]:
            if message.topic.name != name:
                raise MessageCorrupted("the messages of one request belong to one topic")
        topic = await self._use_topic(name, call)
        now_ms = self._clock.wall_ms()
        stored = [_encode(message, topic, now_ms) for message in messages]
        # All have their place before any is stored: a place may refuse, and then nothing is stored.
        places = [await self._find_place(call, topic, message) for message in messages]
        timeout_ms = self._cluster.timeout_ms(call)
        appends: list[Append] = []
        refused_groups: set[str] = set()
        for message, place, blob in zip(messages, places, stored, strict=True):
            message_group = message.system_properties.message_group
            if place.may_move:
                storing = self._store_anywhere(call, topic, place, blob)
                appends.append((None, asyncio.create_task(storing, name="store")))
                continue
            if message_group in refused_groups:
                # Nothing of a message group may overtake what was refused of it.
                append = _refused(Overloaded("the message before it was refused"))
            else:
                append = _append(place, blob, timeout_ms, message)
                if message_group and append.done():
                    refused_groups.add(message_group)
            appends.append((place.broker, append))
        return name, appends


def _append(
    place: Place, blob: bytes, timeout_ms: int, message: v2.Message
) -> asyncio.Future[Appended]:
    """Begin to store one message; a link that is full refuses it, not those before it."""
    may_repeat = _may_repeat(message.system_properties)
    try:
        return place.broker.link.append(
            place.topic_id, place.queue_id, blob, timeout_ms=timeout_ms, may_repeat=may_repeat
        )
    except ServiceError as error:
        return _refused(error)


def _refused(error: ServiceError) -> asyncio.Future[Appended]:
    """Return an append that has ended before it began."""
    refused: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
    refused.set_exception(error)
    return refused


def _outcome(topic_name: str, message_id: str, append: Append) -> _Outcome:
    error = append[1].exception()
    if error is None:
        stored = append[1].result() if append[0] is None else _Stored(append[0], append[1].result())
        queue_offset, due_at_ms = stored.appended
        if due_at_ms:
            return _Outcome(_OK, recall_handle=_recall_handle(topic_name, message_id, stored))
        return _Outcome(_OK, queue_offset)
    if isinstance(error, ServiceError):
        return _Outcome(status_of(error))
    raise error


def _recall_handle(topic_name: str, message_id: str, stored: _Stored) -> str:
    """Return what recalls a delayed message; "" where that could not be promised.

    A handle names one timer, and one that nobody knows of at another broker group would still fire.
    """
    if stored.may_be_elsewhere:
        return ""
    return stored.broker.recall_signer.sign(topic_name, RecallFields(*stored.appended, message_id))


def _may_repeat(properties: v2.SystemProperties) -> bool:
    """Whether a message may be sent again to a broker that may have stored it: it looks first.

    It does not among the timers, and a second one would be a timer that no handle cancels.
    """
    is_delayed = properties.HasField("delivery_timestamp")
    return not is_delayed and properties.message_type != v2.TRANSACTION


def _has_order(properties: v2.SystemProperties) -> bool:
    """Whether it matters which broker group stores a message."""
    return bool(properties.message_group) or properties.message_type == v2.TRANSACTION


def _encode(message: v2.Message, topic: link_pb2.TopicConfig, now_ms: int) -> bytes:
    check_message(message)
    properties = message.system_properties
    kind = message_type(properties)
    check_type(kind, topic.name, topic.type)
    if properties.body_encoding not in _ENCODINGS:
        raise BadRequest(f"the body encoding {properties.body_encoding} is unknown")
    return encode_stored(message, message_type=kind, now_ms=now_ms)


def _refusal(call: Call, ids: Sequence[str], status: CallStatus) -> bytes:
    """Build the answer to a request of which nothing was stored, or nobody knows."""
    return _encode_response(call, ids, status, [_Outcome(status)] * len(ids))


def _response(call: Call, ids: Sequence[str], outcomes: list[_Outcome]) -> bytes:
    """Build the answer to a request whose messages may have ended differently."""
    if len({outcome.status.code for outcome in outcomes}) == 1:
        overall = outcomes[0].status
    else:
        overall = CallStatus(v2.MULTIPLE_RESULTS, "the messages ended differently; see each entry")
    return _encode_response(call, ids, overall, outcomes)


def _encode_response(
    call: Call, ids: Sequence[str], overall: CallStatus, outcomes: list[_Outcome]
) -> bytes:
    call.response_code = overall.code
    entries = [
        service.SendResultEntry(
            status=v2.Status(code=outcome.status.code, message=outcome.status.message),
            message_id=message_id,
            offset=outcome.queue_offset,
            recall_handle=outcome.recall_handle,
        )
        for message_id, outcome in zip(ids, outcomes, strict=True)
    ]
    status = v2.Status(code=overall.code, message=overall.message)
    return service.SendMessageResponse(status=status, entries=entries).SerializeToString()


def _ok_response(message_id: str, queue_offset: int, recall_handle: str = "") -> bytes:
    """Join the answer to the one message of most requests."""
    encoded_id = message_id.encode()
    entry = b"".join(
        (
            OK_STATUS,
            _ENTRY_MESSAGE_ID,
            varint(len(encoded_id)),
            encoded_id,
            varint_field(4, queue_offset),
        )
    )
    if recall_handle:
        entry += bytes_field(5, recall_handle.encode())
    return b"".join((OK_STATUS, _ENTRY, varint(len(entry)), entry))
