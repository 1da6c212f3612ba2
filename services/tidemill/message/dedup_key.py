"""Dedup keys: where a message has its key, and the broker group that owns a key (ADR 0087).

A key is the user property `dedup-key`, or the message id. The broker reads it from the stored
message, so every send is checked, whichever proxy it came through.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple
from zlib import crc32

from tidemill.common.errors import IllegalPropertyKey
from tidemill.message import stored_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

DEDUP_PROPERTY: Final = "dedup-key"
KEY_BYTES_MAX: Final = 255
# An entry of `user_properties` with this key has these bytes.
_PROPERTY_FIELD: Final = b"\n\x09dedup-key\x12"
# Of the fixed fields: number of keys, places and sizes of id and message group, sizes of the wires.
_FIELDS = struct.Struct(">4xHHH4xHHxxIII").unpack_from
# Makes a named tuple without a call of Python code: every keyed send makes one.
_tuple = tuple.__new__


def check_key(key: bytes) -> bytes:
    """Return a dedup key of a user property. Raises IllegalPropertyKey.

    No user property has control characters: `rules.check_properties` rejects them.
    """
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise IllegalPropertyKey(
            f"the property {DEDUP_PROPERTY} has 1 to {KEY_BYTES_MAX} bytes of UTF-8, not {len(key)}"
        )
    return key


class KeyFields(NamedTuple):
    """What deduplication reads of a stored message."""

    message_id: bytes
    message_group: bytes
    key: bytes | None  # the user property, unchecked
    body_crc: int  # CRC-32


def read_fields(blob: bytes) -> KeyFields:
    """Read a stored message. It is one flat function because every keyed send calls it.

    Raises ValueError if `blob` is not a stored message.
    """
    size = len(blob)
    if size < stored_message.FIXED_SIZE:
        raise ValueError("a stored message has more bytes")
    key_count, id_at, id_size, group_at, group_size, system, user, body = _FIELDS(blob)
    system_at = stored_message.FIXED_SIZE + key_count * stored_message.KEY_HASH_SIZE
    user_at = system_at + system
    end = user_at + user
    if end + body > size:
        raise ValueError("the sizes in a stored message exceed it")
    id_at += system_at
    key = None
    if user:
        at = blob.find(_PROPERTY_FIELD, user_at, end)
        if at == user_at + 2:
            # The first property, and shorter than 128 bytes with its header.
            at += len(_PROPERTY_FIELD)
            key = blob[at + 1 : at + 1 + blob[at]]
        elif at >= 0:
            key = property_of(blob)
    group = b""
    if group_size:
        group_at += system_at
        group = blob[group_at : group_at + group_size]
    message_id = blob[id_at : id_at + id_size]
    return _tuple(KeyFields, (message_id, group, key, crc32(memoryview(blob)[size - body :])))


def property_of(blob: bytes | memoryview) -> bytes | None:
    """Return the user property `dedup-key` of a stored message, unchecked; None if it has none.

    Raises ValueError if `blob` is not a stored message.
    """
    wire = bytes(stored_message.wires_of(blob)[1])
    if _PROPERTY_FIELD not in wire:
        return None
    # The bytes may also occur in another value, so the properties are parsed.
    value = v2.Message.FromString(wire).user_properties.get(DEDUP_PROPERTY)
    return None if value is None else value.encode()


def owner_of_key(key: bytes, groups: Sequence[str]) -> str:
    """Return the broker group that owns a key without a message group.

    Invariant: every process and every release returns the same for the same list. If a broker group
    leaves the list, only its keys get another owner.
    """
    return max(groups, key=lambda name: (_weight(key, name), name))


def _weight(key: bytes, name: str) -> bytes:
    return blake2b(key, digest_size=8, key=name.encode()[:64], person=b"key owner").digest()
