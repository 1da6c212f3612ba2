"""Dataset `events`: the lifecycle events of messages, in the order of each broker group's log.

A stream's document is `{"v": 1, "e": {"broker-a": {"at": 123, "log": "..."}}}`. A task reads a
range of one log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.client import connect
from tidemill_pipeline.cluster_state import BrokerLog, ClusterState
from tidemill_pipeline.errors import DataLoss, PipelineError, QueueLoss
from tidemill_pipeline.options import LATEST, SourceOptions, TopicSelection
from tidemill_pipeline.pulling import SHORT_S, log
from tidemill_pipeline.rows import event_batch, unreadable_batch
from tidemill_pipeline.schema import arrow_schema
from tidemill_pipeline.source.outages import OutageTimer, repeat_until_settled

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

VERSION: Final = 1  # of the document
# Deletion of a consumer group and removal of a broker group: without a topic, they concern all.
_OF_ALL: Final = (pb.EVENT_KIND_RESET, pb.EVENT_KIND_BROKER_GROUP_REMOVED)
PARTITION_BYTES: Final = 128 << 20  # of a log per task


class LogPosition(NamedTuple):
    """A position in the log of a broker group, with the id of the log."""

    at: int
    log_id: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogRange:
    """A range of one log, from `start` to before `end`."""

    broker: str
    log_id: str
    start: int
    end: int


class EventRange(InputPartition):
    """One task: a range of a log."""

    def __init__(self, part: LogRange) -> None:
        super().__init__(part)
        self.part = part


def parts_of(whole: LogRange) -> list[LogRange]:
    """Split a range of a log into one range per task."""
    return [
        LogRange(
            broker=whole.broker,
            log_id=whole.log_id,
            start=start,
            end=min(whole.end, start + PARTITION_BYTES),
        )
        for start in range(whole.start, whole.end, PARTITION_BYTES)
    ]


def read_events(
    options: SourceOptions, schema: pa.Schema, part: LogRange, *, short_s: float = SHORT_S
) -> Iterator[pa.RecordBatch]:
    """Yield the events of a task as batches. Runs in an executor.

    If the log was replaced or ends too early for `short_s`, the rest of the range is lost. With
    `failOnDataLoss=false`, an unreadable part of the log is a row.
    """
    client = connect(options.connection)
    topics = () if options.topics.pattern else options.topics.names
    event_filter = _EventFilter(options)
    at, index = part.start, 0
    stalls, since_s = 0, 0.0
    while at < part.end:
        before = at, index
        why = f"the log of {part.broker} ends at {at} but should end at {part.end}"
        try:
            for answer in client.events(
                part.broker,
                start=at,
                index=index,
                until=part.end,
                log_id=part.log_id,
                topics=topics,
            ):
                for gap in _gaps(answer, part.broker, at):
                    _report_loss(options, gap.what, goes_on="the read continues after it")
                    yield unreadable_batch(
                        schema=schema,
                        broker=part.broker,
                        start=gap.start,
                        end=gap.end,
                        size=gap.size,
                        what=gap.what,
                    )
                events = [each for each in answer.events if event_filter.includes(each)]
                if events:
                    yield event_batch(events, schema=schema, broker=part.broker)
                at, index = max(at, answer.next_position), answer.next_index
        except QueueLoss as error:
            why = str(error)
        if (at, index) != before:
            stalls = 0
            continue
        stalls += 1
        since_s = time.monotonic() if stalls == 1 else since_s
        if time.monotonic() - since_s >= short_s:
            _report_loss(options, why, goes_on="the read continues without these events")
            yield unreadable_batch(
                schema=schema,
                broker=part.broker,
                start=at,
                end=part.end,
                size=part.end - at,
                what=why,
            )
            return
        client.pause(stalls)


class _EventFilter:
    """Filter of events by time and topic pattern.

    A log filters by topic names only. A pattern may match topics that are deleted or unknown at the
    moment, so a read with a pattern gets all events and filters them here.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._topics = options.topics if options.topics.pattern else TopicSelection()
        self._first_ms = options.start.at_ms or 0
        self._end_ms = 2**63 if options.end.at_ms is None else options.end.at_ms
        self._known: dict[str, bool] = {}  # by topic

    def includes(self, event: pb.Event) -> bool:
        """Return whether the read includes an event."""
        if not self._first_ms <= event.at_ms < self._end_ms:
            return False
        if not self._topics.pattern or (event.kind in _OF_ALL and not event.topic):
            return True
        topic = event.origin_topic or event.topic
        is_included = self._known.get(topic)
        if is_included is None:
            is_included = self._known[topic] = self._topics.have(topic)
        return is_included


def _warn_of_unknown_topics(options: SourceOptions) -> None:
    """Report missing topics. A log may still have events of a deleted topic."""
    topics = options.topics
    if topics == TopicSelection():
        return
    known = {queue.topic for queue in connect(options.connection).whole_cluster(topics).queues}
    for name in sorted(set(topics.names) - known):
        log.warning("there is no topic %s: the read finds only events before its deletion", name)
    if topics.pattern and not known:
        log.warning("no topic matches %s: the read finds no events", topics.pattern)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _LogGap:
    """An unreadable part of a log: a number of bytes between two positions."""

    start: int
    end: int
    size: int
    what: str


def _gaps(answer: pb.ReadEventsReply, broker: str, start: int) -> Iterator[_LogGap]:
    """Yield the unreadable parts that an answer reports; the answer begins at `start`."""
    begin = start
    if answer.gone_from:
        begin = max(answer.log_min, start)
        what = f"{broker}: retention deleted its log from {start} to {begin}"
        yield _LogGap(start=start, end=begin, size=begin - start, what=what)
    if answer.damaged_bytes:
        what = (
            f"{broker}: {answer.damaged_bytes} bytes of its log between {begin} and"
            f" {answer.next_position} are damaged: their events cannot be read; mend the log from a"
            " replica or a backup"
        )
        size, end = answer.damaged_bytes, answer.next_position
        yield _LogGap(start=begin, end=end, size=size, what=what)


def _report_loss(options: SourceOptions, what: str, *, goes_on: str) -> None:
    """Report a loss as an error or a warning. `goes_on`: effect of failOnDataLoss=false."""
    if options.fails_on_data_loss:
        raise DataLoss(f"{what}. With failOnDataLoss=false {goes_on}")
    log.warning("%s; %s", what, goes_on)


def _short_logs(cluster: ClusterState, positions: Mapping[str, LogPosition]) -> set[str]:
    """Return removed broker groups, and broker groups with a log that ends before a position."""
    short = set()
    for broker, position in positions.items():
        now = cluster.logs.get(broker)
        if now is None:
            is_short = cluster.has_removed(broker)
        else:
            same_log = not now.error and now.log_id == position.log_id
            is_short = same_log and now.log_end < position.at
        if is_short:
            short.add(broker)
    return short


def _look(options: SourceOptions) -> ClusterState:
    # Without topics, the reply has only the logs.
    return connect(options.connection).cluster(TopicSelection())


def _look_at_all(options: SourceOptions) -> ClusterState:
    return connect(options.connection).whole_cluster(TopicSelection())


class EventReader(DataSourceReader):
    """A batch read of events."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each broker group."""
        cluster = _look_at_all(self.options)
        _warn_of_unknown_topics(self.options)
        return [
            EventRange(part)
            for each in cluster.logs.values()
            for part in parts_of(
                LogRange(
                    broker=each.broker,
                    log_id=each.log_id,
                    start=_start(self.options, each),
                    end=each.log_end,
                )
            )
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, EventRange):
            yield from read_events(self.options, self.schema, partition.part)


def _start(options: SourceOptions, of: BrokerLog) -> int:
    # The read itself filters by time, since each event has one.
    return of.log_end if options.start.everywhere == LATEST else of.log_min


class EventStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of events. It runs in a process of the driver; `read` runs in executors."""

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
        self._short_s = short_s
        # Broker groups whose short logs were reported. The query does not wait for them again.
        self._short_logs: set[str] = set()
        self._target: dict[str, LogPosition] | None = None  # end of an AvailableNow run
        self._last_ends: dict[str, LogPosition] | None = None
        self._outages = OutageTimer(options.fail_after_ms, monotonic_s=monotonic_s)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name.
        """Return the start of a new query."""
        cluster = _look_at_all(self.options)
        return _document(
            {
                each.broker: LogPosition(_start(self.options, each), each.log_id)
                for each in cluster.logs.values()
            }
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name.
        """Return the limit of a trigger."""
        if self.options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self.options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next trigger."""
        given = places_of(start)
        cluster = self._look(given)
        target = {}
        for broker, place in given.items():
            if cluster.has_removed(broker):
                self._report_removed(broker, place.at)
            else:
                target[broker] = place
        for broker, end in self._ends(cluster).items():
            last = end.at
            if self._target is not None:
                last = min(last, self._target[broker].at) if broker in self._target else 0
            begin = self._begin(broker, given.get(broker, LogPosition(0, end.log_id)), end)
            if isinstance(limit, ReadMaxBytes) and last - begin.at > limit.max_bytes:
                last = begin.at + limit.max_bytes
            target[broker] = LogPosition(max(last, begin.at), end.log_id)
        return start if target == given else _document(target)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name.
        """Fix the end of this run."""
        logs = _look_at_all(self.options).logs.values()
        self._target = {each.broker: LogPosition(each.log_end, each.log_id) for each in logs}

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name.
        """Return the last known ends of the logs."""
        return None if self._last_ends is None else _document(self._last_ends)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return a task for each broker group."""
        given, until = places_of(start), places_of(end)
        cluster = self._settled(until)
        ends = self._ends(cluster)
        parts = []
        for broker, last in sorted(until.items()):
            before = given.get(broker)
            is_same = before is not None and before.log_id in {"", last.log_id}
            first = before.at if before is not None and is_same else 0
            if first >= last.at:
                continue
            if cluster.has_removed(broker):
                self._report_removed(broker, first)
                continue
            # An unreachable broker group may have the whole range; its task finds out. If the log
            # is another one, the range is lost and the read begins at 0.
            place = self._begin(broker, last, ends.get(broker, last))
            if first < place.at:
                parts.append(LogRange(broker=broker, log_id=last.log_id, start=first, end=place.at))
        return [EventRange(part) for each in parts for part in parts_of(each)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, EventRange):
            yield from read_events(self.options, self.schema, partition.part)

    # ------------------------------------------------------------ parts

    def _look(self, given: Mapping[str, LogPosition]) -> ClusterState:
        cluster = self._settled(given)
        self._outages.note(cluster.unreachable)
        self._last_ends = self._ends(cluster)
        return cluster

    def _settled(self, places: Mapping[str, LogPosition]) -> ClusterState:
        """Return the cluster state. Retry for a while if a log ends before a position in it."""
        cluster = repeat_until_settled(
            connect(self.options.connection),
            lambda: _look(self.options),
            lambda cluster: _short_logs(cluster, places) - self._short_logs,
            short_s=self._short_s,
        )
        self._short_logs = _short_logs(cluster, places)
        return cluster

    def _ends(self, cluster: ClusterState) -> dict[str, LogPosition]:
        """Return the ends of the logs of the reachable broker groups."""
        return {
            each.broker: LogPosition(each.log_end, each.log_id)
            for each in cluster.logs.values()
            if not each.error
        }

    def _begin(self, broker: str, place: LogPosition, end: LogPosition) -> LogPosition:
        """Return the given position, or the position where the read continues after a loss."""
        if place.log_id and place.log_id != end.log_id:
            _report_loss(
                self.options,
                f"{broker} has another log than before: its store was created again",
                goes_on="the read continues at the begin of the new log",
            )
            return LogPosition(0, end.log_id)
        if place.at > end.at:
            _report_loss(
                self.options,
                f"the log of {broker} ends at {end.at} but should be read up to {place.at}: its"
                " store was restored or has lost events",
                goes_on="the read continues at the end of the log",
            )
            return LogPosition(end.at, end.log_id)
        return place

    def _report_removed(self, broker: str, at: int) -> None:
        _report_loss(
            self.options,
            f"the broker group {broker} was removed; its log was read up to {at}",
            goes_on="the read continues without it",
        )


def _document(places: Mapping[str, LogPosition]) -> dict[str, Any]:
    return {
        "v": VERSION,
        "e": {broker: {"at": at, "log": log_id} for broker, (at, log_id) in sorted(places.items())},
    }


def is_of_events(document: Mapping[str, Any]) -> bool:
    """Return whether a document is of a stream of events in the current version."""
    return document.get("v") == VERSION and "e" in document


def places_of(document: Mapping[str, Any]) -> dict[str, LogPosition]:
    """Return the log positions by broker group. Raises PipelineError for another document."""
    if not is_of_events(document):
        raise PipelineError(
            f"the checkpoint is not of a stream of events in version {VERSION}: start the query"
            " with a new checkpoint"
        )
    return {
        broker: LogPosition(place["at"], place["log"]) for broker, place in document["e"].items()
    }
