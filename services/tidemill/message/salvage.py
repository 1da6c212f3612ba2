"""Salvage of a damaged stored message: the properties that pass their checks, and no body.

The position of the damage is unknown. Message id, tag and keys have hashes beside them. User
properties are accepted if they are well-formed. Consumers parse the result, so it contains no byte
without a check.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import md5
from typing import NamedTuple

from tidemill.message import stored_message
from tidemill.message.wire import (
    bytes_field,
    bytes_header,
    milliseconds,
    varint,
    varint_field,
    varint_header,
)

_IDENTITY, _NORMAL, _MD5 = 1, 1, 2  # numbers of the protocol's Encoding, MessageType, DigestType
_TYPES = range(1, 5)  # of clients; TRANSACTION is the last
_BORN_AT_MS_MAX = 253_402_300_799_999  # the end of the year 9999
_USER_PROPERTY = 2  # field of Message
_TAG, _KEY, _MESSAGE_ID, _DIGEST, _BODY_ENCODING, _MESSAGE_TYPE, _BORN = range(1, 8)
_EMPTY_BODY = bytes_header(4) + varint(0)
_VARINT, _BYTES = 0, 2  # wire types
_FIXED_SIZES = {1: 8, 5: 4}  # size by wire type


class SalvagedProperties(NamedTuple):
    """The properties of a damaged message that pass their checks."""

    message_type: int = _NORMAL
    message_id: bytes = b""
    tag: bytes = b""
    keys: tuple[bytes, ...] = ()
    user_wire: bytes = b""
    born_at_ms: int = 0


def properties_of(blob: bytes | memoryview) -> SalvagedProperties:
    """Return the intact properties of a damaged stored message, perhaps none."""
    try:
        fields = stored_message.decode(blob)
    except ValueError:
        return SalvagedProperties()
    hashes = bytes(blob[stored_message.FIXED_SIZE : fields.system_at])
    system = bytes(blob[fields.system_at : fields.user_at])
    user = bytes(blob[fields.user_at : fields.body_wire_at])
    message_id = system[fields.id_at : fields.id_at + fields.id_size]
    is_known = hashes[: stored_message.KEY_HASH_SIZE] == stored_message.encode_key_hash(
        "id", message_id
    )
    is_valid = 0 <= fields.born_at_ms <= _BORN_AT_MS_MAX
    return SalvagedProperties(
        fields.message_type if fields.message_type in _TYPES else _NORMAL,
        message_id if is_known else b"",
        _tag(system, fields),
        tuple(_keys(system, hashes[stored_message.KEY_HASH_SIZE :])),
        user if _are_user_properties(user) else b"",
        fields.born_at_ms if is_valid else 0,
    )


def encode(properties: SalvagedProperties) -> bytes:
    """Build the stored message with these properties and an empty body."""
    kind, message_id, tag, keys, user_wire, born_at_ms = properties
    id_head = bytes_header(_MESSAGE_ID) + varint(len(message_id))
    tag_head = bytes_header(_TAG) + varint(len(tag)) if tag else b""
    digest = varint_field(1, _MD5) + bytes_field(
        2, md5(usedforsecurity=False).hexdigest().upper().encode()
    )
    system = b"".join(
        [
            id_head,
            message_id,
            tag_head,
            tag,
            *(bytes_header(_KEY) + varint(len(key)) + key for key in keys),
            bytes_field(_DIGEST, digest),
            varint_header(_BODY_ENCODING),
            varint(_IDENTITY),
            varint_header(_MESSAGE_TYPE),
            varint(kind),
            bytes_field(_BORN, milliseconds(born_at_ms)),
        ]
    )
    id_at = len(id_head)
    tag_at = id_at + len(message_id) + len(tag_head) if tag else 0
    hashes = [stored_message.encode_key_hash("id", message_id)]
    hashes += [stored_message.encode_key_hash("key", key) for key in keys]
    fixed = stored_message.FIXED.pack(
        stored_message.VERSION,
        kind,
        _IDENTITY,
        len(hashes),
        id_at,
        len(message_id),
        tag_at,
        len(tag),
        0,
        0,
        len(system),
        len(user_wire),
        0,
        stored_message.tag_hash(tag.decode()) if tag else 0,
        born_at_ms,
        0,
    )
    return b"".join((fixed, *hashes, system, user_wire, _EMPTY_BODY))


def _tag(system: bytes, fields: stored_message.StoredMessage) -> bytes:
    tag = system[fields.tag_at : fields.tag_at + fields.tag_size]
    try:
        is_known = bool(tag) and stored_message.tag_hash(tag.decode()) == fields.tag_hash
    except UnicodeDecodeError:
        return b""
    return tag if is_known else b""


def _keys(system: bytes, hashes: bytes) -> Iterator[bytes]:
    """Yield the keys with a matching hash, up to the first damaged byte."""
    size = stored_message.KEY_HASH_SIZE
    known = {hashes[at : at + size] for at in range(0, len(hashes), size)}
    try:
        for number, value in _fields(system):
            if number == _KEY and stored_message.encode_key_hash("key", value) in known:
                yield value
    except ValueError:
        return


def _are_user_properties(wire: bytes) -> bool:
    """Return whether `wire` consists of entries with a key and a value."""
    try:
        for number, entry in _fields(wire):
            texts = list(_fields(entry))
            if number != _USER_PROPERTY or [text[0] for text in texts] != [1, 2]:
                return False
            for _, text in texts:
                text.decode()
    except ValueError:
        return False
    return True


def _fields(wire: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (number, value) for each field of a message; the value of a number is empty.

    Raises ValueError if the bytes are not a message.
    """
    at = 0
    while at < len(wire):
        header, at = _read_varint(wire, at)
        kind, number = header & 7, header >> 3
        if kind == _VARINT:
            _, at = _read_varint(wire, at)
            yield number, b""
            continue
        if kind == _BYTES:
            size, at = _read_varint(wire, at)
        elif kind in _FIXED_SIZES:
            size = _FIXED_SIZES[kind]
        else:
            raise ValueError(f"no field has wire type {kind}")
        if at + size > len(wire):
            raise ValueError("a field ends after its message")
        yield number, wire[at : at + size] if kind == _BYTES else b""
        at += size


def _read_varint(wire: bytes, at: int) -> tuple[int, int]:
    """Return an integer and its end; raise ValueError."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(wire):
            break
        byte = wire[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("an integer has no end")
