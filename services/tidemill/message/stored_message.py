"""The stored message: what the proxy makes of a message once, and what every delivery copies.

    ┌──────────────┬────────────────────┬─────────────┬───────────┬───────────┐
    │ fixed fields │ key hashes, u64 x k│ system wire │ user wire │ body wire │   big-endian
    └──────────────┴────────────────────┴─────────────┴───────────┴───────────┘

The three wires are protobuf bytes of `apache.rocketmq.v2.Message`, as consumers will get them:
system wire holds the stable fields of `SystemProperties` (message id, tag, keys, digest, encoding,
type, born time and host, message group, trace context) without the submessage's own header, because
a delivery joins its own fields to them, and the delivery timestamp of a message of type DELAY,
which the fixed fields hold; user wire holds the `user_properties` entries and body wire
the `body` field, both with their headers. The fixed fields repeat what the engine needs, so that it
never parses protobuf.

    fixed fields
     0  version u8 │ message_type u8 │ body_encoding u8 │ reserved u8
     4  key_count u16 │ id_at u16 │ id_size u16 │ tag_at u16 │ tag_size u16 │ group_at u16
    16  group_size u16
    18  reserved u16 │ system_size u32 │ user_size u32 │ body_size u32 (the body without its header)
    32  tag_hash i64 │ born_at_ms i64 │ due_at_ms i64
    56

`..._at` are positions inside the system wire. A tag hash of 0 says that there is no tag. The key
hashes are what the index finds the message by: first `key_hash("id", message_id)`, then one
`key_hash("key", key)` a key, so key_count is 1 + the number of keys.
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
SYSTEM_WIRE_SIZE_MAX = 65_535  # bytes: positions inside it are 16 bits wide
MESSAGE_TYPE_AT = 1  # position of message_type among the fixed fields
TYPE_DELAY = 3  # MessageType.DELAY of the protocol: such a message waits until it is due
BODY_SIZE_AT = 28  # position of body_size
TAG_HASH_AT = 32  # position of tag_hash
KEY_COUNT_AT = 4  # position of key_count
DUE_AT = 48  # position of due_at_ms
_KINDS = {"id": b"id", "key": b"key"}  # of what the index finds
BORN_AT = 40  # position of born_at_ms
KEY_COUNT = struct.Struct(">H")


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
        """Position of the system wire in the blob."""
        return FIXED_SIZE + self.key_count * KEY_HASH_SIZE

    @property
    def user_at(self) -> int:
        """Position of the user wire in the blob."""
        return self.system_at + self.system_size

    @property
    def body_wire_at(self) -> int:
        """Position of the body wire, which runs to the end of the blob."""
        return self.user_at + self.user_size


def decode(blob: bytes | memoryview) -> StoredMessage:
    """Decode the fixed fields of `blob`.

    Raises ValueError when the blob cannot be a stored message: too short, another version, or sizes
    that do not add up. Positions are checked, so that slices made with them stay inside the blob.
    """
    message = decode_head(blob)
    if message.body_wire_at + message.body_size > len(blob):
        raise ValueError("the sizes in a stored message exceed it")
    return message


def decode_head(blob: bytes | memoryview) -> StoredMessage:
    """Decode as `decode` a blob whose body may have been left out."""
    if len(blob) < FIXED_SIZE:
        raise ValueError(f"a stored message has at least {FIXED_SIZE} bytes, not {len(blob)}")
    message = StoredMessage._make(FIXED.unpack_from(blob))
    if message.version != VERSION:
        raise ValueError(f"unknown version {message.version} of a stored message")
    if message.body_wire_at > len(blob):
        raise ValueError("the sizes in a stored message exceed it")
    limit = message.system_size
    if (
        message.id_at + message.id_size > limit
        or message.tag_at + message.tag_size > limit
        or message.group_at + message.group_size > limit
    ):
        raise ValueError("a position in a stored message lies outside its system wire")
    return message


def is_well_formed(blob: bytes) -> bool:
    """Return whether `blob` holds what the engine reads of it, at a fraction of `decode`."""
    if len(blob) < FIXED_SIZE or blob[0] != VERSION:
        return False
    (key_count,) = KEY_COUNT.unpack_from(blob, KEY_COUNT_AT)
    return len(blob) >= FIXED_SIZE + int(key_count) * KEY_HASH_SIZE


def message_id_of(blob: bytes | memoryview) -> str:
    """Return the message id in `blob`, whose body may have been left out."""
    message = decode_head(blob)
    begin = message.system_at + message.id_at
    return str(blob[begin : begin + message.id_size], "utf-8")


def has_key(blob: bytes | memoryview, key: str) -> bool:
    """Return whether a message whose key hashes match has this key."""
    try:
        fields = decode(blob)
    except ValueError:
        return False
    # Keys stand in the system wire as field 2; the hash has matched already.
    return key.encode() in bytes(blob[fields.system_at : fields.user_at])


def tag_of(blob: bytes | memoryview) -> str:
    """Return the tag in `blob`, empty where there is none."""
    message = decode(blob)
    begin = message.system_at + message.tag_at
    return str(blob[begin : begin + message.tag_size], "utf-8")


def tag_hash(tag: str) -> int:
    """Hash a tag to a signed 64-bit number that is never 0; 0 stands for no tag."""
    digest = blake2b(tag.encode(), digest_size=8, person=b"tag").digest()
    return int.from_bytes(digest, "big", signed=True) or 1


def key_hash(kind: str, text: str) -> int:
    """Hash a message id (`kind` "id") or key ("key") for the index, unsigned 64 bits."""
    return int.from_bytes(encode_key_hash(kind, text.encode()), "big")


def encode_key_hash(kind: str, text: bytes) -> bytes:
    """Return `key_hash` of encoded text as it stands in a stored message."""
    return blake2b(text, digest_size=KEY_HASH_SIZE, person=_KINDS[kind]).digest()
