"""Spark's use of a source, without Spark: a batch, and a stream with its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.options import SourceOptions, parse_source
from tidemill_pipeline.source.events import EventStreamReader
from tidemill_pipeline.source.message_stream import MessageStreamReader
from tidemill_pipeline.source.messages import MessageReader

COLUMNS = StructType(
    [
        StructField("topic", StringType()),
        StructField("broker", StringType()),
        StructField("queue_id", IntegerType()),
        StructField("queue_offset", LongType()),
        StructField("body", BinaryType()),
    ]
)
EVENT_COLUMNS = StructType(
    [StructField("message_id", StringType()), StructField("log_position", LongType())]
)
RUN_MAX = 20  # batches; a run with more does not end


def read_batch(cluster: FakeCluster, **options: str) -> list[dict[str, Any]]:
    """Return the rows of a batch read."""
    parsed = _parsed(cluster, options, is_stream=False)
    return _rows(MessageReader(parsed, COLUMNS, short_s=0), ())


class Stream:
    """A query that can restart from its checkpoint."""

    def __init__(self, cluster: FakeCluster, **options: str) -> None:
        given = {"startingOffsets": "earliest", **options}
        self.options = _parsed(cluster, given, is_stream=True)
        self.short_s = 0.0  # time in which a queue may end too early
        self.now_s = 0.0  # by the clock of its reader
        self.start: Any = None  # end of the committed batches
        self.planned: Any = None  # end of a planned, uncommitted batch

    def run(self, between: Callable[[], None] = lambda: None) -> list[Any]:
        """Start the query and read all rows; return the bodies, or the message ids of events.

        `between` runs after the plan of the first batch and before its tasks.
        """
        reader, column = self.reader()
        if self.start is None:
            self.start = _as_kept(reader.initialOffset())
        reader.prepareForTriggerAvailableNow()
        found: list[Any] = []
        for number in range(RUN_MAX):
            if self.planned is None:
                limit = reader.getDefaultReadLimit()
                end = _as_kept(reader.latestOffset(self.start, limit))
                if end == self.start:
                    return found
                self.planned = end
            if number == 0:
                between()
            found += [row[column] for row in _rows(reader, (self.start, self.planned))]
            self.start, self.planned = self.planned, None
        raise AssertionError(f"the stream had no end: {self.start}")

    def reader(self) -> tuple[Any, str]:
        """Return the reader that Spark would create, and the column to read."""
        if self.options.dataset == "events":
            return EventStreamReader(
                self.options, EVENT_COLUMNS, short_s=self.short_s, monotonic_s=lambda: self.now_s
            ), "message_id"
        return MessageStreamReader(
            self.options, COLUMNS, short_s=self.short_s, monotonic_s=lambda: self.now_s
        ), "body"


def _rows(reader: Any, offsets: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [
        row
        for partition in reader.partitions(*offsets)
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


def _parsed(cluster: FakeCluster, given: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    connection = {"endpoints": cluster.endpoint, "maxRetries": "2", "retryBackoffMs": "5"}
    return parse_source({**connection, **given}, is_stream=is_stream)


def _as_kept(document: Any) -> Any:
    return json.loads(json.dumps(document))
