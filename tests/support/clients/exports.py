"""OTLP metric exports that common libraries do not write."""

from __future__ import annotations

from tidemill.message.outline import LENGTH_DELIMITED

_METRIC = 1, 2, 2  # numbers of the nested fields from an export to a metric
_EMPTY_POINT = b"\x0a\x00"


def nested(*field_numbers: int, content: bytes) -> bytes:
    """Return `content` inside nested messages. The first field number is the outermost."""
    for number in reversed(field_numbers):
        content = bytes([number << 3 | LENGTH_DELIMITED]) + _varint(len(content)) + content
    return content


def a_metric(content: bytes) -> bytes:
    """Return an export of one metric."""
    return nested(*_METRIC, content=content)


def empty_points(kind: int, name: str, *, count: int = 65_000) -> bytes:
    """Return an export of one metric with empty points; `kind` is the field of their type."""
    return a_metric(nested(1, content=name.encode()) + nested(kind, content=_EMPTY_POINT * count))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
