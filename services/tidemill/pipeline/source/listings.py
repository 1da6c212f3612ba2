"""Datasets `pending`, `inflight` and `groups`: what waits, what is out, and how far groups are.

Batch only: each is a look at one moment. One task asks one broker group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tidemill.pipeline.client import Client, connect
from tidemill.pipeline.options import Dataset, SourceOptions, Topics
from tidemill.pipeline.rows import in_flight_batch, pending_batch, progress_batch
from tidemill.pipeline.schema import arrow_schema
from tidemill.pipeline.source.topics import check_topics, names_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BATCH_ROWS: Final = 4_096  # of an Arrow batch; a row has no body


class BrokerPart(InputPartition):
    """One task: a broker group, and the topics that were chosen."""

    def __init__(self, broker: str, topics: tuple[str, ...]) -> None:
        super().__init__(broker)
        self.broker = broker
        self.topics = topics  # none: all


def _pending(client: Client, options: SourceOptions, part: BrokerPart) -> Iterator[Any]:
    return client.pending(
        part.broker, topics=part.topics, from_ms=options.start.at_ms or 0,
        until_ms=options.end.at_ms or 0,
    )  # fmt: skip


def _in_flight(client: Client, options: SourceOptions, part: BrokerPart) -> Iterator[Any]:
    found = client.in_flight(part.broker, options.groups)
    return (each for each in found if not part.topics or each.topic in part.topics)


def _progress(client: Client, options: SourceOptions, part: BrokerPart) -> Iterator[Any]:
    found = client.progress(part.broker, options.groups)
    return (each for each in found if not part.topics or each.topic in part.topics)


_LISTS: Final[
    dict[
        Dataset,
        tuple[
            Callable[[Client, SourceOptions, BrokerPart], Iterator[Any]],
            Callable[[Sequence[Any], pa.Schema, str], pa.RecordBatch],
        ],
    ]
] = {
    "pending": (_pending, pending_batch),
    "inflight": (_in_flight, in_flight_batch),
    "groups": (_progress, progress_batch),
}


class ListingReader(DataSourceReader):
    """A batch read of one of the listings."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each broker group that has any of the topics. Raises BadOption."""
        client = connect(self.options.connection)
        cluster = client.whole_cluster(self.options.topics)
        if self.options.topics == Topics():
            return [BrokerPart(broker, ()) for broker in sorted(cluster.logs)]
        check_topics(
            self.options, {queue.topic for queue in cluster.queues},
            everything=lambda: names_of(client), waits=False,
        )  # fmt: skip
        of: dict[str, set[str]] = {}
        for queue in cluster.queues:
            of.setdefault(queue.broker, set()).add(queue.topic)
        # Others have none of them, and refuse to be asked for what they have not.
        return [BrokerPart(broker, tuple(sorted(names))) for broker, names in sorted(of.items())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if not isinstance(partition, BrokerPart):
            return
        ask, make_batch = _LISTS[self.options.dataset]
        items = ask(connect(self.options.connection), self.options, partition)
        while chunk := list(islice(items, BATCH_ROWS)):
            yield make_batch(chunk, self.schema, partition.broker)
