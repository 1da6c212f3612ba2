"""Datasets `messages` and `dlq` as a batch: stored messages, by ranges of offsets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from tidemill_pipeline.offsets import SourceQueue, SourceRange
from tidemill_pipeline.options import EARLIEST, LATEST, ReadBoundary, SourceOptions
from tidemill_pipeline.pulling import EXPIRED, SHORT_S, gap_reporter, report_lost_tail
from tidemill_pipeline.schema import arrow_schema
from tidemill_pipeline.source.instants import whole_ms
from tidemill_pipeline.source.loads import check_same_predicates
from tidemill_pipeline.source.message_ranges import MessageRange, plan_ranges, read_messages
from tidemill_pipeline.source.queue_bounds import OffsetResolver, SourceView

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class MessageReader(DataSourceReader):
    """A batch read of messages."""

    def __init__(
        self, options: SourceOptions, schema: StructType, *, short_s: float = SHORT_S
    ) -> None:
        self.options = options
        self.schema = arrow_schema(schema)
        self.bounds = PredicateBounds()
        self._short_s = short_s

    def partitions(self) -> Sequence[InputPartition]:
        """Find the ranges of queues and split them into tasks."""
        resolver = OffsetResolver(self.options, short_s=self._short_s)
        view = resolver.whole_view()
        resolver.check_topics(view, waits=False)
        starts = resolver.resolve(self.options.start, view, word=EARLIEST)
        resolver.check_start_has_messages(starts, view)
        ends = resolver.resolve(self.options.end, view, word=LATEST)
        since: Mapping[SourceQueue, int] = {}
        if self.bounds.since_ms is not None:
            since = resolver.resolve(ReadBoundary(at_ms=self.bounds.since_ms), view, word=EARLIEST)
        ranges = []
        for queue, start in sorted(starts.items()):
            if not self.bounds.includes(queue):
                continue
            first, last = self.bounds.clip(max(start, since.get(queue, 0)), ends[queue])
            first = self._after_gap(view, queue, first, last)
            if first < last and view.has_lost_tail(queue, last):
                # A batch reads all existing messages, so a lost tail is not an error.
                report_lost_tail(queue, last, fails=False)
            ranges.append(SourceRange(queue=queue, start=first, end=last))
        return list(plan_ranges(self.options, ranges, view))

    def _after_gap(self, view: SourceView, queue: SourceQueue, start: int, end: int) -> int:
        least = view.queues[queue].min_offset
        if start < least and start < end:
            if self.options.start.by_queue is not None:
                report_gap = gap_reporter(fails=self.options.fails_on_data_loss)
                report_gap(queue, start, min(least, end), EXPIRED)
            return min(least, end)
        return start

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, MessageRange):
            yield from read_messages(self.options, self.schema, partition)


@final
@dataclass(slots=True)
class PredicateBounds:
    """Bounds of queues, offsets and store times, from predicates."""

    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    first: int = 0
    end: int = 2**63 - 1
    since_ms: int | None = None  # earliest store time

    def __str__(self) -> str:
        """Return a text that is the same in every process."""
        chosen = (self.topics, self.brokers, self.queue_ids)
        return str(
            [
                *(None if each is None else sorted(each, key=repr) for each in chosen),
                self.first,
                self.end,
                self.since_ms,
            ]
        )

    def includes(self, queue: SourceQueue) -> bool:
        """Return whether the read includes a queue."""
        return (
            (self.topics is None or queue.topic in self.topics)
            and (self.brokers is None or queue.broker in self.brokers)
            and (self.queue_ids is None or queue.queue_id in self.queue_ids)
        )

    def clip(self, start: int, end: int) -> tuple[int, int]:
        """Return the part of a range within the offset bounds."""
        first = max(start, self.first)
        return first, max(first, min(end, self.end))

    def push(self, predicate: Any) -> None:
        """Narrow the bounds by a predicate. Ignore unsupported predicates."""
        attribute: tuple[str, ...] = getattr(predicate, "attribute", ())
        column = attribute[0] if len(attribute) == 1 else ""
        if column == "queue_offset":
            self._push_offset(predicate)
        elif column == "store_timestamp":
            self._push_time(predicate)
        elif column in _CHOSEN_BY:
            self._push_choice(_CHOSEN_BY[column], predicate)

    def _push_choice(self, field: str, predicate: Any) -> None:
        if isinstance(predicate, EqualTo):
            values = frozenset([predicate.value])
        elif isinstance(predicate, In):
            values = frozenset(predicate.value)
        else:
            return
        before = getattr(self, field)
        setattr(self, field, values if before is None else before & values)

    def _push_offset(self, predicate: Any) -> None:
        value = getattr(predicate, "value", None)
        if not isinstance(value, int):
            return
        if isinstance(predicate, EqualTo | GreaterThanOrEqual):
            self.first = max(self.first, value)
        if isinstance(predicate, GreaterThan):
            self.first = max(self.first, value + 1)
        if isinstance(predicate, LessThan):
            self.end = min(self.end, value)
        if isinstance(predicate, EqualTo | LessThanOrEqual):
            self.end = min(self.end, value + 1)

    def _push_time(self, predicate: Any) -> None:
        """Skip the messages before the first one of a time. An end of a time is not supported.

        Older messages may follow the first one, since clocks are set back.
        """
        value = getattr(predicate, "value", None)
        if isinstance(value, datetime) and isinstance(
            predicate, EqualTo | GreaterThan | GreaterThanOrEqual
        ):
            at_ms = whole_ms(value)
            self.since_ms = at_ms if self.since_ms is None else max(self.since_ms, at_ms)


# Field of PredicateBounds for each column.
_CHOSEN_BY: Final = {"topic": "topics", "broker": "brokers", "queue_id": "queue_ids"}


@final
class PushdownMessageReader(MessageReader):
    """A batch read that applies predicates, for `pushdown=true`.

    Spark rejects a reader with `pushFilters` if its own pushdown setting is off.
    """

    def __init__(
        self, options: SourceOptions, schema: StructType, *, load: str, short_s: float = SHORT_S
    ) -> None:
        super().__init__(options, schema, short_s=short_s)
        self._load = load

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802  # Spark's name.
        """Apply the supported predicates, and return all.

        Spark may reuse the rows for other predicates, so it has to check each row again.
        """
        for each in filters:
            self.bounds.push(each)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks within the predicates. Raises BadOption for other predicates."""
        check_same_predicates(self._load, str(self.bounds))
        return super().partitions()
