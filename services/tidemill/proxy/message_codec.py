"""A message between its two forms: parsed once when it comes in, joined from bytes when it leaves.

    send      Message of a request  ->  stored message (tidemill.common.stored_message)
    receive   stored message + this delivery  ->  ReceiveMessageResponse, without any object

What changes with a delivery (handle, attempt, invisible duration, where and when it was stored) is
appended to the stored system wire inside the one `system_properties` submessage: not every client
merges two of them.
"""

from __future__ import annotations

import struct
from binascii import hexlify
from collections.abc import Iterable
from functools import lru_cache
from hashlib import md5
from itertools import repeat

from tidemill.common import stored_message
from tidemill.common.errors import BadRequest, PropertiesTooLarge
from tidemill.common.receipt_handle import SignedDelivery
from tidemill.common.rpc.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.common.rpc.stubs.apache.rocketmq.v2 import service_pb2 as v2_service
from tidemill.common.rpc.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.proxy.wire import (
    bytes_field,
    bytes_header,
    milliseconds,
    seconds_and_nanos,
    varint,
    varint_header,
)

# Timestamp of the protocol: years 1 to 9999, in seconds of the Unix epoch.
TIMESTAMP_SECONDS_MIN = -62_135_596_800
TIMESTAMP_SECONDS_MAX = 253_402_300_799

_KEY_HASHES_MAX = 65_535  # the count is a u16

# Headers of Message.
_USER_PROPERTY = bytes_header(2)
_SYSTEM_PROPERTIES = bytes_header(3)
_BODY = bytes_header(4)
# Headers of an entry of user_properties.
_ENTRY_KEY = bytes_header(1)
_ENTRY_VALUE = bytes_header(2)
# Headers of SystemProperties: what is stored ...
_TAG = bytes_header(1)
_KEY = bytes_header(2)
_MESSAGE_ID = bytes_header(3)
_MD5_DIGEST = bytes_field(4, bytes([0x08, v2.MD5]) + bytes_header(2) + varint(32) + bytes(32))[:-32]
_BODY_ENCODING = varint_header(5)
_MESSAGE_TYPE = varint_header(6)
_BORN_TIMESTAMP = bytes_header(7)
_BORN_HOST = bytes_header(8)
_MESSAGE_GROUP = bytes_header(17)
_TRACE_CONTEXT = bytes_header(18)
# ... and what a delivery adds.
_STORE_TIMESTAMP = bytes_header(9)
_RECEIPT_HANDLE = bytes_header(12)
_QUEUE_ID = varint_header(13)
_QUEUE_OFFSET = varint_header(14)
_DELIVERY_ATTEMPT = varint_header(16)
# AckMessageResponse.entries, AckMessageResultEntry.status.
_ENTRY = bytes_header(2)
_ENTRY_STATUS = bytes_header(3)
# ReceiveMessageResponse.message.
_MESSAGE = bytes_header(2)

# What a delivery needs of the fixed fields: key count, size of the system and of the user wire.
_SIZES = struct.Struct(">4xH14xII")
assert _SIZES.unpack_from(stored_message.FIXED.pack(1, 0, 0, 7, *[0] * 6, 8, 9, 0, *[0] * 3)) == (
    7,
    8,
    9,
), "the codec reads the layout it was written for"

_cached_tag_hash = lru_cache(maxsize=4096)(stored_message.tag_hash)


@lru_cache(maxsize=4096)
def _text_field(header: bytes, text: str) -> bytes:
    """Encode a field whose values are few: hosts."""
    encoded = text.encode()
    return header + varint(len(encoded)) + encoded


@lru_cache(maxsize=64)
def _kind_fields(encoding: int, message_type: int) -> bytes:
    return _BODY_ENCODING + varint(encoding) + _MESSAGE_TYPE + varint(message_type)


def encode_stored(message: v2.Message, *, message_type: int, now_ms: int) -> bytes:
    """Build the stored message of a message whose names and sizes have been checked."""
    properties = message.system_properties
    message_id = properties.message_id.encode()
    tag = properties.tag.encode()
    group = properties.message_group.encode()
    keys = properties.keys
    born_seconds, born_nanos = _born(properties, now_ms)
    body = message.body
    encoding = properties.body_encoding or v2.IDENTITY

    # The three texts that the engine looks for come first, so that their positions are known.
    parts = [_MESSAGE_ID, varint(len(message_id)), message_id]
    id_at = position = 1 + len(parts[1])
    position += len(message_id)
    tag_at = group_at = 0
    if tag:
        length = varint(len(tag))
        tag_at = position + 1 + len(length)
        position = tag_at + len(tag)
        parts += (_TAG, length, tag)
    if group:
        length = varint(len(group))
        group_at = position + 2 + len(length)
        parts += (_MESSAGE_GROUP, length, group)
    for key in keys:
        encoded_key = key.encode()
        parts += (_KEY, varint(len(encoded_key)), encoded_key)
    checksum = hexlify(md5(body, usedforsecurity=False).digest()).upper()
    born = seconds_and_nanos(born_seconds, born_nanos)
    parts += (
        _MD5_DIGEST,
        checksum,
        _kind_fields(encoding, message_type),
        _BORN_TIMESTAMP,
        varint(len(born)),
        born,
    )
    if born_host := properties.born_host:
        parts.append(_text_field(_BORN_HOST, born_host))
    if properties.HasField("trace_context"):
        trace_context = properties.trace_context.encode()
        parts += (_TRACE_CONTEXT, varint(len(trace_context)), trace_context)
    system_wire = b"".join(parts)
    if len(system_wire) > stored_message.SYSTEM_WIRE_SIZE_MAX or len(keys) >= _KEY_HASHES_MAX:
        raise PropertiesTooLarge(
            f"the system properties take {len(system_wire)} bytes;"
            f" at most {stored_message.SYSTEM_WIRE_SIZE_MAX} are stored"
        )

    user_wire = _user_wire(message)
    key_hashes = stored_message.encode_key_hash("id", message_id)
    if keys:
        encode_key_hash = stored_message.encode_key_hash
        key_hashes += b"".join([encode_key_hash("key", key.encode()) for key in keys])
    fixed = stored_message.FIXED.pack(
        stored_message.VERSION,
        message_type,
        encoding,
        1 + len(keys),
        id_at,
        len(message_id),
        tag_at,
        len(tag),
        group_at,
        len(group),
        len(system_wire),
        len(user_wire),
        len(body),
        _cached_tag_hash(properties.tag) if tag else 0,
        born_seconds * 1000 + born_nanos // 1_000_000,
        0,
    )
    return b"".join((fixed, key_hashes, system_wire, user_wire, _BODY, varint(len(body)), body))


def _born(properties: v2.SystemProperties, now_ms: int) -> tuple[int, int]:
    """Return the born time as sent, or `now_ms` where the client sent none."""
    if not properties.HasField("born_timestamp"):
        return now_ms // 1000, now_ms % 1000 * 1_000_000
    born = properties.born_timestamp
    seconds, nanos = born.seconds, born.nanos
    if not (
        TIMESTAMP_SECONDS_MIN <= seconds <= TIMESTAMP_SECONDS_MAX and 0 <= nanos < 1_000_000_000
    ):
        raise BadRequest("born_timestamp is outside the years 1 to 9999")
    return seconds, nanos


def _user_wire(message: v2.Message) -> bytes:
    if not message.user_properties:
        return b""
    parts: list[bytes] = []
    for key, value in message.user_properties.items():
        key_text, value_text = key.encode(), value.encode()
        entry = b"".join(
            (
                _ENTRY_KEY,
                varint(len(key_text)),
                key_text,
                _ENTRY_VALUE,
                varint(len(value_text)),
                value_text,
            )
        )
        parts += (_USER_PROPERTY, varint(len(entry)), entry)
    return b"".join(parts)


def encode_received(
    batch: link_pb2.Batch, *, topic_wire: bytes, store_host: bytes, signed: SignedDelivery
) -> list[bytes]:
    """Join the ReceiveMessageResponse of each message in `batch`, in its order.

    `topic_wire` is the `topic` field of Message with its header, `store_host` the text of where it
    is stored.
    """
    invisible = milliseconds(batch.visible_at_ms - batch.popped_at_ms)
    of_batch = b"".join(
        (
            bytes_field(10, store_host),
            _QUEUE_ID,
            varint(batch.queue_id),
            bytes_field(15, invisible),
            _RECEIPT_HANDLE,
            varint(signed.handle_size),
        )
    )
    of_batch_size = len(of_batch)
    topic_size = len(topic_wire)
    responses = []
    last_stored_at_ms, stored_at = -1, b""
    origins: Iterable[str] = batch.origin_topics or repeat("", len(batch.indexes))
    for index, queue_offset, stored_at_ms, attempt, blob, origin in zip(
        batch.indexes,
        batch.queue_offsets,
        batch.stored_at_ms,
        batch.delivery_attempts,
        batch.blobs,
        origins,
        strict=True,
    ):
        key_count, system_size, user_size = _SIZES.unpack_from(blob)
        system_at = stored_message.FIXED_SIZE + key_count * stored_message.KEY_HASH_SIZE
        user_at = system_at + system_size
        body_wire_at = user_at + user_size
        if stored_at_ms != last_stored_at_ms:
            # Messages of one round have one time.
            last_stored_at_ms = stored_at_ms
            stored_at = milliseconds(stored_at_ms)
            stored_at = _STORE_TIMESTAMP + varint(len(stored_at)) + stored_at
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
        if origin:
            of_delivery += _dead_letter_queue(blob, origin)
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


def _dead_letter_queue(blob: bytes, origin_topic: str) -> bytes:
    message_id = stored_message.message_id_of(blob)
    return bytes_field(
        20, bytes_field(1, origin_topic.encode()) + bytes_field(2, message_id.encode())
    )


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

    A result repeats its entry, id and handle in the same fields, and has its status in a third.
    """
    parts = [overall]
    for entry, status in zip(entries, statuses, strict=True):
        if entry.HasField("lite_topic"):
            entry.ClearField("lite_topic")  # The one field that a result has not.
        wire = entry.SerializeToString()
        # The status is field 3 here and field 1 everywhere else: only its header differs.
        size = len(wire) + len(status)
        parts += (_ENTRY, varint(size), wire, _ENTRY_STATUS, status[1:])
    return b"".join(parts)
