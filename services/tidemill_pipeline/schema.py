"""The columns of each dataset, in order, with a version.

Each column has a name, a Spark type and a meaning. A read may choose columns in any order with
`.schema("...")`. Other columns are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.option_table import Dataset

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

VERSION: Final = 1  # of all columns; each archive entry has the version of its files


class Column(NamedTuple):
    """One column."""

    name: str
    type: str
    meaning: str


OF_BODIES: Final = ("body", "body_crc32")  # columns that need bodies
# Columns of pending messages that need the message itself, not only its timer.
OF_PENDING_MESSAGES: Final = (
    "tag",
    "keys",
    "message_group",
    "properties",
    "system_properties",
    "body",
    "body_size",
    "body_crc32",
    "born_host",
    "born_timestamp",
    "trace_parent",
)

MESSAGES: Final = (
    Column("topic", "string", "without the namespace of the read"),
    Column("namespace", "string", ""),
    Column("broker", "string", "name of the broker group"),
    Column("queue_id", "int", ""),
    Column("queue_offset", "bigint", "unique with namespace, topic, broker and queue"),
    Column("commitlog_offset", "bigint", "null if unknown"),
    Column("message_id", "string", "created by the client"),
    Column("message_type", "string", "normal, fifo, delay, transaction, priority or lite"),
    Column("tag", "string", "null if none"),
    Column("keys", "array<string>", ""),
    Column("message_group", "string", "for FIFO messages"),
    Column("priority", "int", ""),
    Column("properties", "map<string,string>", "user properties"),
    Column("system_properties", "map<string,string>", "properties without their own column"),
    Column("body", "binary", ""),
    Column("body_size", "int", "bytes as stored"),
    Column("body_crc32", "bigint", "of the body as stored"),
    Column("born_host", "string", ""),
    Column("store_host", "string", ""),
    Column("born_timestamp", "timestamp", ""),
    Column("store_timestamp", "timestamp", ""),
    Column("due_timestamp", "timestamp", "requested delivery time; null if not delayed"),
    Column("fired_timestamp", "timestamp", "when a delayed message was stored in its topic"),
    Column("delivery_attempt", "int", "on retry topics"),
    Column("origin_topic", "string", "on retry and dead-letter topics"),
    Column(
        "origin_message_id", "string", "id in the origin topic; on retry and dead-letter topics"
    ),
    Column("dlq_reason", "string", "of dead letters"),
    Column("trace_parent", "string", ""),
)

EVENTS: Final = (
    Column("event_id", "string", "unique: broker group, log position and index"),
    Column(
        "event",
        "string",
        "stored, scheduled, fired, half, checked, rolled-back, delivered, acked, replayed and so"
        " on; broker-group-removed; unreadable",
    ),
    Column("event_ts", "timestamp", ""),
    Column("topic", "string", "topic of the message at this event"),
    Column("broker", "string", "name of the broker group"),
    Column("queue_id", "int", ""),
    Column("queue_offset", "bigint", "of a pending delayed message: its timer"),
    Column("message_id", "string", "null if the message no longer exists"),
    Column("consumer_group", "string", ""),
    Column("attempt", "int", "delivery attempt, from 1"),
    Column(
        "due_timestamp",
        "timestamp",
        "due time of a delayed message; end of the invisible duration of a delivery",
    ),
    Column("detail", "string", "reason or client"),
    Column("log_position", "bigint", ""),
    Column("event_index", "int", "among the events of one position"),
    Column("topic_id", "bigint", ""),
    Column("client_id", "string", ""),
    Column("reason", "string", "such as group_deleted; the name of a removed broker group"),
    Column("origin_topic", "string", "first topic of the message, if it differs"),
    Column("origin_queue_id", "int", ""),
    Column("origin_queue_offset", "bigint", ""),
    Column("end_offset", "bigint", "end of an expired range or of an unreadable part of the log"),
    Column("timer_id", "bigint", "of a delayed message, pending or fired"),
    Column("half_id", "bigint", "of a half message, also in the event that ends it"),
    Column("body_size", "bigint", ""),
    Column(
        "body_crc32",
        "bigint",
        "of the message as stored; 0, as `body_size`, if its content was freed",
    ),
    Column("delivery", "string", "id of the delivery, also in the events that settle it"),
)

PENDING: Final = (
    Column("topic", "string", "null if deleted; the message then goes to %DLQ%TIMER when due"),
    Column("broker", "string", "name of the broker group"),
    Column("timer_id", "bigint", ""),
    Column("message_id", "string", ""),
    Column("due_timestamp", "timestamp", ""),
    Column("scheduled_timestamp", "timestamp", ""),
    Column("log_position", "bigint", ""),
    Column("wheel_slot", "int", "slot of the due second; null if due after one turn or more"),
    # Columns of the message, null if it cannot be read.
    *(column for column in MESSAGES if column.name in OF_PENDING_MESSAGES),
)

IN_FLIGHT: Final = (
    Column("consumer_group", "string", ""),
    Column("topic", "string", ""),
    Column("broker", "string", "name of the broker group"),
    Column("queue_id", "int", ""),
    Column("queue_offset", "bigint", ""),
    Column("message_id", "string", ""),
    Column("attempt", "int", ""),
    Column("popped_at", "timestamp", ""),
    Column("invisible_until", "timestamp", ""),
    Column("client_id", "string", ""),
    Column("delivery", "string", "id of the delivery, as in events"),
    Column("is_retry", "boolean", "queue and offset belong to the group's retry topic"),
)

GROUPS: Final = (
    Column("consumer_group", "string", ""),
    Column("topic", "string", ""),
    Column("broker", "string", "name of the broker group"),
    Column("queue_id", "int", ""),
    Column("min_offset", "bigint", ""),
    Column("max_offset", "bigint", ""),
    Column("commit_offset", "bigint", "all messages before it are settled; null before a pop"),
    Column("pop_offset", "bigint", "null before a pop"),
    Column("pull_offset", "bigint", "null before a pull"),
    Column("lag", "bigint", "max_offset minus commit_offset; without a pop, minus pull_offset"),
    Column("oldest_unacked_ts", "timestamp", "null if all messages are acked"),
    Column("is_retry", "boolean", "the queue belongs to the group's retry topic"),
)

COLUMNS: Final[dict[Dataset, tuple[Column, ...]]] = {
    "messages": MESSAGES,
    "dlq": MESSAGES,
    "events": EVENTS,
    "pending": PENDING,
    "inflight": IN_FLIGHT,
    "groups": GROUPS,
}


def of_bodies(dataset: Dataset) -> Sequence[str]:
    """Return the columns that `includeBody=false` omits."""
    if dataset == "pending":
        return OF_PENDING_MESSAGES
    return OF_BODIES if dataset in {"messages", "dlq"} else ()


def ddl(dataset: Dataset, *, without: Sequence[str] = ()) -> str:
    """Return the columns of a dataset as a Spark schema."""
    # The session decides whether `timestamp` has a zone, so name the type with one.
    types = {"timestamp": "timestamp_ltz"}
    return ", ".join(
        f"{column.name} {types.get(column.type, column.type)}"
        for column in COLUMNS[dataset]
        if column.name not in without
    )


def check(dataset: Dataset, asked: StructType) -> None:
    """Raise BadOption for an unknown column, a wrong type, a repeated column or no column."""
    known = {column.name: column.type for column in COLUMNS[dataset]}
    if not asked.fields:
        raise BadOption(f"choose at least one column; dataset {dataset} has {', '.join(known)}")
    names = asked.names
    for field in asked.fields:
        if field.name not in known:
            raise BadOption(
                f"dataset {dataset} has no column {field.name}; it has {', '.join(known)}"
            )
        of_type = field.dataType.simpleString()
        if of_type != known[field.name]:
            raise BadOption(
                f"column {field.name} of dataset {dataset} is {known[field.name]}, not {of_type}"
            )
        if names.count(field.name) > 1:
            raise BadOption(f"column {field.name} is named {names.count(field.name)} times")
        if not field.nullable:
            # Spark would trust NOT NULL, and evaluate `is null` and `coalesce` wrongly.
            raise BadOption(
                f"column {field.name} may be null, as all columns: omit NOT NULL and filter with"
                f" `where {field.name} is not null`"
            )


def arrow_schema(struct: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects for these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(struct, timezone="UTC")


def of_dataset(dataset: Dataset) -> pa.Schema:
    """Return the Arrow schema of all columns of a dataset, without the JVM."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "binary": pa.binary(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "array<string>": pa.list_(pa.field("element", pa.string(), nullable=True)),
        "map<string,string>": pa.map_(
            pa.field("key", pa.string(), nullable=False),
            pa.field("value", pa.string(), nullable=True),
        ),
    }
    return pa.schema([pa.field(column.name, types[column.type]) for column in COLUMNS[dataset]])
