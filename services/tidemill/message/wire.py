"""Protobuf's wire format, for hot paths that write it directly.

A header is the field number times eight plus the wire type: 0 for a varint, 2 for bytes with a
length. For a message that passes through, joining bytes costs a third of building and serialising
an object.
"""

from __future__ import annotations

_TWO_BYTES = 1 << 14  # smaller integers take at most two bytes; the table takes 0.6 MB
_UINT64_MASK = (1 << 64) - 1


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _two_bytes(second: range) -> list[bytes]:
    """Return each byte that announces more bytes (the faster index), before each of `second`."""
    first = bytes(range(0x80, 0x100))
    pairs = bytearray(2 * _TWO_BYTES)
    pairs[0::2] = first * len(second)
    pairs[1::2] = b"".join(bytes((byte,)) * len(first) for byte in second)
    table = bytes(pairs)
    return [table[at : at + 2] for at in range(0, len(table), 2)]


# Every start of a process pays for the tables: slices are four times faster than a loop of ours.
_VARINTS = [bytes((value,)) for value in range(0x80)] + _two_bytes(range(0x80))[0x80:]
# The low 14 bits of a larger integer as two bytes that announce more bytes.
_LOW_BITS = _two_bytes(range(0x80, 0x100))


def varint(value: int) -> bytes:
    """Encode an integer; a negative one takes ten bytes, as int32 and int64 do."""
    if 0 <= value < _TWO_BYTES:
        return _VARINTS[value]
    if 0 < value < _TWO_BYTES << 14:
        return _LOW_BITS[value & (_TWO_BYTES - 1)] + _VARINTS[value >> 14]
    if 0 < value < _TWO_BYTES << 28:
        return (
            _LOW_BITS[value & (_TWO_BYTES - 1)]
            + _LOW_BITS[value >> 14 & (_TWO_BYTES - 1)]
            + _VARINTS[value >> 28]
        )
    return _encode_varint(value & _UINT64_MASK)


_FIELD_NUMBERS = range(32)  # more than any message of the hot path has
_VARINT_HEADERS = [varint(field << 3) for field in _FIELD_NUMBERS]
_BYTES_HEADERS = [varint(field << 3 | 2) for field in _FIELD_NUMBERS]


def varint_header(field: int) -> bytes:
    """Encode the header of an integer, enum or bool field."""
    return _VARINT_HEADERS[field]


def bytes_header(field: int) -> bytes:
    """Encode the header of a string, bytes or message field."""
    return _BYTES_HEADERS[field]


def varint_field(field: int, value: int) -> bytes:
    """Encode an integer, enum or bool field; a 0 is omitted."""
    return _VARINT_HEADERS[field] + varint(value) if value else b""


def bytes_field(field: int, value: bytes) -> bytes:
    """Encode a string, bytes or message field, even if it is empty."""
    return _BYTES_HEADERS[field] + varint(len(value)) + value


def seconds_and_nanos(seconds: int, nanos: int) -> bytes:
    """Encode the content of a Timestamp or Duration."""
    return varint_field(1, seconds) + varint_field(2, nanos)


_NANOS_OF_MS = [varint_field(2, millisecond * 1_000_000) for millisecond in range(1000)]


def milliseconds(value_ms: int) -> bytes:
    """Encode the content of a Timestamp or Duration of `value_ms`, which must not be negative."""
    seconds, fraction_ms = divmod(value_ms, 1000)
    return varint_field(1, seconds) + _NANOS_OF_MS[fraction_ms]
