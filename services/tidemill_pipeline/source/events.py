"""Dataset `events`: what happened to messages, in the order of each broker group's log.

A stream's document is `{"v": 1, "e": {"broker-a": {"at": 123, "log": "..."}}}`. One task reads one
broker group, since only the log itself knows where its records begin.
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
# The deletion of a group, and the removal of a broker group: without a topic they are of all.
_OF_ALL: Final = (pb.EVENT_KIND_RESET, pb.EVENT_KIND_BROKER_GROUP_REMOVED)
PARTITION_BYTES: Final = 128 << 20  # of a log, that one task reads


class LogPosition(NamedTuple):
    """A position in the log of a broker group, and which log that is."""

    at: int
    log_id: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogRange:
    """What one task reads: of one log, from `start`, before `end`."""

    broker: str
    log_id: str
    start: int
    end: int


class EventRange(InputPartition):
    """One task."""

    def __init__(self, part: LogRange) -> None:
        super().__init__(part)
        self.part = part


def parts_of(whole: LogRange) -> list[LogRange]:
    """Return what one task each reads of a log."""
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

    What is not there for `short_s` is gone: its log is another one, or ends sooner. What cannot be
    read is a row of its own, where it is not an error.
    """
    client = connect(options.connection)
    topics = () if options.topics.pattern else options.topics.names
    asked = _EventFilter(options)
    at, index = part.start, 0
    stalls, since_s = 0, 0.0
    while at < part.end:
        before = at, index
        why = f"the log of {part.broker} ends at {at}, and was told to end at {part.end}"
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
                    _tell(options, gap.what, goes_on="the read goes on behind it")
                    yield unreadable_batch(
                        schema=schema,
                        broker=part.broker,
                        start=gap.start,
                        end=gap.end,
                        size=gap.size,
                        what=gap.what,
                    )
                events = [each for each in answer.events if asked.have(each)]
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
            _tell(options, why, goes_on="the read goes on without what is missing")
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
    """Which events were asked for, of those that a log was not asked for by name.

    A log knows names alone, and an expression may mean topics that are deleted by now, or that a
    broker group which is away would tell of. So of an expression all events are read.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._topics = options.topics if options.topics.pattern else TopicSelection()
        self._first_ms = options.start.at_ms or 0
        self._end_ms = 2**63 if options.end.at_ms is None else options.end.at_ms
        self._known: dict[str, bool] = {}  # by topic

    def have(self, event: pb.Event) -> bool:
        """Say whether an event is one of them."""
        if not self._first_ms <= event.at_ms < self._end_ms:
            return False
        if not self._topics.pattern or (event.kind in _OF_ALL and not event.topic):
            return True
        first = event.origin_topic or event.topic
        found = self._known.get(first)
        if found is None:
            found = self._known[first] = self._topics.have(first)
        return found


def _warn_of_unknown_topics(options: SourceOptions) -> None:
    """Say which topics are not there; a log may tell of one that was deleted."""
    topics = options.topics
    if topics == TopicSelection():
        return
    known = {queue.topic for queue in connect(options.connection).whole_cluster(topics).queues}
    for name in sorted(set(topics.names) - known):
        log.warning("there is no topic %s: its events are of before it was deleted, if any", name)
    if topics.pattern and not known:
        log.warning("no topic matches %s: no event is read", topics.pattern)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _LogGap:
    """Of a log, what nobody can read: so many bytes between two positions."""

    start: int
    end: int
    size: int
    what: str


def _gaps(answer: pb.ReadEventsReply, broker: str, start: int) -> Iterator[_LogGap]:
    """Yield what an answer, which goes on at `start`, could not tell."""
    begin = start
    if answer.gone_from:
        begin = max(answer.log_min, start)
        what = f"{broker}: its log from {start} to {begin} is gone, by retention"
        yield _LogGap(start=start, end=begin, size=begin - start, what=what)
    if answer.damaged_bytes:
        what = (
            f"{broker}: {answer.damaged_bytes} bytes of its log between {begin} and"
            f" {answer.next_position} are damaged: what they told cannot be read; a replica may"
            " have it, from which it is mended"
        )
        size, end = answer.damaged_bytes, answer.next_position
        yield _LogGap(start=begin, end=end, size=size, what=what)


def _tell(options: SourceOptions, what: str, *, goes_on: str) -> None:
    """Say that something is lost, and what a read does that may lose it."""
    if options.fails_on_data_loss:
        raise DataLoss(f"{what}. With failOnDataLoss=false {goes_on}")
    log.warning("%s; %s", what, goes_on)


def _short_logs(cluster: ClusterState, places: Mapping[str, LogPosition]) -> set[str]:
    """Return the broker groups that tell less of their logs than was read, or that are removed."""
    found = set()
    for broker, place in places.items():
        now = cluster.logs.get(broker)
        if now is None:
            is_less = cluster.has_removed(broker)
        else:
            is_less = not now.error and now.log_id == place.log_id and now.log_end < place.at
        if is_less:
            found.add(broker)
    return found


def _look(options: SourceOptions) -> ClusterState:
    # No topic: only where the logs begin and end is wanted.
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
    # An instant is found by reading: each event says when it was.
    return of.log_end if options.start.everywhere == LATEST else of.log_min


class EventStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of events. Lives beside the driver; `read` runs in executors."""

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
        # Broker groups of which it was told that they have less: nobody waits for them again.
        self._shorter: set[str] = set()
        self._target: dict[str, LogPosition] | None = None
        self._seen: dict[str, LogPosition] | None = None
        self._away = OutageTimer(options.fail_after_ms, monotonic_s=monotonic_s)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name.
        """Return where a new query starts."""
        cluster = _look_at_all(self.options)
        return _document(
            {
                each.broker: LogPosition(_start(self.options, each), each.log_id)
                for each in cluster.logs.values()
            }
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name.
        """Return what the options say of a trigger."""
        if self.options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self.options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return how far the next trigger goes."""
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
        """Freeze where this run ends."""
        logs = _look_at_all(self.options).logs.values()
        self._target = {each.broker: LogPosition(each.log_end, each.log_id) for each in logs}

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name.
        """Return where the logs ended when they were looked at last."""
        return None if self._seen is None else _document(self._seen)

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
            # One that gives no answer may have all of it: its task finds out. Of another log it is
            # the beginning, and what was planned of this one is not there.
            place = self._begin(broker, last, ends.get(broker, last))
            if first < place.at:
                parts.append(LogRange(broker=broker, log_id=last.log_id, start=first, end=place.at))
        return [EventRange(part) for each in parts for part in parts_of(each)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, EventRange):
            yield from read_events(self.options, self.schema, partition.part)

    # ------------------------------------------------------------ its parts

    def _look(self, given: Mapping[str, LogPosition]) -> ClusterState:
        cluster = self._settled(given)
        self._away.note(cluster.unreachable)
        self._seen = self._ends(cluster)
        return cluster

    def _settled(self, places: Mapping[str, LogPosition]) -> ClusterState:
        """Look where the logs end, again for a while where they end before a place in them."""
        cluster = repeat_until_settled(
            connect(self.options.connection),
            lambda: _look(self.options),
            lambda cluster: _short_logs(cluster, places) - self._shorter,
            short_s=self._short_s,
        )
        self._shorter = _short_logs(cluster, places)
        return cluster

    def _ends(self, cluster: ClusterState) -> dict[str, LogPosition]:
        """Return where the logs end of the broker groups that gave an answer."""
        return {
            each.broker: LogPosition(each.log_end, each.log_id)
            for each in cluster.logs.values()
            if not each.error
        }

    def _begin(self, broker: str, place: LogPosition, end: LogPosition) -> LogPosition:
        """Return a place in a log that is there: the given one, or where the read goes on."""
        if place.log_id and place.log_id != end.log_id:
            _tell(
                self.options,
                f"{broker} has another log than before: its store was made anew",
                goes_on="it is read from its beginning",
            )
            return LogPosition(0, end.log_id)
        if place.at > end.at:
            _tell(
                self.options,
                f"the log of {broker} ends at {end.at}, and was to be read up to {place.at}: its"
                " store was restored, or has lost the rest",
                goes_on="the read goes on where it ends",
            )
            return LogPosition(end.at, end.log_id)
        return place

    def _report_removed(self, broker: str, at: int) -> None:
        _tell(
            self.options,
            f"the broker group {broker} was removed; its log was read up to {at}",
            goes_on="the read goes on without it",
        )


def _document(places: Mapping[str, LogPosition]) -> dict[str, Any]:
    return {
        "v": VERSION,
        "e": {broker: {"at": at, "log": log_id} for broker, (at, log_id) in sorted(places.items())},
    }


def is_of_events(document: Mapping[str, Any]) -> bool:
    """Say whether it is a document of a stream of events that this program reads."""
    return document.get("v") == VERSION and "e" in document


def places_of(document: Mapping[str, Any]) -> dict[str, LogPosition]:
    """Return the places in the logs of broker groups. Raises PipelineError for another document."""
    if not is_of_events(document):
        raise PipelineError(
            "the checkpoint is not of a stream of events that this program reads: start it with a"
            " new checkpoint"
        )
    return {
        broker: LogPosition(place["at"], place["log"]) for broker, place in document["e"].items()
    }
