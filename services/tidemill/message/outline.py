"""What a request is made of, before it is parsed.

Parsed, two bytes of an empty entry become a hundred. Large requests to send are walked first, by
the lengths in front of their parts; small ones may as well be parsed and counted then. Exports of
clients' metrics are walked whatever their size, and never parsed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tidemill.common.errors import BadRequest
from tidemill.message import limits

SMALL_BYTES: Final = 64 << 10  # parsed it takes 3 MB in the worst case, and as many milliseconds
_FIELDS_MAX: Final = 512  # of a message or a request: more than all that are counted, and some
_MESSAGES: Final = 1  # of SendMessageRequest
_USER_PROPERTIES, _SYSTEM_PROPERTIES = 2, 3  # of Message
_STACK_TRACE: Final = 3  # of TelemetryCommand
VARINT: Final = 0  # the wire type of numbers
LENGTH_DELIMITED: Final = 2  # the wire type of texts, bytes and messages
_SKIPPED: Final = {1: 8, 5: 4}  # size of fields by their wire type
_SHIFTS: Final = range(0, 70, 7)  # of the ten bytes that a number has at most


class MalformedWire(Exception):
    """Raised where bytes are no protobuf message."""


class WireField(NamedTuple):
    """A field of a message: its number and wire type, and where its content lies."""

    field: int
    kind: int
    begin: int
    end: int
    value: int  # of a VARINT


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


def check_telemetry(request: bytes, *, is_asked: bool) -> None:
    """Raise BadRequest for a large TelemetryCommand that is no stack trace somebody asked for.

    Parsed, a stack trace takes what it takes as bytes, however large.
    """
    if len(request) <= SMALL_BYTES:
        return
    trace_bytes = sum(
        end - begin
        for field, begin, end in _fields(request, 0, len(request))
        if field == _STACK_TRACE
    )
    if not is_asked or len(request) - trace_bytes > SMALL_BYTES:
        raise BadRequest(
            f"a telemetry command has at most {SMALL_BYTES} bytes, unless it is a stack trace that"
            f" was asked for"
        )


def _fields(wire: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of each field with a length, up to what makes no sense."""
    try:
        for entry_count, entry in enumerate(entries(wire, at, end)):
            if entry_count >= _FIELDS_MAX:
                raise BadRequest(f"a request or a message has at most {_FIELDS_MAX} fields")
            if entry.kind == LENGTH_DELIMITED:
                yield entry.field, entry.begin, entry.end
    except MalformedWire:
        return


def entries(wire: bytes, at: int, end: int) -> Iterator[WireField]:
    """Yield all fields of a message; raise MalformedWire for bytes that are not a message.

    The function neither reads nor copies the content of a field. The caller limits the count.
    """
    while at < end:
        tag, begin = _varint(wire, at, end)
        field, kind = tag >> 3, tag & 7
        value = 0
        if kind == LENGTH_DELIMITED:
            size, begin = _varint(wire, begin, end)
            at = begin + size
        elif kind == VARINT:
            value, at = _varint(wire, begin, end)
        elif kind in _SKIPPED:
            at = begin + _SKIPPED[kind]
        else:
            raise MalformedWire
        if field == 0 or at > end:
            raise MalformedWire
        yield WireField(field, kind, begin, at, value)


def _varint(wire: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number and where it ends; raise MalformedWire for one that is cut, or too long."""
    value = 0
    for shift in _SHIFTS:
        if at >= end:
            break
        byte = wire[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise MalformedWire
