"""Datasets `messages` and `dlq`: stored messages, by ranges of offsets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tidemill.pipeline import offsets as plan
from tidemill.pipeline.archive.manifest import DataFile, QueueKey
from tidemill.pipeline.archive.reading import read_range
from tidemill.pipeline.archive.store import ArchiveStore
from tidemill.pipeline.client import connect
from tidemill.pipeline.errors import Unreachable
from tidemill.pipeline.offsets import Offsets, QueueName, QueueRange
from tidemill.pipeline.options import EARLIEST, LATEST, SourceOptions
from tidemill.pipeline.pulling import pull_range, tell_gap
from tidemill.pipeline.rows import message_batch
from tidemill.pipeline.schema import arrow_schema
from tidemill.pipeline.source.places import Places, View, all_reachable

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


_OF_BODIES = frozenset({"body", "body_crc32"})


class MessageRange(InputPartition):
    """One task: a range of a queue, and which part of it an archive has."""

    def __init__(
        self,
        part: QueueRange,
        *,
        key: QueueKey | None = None,
        files: tuple[DataFile, ...] = (),
    ) -> None:
        super().__init__(part)
        self.part = part
        self.key = key  # of the archive; None: it is read from a broker
        self.files = files


def plan_ranges(
    options: SourceOptions, ranges: Iterable[QueueRange], view: View
) -> list[MessageRange]:
    """Return the tasks of some ranges, those that are archived apart from the others."""
    archived, live = [], []
    for each in ranges:
        to = min(each.end, max(each.start, view.archived_to.get(each.name, each.start)))
        archived.append(QueueRange(name=each.name, start=each.start, end=to))
        live.append(QueueRange(name=each.name, start=to, end=each.end))
    size = {
        "rows_per_partition": options.rows_per_partition, "partitions_min": options.partitions_min,
    }  # fmt: skip
    parts = [MessageRange(part) for part in plan.split(live, **size)]
    if not view.keys:
        return parts
    archive = ArchiveStore(options.archive_path).archive()
    for part in plan.split(archived, **size):
        key = view.keys[part.name]
        files = tuple(archive.holding(key, part.start, part.end))
        parts.append(MessageRange(part, key=key, files=files))
    return parts


def read_messages(
    options: SourceOptions, schema: pa.Schema, partition: MessageRange
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task as batches. Runs in an executor."""
    if partition.key is not None:
        yield from _read_archived(options, schema, partition, partition.key)
        return
    part = partition.part
    # Bodies are not even read where no column is made of them.
    with_bodies = bool(_OF_BODIES.intersection(schema.names))
    for messages in pull_range(connect(options.connection), options, part, with_bodies=with_bodies):
        yield message_batch(
            messages, schema=schema, topic=part.name.topic, broker=part.name.broker,
            namespace=options.connection.namespace, decodes_body=options.decodes_body,
        )  # fmt: skip


def _read_archived(
    options: SourceOptions, schema: pa.Schema, partition: MessageRange, key: QueueKey
) -> Iterator[pa.RecordBatch]:
    store, part = ArchiveStore(options.archive_path), partition.part
    tags = _tags(options.filter)
    columns = list(dict.fromkeys([*schema.names, *(["tag"] if tags else [])]))
    for batch in read_range(
        store, partition.files, key, start=part.start, end=part.end, columns=columns
    ):
        kept = batch
        if tags:
            kept = batch.filter(pa.compute.is_in(batch["tag"], pa.array(tags)))
        if kept.num_rows:
            yield pa.RecordBatch.from_arrays(
                [kept[field.name].cast(field.type) for field in schema], schema=schema
            )


def _tags(expression: str) -> list[str]:
    tags = [tag.strip() for tag in expression.split("||")]
    return [] if "*" in tags else tags


# ---------------------------------------------------------------- batch


class MessageReader(DataSourceReader):
    """A batch read of messages."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)
        self.wanted = Wanted()

    def partitions(self) -> Sequence[InputPartition]:
        """Look where the queues begin and end, and share the ranges between tasks."""
        places = Places(self.options)
        view = places.view()
        all_reachable(view, self.options.connection.endpoints)
        starts = places.resolve(self.options.start, view, word=EARLIEST)
        places.check_young(starts, view)
        ends = places.resolve(self.options.end, view, word=LATEST)
        ranges = []
        for name, start in sorted(starts.items()):
            if not self.wanted.takes(name):
                continue
            first, last = self.wanted.bounds(start, ends[name])
            first = self._after_gap(view, name, first, last)
            ranges.append(QueueRange(name=name, start=first, end=last))
        return list(plan_ranges(self.options, ranges, view))

    def _after_gap(self, view: View, name: QueueName, start: int, end: int) -> int:
        least = view.queues[name].min_offset
        if start < least and start < end:
            if self.options.start.by_queue is not None:
                tell_gap(name, start, min(least, end), fails=self.options.fails_on_data_loss)
            return min(least, end)
        return start

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, MessageRange):
            yield from read_messages(self.options, self.schema, partition)


@final
@dataclass(slots=True)
class Wanted:
    """What predicates leave of the queues and their offsets."""

    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    first: int = 0
    end: int = 2**63 - 1

    def takes(self, name: QueueName) -> bool:
        """Say whether a queue is read."""
        return (
            (self.topics is None or name.topic in self.topics)
            and (self.brokers is None or name.broker in self.brokers)
            and (self.queue_ids is None or name.queue_id in self.queue_ids)
        )

    def bounds(self, start: int, end: int) -> tuple[int, int]:
        """Return what is left of a range."""
        first = max(start, self.first)
        return first, max(first, min(end, self.end))

    def push(self, predicate: Any) -> bool:
        """Take a predicate in. Returns whether Spark need not look at it again."""
        attribute: tuple[str, ...] = getattr(predicate, "attribute", ())
        column = attribute[0] if len(attribute) == 1 else ""
        if column == "queue_offset":
            return self._push_offset(predicate)
        field = {"topic": "topics", "broker": "brokers", "queue_id": "queue_ids"}.get(column)
        if field is None:
            return False
        if isinstance(predicate, EqualTo):
            values = frozenset([predicate.value])
        elif isinstance(predicate, In):
            values = frozenset(predicate.value)
        else:
            return False
        before = getattr(self, field)
        setattr(self, field, values if before is None else before & values)
        return True

    def _push_offset(self, predicate: Any) -> bool:
        value = getattr(predicate, "value", None)
        if not isinstance(value, int):
            return False
        if isinstance(predicate, EqualTo):
            self.first, self.end = max(self.first, value), min(self.end, value + 1)
        elif isinstance(predicate, GreaterThanOrEqual):
            self.first = max(self.first, value)
        elif isinstance(predicate, GreaterThan):
            self.first = max(self.first, value + 1)
        elif isinstance(predicate, LessThan):
            self.end = min(self.end, value)
        elif isinstance(predicate, LessThanOrEqual):
            self.end = min(self.end, value + 1)
        else:
            return False
        return True


class PushdownMessageReader(MessageReader):
    """A batch read that takes predicates, where the option says so.

    Spark refuses a reader that offers it while its own setting is off.
    """

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802  # Spark's name.
        """Take what can be taken and return the rest."""
        return [each for each in filters if not self.wanted.push(each)]


# ---------------------------------------------------------------- stream


class MessageStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of messages. Lives beside the driver; `read` runs in executors."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)
        self._target: dict[QueueName, int] | None = None
        self._seen: Offsets | None = None
        self._last_batch_s = time.monotonic()
        self._away_since_s: dict[str, float] = {}

    # ------------------------------------------------------------ what Spark asks

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name.
        """Return where a new query starts."""
        places = Places(self.options)
        view = places.view()
        all_reachable(view, self.options.connection.endpoints)
        starts = places.resolve(self.options.start, view, word=LATEST)
        places.check_young(starts, view)
        return _document(starts, view)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name.
        """Return what the options say of a trigger."""
        if self.options.rows_per_trigger_max is not None:
            return ReadMaxRows(self.options.rows_per_trigger_max)
        if self.options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self.options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return how far the next trigger goes. Reads no message."""
        view = self._look()
        given = Offsets.from_document(start)
        begin = self._begin(given, view)
        target = self._reachable_ends(begin, view)
        if self._waits_for_more(begin, target):
            return start
        if isinstance(limit, ReadMaxRows):
            target = plan.take_rows(begin, target, limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            per_row = {name: queue.bytes_per_row for name, queue in view.queues.items()}
            target = plan.take_bytes(begin, target, per_row, limit.max_bytes)
        if target == begin and target == dict(given.at):
            return start  # Nothing new: the same text.
        self._last_batch_s = time.monotonic()
        return _document(target, view, before=given)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name.
        """Freeze where this run ends."""
        view = Places(self.options).view()
        all_reachable(view, self.options.connection.endpoints)
        self._target = view.ends

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name.
        """Return where the queues ended when they were looked at last."""
        return None if self._seen is None else self._seen.as_document()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Share a trigger between tasks."""
        given, until = Offsets.from_document(start), Offsets.from_document(end)
        view = Places(self.options).view()
        begin = self._begin(given, view)
        ranges = []
        for name, last in sorted(until.at.items()):
            queue = view.queues.get(name)
            least = last if queue is None else queue.min_offset
            # A queue that this trigger found: from where new queues start.
            default = least if self.options.new_queues == EARLIEST else last
            first = begin.get(name, given.at.get(name, default))
            if queue is None and name.broker in view.unreachable:
                least = first  # Its tasks find out.
            if first < least and first < last:
                tell_gap(name, first, min(least, last), fails=self.options.fails_on_data_loss)
                first = min(least, last)
            if first < last:
                ranges.append(QueueRange(name=name, start=first, end=last))
        return list(plan_ranges(self.options, ranges, view))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if isinstance(partition, MessageRange):
            yield from read_messages(self.options, self.schema, partition)

    # ------------------------------------------------------------ its parts

    def _look(self) -> View:
        view = Places(self.options).view()
        now_s = time.monotonic()
        self._away_since_s = {
            broker: self._away_since_s.get(broker, now_s) for broker in view.unreachable
        }
        for broker, since_s in self._away_since_s.items():
            if (now_s - since_s) * 1000 > self.options.fail_after_ms:
                raise Unreachable(
                    f"{broker} has been away for {now_s - since_s:.0f} s: failAfterMs"
                )
        self._seen = Offsets(at=view.ends, topic_ids=plan.topic_ids(view.queues.values()))
        return view

    def _begin(self, given: Offsets, view: View) -> dict[QueueName, int]:
        """Return where each queue goes on: as given, or where new ones and new topics start."""
        begin = dict(given.at)
        for name, queue in view.queues.items():
            before = given.topic_ids.get((name.topic, name.broker))
            if name in begin and before not in {None, queue.topic_id}:
                tell_gap(name, begin[name], begin[name] + 1, fails=self.options.fails_on_data_loss)
                begin[name] = queue.min_offset
            elif name not in begin:
                new = self.options.new_queues == EARLIEST
                begin[name] = queue.min_offset if new else queue.max_offset
        return begin

    def _reachable_ends(self, begin: Mapping[QueueName, int], view: View) -> dict[QueueName, int]:
        """Return how far there is something, at most to the frozen target of this run."""
        target = dict(begin)  # What cannot be asked stays where it is.
        for name, queue in view.queues.items():
            end = queue.max_offset
            if self._target is not None:
                end = min(end, self._target.get(name, begin[name]))
            # An end that went back is told by the task that reads: it is data loss.
            target[name] = max(end, begin[name])
        return target

    def _waits_for_more(
        self, begin: Mapping[QueueName, int], target: Mapping[QueueName, int]
    ) -> bool:
        least = self.options.rows_per_trigger_min
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._last_batch_s) * 1000
        there = sum(plan.backlog(begin, target).values())
        return there < least and waited_ms < self.options.trigger_delay_ms_max


def _document(
    at: Mapping[QueueName, int], view: View, *, before: Offsets | None = None
) -> dict[str, Any]:
    # Of what cannot be asked now, the topic that it was.
    known = dict(before.topic_ids) if before is not None else {}
    known.update(plan.topic_ids(view.queues.values()))
    return Offsets(at=at, topic_ids=known).as_document()
