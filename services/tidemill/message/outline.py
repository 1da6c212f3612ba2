"""The outline of an unparsed request: its fields and their sizes.

A parser turns two bytes of an empty entry into a hundred bytes of memory. Therefore the sizes and
counts of a large send request are checked before it is parsed. Small requests are parsed first and
then checked. Exports of client metrics are never parsed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tidemill.common.errors import BadRequest
from tidemill.message import limits

SMALL_BYTES: Final = 64 << 10  # takes at most 3 MB and 3 ms to parse
_FIELDS_MAX: Final = 512  # of a message or a request; more than all counted fields together
_MESSAGES: Final = 1  # field of SendMessageRequest
_USER_PROPERTIES, _SYSTEM_PROPERTIES = 2, 3  # fields of Message
_STACK_TRACE: Final = 3  # field of TelemetryCommand
VARINT: Final = 0  # wire type of numbers
LENGTH_DELIMITED: Final = 2  # wire type of strings, bytes and messages
_SKIPPED: Final = {1: 8, 5: 4}  # size of a field by its wire type
_SHIFTS: Final = range(0, 70, 7)  # of the ten bytes of the longest number


class MalformedWire(Exception):
    """The bytes are not a protobuf message."""


class WireField(NamedTuple):
    """A field of a message: its number, its wire type and the position of its content."""

    field: int
    wire_type: int
    begin: int
    end: int
    value: int  # of a number


def check_send(request: bytes) -> None:
    """Raise the error for a SendMessageRequest with too many entries, if it has too many.

    The parser rejects a malformed request.
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


def check_telemetry(request: bytes, *, is_requested: bool) -> None:
    """Raise BadRequest for a large TelemetryCommand, unless it is a requested stack trace.

    A parsed stack trace takes as much memory as its bytes.
    """
    if len(request) <= SMALL_BYTES:
        return
    trace_bytes = sum(
        end - begin
        for field, begin, end in _fields(request, 0, len(request))
        if field == _STACK_TRACE
    )
    if not is_requested or len(request) - trace_bytes > SMALL_BYTES:
        raise BadRequest(
            f"a telemetry command has at most {SMALL_BYTES} bytes, unless it is a requested stack"
            f" trace"
        )


def _fields(wire: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of each field with a length; stop at malformed bytes."""
    try:
        for entry_count, entry in enumerate(entries(wire, at, end)):
            if entry_count >= _FIELDS_MAX:
                raise BadRequest(f"a request or a message has at most {_FIELDS_MAX} fields")
            if entry.wire_type == LENGTH_DELIMITED:
                yield entry.field, entry.begin, entry.end
    except MalformedWire:
        return


def entries(wire: bytes, at: int, end: int) -> Iterator[WireField]:
    """Yield all fields of a message; raise MalformedWire for bytes that are not a message.

    The function neither reads nor copies the content of a field. The caller limits the count.
    """
    while at < end:
        tag, begin = _varint(wire, at, end)
        field, wire_type = tag >> 3, tag & 7
        value = 0
        if wire_type == LENGTH_DELIMITED:
            size, begin = _varint(wire, begin, end)
            at = begin + size
        elif wire_type == VARINT:
            value, at = _varint(wire, begin, end)
        elif wire_type in _SKIPPED:
            at = begin + _SKIPPED[wire_type]
        else:
            raise MalformedWire
        if field == 0 or at > end:
            raise MalformedWire
        yield WireField(field, wire_type, begin, at, value)


def _varint(wire: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number and its end; raise MalformedWire if it is cut or too long."""
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
