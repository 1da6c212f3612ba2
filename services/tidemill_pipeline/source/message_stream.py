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
    SHORT_S,
    TAKEN,
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
    """Take the queues that only the archive has out of new places, of which nothing is read."""
    passed = {
        queue: at
        for queue, at in places.items()
        if not view.is_at_broker(queue) and at == view.queues[queue].max_offset
    }
    for queue in passed:
        del places[queue]
    return passed


class MessageStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of messages. Lives beside the driver; `read` runs in executors."""

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
        self._places = OffsetResolver(options, short_s=short_s)
        # Queues that were told to end before where this query is: nobody waits for them again.
        self._shorter: set[SourceQueue] = set()
        # Queues of which it was told that what stood behind the archive is gone.
        self._lost_tails: set[SourceQueue] = set()
        self._target: dict[SourceQueue, int] | None = None
        self._seen: Offsets | None = None
        self._monotonic_s = monotonic_s
        self._last_batch_s = monotonic_s()
        self._away = OutageTimer(options.fail_after_ms, monotonic_s=monotonic_s)
        self._dropped_topics: set[str] = set()  # topics that are not asked for any more
        self._lagging_queues: set[SourceQueue] = (
            set()
        )  # queues of which the archive has less than was read

    # ------------------------------------------------------------ what Spark asks

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name.
        """Return where a new query starts."""
        view = self._places.whole_view()
        self._places.check_topics(view, waits=True)
        self._places.check_stops(view)
        starts = self._places.resolve(self.options.start, view, word=LATEST)
        self._places.check_start_has_messages(starts, view)
        passed = _pop_passed(starts, view)
        begin = Offsets(at=starts, knows_archive=self._places.are_both, passed=passed)
        return self._document(begin)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name.
        """Return what the options say of a trigger."""
        if self.options.rows_per_trigger_max is not None:
            return ReadMaxRows(self.options.rows_per_trigger_max)
        if self.options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self.options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return how far the next trigger goes. Reads no message."""
        view = self._look(Offsets.from_document(start))
        given = Offsets.from_document(start)
        self._report_dropped_topics(given)
        begin = self._begin(given, view)
        new_places = {queue: at for queue, at in begin.items() if queue not in given.at}
        passed = {queue: at for queue, at in given.passed.items() if queue not in begin}
        passed |= _pop_passed(new_places, view)
        begin = {queue: at for queue, at in begin.items() if queue not in passed}
        # Of one that is new its place alone, so that what is gone of it by then is found out.
        target = self._reachable_ends(begin, view)
        target |= new_places
        if not new_places and self._waits_for_more(begin, target):
            return start
        if isinstance(limit, ReadMaxRows):
            target = plan.take_rows(begin, target, limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            per_row = {queue: ends.bytes_per_row for queue, ends in view.queues.items()}
            target = plan.take_bytes(begin, target, per_row, limit.max_bytes)
        # Of a broker that is away nobody can say yet what only the archive has.
        is_known = given.knows_archive or not view.unreachable
        reached = Offsets(
            at=target, knows_archive=self._places.are_both and is_known, passed=passed
        )
        if reached == given:
            return start  # Nothing new: the same text.
        self._last_batch_s = self._monotonic_s()
        return self._document(reached)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name.
        """Freeze where this run ends."""
        self._target = self._places.whole_view(excused=self._shorter).ends

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name.
        """Return where the queues ended when they were looked at last."""
        return None if self._seen is None else self._seen.as_document()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Share a trigger between tasks."""
        planned = Offsets.from_document(end)
        view = self._places.view(planned, excused=self._shorter, planned=planned.at.keys())
        self._shorter |= view.short_queues(planned)
        given = Offsets.from_document(start)
        # A plan without an archive has found new queues at their brokers.
        known = replace(given, knows_archive=given.knows_archive or not planned.knows_archive)
        ranges = []
        for queue, planned_to in sorted(planned.at.items()):
            last = planned_to
            first = given.at.get(queue, given.passed.get(queue))
            ends = view.queues.get(queue)
            # Of another topic brokers were not asked: what they have of it its tasks find out.
            is_asked = view.cluster is None or self.options.topics.have(queue.topic)
            if ends is None and is_asked and view.has_lost(queue):
                if first is None or first < last:
                    report_lost_queue(queue, first or 0, fails=self.options.fails_on_data_loss)
                continue
            last = self._at_most_its_end(queue, last, view, "was planned to be read up to")
            if (
                view.cluster is None
                and ends is not None
                and max(first or 0, ends.max_offset) < last
            ):
                raise ArchiveError(
                    f"{queue} is archived up to {ends.max_offset}, and brokers were to be read up"
                    f" to {last}: archive it, or go on with readMode=auto"
                )
            is_away = queue.broker in view.unreachable or not is_asked
            if first is None:
                if not is_asked:
                    continue  # Of one that was found then its place alone was planned.
                if ends is None or is_away:
                    raise NoAnswer(f"no answer from {queue.broker}, where {queue} was found")
                # This trigger found it. Where it ended then is where it starts, or where it began.
                first = ends.min_offset if self._is_read_whole(queue, known, view) else last
            least = first if ends is None or is_away else ends.min_offset  # Its tasks find out.
            if first < least and first < last:
                tell = gap_reporter(fails=self.options.fails_on_data_loss)
                tell(queue, first, min(least, last), TAKEN)
                first = min(least, last)
            if is_asked and view.has_lost_tail(queue, last) and last > view.archived_to[queue]:
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

    # ------------------------------------------------------------ its parts

    def _document(self, offsets: Offsets) -> dict[str, Any]:
        return plan.with_report(
            offsets.as_document(),
            group=self.options.reports_as,
            connection=self.options.connection.as_options(),
        )

    def _look(self, given: Offsets) -> SourceView:
        view = self._places.view(given, excused=self._shorter)
        self._away.note(view.unreachable)
        stops = self._places.stops(view)
        self._seen = Offsets(
            at=view.ends
            if stops is None
            else {queue: min(end, stops.get(queue, 0)) for queue, end in view.ends.items()}
        )
        self._shorter = view.short_queues(given)
        return view

    def _report_dropped_topics(self, given: Offsets) -> None:
        """Tell once of topics that the query has read and does not ask for any more."""
        left = {queue.topic for queue in given.at if not self.options.topics.have(queue.topic)}
        for topic in sorted(left - self._dropped_topics):
            log.warning(
                "the checkpoint has a place in %s, which the options do not name any more: nothing"
                " of it is read, and it goes on there when they name it again",
                topic,
            )
        self._dropped_topics |= left

    def _begin(self, given: Offsets, view: SourceView) -> dict[SourceQueue, int]:
        """Return where each queue goes on: as given, or where new ones start; without lost ones."""
        begin = {}
        for queue, at in given.at.items():
            if self._has_lost(queue, view):
                report_lost_queue(queue, at, fails=self.options.fails_on_data_loss)
            else:
                begin[queue] = self._at_most_its_end(queue, at, view, "was read up to")
                archived_to = view.archived_to.get(queue, at + 1)
                # What was to be read of it in this run is known, and may be more than is archived.
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
            # Of what a broker that is away may have more of before, the beginning is not known.
            if queue not in begin and queue.broker not in view.unreachable:
                is_whole = self._is_read_whole(queue, given, view)
                begin[queue] = ends.min_offset if is_whole else ends.max_offset
                if not is_whole and self.options.new_queues == EARLIEST:
                    log.warning(
                        "%s is in the archive alone, and the query's checkpoint, of before this"
                        " version or of another readMode, cannot say that it was not read: it is"
                        " taken as read",
                        queue,
                    )
        return begin

    def _at_most_its_end(self, queue: SourceQueue, at: int, view: SourceView, what: str) -> int:
        """Return an offset that was told, or where its queue ends now, where that is before."""
        if not view.is_at_broker(queue) or at <= view.queues[queue].max_offset:
            return at
        ends = view.queues[queue]
        if view.cluster is None:
            # Brokers had more than is archived yet, and so it was read from them.
            if queue not in self._lagging_queues:
                log.warning(
                    "%s is archived up to %d, and %s %d: the read goes on when it is archived",
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
            goes_on="the read goes on there",
        )
        return ends.max_offset

    def _has_lost(self, queue: SourceQueue, view: SourceView) -> bool:
        # One of a topic that is not asked for any more keeps its place.
        return self.options.topics.have(queue.topic) and view.has_lost(queue)

    def _is_read_whole(self, found: SourceQueue, given: Offsets, view: SourceView) -> bool:
        """Say whether a queue that was found is read from its first message on.

        One of a topic that was made anew always is: its name was read already. One that only an
        archive has was so itself, where that could not be written down: see Offsets.
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
        # Of a topic that is known it is a queue that it was given.
        return bool(incarnations) and found.incarnation not in incarnations

    def _reachable_ends(
        self, begin: Mapping[SourceQueue, int], view: SourceView
    ) -> dict[SourceQueue, int]:
        """Return how far there is something to read, at most to the frozen target of this run."""
        target = dict(begin)  # What cannot be asked stays where it is.
        stops = self._places.stops(view)
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
        least = self.options.rows_per_trigger_min
        if least is None or self._target is not None:
            return False
        waited_ms = (self._monotonic_s() - self._last_batch_s) * 1000
        there = sum(plan.backlog(begin, target).values())
        return there < least and waited_ms < self.options.trigger_delay_ms_max
