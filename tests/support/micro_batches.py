"""What Spark does with a source, without Spark: a batch, and a stream with its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from tests.support.fake_cluster import FakeCluster
from tidemill.pipeline.options import SourceOptions, parse_source
from tidemill.pipeline.source.messages import MessageReader, MessageStreamReader

COLUMNS = StructType(
    [
        StructField("topic", StringType()),
        StructField("broker", StringType()),
        StructField("queue_id", IntegerType()),
        StructField("queue_offset", LongType()),
        StructField("body", BinaryType()),
    ]
)
RUN_MAX = 20  # batches of a run that does not end by itself


def read_batch(cluster: FakeCluster, **options: str) -> list[dict[str, Any]]:
    """Return the rows of a batch read."""
    parsed = _parsed(cluster, options, is_stream=False)
    return _rows(MessageReader(parsed, COLUMNS, short_s=0), ())


class Stream:
    """A query that may be started again and again with its checkpoint."""

    def __init__(self, cluster: FakeCluster, **options: str) -> None:
        given = {"startingOffsets": "earliest", **options}
        self.options = _parsed(cluster, given, is_stream=True)
        self.short_s = 0.0  # how long a queue may end too soon
        self.start: Any = None  # where what is committed ends
        self.planned: Any = None  # of a batch that is not committed

    def run(self, between: Callable[[], None] = lambda: None) -> list[bytes]:
        """Start it, read all that is there, and return the bodies.

        `between` comes after the plan of the first batch, and before its tasks.
        """
        reader = MessageStreamReader(self.options, COLUMNS, short_s=self.short_s)
        if self.start is None:
            self.start = _as_kept(reader.initialOffset())
        reader.prepareForTriggerAvailableNow()
        bodies: list[bytes] = []
        for number in range(RUN_MAX):
            if self.planned is None:
                limit = reader.getDefaultReadLimit()
                end = _as_kept(reader.latestOffset(self.start, limit))
                if end == self.start:
                    return bodies
                self.planned = end
            if number == 0:
                between()
            bodies += [row["body"] for row in _rows(reader, (self.start, self.planned))]
            self.start, self.planned = self.planned, None
        raise AssertionError(f"the stream had no end: {self.start}")


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
