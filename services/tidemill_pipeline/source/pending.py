"""Dataset `pending`: delayed messages that wait, by when they are due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from tidemill_pipeline.client import ClusterClient, connect
from tidemill_pipeline.cluster_state import OmittedItems
from tidemill_pipeline.options import SourceOptions, TopicSelection
from tidemill_pipeline.rows import pending_batches
from tidemill_pipeline.schema import OF_PENDING_MESSAGES
from tidemill_pipeline.source.instants import whole_ms
from tidemill_pipeline.source.listings import BrokerPart, ListingReader, topics_by_broker
from tidemill_pipeline.source.loads import check_same_predicates

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class PendingReader(ListingReader):
    """A read of delayed messages that wait."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.due = DueTimeRange(from_ms=options.start.at_ms or 0, until_ms=options.end.at_ms)

    def parts(self) -> list[BrokerPart]:
        """Return the tasks; none where nothing can be due."""
        parts = super().parts()
        return [] if self.due.is_empty else parts

    def _items(self, client: ClusterClient, part: BrokerPart, left: OmittedItems) -> Iterator[Any]:
        return client.pending(
            part.broker,
            topics=part.topics,
            from_ms=self.due.from_ms,
            until_ms=self.due.until_ms,
            with_messages=not set(OF_PENDING_MESSAGES).isdisjoint(self.schema.names),
            left=left,
        )

    def _batches(self, items: Sequence[Any], broker: str) -> Iterator[pa.RecordBatch]:
        return pending_batches(items, self.schema, broker, decodes_body=self.options.decodes_body)


@final
@dataclass(slots=True, kw_only=True)
class DueTimeRange:
    """When messages are due that are asked for: then or later, and before then; None: no end."""

    from_ms: int = 0
    until_ms: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be due: nothing is before 1970."""
        return self.until_ms is not None and self.until_ms <= max(0, self.from_ms)

    def narrow(self, *, from_ms: int = 0, until_ms: int | None = None) -> None:
        """Leave what is due within both ranges."""
        self.from_ms = max(self.from_ms, from_ms)
        ends = [end for end in (self.until_ms, until_ms) if end is not None]
        self.until_ms = min(ends, default=None)


@final
class PushdownPendingReader(PendingReader):
    """A read of delayed messages that asks for those alone that predicates leave.

    That is by due time, topic and broker.
    """

    def __init__(self, options: SourceOptions, schema: StructType, *, load: str) -> None:
        super().__init__(options, schema)
        self._load = load
        self._chosen: dict[str, frozenset[str]] = {}  # values by column

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802  # Spark's name.
        """Take what can be taken, and return all: a millisecond is the least that is asked for."""
        for each in filters:
            attribute, value = getattr(each, "attribute", ()), getattr(each, "value", None)
            if isinstance(each, EqualTo | In):
                self._push_values(attribute, each.value if isinstance(each, In) else [value])
            elif attribute == ("due_timestamp",) and isinstance(value, datetime):
                self._push_bound(each, whole_ms(value))
        return filters

    def _push_values(self, attribute: tuple[str, ...], values: Iterable[Any]) -> None:
        """Take in which values a column may have."""
        if attribute == ("due_timestamp",):
            times = [whole_ms(value) for value in values if isinstance(value, datetime)]
            if times:
                self.due.narrow(from_ms=min(times), until_ms=max(times) + 1)
        elif attribute in {("topic",), ("broker",)}:
            wanted = frozenset(value for value in values if isinstance(value, str))
            self._chosen[attribute[0]] = self._chosen.get(attribute[0], wanted) & wanted

    def _push_bound(self, predicate: Any, at_ms: int) -> None:
        if isinstance(predicate, GreaterThan | GreaterThanOrEqual):
            self.due.narrow(from_ms=at_ms)
        elif isinstance(predicate, LessThan | LessThanOrEqual):
            self.due.narrow(until_ms=at_ms + 1)

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each broker group. Raises BadOption for a second choice."""
        chosen = {column: sorted(values) for column, values in self._chosen.items()}
        check_same_predicates(self._load, f"{self.due} {sorted(chosen.items())}")
        return super().partitions()

    def parts(self) -> list[BrokerPart]:
        """Return the tasks that predicates leave."""
        parts = super().parts()
        brokers, topics = self._chosen.get("broker"), self._chosen.get("topic")
        if brokers is not None:
            parts = [part for part in parts if part.broker in brokers]
        return parts if topics is None else self._of_topics(parts, topics)

    def _of_topics(self, parts: list[BrokerPart], topics: frozenset[str]) -> list[BrokerPart]:
        if self.options.topics == TopicSelection():
            asked = TopicSelection(names=tuple(sorted(topics)))
            there = topics_by_broker(connect(self.options.connection).whole_cluster(asked))
            left = {part.broker: there.get(part.broker, ()) for part in parts}
        else:
            left = {part.broker: tuple(topics.intersection(part.topics)) for part in parts}
        # Without a topic a task would ask for all.
        return [BrokerPart(broker, tuple(sorted(names))) for broker, names in left.items() if names]


def pending_reader(options: SourceOptions, schema: StructType, *, load: str) -> PendingReader:
    """Return what reads them. Spark refuses a reader that takes predicates unless it is set so."""
    if options.pushes_down:
        return PushdownPendingReader(options, schema, load=load)
    return PendingReader(options, schema)
