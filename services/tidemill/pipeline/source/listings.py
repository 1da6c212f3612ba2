"""Datasets `pending`, `inflight` and `groups`: what waits, what is out, and how far groups are.

Batch only: each is a look at one moment. One task asks one broker group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

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
from tidemill.pipeline.options import Dataset, SourceOptions, Topics
from tidemill.pipeline.rows import in_flight_batch, pending_batch, progress_batch
from tidemill.pipeline.schema import OF_WAITING, arrow_schema
from tidemill.pipeline.source.instants import whole_ms
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


def _in_flight(client: Client, options: SourceOptions, part: BrokerPart) -> Iterator[Any]:
    found = client.in_flight(part.broker, options.groups)
    return (each for each in found if not part.topics or each.topic in part.topics)


def _progress(client: Client, options: SourceOptions, part: BrokerPart) -> Iterator[Any]:
    found = client.progress(part.broker, options.groups)
    return (each for each in found if not part.topics or each.topic in part.topics)


_Make = Callable[[Sequence[Any], pa.Schema, str], pa.RecordBatch]
_LISTS: Final[
    dict[Dataset, tuple[Callable[[Client, SourceOptions, BrokerPart], Iterator[Any]], _Make]]
] = {"inflight": (_in_flight, in_flight_batch), "groups": (_progress, progress_batch)}


class ListingReader(DataSourceReader):
    """A batch read of one of the listings."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)
        # Of delayed messages: due then, and before then; 0: without end.
        self.due_from_ms = options.start.at_ms or 0
        self.due_until_ms = options.end.at_ms or 0

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
        client = connect(self.options.connection)
        make_batch: _Make
        if self.options.dataset == "pending":
            items: Iterator[Any] = self._pending(client, partition)
            make_batch = functools.partial(pending_batch, decodes_body=self.options.decodes_body)
        else:
            ask, make_batch = _LISTS[self.options.dataset]
            items = ask(client, self.options, partition)
        while chunk := list(islice(items, BATCH_ROWS)):
            yield make_batch(chunk, self.schema, partition.broker)

    def _pending(self, client: Client, part: BrokerPart) -> Iterator[Any]:
        return client.pending(
            part.broker, topics=part.topics, from_ms=self.due_from_ms, until_ms=self.due_until_ms,
            with_messages=not set(OF_WAITING).isdisjoint(self.schema.names),
        )  # fmt: skip


class PushdownListingReader(ListingReader):
    """A read of delayed messages that asks for those alone that predicates leave by due time."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802  # Spark's name.
        """Take due times, and return all, since a millisecond is the least that is asked for."""
        for each in filters:
            if getattr(each, "attribute", ()) == ("due_timestamp",):
                self._push(each)
        return filters

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
