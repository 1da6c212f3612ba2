"""Encoding of a protocol message as a stored message, once, when it arrives.

The caller has checked names and sizes (`tidemill.message.rules`).
"""

from __future__ import annotations

from binascii import hexlify
from functools import lru_cache
from hashlib import md5

from tidemill.common.errors import BadRequest, IllegalDeliveryTime, PropertiesTooLarge
from tidemill.message import limits, stored_message
from tidemill.message.wire import (
    bytes_field,
    bytes_header,
    seconds_and_nanos,
    varint,
    varint_header,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

# Timestamps of the protocol: years 1 to 9999, in seconds of the Unix epoch.
TIMESTAMP_SECONDS_MIN = -62_135_596_800
TIMESTAMP_SECONDS_MAX = 253_402_300_799

# A committed half message may be delayed, too.
_TYPES_WITH_DUE_TIME = frozenset({v2.DELAY, v2.TRANSACTION})
_KEY_HASHES_MAX = 65_535  # the count is 16 bits

# Field headers of Message.
_USER_PROPERTY = bytes_header(2)
_BODY = bytes_header(4)
# Field headers of an entry of user_properties.
_ENTRY_KEY = bytes_header(1)
_ENTRY_VALUE = bytes_header(2)
# Field headers of SystemProperties.
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
_PRIORITY = varint_header(22)

# Tags are few and short. A tag of kilobytes is allowed and would waste the cache.
_CACHED_CHARS_MAX = 128
_cached_tag_hash = lru_cache(maxsize=4096)(stored_message.tag_hash)


def _tag_hash(tag: str) -> int:
    if len(tag) <= _CACHED_CHARS_MAX:
        return _cached_tag_hash(tag)
    return stored_message.tag_hash(tag)


@lru_cache(maxsize=4096)
def _text_field(header: bytes, text: str) -> bytes:
    """Encode a field with few different and short values: hosts."""
    encoded = text.encode()
    return header + varint(len(encoded)) + encoded


@lru_cache(maxsize=64)
def _kind_fields(encoding: int, message_type: int) -> bytes:
    return _BODY_ENCODING + varint(encoding) + _MESSAGE_TYPE + varint(message_type)


def encode_stored(message: v2.Message, *, message_type: int, now_ms: int) -> bytes:
    """Build the stored message of a message with checked names and sizes.

    It is one flat function because every send calls it.

    A message of type DELAY without a delivery timestamp is due in 1970, until code that knows its
    delay sets the time. Raises IllegalDeliveryTime, BadRequest, PropertiesTooLarge.
    """
    properties = message.system_properties
    message_id = properties.message_id.encode()
    tag = properties.tag.encode()
    group = properties.message_group.encode()
    keys = properties.keys
    born_seconds, born_nanos = _born(properties, now_ms)
    body = message.body
    encoding = properties.body_encoding or v2.IDENTITY

    # The three texts that the engine needs come first, so that their positions are known.
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
        limits.TRACE_CONTEXT.check_text(properties.trace_context)
        trace_context = properties.trace_context.encode()
        parts += (_TRACE_CONTEXT, varint(len(trace_context)), trace_context)
    if properties.HasField("priority"):
        # Also a 0: the consumer gets what the producer sent.
        parts += (_PRIORITY, varint(properties.priority))
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
        _tag_hash(properties.tag) if tag else 0,
        born_seconds * 1000 + born_nanos // 1_000_000,
        _due_at_ms(properties) if message_type in _TYPES_WITH_DUE_TIME else 0,
    )
    return b"".join((fixed, key_hashes, system_wire, user_wire, _BODY, varint(len(body)), body))


def _born(properties: v2.SystemProperties, now_ms: int) -> tuple[int, int]:
    """Return the born time of the client, or `now_ms` if the client sent none."""
    if not properties.HasField("born_timestamp"):
        return now_ms // 1000, now_ms % 1000 * 1_000_000
    born = properties.born_timestamp
    seconds, nanos = born.seconds, born.nanos
    if not (
        TIMESTAMP_SECONDS_MIN <= seconds <= TIMESTAMP_SECONDS_MAX and 0 <= nanos < 1_000_000_000
    ):
        raise BadRequest("born_timestamp is outside the years 1 to 9999")
    return seconds, nanos


def _due_at_ms(properties: v2.SystemProperties) -> int:
    """Return the delivery timestamp in milliseconds, rounded up."""
    due = properties.delivery_timestamp
    seconds, nanos = due.seconds, due.nanos
    if not (0 <= seconds <= TIMESTAMP_SECONDS_MAX and 0 <= nanos < 1_000_000_000):
        raise IllegalDeliveryTime(
            f"a delivery timestamp has 0 to {TIMESTAMP_SECONDS_MAX} seconds, the years 1970 to"
            f" 9999, and 0 to 999999999 nanos, not {seconds} and {nanos}"
        )
    return seconds * 1000 + -(-nanos // 1_000_000)


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
