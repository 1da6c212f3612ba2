"""Conversion of the rows of a frame to messages."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, final

from tidemill.message.dedup_key import DEDUP_PROPERTY
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.options import SinkOptions
from tidemill_pipeline.schema import MESSAGES

# The supported columns with their Spark types.
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
# Columns of a read that only the cluster sets.
READ_ONLY: Final = frozenset(column.name for column in MESSAGES) - COLUMNS.keys()
SET_BY_CLUSTER: Final = "set by the cluster"  # key of a row for its read-only columns with a value
NO_TEXT: Final = "no text"  # key of a row for the columns that are not valid UTF-8
# Encodings of bodies. The user packs GZIP bodies before the write.
_ENCODINGS: Final = {"IDENTITY": v2.IDENTITY, "GZIP": v2.GZIP}
_DUE_MS_MAX: Final = 253_402_300_799_999  # the last instant of a protobuf Timestamp


_ID_BYTES: Final = 16  # 32 hexadecimal digits, as the ids of clients


class BadRow(Exception):
    """A row that cannot be a message."""


@final
class RowIds:
    """Message ids for rows without one. A repeated task gives the same ids.

    An id is a hash of the write, the task, the row number and the message. Ids of other writes
    differ. If a repeated task gets its rows in another order, the ids differ, too.
    """

    def __init__(self, write: str, partition: int) -> None:
        """`write`: an id that only repetitions of the same task or batch share."""
        self.partition = partition
        self._task = f"{write}/{partition}/".encode()
        self._number = 0

    def of(self, message: v2.Message, due: object = None) -> str:
        """Return the id of the next row. `message` has no id and no times; `due`: its due time."""
        self._number += 1
        row = blake2b(self._task, digest_size=_ID_BYTES)
        row.update(b"%d/%b/" % (self._number, str(due).encode()))
        row.update(message.SerializeToString(deterministic=True))
        return row.hexdigest().upper()


def check_columns(types: Mapping[str, str], options: SinkOptions) -> None:
    """Raise BadOption if a frame has columns that cannot be sent, or lacks a required one.

    INSERT passes all columns of its table. Those that only the cluster sets must then be null.
    """
    is_table = types.keys() >= READ_ONLY
    for name, of_type in types.items():
        if is_table and name in READ_ONLY:
            continue
        if name not in COLUMNS:
            raise BadOption(f"column {name} cannot be sent; columns are {', '.join(COLUMNS)}")
        if of_type not in COLUMNS[name]:
            raise BadOption(f"column {name} is {' or '.join(COLUMNS[name])}, not {of_type}")
    if "body" not in types:
        raise BadOption("the frame has no column body, which is required")
    if not options.topic and "topic" not in types:
        raise BadOption("no topic; set the option topic or add a column topic")


def message_of(
    row: Mapping[str, Any], options: SinkOptions, topic_of: Any, *, now_ms: int, ids: RowIds
) -> v2.Message:
    """Return a row as a message. Raises BadRow.

    `topic_of` returns the resource of a topic. Times are in milliseconds.
    """
    if row.get(NO_TEXT):
        raise BadRow(f"its {', '.join(row[NO_TEXT])} is not valid UTF-8")
    if row.get(SET_BY_CLUSTER):
        raise BadRow(
            f"it has a value for {', '.join(row[SET_BY_CLUSTER])}, which only the cluster sets;"
            f" select the columns to send: {', '.join(COLUMNS)}"
        )
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
        # Without a time, a repeated send has the same bytes.
        message.body = gzip.compress(message.body, mtime=0)
        system.body_encoding = v2.GZIP
    due_ms = _due_ms(row, now_ms)
    group = row.get("message_group")
    if group == "":
        raise BadRow("its message_group is empty, which would give up its order; use null for none")
    if due_ms is not None and not 0 <= due_ms <= _DUE_MS_MAX:
        raise BadRow("its due time is outside the years 1970 to 9999")
    if due_ms is not None and group:
        raise BadRow("it has a due time and a message group; only one of them is allowed")
    system.message_type = v2.FIFO if group else v2.NORMAL if due_ms is None else v2.DELAY
    if group:
        system.message_group = group
    if row.get("tag"):
        system.tag = row["tag"]
    if row.get("keys"):
        if None in row["keys"]:
            raise BadRow("one of its keys is null; use array_compact(keys)")
        system.keys.extend(row["keys"])
    if row.get("priority") is not None:
        _set_priority(system, row["priority"])
    if row.get("dedup_key") is not None and not options.has_dedup_keys:
        raise BadRow("it has a dedup_key, which needs mode=dedup")
    for name, value in _pairs(row.get("properties")):
        if value is None:
            raise BadRow(
                f"its property {name} is null; use map_filter(properties, (name, value) -> value is"
                " not null)"
            )
        message.user_properties[name] = value
    given = row.get("message_id")
    system.message_id = given or ids.of(
        message, due=(row.get("due_timestamp"), row.get("delay_ms"))
    )
    if options.has_dedup_keys:
        message.user_properties[DEDUP_PROPERTY] = _dedup_key(row, message)
    system.born_timestamp.FromMilliseconds(now_ms)
    if due_ms is not None:
        system.delivery_timestamp.FromMilliseconds(due_ms)
    return message


def _dedup_key(row: Mapping[str, Any], message: v2.Message) -> str:
    """Return the dedup key of a row: its column, its property, or its id. Raises BadRow.

    A repeated task gives a row the same id.
    """
    of_column = row.get("dedup_key")
    if of_column == "":
        raise BadRow("its dedup_key is empty; use null for none")
    of_property = message.user_properties.get(DEDUP_PROPERTY)
    if of_column and of_property and of_column != of_property:
        raise BadRow(f"its dedup_key and its property {DEDUP_PROPERTY} differ")
    return str(of_column or of_property or message.system_properties.message_id)


def _set_priority(system: v2.SystemProperties, priority: int) -> None:
    """Set the priority of a message. A delayed message keeps its type. Raises BadRow."""
    if priority < 0:
        raise BadRow(f"its priority is {priority}; it must be 0 or higher")
    if system.message_type == v2.FIFO:
        raise BadRow("it has a priority and a message group; only one of them is allowed")
    system.priority = priority
    if system.message_type == v2.NORMAL:
        system.message_type = v2.PRIORITY


def _encoding(row: Mapping[str, Any]) -> v2.Encoding.ValueType:
    name = (row.get("body_encoding") or "IDENTITY").upper()
    if name not in _ENCODINGS:
        raise BadRow(f"its body_encoding is {name}; encodings are {' and '.join(_ENCODINGS)}")
    return _ENCODINGS[name]


def _due_ms(row: Mapping[str, Any], now_ms: int) -> int | None:
    if row.get("due_timestamp") is not None:
        if row.get("delay_ms") is not None:
            raise BadRow("it has due_timestamp and delay_ms; only one of them is allowed")
        return int(row["due_timestamp"])
    if row.get("delay_ms") is not None:
        return now_ms + int(row["delay_ms"])
    return None


def _pairs(properties: Any) -> list[tuple[str, str | None]]:
    # Arrow returns a map as pairs.
    if properties is None:
        return []
    return list(properties.items()) if isinstance(properties, dict) else list(properties)
