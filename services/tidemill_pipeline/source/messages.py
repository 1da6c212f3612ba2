"""Datasets `messages` and `dlq`: stored messages, by ranges of offsets."""

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
from tidemill_pipeline.pulling import SHORT_S, TAKEN, gap_reporter, report_lost_tail
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
        self.wanted = PredicateBounds()
        self._short_s = short_s

    def partitions(self) -> Sequence[InputPartition]:
        """Look where the queues begin and end, and share the ranges between tasks."""
        places = OffsetResolver(self.options, short_s=self._short_s)
        view = places.whole_view()
        places.check_topics(view, waits=False)
        starts = places.resolve(self.options.start, view, word=EARLIEST)
        places.check_start_has_messages(starts, view)
        ends = places.resolve(self.options.end, view, word=LATEST)
        young: Mapping[SourceQueue, int] = {}
        if self.wanted.since_ms is not None:
            young = places.resolve(ReadBoundary(at_ms=self.wanted.since_ms), view, word=EARLIEST)
        ranges = []
        for queue, start in sorted(starts.items()):
            if not self.wanted.takes(queue):
                continue
            first, last = self.wanted.bounds(max(start, young.get(queue, 0)), ends[queue])
            first = self._after_gap(view, queue, first, last)
            if first < last and view.has_lost_tail(queue, last):
                # Whoever has read all that is there need not have lost anything.
                report_lost_tail(queue, last, fails=False)
            ranges.append(SourceRange(queue=queue, start=first, end=last))
        return list(plan_ranges(self.options, ranges, view))

    def _after_gap(self, view: SourceView, queue: SourceQueue, start: int, end: int) -> int:
        least = view.queues[queue].min_offset
        if start < least and start < end:
            if self.options.start.by_queue is not None:
                tell = gap_reporter(fails=self.options.fails_on_data_loss)
                tell(queue, start, min(least, end), TAKEN)
            return min(least, end)
        return start

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, MessageRange):
            yield from read_messages(self.options, self.schema, partition)


@final
@dataclass(slots=True)
class PredicateBounds:
    """What predicates leave of the queues and their offsets."""

    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    first: int = 0
    end: int = 2**63 - 1
    since_ms: int | None = None  # when the first of them was stored

    def __str__(self) -> str:
        """Return it as text that is the same in any process."""
        chosen = (self.topics, self.brokers, self.queue_ids)
        return str(
            [
                *(None if each is None else sorted(each, key=repr) for each in chosen),
                self.first,
                self.end,
                self.since_ms,
            ]
        )

    def takes(self, queue: SourceQueue) -> bool:
        """Say whether a queue is read."""
        return (
            (self.topics is None or queue.topic in self.topics)
            and (self.brokers is None or queue.broker in self.brokers)
            and (self.queue_ids is None or queue.queue_id in self.queue_ids)
        )

    def bounds(self, start: int, end: int) -> tuple[int, int]:
        """Return what is left of a range."""
        first = max(start, self.first)
        return first, max(first, min(end, self.end))

    def push(self, predicate: Any) -> None:
        """Take in what a predicate leaves, as far as it can be told here."""
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
        """Leave out what stands before the first message of a time. Its end nobody can look up.

        Behind the first there may be older ones, too: clocks are set back.
        """
        value = getattr(predicate, "value", None)
        if isinstance(value, datetime) and isinstance(
            predicate, EqualTo | GreaterThan | GreaterThanOrEqual
        ):
            at_ms = whole_ms(value)
            self.since_ms = at_ms if self.since_ms is None else max(self.since_ms, at_ms)


# Which fields of Wanted hold the values of a column.
_CHOSEN_BY: Final = {"topic": "topics", "broker": "brokers", "queue_id": "queue_ids"}


@final
class PushdownMessageReader(MessageReader):
    """A batch read that takes predicates, where the option says so.

    Spark refuses a reader that offers it while its own setting is off.
    """

    def __init__(
        self, options: SourceOptions, schema: StructType, *, load: str, short_s: float = SHORT_S
    ) -> None:
        super().__init__(options, schema, short_s=short_s)
        self._load = load

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802  # Spark's name.
        """Take what can be taken, and return all.

        Spark may hand the rows of these predicates to a look with others: so it looks at each row.
        """
        for each in filters:
            self.wanted.push(each)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Share what predicates leave between tasks. Raises BadOption for a second choice."""
        check_same_predicates(self._load, str(self.wanted))
        return super().partitions()
