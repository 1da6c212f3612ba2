"""Rows of a frame as messages, and what is wrong with a row that cannot be one."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, final

from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.options import SinkOptions

# Columns that are read, and the types they may have, as Spark writes them.
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "message_id": ("string",),
    "tag": ("string",),
    "keys": ("array<string>",),
    "message_group": ("string",),
    "properties": ("map<string,string>",),
    "due_timestamp": ("timestamp",),
    "delay_ms": ("bigint", "int"),
    "priority": ("int",),
    "dedup_key": ("string",),
    "body_encoding": ("string",),
}
NO_TEXT: Final = "no text"  # of a row: columns whose value is no UTF-8
# Of bodies: as they are, and packed by who sends them.
_ENCODINGS: Final = {"IDENTITY": v2.IDENTITY, "GZIP": v2.GZIP}
_DUE_MS_MAX: Final = 253_402_300_799_999  # the last instant that a Timestamp of protobuf can be


_ID_BYTES: Final = 16  # of hexadecimal digits twice as many, as clients' ids have


class BadRow(Exception):
    """A row cannot be a message."""


@final
class RowIds:
    """Ids of messages whose rows have none: the same again where a task is done again.

    An id is made of the write, the task, the number of the row and all that is sent. So those of
    another write differ, and rows that come in another order the second time are never taken for
    each other.
    """

    def __init__(self, write: str, partition: int) -> None:
        """`write`: what is the same when Spark repeats a task or a batch, and never otherwise."""
        self._task = f"{write}/{partition}/".encode()
        self._number = 0

    def of(self, message: v2.Message, due: object = None) -> str:
        """Return the id of the next row, as a message without id and times; `due`: as it says."""
        self._number += 1
        row = blake2b(self._task, digest_size=_ID_BYTES)
        row.update(b"%d/%b/" % (self._number, str(due).encode()))
        row.update(message.SerializeToString(deterministic=True))
        return row.hexdigest().upper()


def check_columns(types: Mapping[str, str], options: SinkOptions) -> None:
    """Raise BadOption where the columns of a frame cannot be written."""
    for name, of_type in types.items():
        if name not in COLUMNS:
            raise BadOption(f"column {name} cannot be sent; columns are {', '.join(COLUMNS)}")
        if of_type not in COLUMNS[name]:
            raise BadOption(f"column {name} is {' or '.join(COLUMNS[name])}, not {of_type}")
    if "body" not in types:
        raise BadOption("a column body is needed: what is sent")
    if not options.topic and "topic" not in types:
        raise BadOption("where to? give option topic, or a column topic")


def message_of(
    row: Mapping[str, Any], options: SinkOptions, topic_of: Any, *, now_ms: int, ids: RowIds
) -> v2.Message:
    """Return a row as a message. Raises BadRow.

    `topic_of` names a topic as calls do; times are milliseconds.
    """
    if row.get(NO_TEXT):
        raise BadRow(f"its {', '.join(row[NO_TEXT])} is no UTF-8")
    topic = options.topic or row.get("topic")
    body = row.get("body")
    if not topic:
        raise BadRow("it has no topic")
    if body is None:
        raise BadRow("it has no body")
    message = v2.Message(topic=topic_of(topic), body=body)
    system = message.system_properties
    system.body_encoding = _encoding(row)
    if options.packs_bodies and system.body_encoding == v2.IDENTITY:
        # No time in it: the same row is the same bytes when it is sent again.
        message.body = gzip.compress(message.body, mtime=0)
        system.body_encoding = v2.GZIP
    due_ms = _due_ms(row, now_ms)
    group = row.get("message_group")
    if due_ms is not None and not 0 <= due_ms <= _DUE_MS_MAX:
        raise BadRow("it is due outside the years 1970 to 9999")
    if due_ms is not None and group:
        raise BadRow("it has a due time and a message group: a message is delayed or in order")
    system.message_type = v2.FIFO if group else v2.NORMAL if due_ms is None else v2.DELAY
    if group:
        system.message_group = group
    if row.get("tag"):
        system.tag = row["tag"]
    if row.get("keys"):
        system.keys.extend(key for key in row["keys"] if key is not None)
    if row.get("priority") is not None:
        raise BadRow("priority messages are not served yet")
    if row.get("dedup_key") is not None:
        raise BadRow("a dedup_key is of mode dedup, which is not there yet")
    for name, value in _pairs(row.get("properties")):
        if value is not None:
            message.user_properties[name] = value
    given = row.get("message_id")
    system.message_id = given or ids.of(
        message, due=(row.get("due_timestamp"), row.get("delay_ms"))
    )
    system.born_timestamp.FromMilliseconds(now_ms)
    if due_ms is not None:
        system.delivery_timestamp.FromMilliseconds(due_ms)
    return message


def _encoding(row: Mapping[str, Any]) -> v2.Encoding.ValueType:
    name = (row.get("body_encoding") or "IDENTITY").upper()
    if name not in _ENCODINGS:
        raise BadRow(f"its body_encoding is {name}; encodings are {' and '.join(_ENCODINGS)}")
    return _ENCODINGS[name]


def _due_ms(row: Mapping[str, Any], now_ms: int) -> int | None:
    if row.get("due_timestamp") is not None:
        if row.get("delay_ms") is not None:
            raise BadRow("it has due_timestamp and delay_ms: a delayed send has one of them")
        return int(row["due_timestamp"])
    if row.get("delay_ms") is not None:
        return now_ms + int(row["delay_ms"])
    return None


def _pairs(properties: Any) -> list[tuple[str, str | None]]:
    # Arrow gives a map as pairs.
    if properties is None:
        return []
    return list(properties.items()) if isinstance(properties, dict) else list(properties)
