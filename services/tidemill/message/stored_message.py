"""The stored message: the proxy builds it once, and every delivery copies its bytes.

    ┌──────────────┬────────────────────┬─────────────┬───────────┬───────────┐
    │ fixed fields │ key hashes, u64 x k│ system wire │ user wire │ body wire │   big-endian
    └──────────────┴────────────────────┴─────────────┴───────────┴───────────┘

The three wires are protobuf bytes of `apache.rocketmq.v2.Message`, as consumers receive them:

    system wire   the stable fields of `SystemProperties`: message id, tag, keys, digest, encoding,
                  type, born time and host, message group, trace context. The header of the
                  submessage is missing, because a delivery appends its own fields. The delivery
                  timestamp of type DELAY is missing, because the fixed fields have it.
    user wire     the `user_properties` entries with their headers
    body wire     the `body` field with its header

The fixed fields repeat the values that the engine needs, so that it never parses protobuf.

    fixed fields
     0  version u8 │ message_type u8 │ body_encoding u8 │ reserved u8
     4  key_count u16 │ id_at u16 │ id_size u16 │ tag_at u16 │ tag_size u16 │ group_at u16
    16  group_size u16
    18  reserved u16 │ system_size u32 │ user_size u32 │ body_size u32 (the body without its header)
    32  tag_hash i64 │ born_at_ms i64 │ due_at_ms i64
    56

`..._at` are positions in the system wire. A tag hash of 0 means that there is no tag. The index
finds a message by its key hashes: first `key_hash("id", message_id)`, then `key_hash("key", key)`
for each key. So key_count is 1 + the number of keys.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

VERSION = 1
FIXED = struct.Struct(">BBBxHHHHHHHxxIIIqqq")
FIXED_SIZE = 56  # bytes
assert FIXED.size == FIXED_SIZE, "the stored message is part of the disk format"
KEY_HASH_SIZE = 8  # bytes
SYSTEM_WIRE_SIZE_MAX = 65_535  # bytes; positions in it are 16 bits wide
MESSAGE_TYPE_AT = 1  # position of message_type in the fixed fields
# Values of MessageType of the protocol.
TYPE_FIFO = 2
TYPE_DELAY = 3  # the message waits until it is due
TYPE_TRANSACTION = 4  # the message waits until its producer has decided
BODY_SIZE_AT = 28  # position of body_size
TAG_HASH_AT = 32  # position of tag_hash
KEY_COUNT_AT = 4  # position of key_count
DUE_AT = 48  # position of due_at_ms
_KINDS = {"id": b"id", "key": b"key"}  # kinds of index entries
BORN_AT = 40  # position of born_at_ms
KEY_COUNT = struct.Struct(">H")
_WIRE_SIZES = struct.Struct(">4xH14xII")  # key_count, system_size, user_size
_tuple = tuple.__new__  # makes a named tuple without a call of Python code


class StoredMessage(NamedTuple):
    """The fixed fields of a stored message, decoded."""

    version: int
    message_type: int
    body_encoding: int
    key_count: int
    id_at: int
    id_size: int
    tag_at: int
    tag_size: int
    group_at: int
    group_size: int
    system_size: int
    user_size: int
    body_size: int
    tag_hash: int
    born_at_ms: int
    due_at_ms: int

    @property
    def system_at(self) -> int:
        """The position of the system wire in the blob."""
        return FIXED_SIZE + self.key_count * KEY_HASH_SIZE

    @property
    def user_at(self) -> int:
        """The position of the user wire in the blob."""
        return self.system_at + self.system_size

    @property
    def body_wire_at(self) -> int:
        """The position of the body wire, which extends to the end of the blob."""
        return self.user_at + self.user_size


def decode(blob: bytes | memoryview) -> StoredMessage:
    """Decode the fixed fields of `blob`.

    Raises ValueError if the blob is not a stored message: it is too short, has another version, or
    its sizes do not fit. The positions are checked too, so that slices with them stay inside the
    blob.
    """
    message = decode_head(blob)
    if message.body_wire_at + message.body_size > len(blob):
        raise ValueError("the sizes in a stored message exceed it")
    return message


def decode_head(blob: bytes | memoryview) -> StoredMessage:
    """Decode as `decode` does; the body may be missing."""
    if len(blob) < FIXED_SIZE:
        raise ValueError(f"a stored message has at least {FIXED_SIZE} bytes, not {len(blob)}")
    fields = FIXED.unpack_from(blob)
    version, _, _, key_count, id_at, id_size, tag_at, tag_size, group_at, group_size = fields[:10]
    system_size, user_size = fields[10:12]
    if version != VERSION:
        raise ValueError(f"unknown version {version} of a stored message")
    if FIXED_SIZE + key_count * KEY_HASH_SIZE + system_size + user_size > len(blob):
        raise ValueError("the sizes in a stored message exceed it")
    if max(id_at + id_size, tag_at + tag_size, group_at + group_size) > system_size:
        raise ValueError("a position in a stored message lies outside its system wire")
    return _tuple(StoredMessage, fields)


def wires_of(blob: bytes | memoryview) -> tuple[bytes | memoryview, bytes | memoryview]:
    """Return the system wire and the user wire of `blob`; much cheaper than `decode`.

    Raises ValueError if `blob` is not a stored message.
    """
    if len(blob) < FIXED_SIZE or blob[0] != VERSION:
        raise ValueError("this is no stored message")
    key_count, system_size, user_size = _WIRE_SIZES.unpack_from(blob)
    system_at = FIXED_SIZE + key_count * KEY_HASH_SIZE
    user_at = system_at + system_size
    end = user_at + user_size
    if end > len(blob):
        raise ValueError("the sizes in a stored message exceed it")
    return blob[system_at:user_at], blob[user_at:end]


def is_well_formed(blob: bytes) -> bool:
    """Return whether the engine can read `blob`; much cheaper than `decode`."""
    if len(blob) < FIXED_SIZE or blob[0] != VERSION:
        return False
    (key_count,) = KEY_COUNT.unpack_from(blob, KEY_COUNT_AT)
    return len(blob) >= FIXED_SIZE + int(key_count) * KEY_HASH_SIZE


def message_id_of(blob: bytes | memoryview) -> str:
    """Return the message id in `blob`; the body may be missing."""
    message = decode_head(blob)
    begin = message.system_at + message.id_at
    return str(blob[begin : begin + message.id_size], "utf-8")


def without_content(blob: bytes | memoryview) -> bytes:
    """Return a stored message with the key hashes, the message id and the times of `blob` alone.

    Raises ValueError if `blob` is not a stored message.
    """
    message = decode_head(blob)
    version, type_, encoding, key_count, id_at, id_size = message[:6]
    tag_hash, born_at_ms, due_at_ms = message[-3:]
    # Not by `_replace`, which takes longer than all else: packing comes here for each message.
    fixed = FIXED.pack(
        version,
        type_,
        encoding,
        key_count,
        0,
        id_size,
        0,
        0,
        0,
        0,
        id_size,
        0,
        0,
        tag_hash,
        born_at_ms,
        due_at_ms,
    )
    system_at = FIXED_SIZE + key_count * KEY_HASH_SIZE
    id_at += system_at
    return b"".join((fixed, blob[FIXED_SIZE:system_at], blob[id_at : id_at + id_size]))


def has_key(blob: bytes | memoryview, key: str) -> bool:
    """Return whether a message with matching key hashes has this key."""
    try:
        fields = decode(blob)
    except ValueError:
        return False
    # Keys are field 2 of the system wire. The hash has already matched.
    return key.encode() in bytes(blob[fields.system_at : fields.user_at])


def tag_of(blob: bytes | memoryview) -> str:
    """Return the tag in `blob`; empty if there is none."""
    message = decode(blob)
    begin = message.system_at + message.tag_at
    return str(blob[begin : begin + message.tag_size], "utf-8")


def tag_hash(tag: str) -> int:
    """Hash a tag to a signed 64-bit number that is never 0; 0 means no tag."""
    digest = blake2b(tag.encode(), digest_size=8, person=b"tag").digest()
    return int.from_bytes(digest, "big", signed=True) or 1


def key_hash(kind: str, text: str) -> int:
    """Hash a message id (`kind` "id") or key ("key") to 64 unsigned bits for the index."""
    return int.from_bytes(encode_key_hash(kind, text.encode()), "big")


def encode_key_hash(kind: str, text: bytes) -> bytes:
    """Return the `key_hash` of encoded text in its stored form."""
    return blake2b(text, digest_size=KEY_HASH_SIZE, person=_KINDS[kind]).digest()
