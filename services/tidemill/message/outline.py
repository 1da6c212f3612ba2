"""What a request is made of, before it is parsed.

Parsed, two bytes of an empty entry become a hundred. Large requests to send are walked first, by
the lengths in front of their parts; small ones may as well be parsed and counted then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tidemill.common.errors import BadRequest
from tidemill.message import limits

SMALL_BYTES: Final = 64 << 10  # parsed it takes 3 MB in the worst case, and as many milliseconds
_FIELDS_MAX: Final = 512  # of a message or a request: more than all that are counted, and some
_MESSAGES: Final = 1  # of SendMessageRequest
_USER_PROPERTIES, _SYSTEM_PROPERTIES = 2, 3  # of Message
_LENGTH_DELIMITED: Final = 2
_SKIPPED: Final = {1: 8, 5: 4}  # size of fields by their wire type


def check_send(request: bytes) -> None:
    """Raise what is wrong with the counts in a SendMessageRequest, if anything is.

    One that makes no sense is left to the parser.
    """
    if len(request) <= SMALL_BYTES:
        return
    message_count = system_bytes = 0
    for field, begin, end in _fields(request, 0, len(request)):
        if field != _MESSAGES:
            continue
        message_count += 1
        limits.MESSAGES.check_count(message_count)
        property_count = 0
        for part, part_begin, part_end in _fields(request, begin, end):
            if part == _USER_PROPERTIES:
                property_count += 1
                limits.USER_PROPERTIES.check_count(property_count)
            elif part == _SYSTEM_PROPERTIES:
                system_bytes += part_end - part_begin
                limits.SYSTEM_PROPERTIES.check_count(system_bytes)


def _fields(wire: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of each field with a length, up to what makes no sense."""
    for _ in range(_FIELDS_MAX):
        if at >= end:
            return
        tag, at = _varint(wire, at, end)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, at = _varint(wire, at, end)
            begin, at = at, at + size
            if at > end:
                return
            yield tag >> 3, begin, at
        elif kind == 0:
            _, at = _varint(wire, at, end)
        elif kind in _SKIPPED:
            at += _SKIPPED[kind]
        else:
            return
    raise BadRequest(f"a request or a message has at most {_FIELDS_MAX} fields")


def _varint(wire: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number and where it ends; one that is cut ends with `end`, beyond any field."""
    value = shift = 0
    while at < end:
        byte = wire[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end
