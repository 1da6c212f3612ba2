"""Datasets `messages` and `dlq` as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tidemill_pipeline import offsets as plan
from tidemill_pipeline.errors import ArchiveError, NoAnswer
from tidemill_pipeline.offsets import Offsets, SourceQueue, SourceRange
from tidemill_pipeline.options import EARLIEST, LATEST, SourceOptions
from tidemill_pipeline.pulling import (
    EXPIRED,
    SHORT_S,
    gap_reporter,
    log,
    report_lost_queue,
    report_lost_tail,
    report_short_queue,
)
from tidemill_pipeline.schema import arrow_schema
from tidemill_pipeline.source.message_ranges import MessageRange, plan_ranges, read_messages
from tidemill_pipeline.source.outages import OutageTimer
from tidemill_pipeline.source.queue_bounds import OffsetResolver, SourceView

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def _pop_passed(places: dict[SourceQueue, int], view: SourceView) -> dict[SourceQueue, int]:
    """Remove and return the queues that only the archive has and that start at their end."""
    passed = {
        queue: at
        for queue, at in places.items()
        if not view.is_at_broker(queue) and at == view.queues[queue].max_offset
    }
    for queue in passed:
        del places[queue]
    return passed


class MessageStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of messages. It runs in a process of the driver; `read` runs in executors."""

    def __init__(
        self,
        options: SourceOptions,
        schema: StructType,
        *,
        short_s: float = SHORT_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.schema = arrow_schema(schema)
        self._resolver = OffsetResolver(options, short_s=short_s)
        # Queues that were reported to end too early. The query does not wait for them again.
        self._short_queues: set[SourceQueue] = set()
        # Queues whose lost messages after the archive were reported.
        self._lost_tails: set[SourceQueue] = set()
        self._target: dict[SourceQueue, int] | None = None  # end of an AvailableNow run
        self._last_ends: Offsets | None = None
        self._monotonic_s = monotonic_s
        self._last_batch_s = monotonic_s()
        self._outages = OutageTimer(options.fail_after_ms, monotonic_s=monotonic_s)
        self._dropped_topics: set[str] = set()  # reported topics that the options omit
        self._lagging_queues: set[SourceQueue] = set()  # reported, with a late archive

    # ------------------------------------------------------------ interface of Spark

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name.
        """Return the start of a new query."""
        view = self._resolver.whole_view()
        self._resolver.check_topics(view, waits=True)
        self._resolver.check_stops(view)
        starts = self._resolver.resolve(self.options.start, view, word=LATEST)
        self._resolver.check_start_has_messages(starts, view)
        passed = _pop_passed(starts, view)
        begin = Offsets(at=starts, knows_archive=self._resolver.are_both, passed=passed)
        return self._document(begin)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name.
        """Return the limit of a trigger."""
        if self.options.rows_per_trigger_max is not None:
            return ReadMaxRows(self.options.rows_per_trigger_max)
        if self.options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self.options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next trigger. Does not read messages."""
        view = self._look(Offsets.from_document(start))
        given = Offsets.from_document(start)
        self._report_dropped_topics(given)
        begin = self._begin(given, view)
        new_queues = {queue: at for queue, at in begin.items() if queue not in given.at}
        passed = {queue: at for queue, at in given.passed.items() if queue not in begin}
        passed |= _pop_passed(new_queues, view)
        begin = {queue: at for queue, at in begin.items() if queue not in passed}
        # A new queue enters with its start only. The next trigger then detects lost messages.
        target = self._reachable_ends(begin, view)
        target |= new_queues
        if not new_queues and self._waits_for_more(begin, target):
            return start
        if isinstance(limit, ReadMaxRows):
            target = plan.take_rows(begin, target, limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            per_row = {queue: ends.bytes_per_row for queue, ends in view.queues.items()}
            target = plan.take_bytes(begin, target, per_row, limit.max_bytes)
        # While a broker is unreachable, the queues that only the archive has are unknown.
        is_known = given.knows_archive or not view.unreachable
        reached = Offsets(
            at=target, knows_archive=self._resolver.are_both and is_known, passed=passed
        )
        if reached == given:
            return start  # Nothing new: Spark expects the same text.
        self._last_batch_s = self._monotonic_s()
        return self._document(reached)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name.
        """Fix the end of this run."""
        self._target = self._resolver.whole_view(excused=self._short_queues).ends

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name.
        """Return the ends of the queues in the last view."""
        return None if self._last_ends is None else self._last_ends.as_document()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split a trigger into tasks."""
        planned = Offsets.from_document(end)
        view = self._resolver.view(planned, excused=self._short_queues, planned=planned.at.keys())
        self._short_queues |= view.short_queues(planned)
        given = Offsets.from_document(start)
        # If the plan had no archive, brokers had its new queues.
        known = replace(given, knows_archive=given.knows_archive or not planned.knows_archive)
        ranges = []
        for queue, planned_to in sorted(planned.at.items()):
            last = planned_to
            first = given.at.get(queue, given.passed.get(queue))
            ends = view.queues.get(queue)
            # The view has no queues of brokers for topics that the options no longer name. The
            # tasks of these topics find out what the brokers have.
            is_requested = view.cluster is None or self.options.topics.have(queue.topic)
            if ends is None and is_requested and view.has_lost(queue):
                if first is None or first < last:
                    report_lost_queue(queue, first or 0, fails=self.options.fails_on_data_loss)
                continue
            last = self._at_most_its_end(queue, last, view, "the plan reads it up to")
            if (
                view.cluster is None
                and ends is not None
                and max(first or 0, ends.max_offset) < last
            ):
                raise ArchiveError(
                    f"{queue} is archived up to {ends.max_offset} but the plan reads it up to"
                    f" {last}: archive it, or continue with readMode=auto"
                )
            is_unknown = queue.broker in view.unreachable or not is_requested
            if first is None:
                if not is_requested:
                    continue  # The plan has only the start of a new queue.
                if ends is None or is_unknown:
                    raise NoAnswer(f"no answer from {queue.broker}, which had the new {queue}")
                # The queue is new in this trigger and starts at its begin or its planned end.
                first = ends.min_offset if self._is_read_whole(queue, known, view) else last
            # If the begin is unknown, the tasks report expired messages.
            least = first if ends is None or is_unknown else ends.min_offset
            if first < least and first < last:
                report_gap = gap_reporter(fails=self.options.fails_on_data_loss)
                report_gap(queue, first, min(least, last), EXPIRED)
                first = min(least, last)
            if is_requested and view.has_lost_tail(queue, last) and last > view.archived_to[queue]:
                at = max(first, view.archived_to[queue])
                report_lost_tail(queue, at, fails=self.options.fails_on_data_loss)
                last = at
            if first < last:
                ranges.append(SourceRange(queue=queue, start=first, end=last))
        return list(plan_ranges(self.options, ranges, view))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, MessageRange):
            yield from read_messages(self.options, self.schema, partition)

    # ------------------------------------------------------------ parts

    def _document(self, offsets: Offsets) -> dict[str, Any]:
        return plan.with_report(
            offsets.as_document(),
            group=self.options.reports_as,
            connection=self.options.connection.as_options(),
        )

    def _look(self, given: Offsets) -> SourceView:
        view = self._resolver.view(given, excused=self._short_queues)
        self._outages.note(view.unreachable)
        stops = self._resolver.stops(view)
        self._last_ends = Offsets(
            at=view.ends
            if stops is None
            else {queue: min(end, stops.get(queue, 0)) for queue, end in view.ends.items()}
        )
        self._short_queues = view.short_queues(given)
        return view

    def _report_dropped_topics(self, given: Offsets) -> None:
        """Report once each topic that the query has read but that the options no longer name."""
        dropped = {queue.topic for queue in given.at if not self.options.topics.have(queue.topic)}
        for topic in sorted(dropped - self._dropped_topics):
            log.warning(
                "the checkpoint has offsets of %s, which the options no longer name: the query does"
                " not read it, and continues there when the options name it again",
                topic,
            )
        self._dropped_topics |= dropped

    def _begin(self, given: Offsets, view: SourceView) -> dict[SourceQueue, int]:
        """Return the offset from which to read each queue. Omit lost queues."""
        begin = {}
        for queue, at in given.at.items():
            if self._has_lost(queue, view):
                report_lost_queue(queue, at, fails=self.options.fails_on_data_loss)
            else:
                begin[queue] = self._at_most_its_end(queue, at, view, "was read up to")
                archived_to = view.archived_to.get(queue, at + 1)
                # The target of this run may lie after the archived end.
                known = max(at, 0 if self._target is None else self._target.get(queue, 0))
                if at >= archived_to and view.has_lost_tail(queue, known):
                    if queue not in self._lost_tails:
                        report_lost_tail(queue, archived_to, fails=self.options.fails_on_data_loss)
                    self._lost_tails.add(queue)
                    begin[queue] = archived_to
        for queue, at in given.passed.items():
            if view.is_at_broker(queue):
                begin[queue] = self._at_most_its_end(queue, at, view, "was known up to")
        for queue, ends in view.queues.items():
            if queue in given.passed:
                continue
            # The begin is unknown while the broker is unreachable: it may have earlier messages.
            if queue not in begin and queue.broker not in view.unreachable:
                is_whole = self._is_read_whole(queue, given, view)
                begin[queue] = ends.min_offset if is_whole else ends.max_offset
                if not is_whole and self.options.new_queues == EARLIEST:
                    log.warning(
                        "only the archive has %s, and the checkpoint is of another readMode, so"
                        " that the query may have read the queue: the query skips it",
                        queue,
                    )
        return begin

    def _at_most_its_end(self, queue: SourceQueue, at: int, view: SourceView, what: str) -> int:
        """Return a known offset, or the current end of the queue if it is smaller."""
        if not view.is_at_broker(queue) or at <= view.queues[queue].max_offset:
            return at
        ends = view.queues[queue]
        if view.cluster is None:
            # The query has read messages from brokers that are not archived yet.
            if queue not in self._lagging_queues:
                log.warning(
                    "%s is archived up to %d but %s %d: the read waits for the archive",
                    queue,
                    ends.max_offset,
                    what,
                    at,
                )
            self._lagging_queues.add(queue)
            return at
        report_short_queue(
            queue,
            ends.max_offset,
            f"{what} {at}",
            fails=self.options.fails_on_data_loss,
            goes_on="the read continues there",
        )
        return ends.max_offset

    def _has_lost(self, queue: SourceQueue, view: SourceView) -> bool:
        # A queue of a topic that the options no longer name keeps its offset.
        return self.options.topics.have(queue.topic) and view.has_lost(queue)

    def _is_read_whole(self, found: SourceQueue, given: Offsets, view: SourceView) -> bool:
        """Return whether to read a new queue from its first message on.

        This holds for each new incarnation of a topic that the query already reads. If only the
        archive has the queue, a checkpoint of another mode may have read it: see `Offsets`.
        """
        if not (given.knows_archive or view.is_at_broker(found)):
            return False
        if self.options.new_queues == EARLIEST:
            return True
        incarnations = {
            queue.incarnation
            for queue in given.at
            if (queue.topic, queue.broker) == (found.topic, found.broker)
        }
        # A new queue of a known incarnation was added to the topic.
        return bool(incarnations) and found.incarnation not in incarnations

    def _reachable_ends(
        self, begin: Mapping[SourceQueue, int], view: SourceView
    ) -> dict[SourceQueue, int]:
        """Return the readable ends of queues, up to the fixed target of this run."""
        target = dict(begin)  # Queues of unreachable brokers keep their offset.
        stops = self._resolver.stops(view)
        for queue, ends in view.queues.items():
            if queue not in begin:
                continue
            end = ends.max_offset
            if stops is not None:
                end = min(end, stops.get(queue, begin[queue]))
            if self._target is not None:
                end = min(end, self._target.get(queue, begin[queue]))
            target[queue] = max(end, begin[queue])
        return target

    def _waits_for_more(
        self, begin: Mapping[SourceQueue, int], target: Mapping[SourceQueue, int]
    ) -> bool:
        rows_min = self.options.rows_per_trigger_min
        if rows_min is None or self._target is not None:
            return False
        waited_ms = (self._monotonic_s() - self._last_batch_s) * 1000
        rows = sum(plan.backlog(begin, target).values())
        return rows < rows_min and waited_ms < self.options.trigger_delay_ms_max
