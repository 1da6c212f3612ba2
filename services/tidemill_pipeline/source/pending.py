"""Dataset `pending`: pending delayed messages, by due time."""

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
    """A read of pending delayed messages."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.due = DueTimeRange(from_ms=options.start.at_ms or 0, until_ms=options.end.at_ms)

    def parts(self) -> list[BrokerPart]:
        """Return the tasks; none if the range of due times is empty."""
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
    """A range of due times, from `from_ms` to before `until_ms`; None: no end."""

    from_ms: int = 0
    until_ms: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no message can be due; no due time is before 1970."""
        return self.until_ms is not None and self.until_ms <= max(0, self.from_ms)

    def narrow(self, *, from_ms: int = 0, until_ms: int | None = None) -> None:
        """Intersect the range with another one."""
        self.from_ms = max(self.from_ms, from_ms)
        ends = [end for end in (self.until_ms, until_ms) if end is not None]
        self.until_ms = min(ends, default=None)


@final
class PushdownPendingReader(PendingReader):
    """A read of pending delayed messages with predicates on due time, topic and broker."""

    def __init__(self, options: SourceOptions, schema: StructType, *, load: str) -> None:
        super().__init__(options, schema)
        self._load = load
        self._chosen: dict[str, frozenset[str]] = {}  # values by column

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802  # Spark's name.
        """Apply the supported predicates, and return all, since requests round to milliseconds."""
        for each in filters:
            attribute, value = getattr(each, "attribute", ()), getattr(each, "value", None)
            if isinstance(each, EqualTo | In):
                self._push_values(attribute, each.value if isinstance(each, In) else [value])
            elif attribute == ("due_timestamp",) and isinstance(value, datetime):
                self._push_bound(each, whole_ms(value))
        return filters

    def _push_values(self, attribute: tuple[str, ...], values: Iterable[Any]) -> None:
        """Restrict a column to values."""
        if attribute == ("due_timestamp",):
            times = [whole_ms(value) for value in values if isinstance(value, datetime)]
            if times:
                self.due.narrow(from_ms=min(times), until_ms=max(times) + 1)
        elif attribute in {("topic",), ("broker",)}:
            texts = frozenset(value for value in values if isinstance(value, str))
            self._chosen[attribute[0]] = self._chosen.get(attribute[0], texts) & texts

    def _push_bound(self, predicate: Any, at_ms: int) -> None:
        if isinstance(predicate, GreaterThan | GreaterThanOrEqual):
            self.due.narrow(from_ms=at_ms)
        elif isinstance(predicate, LessThan | LessThanOrEqual):
            self.due.narrow(until_ms=at_ms + 1)

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each broker group. Raises BadOption for other predicates."""
        chosen = {column: sorted(values) for column, values in self._chosen.items()}
        check_same_predicates(self._load, f"{self.due} {sorted(chosen.items())}")
        return super().partitions()

    def parts(self) -> list[BrokerPart]:
        """Return the tasks within the predicates."""
        parts = super().parts()
        brokers, topics = self._chosen.get("broker"), self._chosen.get("topic")
        if brokers is not None:
            parts = [part for part in parts if part.broker in brokers]
        return parts if topics is None else self._of_topics(parts, topics)

    def _of_topics(self, parts: list[BrokerPart], topics: frozenset[str]) -> list[BrokerPart]:
        if self.options.topics == TopicSelection():
            chosen = TopicSelection(names=tuple(sorted(topics)))
            existing = topics_by_broker(connect(self.options.connection).whole_cluster(chosen))
            names = {part.broker: existing.get(part.broker, ()) for part in parts}
        else:
            names = {part.broker: tuple(topics.intersection(part.topics)) for part in parts}
        # A task without topics would read all topics.
        return [BrokerPart(broker, tuple(sorted(each))) for broker, each in names.items() if each]


def pending_reader(options: SourceOptions, schema: StructType, *, load: str) -> PendingReader:
    """Return the reader. Spark rejects a reader with pushFilters if its own setting is off."""
    if options.pushes_down:
        return PushdownPendingReader(options, schema, load=load)
    return PendingReader(options, schema)
