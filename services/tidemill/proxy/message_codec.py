"""Encoding of responses from bytes: stored messages with the fields of a delivery, and statuses.

The fields of a delivery (handle, attempt, invisible duration, place and time of storage) are
appended to the stored system wire inside the one `system_properties` submessage, because not every
client merges two of them. The codec builds no object for a message.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable
from functools import lru_cache
from itertools import repeat

from tidemill.message import stored_message
from tidemill.message.namespaces import without_namespace
from tidemill.message.receipt_handle import HANDLE_CHARS, SignedDelivery
from tidemill.message.resources import ResourceName
from tidemill.message.wire import (
    bytes_field,
    bytes_header,
    milliseconds,
    varint,
    varint_field,
    varint_header,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as v2_service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

# Header of Message.
_SYSTEM_PROPERTIES = bytes_header(3)
# Headers of SystemProperties that a delivery adds.
_RECEIPT_HANDLE = bytes_header(12) + varint(HANDLE_CHARS)
_QUEUE_ID = varint_header(13)
_QUEUE_OFFSET = varint_header(14)
_DELIVERY_ATTEMPT = varint_header(16)
_PROVENANCE = varint(1000 << 3 | 2)
# Headers of Provenance.
_LOG_OFFSET = varint_header(1)
_FIRED_AT_MS = varint_header(7)
_OF_BODY_SIZE = varint_header(9)
_DELAY = int(v2.DELAY)
# AckMessageResponse.entries, AckMessageResultEntry.status.
_ENTRY = bytes_header(2)
_ENTRY_STATUS = bytes_header(3)
# ReceiveMessageResponse.message.
_MESSAGE = bytes_header(2)
# Header of a message in responses to reads.
OF_PULL = bytes_header(2)  # PullMessageResponse.message
OF_READ = bytes_header(1)  # ReadMessagesReply.messages
JOINED_A_SLICE = 64  # messages of a page, a fifth of a millisecond

_NO_CAUSE = (b"", "")

_BODY_SIZE = struct.Struct(">I")
# Fixed fields that a delivery needs: type, key count, sizes of the system and the user wire, due
# time.
_FIELDS = struct.Struct(">xBxxH14xII20xq")
assert _FIELDS.unpack_from(stored_message.FIXED.pack(1, 3, 0, 7, *[0] * 6, 8, 9, 0, 0, 0, 6)) == (
    3,
    7,
    8,
    9,
    6,
), "the codec reads the layout it was written for"


def encode_received(
    batch: link_pb2.Batch, *, topic: ResourceName, store_host: bytes, signed: SignedDelivery
) -> list[bytes]:
    """Join the ReceiveMessageResponse of each message in `batch`, in its order.

    `store_host` names the broker group.
    """
    topic_wire = encode_topic(topic.namespace, topic.bare)
    of_batch = (
        _of_queue(store_host, batch.queue_id)
        + _invisible_duration(batch.visible_at_ms - batch.popped_at_ms)
        + _RECEIPT_HANDLE
    )
    of_batch_size = len(of_batch)
    topic_size = len(topic_wire)
    responses = []
    last_stored_at_ms, stored_at = -1, b""
    for index, queue_offset, stored_at_ms, attempt, blob, origin in _batch_rows(batch):
        message_type, key_count, system_size, user_size, due_at_ms = _FIELDS.unpack_from(blob)
        system_at = stored_message.FIXED_SIZE + key_count * stored_message.KEY_HASH_SIZE
        user_at = system_at + system_size
        body_wire_at = user_at + user_size
        if stored_at_ms != last_stored_at_ms:
            # Messages of one round have the same time.
            last_stored_at_ms = stored_at_ms
            stored_at = bytes_field(9, milliseconds(stored_at_ms))
        # The handle first: `of_batch` ends with its header.
        of_delivery = b"".join(
            (
                signed.handle(index),
                stored_at,
                _QUEUE_OFFSET,
                varint(queue_offset),
                _DELIVERY_ATTEMPT,
                varint(attempt),
            )
        )
        if due_at_ms or message_type == _DELAY:
            of_delivery += bytes_field(11, milliseconds(due_at_ms))
        if origin:
            of_delivery += _dead_letter_queue(blob, without_namespace(topic.namespace, origin))
        added_size = of_batch_size + len(of_delivery)
        system_length = varint(system_size + added_size)
        size = topic_size + len(blob) - system_at + 1 + len(system_length) + added_size
        responses.append(
            b"".join(
                (
                    _MESSAGE,
                    varint(size),
                    topic_wire,
                    blob[user_at:body_wire_at],
                    _SYSTEM_PROPERTIES,
                    system_length,
                    blob[system_at:user_at],
                    of_batch,
                    of_delivery,
                    blob[body_wire_at:],
                )
            )
        )
    return responses


def encode_read(
    items: list[bytes], *, next_offset: int, min_offset: int, end_offset: int, gone_from: int = -1
) -> bytes:
    """Join a ReadMessagesReply of its messages; `gone_from`: offset of the first expired one."""
    ending = (
        varint_field(2, next_offset) + varint_field(3, min_offset) + varint_field(4, end_offset)
    )
    if gone_from >= 0:
        ending += varint_field(5, gone_from) + varint_field(6, 1)
    return b"".join((*items, ending))


def join_pulled(
    reply: link_pb2.PullReply,
    *,
    header: bytes,
    topic: ResourceName,
    store_host: bytes,
    queue_id: int,
) -> Generator[None, None, list[bytes]]:
    """Join each message of a pull, in its order, as the field `header` of a response.

    A pulled message has no fields of a delivery. It has its place and its `Provenance`. A pull may
    have a thousand messages, so this yields between slices.
    """
    of_queue = _of_queue(store_host, queue_id)
    topic_wire = encode_topic(topic.namespace, topic.bare)
    responses = []
    last_stored_at_ms, stored_at = -1, b""
    causes = _causes(reply, topic.namespace)
    for number, row in enumerate(_pulled_rows(reply)):
        queue_offset, log_offset, stored_at_ms, attempt, blob = row
        if number % JOINED_A_SLICE == JOINED_A_SLICE - 1:
            yield
        message_type, key_count, system_size, user_size, due_at_ms = _FIELDS.unpack_from(blob)
        system_at = stored_message.FIXED_SIZE + key_count * stored_message.KEY_HASH_SIZE
        user_at = system_at + system_size
        body_wire_at = user_at + user_size
        if stored_at_ms != last_stored_at_ms:
            last_stored_at_ms = stored_at_ms
            stored_at = bytes_field(9, milliseconds(stored_at_ms))
        provenance = _LOG_OFFSET + varint(log_offset)
        if len(blob) == body_wire_at:
            (body_size,) = _BODY_SIZE.unpack_from(blob, stored_message.BODY_SIZE_AT)
            provenance += _OF_BODY_SIZE + varint(body_size)
        of_cause, origin = causes.get(number, _NO_CAUSE)
        if of_cause:
            provenance += of_cause
        elif message_type == _DELAY and attempt == 1:
            # The message was already due on arrival, so it has no timer.
            provenance += _FIRED_AT_MS + varint(stored_at_ms)
        added = [of_queue, stored_at, _QUEUE_OFFSET, varint(queue_offset)]
        added += (_DELIVERY_ATTEMPT, varint(attempt))
        if due_at_ms or message_type == _DELAY:
            added.append(bytes_field(11, milliseconds(due_at_ms)))
        if origin:
            added.append(_dead_letter_queue(blob, origin))
        added += (_PROVENANCE, varint(len(provenance)), provenance)
        of_message = b"".join(added)
        system_length = varint(system_size + len(of_message))
        size = len(topic_wire) + len(blob) - system_at + 1 + len(system_length) + len(of_message)
        responses.append(
            b"".join(
                (
                    header,
                    varint(size),
                    topic_wire,
                    blob[user_at:body_wire_at],
                    _SYSTEM_PROPERTIES,
                    system_length,
                    blob[system_at:user_at],
                    of_message,
                    blob[body_wire_at:],
                )
            )
        )
    return responses


def encode_next_offset(offset: int) -> bytes:
    """Encode the PullMessageResponse that ends every pull."""
    return varint_header(3) + varint(offset)


def _batch_rows(batch: link_pb2.Batch) -> Iterable[tuple[int, int, int, int, bytes, str]]:
    """Return index, queue offset, store time, attempt, blob and origin topic per message."""
    return zip(
        batch.indexes,
        batch.queue_offsets,
        batch.stored_at_ms,
        batch.delivery_attempts,
        batch.blobs,
        batch.origin_topics or repeat("", len(batch.indexes)),
        strict=True,
    )


def _pulled_rows(reply: link_pb2.PullReply) -> Iterable[tuple[int, int, int, int, bytes]]:
    """Return queue offset, log offset, store time, attempt and blob per message."""
    return zip(
        reply.queue_offsets,
        reply.log_offsets,
        reply.stored_at_ms,
        reply.delivery_attempts,
        reply.blobs,
        strict=True,
    )


def _causes(reply: link_pb2.PullReply, namespace: str) -> dict[int, tuple[bytes, str]]:
    """Return the encoded Provenance and the origin topic of copies, by number of the message.

    The names are those of a client of this namespace.
    """
    causes = {}
    rows = zip(reply.provenance_of, reply.provenances, reply.dead_letter_origins, strict=True)
    for number, encoded, origin in rows:
        shown = encoded
        if namespace:
            provenance = v2.Provenance.FromString(encoded)
            provenance.consumer_group = without_namespace(namespace, provenance.consumer_group)
            provenance.origin_topic = without_namespace(namespace, provenance.origin_topic)
            shown = provenance.SerializeToString()
        causes[number] = shown, without_namespace(namespace, origin)
    return causes


def _dead_letter_queue(blob: bytes, origin_topic: str) -> bytes:
    message_id = stored_message.message_id_of(blob)
    return bytes_field(
        20, bytes_field(1, origin_topic.encode()) + bytes_field(2, message_id.encode())
    )


@lru_cache(maxsize=1024)
def _of_queue(store_host: bytes, queue_id: int) -> bytes:
    """Encode the place of storage of the messages of a delivery."""
    return bytes_field(10, store_host) + _QUEUE_ID + varint(queue_id)


@lru_cache(maxsize=1024)
def _invisible_duration(duration_ms: int) -> bytes:
    return bytes_field(15, milliseconds(duration_ms))


@lru_cache(maxsize=1024)
def encode_topic(namespace: str, name: str) -> bytes:
    """Encode the `topic` field of Message with its header."""
    resource = bytes_field(1, namespace.encode()) if namespace else b""
    return bytes_field(1, resource + bytes_field(2, name.encode()))


def encode_status(code: int, message: str) -> bytes:
    """Encode field 1 of every response of the protocol: its Status."""
    return bytes_field(1, varint_header(1) + varint(code) + bytes_field(2, message.encode()))


OK_STATUS = encode_status(v2.OK, "OK")


def encode_delivery_timestamp(now_ms: int) -> bytes:
    """Encode the ReceiveMessageResponse that ends every receive."""
    return bytes_field(3, milliseconds(now_ms))


def encode_acks(
    entries: Iterable[v2_service.AckMessageEntry], statuses: Iterable[bytes], overall: bytes
) -> bytes:
    """Encode an AckMessageResponse out of a request's entries and the encoded status of each.

    A result has the id and handle of its entry in the same fields, and its status in a third.
    """
    parts = [overall]
    for entry, status in zip(entries, statuses, strict=True):
        if entry.HasField("lite_topic"):
            entry.ClearField("lite_topic")  # The only field that a result does not have.
        wire = entry.SerializeToString()
        # The status is field 3 here and field 1 everywhere else: only its header differs.
        size = len(wire) + len(status)
        parts += (_ENTRY, varint(size), wire, _ENTRY_STATUS, status[1:])
    return b"".join(parts)
