"""Messages and events as Arrow batches, with only the requested columns.

The cost of a row limits the speed of a source. A column is therefore one comprehension over the
messages of a pull, and no row becomes an object.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from google.protobuf.message import DecodeError

from tidemill.message import stored_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.bodies import unpacked_parts

# By MessageType of the protocol.
TYPE_NAMES: Final = {
    v2.NORMAL: "normal",
    v2.FIFO: "fifo",
    v2.DELAY: "delay",
    v2.TRANSACTION: "transaction",
    v2.LITE: "lite",
    v2.PRIORITY: "priority",
}
EVENT_NAMES: Final[dict[int, str]] = {
    value: name.removeprefix("EVENT_KIND_").lower().replace("_", "-")
    for name, value in pb.EventKind.items()
    if value != pb.EVENT_KIND_UNSPECIFIED
}
# Event name of a row for a part of a log that is lost or damaged.
UNREADABLE: Final = "unreadable"
ENCODING: Final = "body_encoding"  # among system_properties
PACKED: Final = v2.Encoding.Name(v2.GZIP)  # the value of a packed body
_US: Final = 1_000_000  # microseconds per second


class _MessageBatch:
    """Messages of one batch, their unpacked bodies, and the properties that they share."""

    __slots__ = ("bodies", "broker", "messages", "namespace", "system", "topic")

    def __init__(
        self,
        messages: Sequence[v2.Message],
        bodies: list[bytes],
        *,
        topic: str,
        broker: str,
        namespace: str,
    ) -> None:
        self.messages = messages
        self.bodies = bodies
        self.system = [message.system_properties for message in messages]
        self.topic, self.broker, self.namespace = topic, broker, namespace


def message_batches(
    messages: Sequence[v2.Message],
    *,
    schema: pa.Schema,
    topic: str,
    broker: str,
    namespace: str,
    decodes_body: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one queue with the columns of `schema`.

    The result is one batch, or several if unpacked bodies are large.
    """
    decodes = decodes_body and "body" in schema.names
    for part, bodies in _with_bodies(messages, decodes=decodes):
        pull = _MessageBatch(
            messages[part], bodies, topic=topic, broker=broker, namespace=namespace
        )
        yield pa.RecordBatch.from_arrays(
            [pa.array(_COLUMNS[field.name](pull), field.type) for field in schema], schema=schema
        )


def _with_bodies(
    messages: Sequence[v2.Message], *, decodes: bool
) -> Iterator[tuple[slice, list[bytes]]]:
    are_packed = [
        decodes and message.system_properties.body_encoding == v2.GZIP for message in messages
    ]
    return unpacked_parts([message.body for message in messages], are_packed)


def _time(instant: Any) -> int:
    return instant.seconds * _US + instant.nanos // 1000  # type: ignore[no-any-return]  # A Timestamp.


def _due(system: v2.SystemProperties) -> int | None:
    return _time(system.delivery_timestamp) if system.HasField("delivery_timestamp") else None


def _fired(system: v2.SystemProperties) -> int | None:
    return ms(system.provenance.fired_at_ms) if system.HasField("provenance") else None


def _other_properties(system: v2.SystemProperties) -> list[tuple[str, str]]:
    """Return the properties without a column."""
    rest = []
    if system.body_encoding:
        rest.append((ENCODING, v2.Encoding.Name(system.body_encoding)))
    if system.HasField("body_digest"):
        rest.append(("body_digest_type", v2.DigestType.Name(system.body_digest.type)))
        rest.append(("body_digest", system.body_digest.checksum))
    if system.HasField("lite_topic"):
        rest.append(("lite_topic", system.lite_topic))
    provenance = system.provenance
    if provenance.timer_id:
        rest.append(("timer_id", str(provenance.timer_id)))
    if provenance.origin_topic:
        rest.append(("consumer_group", provenance.consumer_group))
        rest.append(("origin_queue_id", str(provenance.origin_queue_id)))
        rest.append(("origin_queue_offset", str(provenance.origin_queue_offset)))
    return rest


def _size(message: v2.Message) -> int:
    # Without bodies, the broker reports their size.
    return len(message.body) or message.system_properties.provenance.body_size


def _optional(value: str) -> str | None:
    return value or None


def _origin_topic(system: v2.SystemProperties) -> str | None:
    return _optional(system.provenance.origin_topic) or _optional(system.dead_letter_queue.topic)


def _origin_id(system: v2.SystemProperties) -> str | None:
    # A copy keeps the id of its message.
    is_copy = system.provenance.origin_topic or system.HasField("dead_letter_queue")
    return (system.dead_letter_queue.message_id or system.message_id) if is_copy else None


_COLUMNS: Final[dict[str, Callable[[_MessageBatch], list[Any]]]] = {
    "topic": lambda pull: [pull.topic] * len(pull.messages),
    "namespace": lambda pull: [pull.namespace] * len(pull.messages),
    "broker": lambda pull: [pull.broker] * len(pull.messages),
    "queue_id": lambda pull: [each.queue_id for each in pull.system],
    "queue_offset": lambda pull: [each.queue_offset for each in pull.system],
    "commitlog_offset": lambda pull: [
        each.provenance.log_offset if each.HasField("provenance") else None for each in pull.system
    ],
    "message_id": lambda pull: [each.message_id for each in pull.system],
    "message_type": lambda pull: [TYPE_NAMES.get(each.message_type) for each in pull.system],
    "tag": lambda pull: [each.tag if each.HasField("tag") else None for each in pull.system],
    "keys": lambda pull: [list(each.keys) for each in pull.system],
    "message_group": lambda pull: [_optional(each.message_group) for each in pull.system],
    "priority": lambda pull: [
        each.priority if each.HasField("priority") else None for each in pull.system
    ],
    "properties": lambda pull: [list(each.user_properties.items()) for each in pull.messages],
    "system_properties": lambda pull: [_other_properties(each) for each in pull.system],
    "body": lambda pull: pull.bodies,
    "body_size": lambda pull: [_size(each) for each in pull.messages],
    "body_crc32": lambda pull: [zlib.crc32(each.body) for each in pull.messages],
    "born_host": lambda pull: [_optional(each.born_host) for each in pull.system],
    "store_host": lambda pull: [_optional(each.store_host) for each in pull.system],
    "born_timestamp": lambda pull: [_time(each.born_timestamp) for each in pull.system],
    "store_timestamp": lambda pull: [_time(each.store_timestamp) for each in pull.system],
    "due_timestamp": lambda pull: [_due(each) for each in pull.system],
    "fired_timestamp": lambda pull: [_fired(each) for each in pull.system],
    "delivery_attempt": lambda pull: [
        each.delivery_attempt if each.HasField("delivery_attempt") else None for each in pull.system
    ],
    "origin_topic": lambda pull: [_origin_topic(each) for each in pull.system],
    "origin_message_id": lambda pull: [_origin_id(each) for each in pull.system],
    "dlq_reason": lambda pull: [_optional(each.provenance.reason) for each in pull.system],
    "trace_parent": lambda pull: [_optional(each.trace_context) for each in pull.system],
}


def event_batch(events: Sequence[pb.Event], *, schema: pa.Schema, broker: str) -> pa.RecordBatch:
    """Return events of one broker group as a batch with the columns of `schema`."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array([_EVENT_COLUMNS[field.name](event, broker) for event in events], field.type)
            for field in schema
        ],
        schema=schema,
    )


def unreadable_batch(
    *, schema: pa.Schema, broker: str, start: int, end: int, size: int, what: str
) -> pa.RecordBatch:
    """Return one row for `size` unreadable bytes between two positions of a log."""
    row = {
        "event_id": f"{broker}:{start}:{UNREADABLE}",
        "event": UNREADABLE,
        "broker": broker,
        "log_position": start,
        "end_offset": end,
        "body_size": size,
        "detail": what,
    }
    return pa.RecordBatch.from_arrays(
        [pa.array([row.get(field.name)], field.type) for field in schema], schema=schema
    )


def ms(value: int) -> int | None:
    """Return milliseconds as the microseconds of a timestamp; None for 0."""
    return value * 1000 if value else None


_EVENT_COLUMNS: Final[dict[str, Callable[[pb.Event, str], Any]]] = {
    "event_id": lambda event, broker: f"{broker}:{event.position}:{event.index}",
    "event": lambda event, _: EVENT_NAMES.get(event.kind),
    "event_ts": lambda event, _: event.at_ms * 1000,
    "topic": lambda event, _: event.topic,
    "broker": lambda _, broker: broker,
    "queue_id": lambda event, _: event.queue_id,
    "queue_offset": lambda event, _: event.queue_offset,
    "message_id": lambda event, _: event.message_id or None,
    "consumer_group": lambda event, _: event.consumer_group or None,
    "attempt": lambda event, _: event.attempt or None,
    "due_timestamp": lambda event, _: ms(event.due_at_ms),
    "detail": lambda event, _: event.reason or event.client_id or None,
    "log_position": lambda event, _: event.position,
    "event_index": lambda event, _: event.index,
    "topic_id": lambda event, _: event.topic_id,
    "client_id": lambda event, _: event.client_id or None,
    "reason": lambda event, _: event.reason or None,
    "origin_topic": lambda event, _: event.origin_topic or None,
    "origin_queue_id": lambda event, _: event.origin_queue_id if event.origin_topic else None,
    "origin_queue_offset": lambda event, _: (
        event.origin_queue_offset if event.origin_topic else None
    ),
    "end_offset": lambda event, _: event.end_offset or None,
    "timer_id": lambda event, _: event.timer_id or None,
    "half_id": lambda event, _: event.half_id or None,
    "body_size": lambda event, _: event.body_size,
    "body_crc32": lambda event, _: event.body_crc32,
    "delivery": lambda event, broker: (
        f"{broker}:{event.delivery_id}:{event.delivery_index}" if event.delivery_id else None
    ),
}


def _listing(
    items: Sequence[Any],
    schema: pa.Schema,
    columns: dict[str, Callable[[Any, str], Any]],
    broker: str,
) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([columns[field.name](item, broker) for item in items], field.type)
            for field in schema
        ],
        schema=schema,
    )


def pending_batches(
    items: Sequence[pb.Pending], schema: pa.Schema, broker: str, *, decodes_body: bool
) -> Iterator[pa.RecordBatch]:
    """Yield pending delayed messages: one batch, or several if unpacked bodies are large.

    The columns of the message are null if its broker could not read it.
    """
    messages = [_pending_message(item.message) for item in items]
    filled = [v2.Message() if message is None else message for message in messages]
    decodes = decodes_body and "body" in schema.names
    for part, bodies in _with_bodies(filled, decodes=decodes):
        pull = _MessageBatch(filled[part], bodies, topic="", broker=broker, namespace="")
        values = _pending_values(items[part], messages[part], pull)
        yield pa.RecordBatch.from_arrays(
            [pa.array(values(field.name), field.type) for field in schema], schema=schema
        )


def _pending_values(
    items: Sequence[pb.Pending], messages: Sequence[v2.Message | None], pull: _MessageBatch
) -> Callable[[str], list[Any]]:
    """Return a function from a column's name to its values."""

    def values(name: str) -> list[Any]:
        if name in _PENDING_COLUMNS:
            return [_PENDING_COLUMNS[name](item, pull.broker) for item in items]
        pairs = zip(_COLUMNS[name](pull), messages, strict=True)
        return [value if message is not None else None for value, message in pairs]

    return values


def _pending_message(blob: bytes) -> v2.Message | None:
    """Return a decoded stored message; None if it is damaged or was not requested."""
    if not blob:
        return None
    try:
        stored = stored_message.decode(blob)
        message = v2.Message.FromString(blob[stored.user_at :])
        message.system_properties.MergeFromString(blob[stored.system_at : stored.user_at])
    except (ValueError, DecodeError):
        return None
    return message


def in_flight_batch(items: Sequence[pb.InFlight], schema: pa.Schema, broker: str) -> pa.RecordBatch:
    """Return deliveries in flight as a batch."""
    return _listing(items, schema, _IN_FLIGHT_COLUMNS, broker)


def progress_batch(items: Sequence[pb.Progress], schema: pa.Schema, broker: str) -> pa.RecordBatch:
    """Return the progress of groups as a batch."""
    return _listing(items, schema, _GROUP_COLUMNS, broker)


_PENDING_COLUMNS: Final[dict[str, Callable[[pb.Pending, str], Any]]] = {
    "topic": lambda item, _: item.topic or None,
    "broker": lambda _, broker: broker,
    "timer_id": lambda item, _: item.timer_id,
    "message_id": lambda item, _: item.message_id or None,
    "due_timestamp": lambda item, _: ms(item.due_at_ms),
    "scheduled_timestamp": lambda item, _: ms(item.scheduled_at_ms),
    "log_position": lambda item, _: item.log_position,
    "wheel_slot": lambda item, _: item.wheel_slot if item.HasField("wheel_slot") else None,
}

_IN_FLIGHT_COLUMNS: Final[dict[str, Callable[[pb.InFlight, str], Any]]] = {
    "consumer_group": lambda item, _: item.consumer_group,
    "topic": lambda item, _: item.topic,
    "broker": lambda _, broker: broker,
    "queue_id": lambda item, _: item.queue_id,
    "queue_offset": lambda item, _: item.queue_offset,
    "message_id": lambda item, _: item.message_id or None,
    "attempt": lambda item, _: item.attempt,
    "popped_at": lambda item, _: ms(item.popped_at_ms),
    "invisible_until": lambda item, _: ms(item.invisible_until_ms),
    "client_id": lambda item, _: item.client_id or None,
    "delivery": lambda item, broker: f"{broker}:{item.delivery_id}:{item.delivery_index}",
    "is_retry": lambda item, _: item.is_retry,
}


def _offset(value: int) -> int | None:
    return value if value >= 0 else None


def _lag(item: pb.Progress) -> int:
    # A group that pulls has no commit offset.
    at = item.commit_offset if item.commit_offset >= 0 else item.pull_offset
    return max(0, item.max_offset - max(at, item.min_offset))


_GROUP_COLUMNS: Final[dict[str, Callable[[pb.Progress, str], Any]]] = {
    "consumer_group": lambda item, _: item.consumer_group,
    "topic": lambda item, _: item.topic,
    "broker": lambda _, broker: broker,
    "queue_id": lambda item, _: item.queue_id,
    "min_offset": lambda item, _: item.min_offset,
    "max_offset": lambda item, _: item.max_offset,
    "commit_offset": lambda item, _: _offset(item.commit_offset),
    "pop_offset": lambda item, _: _offset(item.pop_offset),
    "pull_offset": lambda item, _: _offset(item.pull_offset),
    "lag": lambda item, _: _lag(item),
    "oldest_unacked_ts": lambda item, _: ms(item.oldest_unacked_at_ms),
    "is_retry": lambda item, _: item.is_retry,
}
