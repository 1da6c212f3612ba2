"""What is left of a damaged stored message: its properties, as far as they check, and no body.

Nothing says which of its bytes are damaged. The message id, the tag and the keys have hashes beside
them; user properties are taken when they are well formed. Consumers parse what is made here, so
bytes that nobody can vouch for are in none of it.
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
_TYPES = range(1, 5)  # what clients send; TRANSACTION is the last
_BORN_AT_MS_MAX = 253_402_300_799_999  # the end of the year 9999
_USER_PROPERTY = 2  # a field of Message
_TAG, _KEY, _MESSAGE_ID, _DIGEST, _BODY_ENCODING, _MESSAGE_TYPE, _BORN = range(1, 8)
_EMPTY_BODY = bytes_header(4) + varint(0)
_VARINT, _BYTES = 0, 2  # kinds of values
_FIXED_SIZES = {1: 8, 5: 4}  # by kind


class SalvagedProperties(NamedTuple):
    """What checks of a message."""

    message_type: int = _NORMAL
    message_id: bytes = b""
    tag: bytes = b""
    keys: tuple[bytes, ...] = ()
    user_wire: bytes = b""
    born_at_ms: int = 0


def properties_of(blob: bytes | memoryview) -> SalvagedProperties:
    """Return what checks of a stored message that may be damaged anywhere, or none at all."""
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
    is_sent = 0 <= fields.born_at_ms <= _BORN_AT_MS_MAX
    return SalvagedProperties(
        fields.message_type if fields.message_type in _TYPES else _NORMAL,
        message_id if is_known else b"",
        _tag(system, fields),
        tuple(_keys(system, hashes[stored_message.KEY_HASH_SIZE :])),
        user if _are_user_properties(user) else b"",
        fields.born_at_ms if is_sent else 0,
    )


def encode(properties: SalvagedProperties) -> bytes:
    """Build the stored message that has these properties and an empty body."""
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
    """Yield the keys whose hashes are there, up to where the wire is damaged."""
    size = stored_message.KEY_HASH_SIZE
    known = {hashes[at : at + size] for at in range(0, len(hashes), size)}
    try:
        for number, value in _fields(system):
            if number == _KEY and stored_message.encode_key_hash("key", value) in known:
                yield value
    except ValueError:
        return


def _are_user_properties(wire: bytes) -> bool:
    """Whether `wire` is entries of a key and a value, and nothing else."""
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
    """Yield (number, value) of the fields of a message; of a number, an empty value.

    Raises ValueError where the bytes are none.
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
            raise ValueError(f"no field has kind {kind}")
        if at + size > len(wire):
            raise ValueError("a field ends behind its message")
        yield number, wire[at : at + size] if kind == _BYTES else b""
        at += size


def _read_varint(wire: bytes, at: int) -> tuple[int, int]:
    """Return an integer and where the next thing begins. Raises ValueError."""
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
