"""Datasets `pending`, `inflight` and `groups`: what waits, what is out, and how far groups are.

Batch only: each is a look at one moment. One task asks one broker group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from tidemill.pipeline.client import Client, connect
from tidemill.pipeline.options import SourceOptions, Topics
from tidemill.pipeline.pulling import BATCH_BYTES
from tidemill.pipeline.rows import in_flight_batch, pending_batches, progress_batch
from tidemill.pipeline.schema import OF_WAITING, arrow_schema
from tidemill.pipeline.source.instants import whole_ms
from tidemill.pipeline.source.loads import check_asked_alike
from tidemill.pipeline.source.topics import check_topics, names_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BATCH_ROWS: Final = 4_096  # of an Arrow batch: most rows have no body


class BrokerPart(InputPartition):
    """One task: a broker group, and the topics that were chosen."""

    def __init__(self, broker: str, topics: tuple[str, ...]) -> None:
        super().__init__(broker)
        self.broker = broker
        self.topics = topics  # none: all


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
        for items in _gathered(self._items(connect(self.options.connection), partition)):
            yield from self._batches(items, partition.broker)

    def _items(self, client: Client, part: BrokerPart) -> Iterator[Any]:
        is_progress = self.options.dataset == "groups"
        ask = client.progress if is_progress else client.in_flight
        found = ask(part.broker, self.options.groups)
        return (each for each in found if not part.topics or each.topic in part.topics)

    def _batches(self, items: Sequence[Any], broker: str) -> Iterator[pa.RecordBatch]:
        make = progress_batch if self.options.dataset == "groups" else in_flight_batch
        yield make(items, self.schema, broker)


class PendingReader(ListingReader):
    """A read of delayed messages that wait."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        # Due then, and before then; 0: without end.
        self.due_from_ms = options.start.at_ms or 0
        self.due_until_ms = options.end.at_ms or 0

    def _items(self, client: Client, part: BrokerPart) -> Iterator[Any]:
        return client.pending(
            part.broker, topics=part.topics, from_ms=self.due_from_ms, until_ms=self.due_until_ms,
            with_messages=not set(OF_WAITING).isdisjoint(self.schema.names),
        )  # fmt: skip

    def _batches(self, items: Sequence[Any], broker: str) -> Iterator[pa.RecordBatch]:
        return pending_batches(items, self.schema, broker, decodes_body=self.options.decodes_body)


@final
class PushdownPendingReader(PendingReader):
    """A read of delayed messages that asks for those alone that predicates leave by due time."""

    def __init__(self, options: SourceOptions, schema: StructType, *, load: str) -> None:
        super().__init__(options, schema)
        self._load = load

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802  # Spark's name.
        """Take due times, and return all, since a millisecond is the least that is asked for."""
        for each in filters:
            if getattr(each, "attribute", ()) == ("due_timestamp",):
                self._push(each)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each broker group. Raises BadOption for a second choice."""
        check_asked_alike(self._load, str((self.due_from_ms, self.due_until_ms)))
        return super().partitions()

    def _push(self, predicate: Any) -> None:
        value = getattr(predicate, "value", None)
        if not isinstance(value, datetime):
            return
        at_ms = whole_ms(value)
        if isinstance(predicate, EqualTo | GreaterThan | GreaterThanOrEqual):
            self.due_from_ms = max(self.due_from_ms, at_ms)
        if isinstance(predicate, EqualTo | LessThan | LessThanOrEqual):
            until_ms = at_ms + 1
            self.due_until_ms = min(self.due_until_ms or until_ms, until_ms)


def listing_reader(
    options: SourceOptions, schema: StructType, *, load: str = ""
) -> ListingReader:  # fmt: skip
    """Return what reads a listing. Spark refuses one that takes predicates unless it is set so."""
    if options.dataset != "pending":
        return ListingReader(options, schema)
    if options.pushes_down:
        return PushdownPendingReader(options, schema, load=load)
    return PendingReader(options, schema)


def _gathered(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield items, as they come, in lists of as much as a batch may have."""
    gathered: list[Any] = []
    size = 0
    for item in items:
        gathered.append(item)
        size += item.ByteSize()
        if len(gathered) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield gathered
            gathered, size = [], 0
    if gathered:
        yield gathered
