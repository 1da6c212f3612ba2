"""The columns of every dataset: fixed, in order, and versioned.

One row a column: its name, its type as Spark writes it, and what it is. A read may name any of them
in any order by `.schema("...")`; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.option_table import Dataset

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

VERSION: Final = 1  # of all columns together; an archive says which it was written with


class Column(NamedTuple):
    """One column."""

    name: str
    type: str
    meaning: str


OF_BODIES: Final = ("body", "body_crc32")  # which need that bodies are read
# Of messages that wait: which need that these are read, and not only when they are due.
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
    Column("topic", "string", "without namespace"),
    Column("namespace", "string", ""),
    Column("broker", "string", "name of the broker group"),
    Column("queue_id", "int", ""),
    Column("queue_offset", "bigint", "unique with namespace, topic, broker and queue"),
    Column("commitlog_offset", "bigint", "null where nobody told it"),
    Column("message_id", "string", "made by the client"),
    Column("message_type", "string", "normal, fifo, delay, transaction, priority or lite"),
    Column("tag", "string", "null if none"),
    Column("keys", "array<string>", ""),
    Column("message_group", "string", "key of FIFO messages"),
    Column("priority", "int", ""),
    Column("properties", "map<string,string>", "of the user"),
    Column("system_properties", "map<string,string>", "what has no column of its own"),
    Column("body", "binary", ""),
    Column("body_size", "int", "bytes as stored"),
    Column("body_crc32", "bigint", "of the body as stored"),
    Column("born_host", "string", ""),
    Column("store_host", "string", ""),
    Column("born_timestamp", "timestamp", ""),
    Column("store_timestamp", "timestamp", ""),
    Column("due_timestamp", "timestamp", "when delivery was asked for; null if not"),
    Column("fired_timestamp", "timestamp", "when a delayed message became one of its topic"),
    Column("delivery_attempt", "int", "on retry topics"),
    Column("origin_topic", "string", "on retry and dead-letter topics"),
    Column(
        "origin_message_id", "string", "id of the message there; on retry and dead-letter topics"
    ),
    Column("dlq_reason", "string", "of dead letters"),
    Column("trace_parent", "string", ""),
)

EVENTS: Final = (
    Column("event_id", "string", "broker group, log position and index: once each"),
    Column(
        "event",
        "string",
        "stored, scheduled, fired, delivered, acked and so on; broker-group-removed; unreadable",
    ),
    Column("event_ts", "timestamp", ""),
    Column("topic", "string", "where the message stands by this event"),
    Column("broker", "string", "name of the broker group"),
    Column("queue_id", "int", ""),
    Column("queue_offset", "bigint", "of a message that waits for its time: its timer"),
    Column("message_id", "string", "null where the message itself is gone"),
    Column("consumer_group", "string", ""),
    Column("attempt", "int", "which delivery it is, from 1"),
    Column(
        "due_timestamp",
        "timestamp",
        "when a delayed message is due; of a delivery, when its invisible duration ends",
    ),
    Column("detail", "string", "reason, or client"),
    Column("log_position", "bigint", ""),
    Column("event_index", "int", "among those of one position"),
    Column("topic_id", "bigint", ""),
    Column("client_id", "string", ""),
    Column(
        "reason", "string", "why, as group_deleted; of a broker group that was removed: its name"
    ),
    Column("origin_topic", "string", "where the message stood first, if elsewhere"),
    Column("origin_queue_id", "int", ""),
    Column("origin_queue_offset", "bigint", ""),
    Column("end_offset", "bigint", "of an expired range; of an unreadable part, of the log"),
    Column("timer_id", "bigint", "of a delayed message, and of what it became"),
    Column("body_size", "bigint", ""),
    Column("body_crc32", "bigint", "of the message as stored"),
    Column("delivery", "string", "which delivery: of what settles one, that one's"),
)

PENDING: Final = (
    Column("topic", "string", "null where it was deleted: to %DLQ%TIMER when it is due"),
    Column("broker", "string", "name of the broker group"),
    Column("timer_id", "bigint", ""),
    Column("message_id", "string", ""),
    Column("due_timestamp", "timestamp", ""),
    Column("scheduled_timestamp", "timestamp", ""),
    Column("log_position", "bigint", ""),
    Column("wheel_slot", "int", "of the second that it is due in; null a whole turn ahead"),
    # Of the message itself, where it could be read.
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
    Column("delivery", "string", "which delivery, as events name it"),
    Column("is_retry", "boolean", "queue and offset are of the group's retry topic for `topic`"),
)

GROUPS: Final = (
    Column("consumer_group", "string", ""),
    Column("topic", "string", ""),
    Column("broker", "string", "name of the broker group"),
    Column("queue_id", "int", ""),
    Column("min_offset", "bigint", ""),
    Column("max_offset", "bigint", ""),
    Column("commit_offset", "bigint", "all before it is settled; null where nothing was popped"),
    Column("pop_offset", "bigint", "null where nothing was popped"),
    Column("pull_offset", "bigint", "null where the group has none"),
    Column("lag", "bigint", "max_offset less commit_offset, or where there is none pull_offset"),
    Column("oldest_unacked_ts", "timestamp", "null where nothing is"),
    Column("is_retry", "boolean", "the queue is of the group's retry topic for `topic`"),
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
    """Return the columns that `includeBody=false` leaves out."""
    if dataset == "pending":
        return OF_PENDING_MESSAGES
    return OF_BODIES if dataset in {"messages", "dlq"} else ()


def ddl(dataset: Dataset, *, without: Sequence[str] = ()) -> str:
    """Return the columns of a dataset as Spark writes a schema."""
    # What `timestamp` alone is a session says: with an instant, or without.
    types = {"timestamp": "timestamp_ltz"}
    return ", ".join(
        f"{column.name} {types.get(column.type, column.type)}"
        for column in COLUMNS[dataset]
        if column.name not in without
    )


def check(dataset: Dataset, asked: StructType) -> None:
    """Raise BadOption where a read names a column that is not there, or of another type.

    Or none, or one twice, which Spark cannot tell apart in what comes.
    """
    known = {column.name: column.type for column in COLUMNS[dataset]}
    if not asked.fields:
        raise BadOption(f"a read has a column at least; dataset {dataset} has {', '.join(known)}")
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
            # Spark would believe it, and give `is null` and `coalesce` other answers.
            raise BadOption(
                f"column {field.name} may be null, in every dataset: leave NOT NULL out, and say"
                f" where {field.name} is not null"
            )


def arrow_schema(struct: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of batches with these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(struct, timezone="UTC")


def of_dataset(dataset: Dataset) -> pa.Schema:
    """Return the Arrow schema of all columns of a dataset, without asking Spark's Java side."""
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
