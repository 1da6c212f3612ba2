"""Dataset `events`: what happened to messages, in the order of each broker group's log.

A stream's document is `{"v": 1, "e": {"broker-a": {"at": 123, "log": "..."}}}`. One task reads one
broker group, since only the log itself knows where its records begin.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
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

from tidemill.pipeline.client import BrokerLog, Cluster, connect
from tidemill.pipeline.errors import DataLoss, PipelineError, Unreachable
from tidemill.pipeline.options import LATEST, SourceOptions, Topics
from tidemill.pipeline.pulling import log
from tidemill.pipeline.rows import event_batch
from tidemill.pipeline.schema import arrow_schema
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

VERSION: Final = 1  # of the document
PARTITION_BYTES: Final = 128 << 20  # of a log, that one task reads


class LogPlace(NamedTuple):
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
            broker=whole.broker, log_id=whole.log_id, start=start,
            end=min(whole.end, start + PARTITION_BYTES),
        )
        for start in range(whole.start, whole.end, PARTITION_BYTES)
    ]  # fmt: skip


def read_events(
    options: SourceOptions, schema: pa.Schema, part: LogRange
) -> Iterator[pa.RecordBatch]:
    """Yield the events of a task as batches. Runs in an executor."""
    client = connect(options.connection)
    topics = _names(options)
    at, index = part.start, 0
    first_ms = options.start.at_ms or 0
    end_ms = 2**63 if options.end.at_ms is None else options.end.at_ms
    while at < part.end:
        before = at, index
        for answer in client.events(
            part.broker, start=at, index=index, until=part.end, log_id=part.log_id, topics=topics
        ):
            _tell_gap(answer, part.broker, at, options)
            events = [each for each in answer.events if first_ms <= each.at_ms < end_ms]
            if events:
                yield event_batch(events, schema=schema, broker=part.broker)
            at, index = max(at, answer.next_position), answer.next_index
        if (at, index) == before:
            raise DataLoss(
                f"the log of {part.broker} ends at {at}, and was told to end at {part.end}"
            )


def _names(options: SourceOptions) -> tuple[str, ...]:
    if not options.topics.pattern:
        return options.topics.names
    # By name, which is all that the log can be asked for.
    queues = connect(options.connection).cluster(options.topics).queues
    return tuple(sorted({name.topic for name in queues})) or ("",)


def _tell_gap(answer: pb.ReadEventsReply, broker: str, start: int, options: SourceOptions) -> None:
    if not answer.gone_from:
        return
    begin = max(answer.log_min, start)
    if options.fails_on_data_loss:
        raise DataLoss(
            f"{broker}: its log from {start} to {begin} is gone, by retention. With"
            " failOnDataLoss=false the read goes on behind it"
        )
    log.warning("%s: its log from %d to %d is gone and is passed over", broker, start, begin)


def _look(options: SourceOptions) -> Cluster:
    # No topic: only where the logs begin and end is wanted.
    return connect(options.connection).cluster(Topics())


def _look_at_all(options: SourceOptions) -> Cluster:
    return connect(options.connection).whole_cluster(Topics())


class EventReader(DataSourceReader):
    """A batch read of events."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each broker group."""
        cluster = _look_at_all(self.options)
        return [
            EventRange(part)
            for each in cluster.logs.values()
            for part in parts_of(
                LogRange(
                    broker=each.broker, log_id=each.log_id, start=_start(self.options, each),
                    end=each.log_end,
                )
            )
        ]  # fmt: skip

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, EventRange):
            yield from read_events(self.options, self.schema, partition.part)


def _start(options: SourceOptions, of: BrokerLog) -> int:
    # An instant is found by reading: each event says when it was.
    return of.log_end if options.start.everywhere == LATEST else of.log_min


class EventStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of events. Lives beside the driver; `read` runs in executors."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)
        self._target: dict[str, LogPlace] | None = None
        self._seen: dict[str, LogPlace] | None = None
        self._away_since_s: dict[str, float] = {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name.
        """Return where a new query starts."""
        cluster = _look_at_all(self.options)
        return _document(
            {
                each.broker: LogPlace(_start(self.options, each), each.log_id)
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
        given = _places(start)
        ends = self._ends()
        target = dict(given)
        for broker, end in ends.items():
            last = end.at
            if self._target is not None:
                last = min(last, self._target[broker].at) if broker in self._target else 0
            begin = given.get(broker, LogPlace(0, end.log_id))
            if begin.log_id and begin.log_id != end.log_id:
                self._tell_another(broker)
                begin = LogPlace(0, end.log_id)
            if isinstance(limit, ReadMaxBytes) and last - begin.at > limit.max_bytes:
                last = begin.at + limit.max_bytes
            target[broker] = LogPlace(max(last, begin.at), end.log_id)
        return start if target == given else _document(target)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name.
        """Freeze where this run ends."""
        logs = _look_at_all(self.options).logs.values()
        self._target = {each.broker: LogPlace(each.log_end, each.log_id) for each in logs}

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name.
        """Return where the logs ended when they were looked at last."""
        return None if self._seen is None else _document(self._seen)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return a task for each broker group."""
        given, until = _places(start), _places(end)
        parts = []
        for broker, last in sorted(until.items()):
            before = given.get(broker)
            is_same = before is not None and before.log_id in {"", last.log_id}
            first = before.at if before is not None and is_same else 0
            if first < last.at:
                parts.append(LogRange(broker=broker, log_id=last.log_id, start=first, end=last.at))
        return [EventRange(part) for each in parts for part in parts_of(each)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, EventRange):
            yield from read_events(self.options, self.schema, partition.part)

    def _ends(self) -> dict[str, LogPlace]:
        cluster = _look(self.options)
        now_s = time.monotonic()
        self._away_since_s = {
            broker: self._away_since_s.get(broker, now_s) for broker in cluster.unreachable
        }
        for broker, since_s in self._away_since_s.items():
            if (now_s - since_s) * 1000 > self.options.fail_after_ms:
                raise Unreachable(
                    f"{broker} has been away for {now_s - since_s:.0f} s: failAfterMs"
                )
        self._seen = {
            each.broker: LogPlace(each.log_end, each.log_id)
            for each in cluster.logs.values()
            if not each.error
        }
        return self._seen

    def _tell_another(self, broker: str) -> None:
        if self.options.fails_on_data_loss:
            raise DataLoss(
                f"{broker} has another log than before: its store was made anew. With"
                " failOnDataLoss=false the read goes on at its beginning"
            )
        log.warning("%s has another log than before; it is read from its beginning", broker)


def _document(places: Mapping[str, LogPlace]) -> dict[str, Any]:
    return {
        "v": VERSION,
        "e": {broker: {"at": at, "log": log_id} for broker, (at, log_id) in sorted(places.items())},
    }


def _places(document: Mapping[str, Any]) -> dict[str, LogPlace]:
    if document.get("v") != VERSION or "e" not in document:
        raise PipelineError(
            "the checkpoint is not of a stream of events that this program reads: start it with a"
            " new checkpoint"
        )
    return {broker: LogPlace(place["at"], place["log"]) for broker, place in document["e"].items()}
