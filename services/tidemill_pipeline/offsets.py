"""Offsets of a read: the document in a Spark checkpoint, the share of a trigger, and its tasks.

Pure. A stream's document is `{"v": 1, "o": {"orders": {"broker-a": {"LOG/7": {"0": 123}}}}}` with
sorted keys, so equal offsets are equal texts. `LOG/7` is the incarnation: offsets are valid only in
the log and the topic that assigned them (ADR 0054).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from tidemill_pipeline.errors import PipelineError

VERSION: Final = 1  # of the document


class Incarnation(NamedTuple):
    """The log and the topic in it that a queue name means."""

    log_id: str
    topic_id: int

    def __str__(self) -> str:
        return f"{self.log_id}/{self.topic_id}"

    @classmethod
    def of(cls, text: str) -> Incarnation:
        """Return the incarnation of a text of `str`."""
        log_id, _, topic_id = text.rpartition("/")
        return cls(log_id, int(topic_id))


class QueueName(NamedTuple):
    """One queue of one topic at one broker group, as users write it."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic} at {self.broker}"


class SourceQueue(NamedTuple):
    """One incarnation of a queue: its offsets keep their meaning."""

    topic: str
    broker: str
    queue_id: int
    incarnation: Incarnation

    @property
    def name(self) -> QueueName:
        """Return the name, which other incarnations share."""
        return QueueName(self.topic, self.broker, self.queue_id)

    def __str__(self) -> str:
        return str(self.name)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEnds:
    """First and end offset of a queue."""

    queue: SourceQueue
    min_offset: int
    max_offset: int
    bytes: int = 0  # approximate size of all its messages
    dedup_window_ms: int = 0  # of dedup keys that come from the property; 0: none

    @property
    def bytes_per_row(self) -> float:
        """Return the average size of a message, at least 1."""
        rows = self.max_offset - self.min_offset
        return max(1.0, self.bytes / rows) if rows > 0 else 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRange:
    """Offsets of one queue, from `start` to before `end`."""

    queue: SourceQueue
    start: int
    end: int

    @property
    def rows(self) -> int:
        """Return the number of offsets."""
        return self.end - self.start


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """One offset per queue.

    `knows_archive`: the offsets include queues that only the archive of `readMode=auto` has. A
    checkpoint of another mode lacks these queues, although it may have read them.
    `passed`: queues of the archive that the query skips, with their ends. Their deletion is not
    data loss. If a broker has such a queue again, the query reads on from that end.
    """

    at: Mapping[SourceQueue, int]
    knows_archive: bool = False
    passed: Mapping[SourceQueue, int] = field(default_factory=dict)

    def as_document(self) -> dict[str, Any]:
        """Return the document for Spark's checkpoint."""
        known = {"archive": True} if self.knows_archive else {}
        passed = {"passed": _nested(self.passed)} if self.passed else {}
        return {"v": VERSION, "o": _nested(self.at), **known, **passed}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Offsets:
        """Read a document that `as_document` returned. Raises PipelineError for another version."""
        version = document.get("v")
        if version != VERSION:
            raise PipelineError(
                f"the checkpoint has offsets of version {version}, but this program reads only"
                f" version {VERSION}: start the query with a new checkpoint"
            )
        return cls(
            at=_flat(document["o"]),
            knows_archive=bool(document.get("archive", False)),
            passed=_flat(document.get("passed", {})),
        )


def with_report(
    document: dict[str, Any], *, group: str, connection: Mapping[str, str]
) -> dict[str, Any]:
    """Return a document that tells the listener where to publish progress.

    Readers of the offsets ignore this member.
    """
    if not group:
        return document
    return {**document, "report": {"as": group, "at": dict(sorted(connection.items()))}}


def _nested(at: Mapping[SourceQueue, int]) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    topics: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for queue in sorted(at):
        incarnations = topics.setdefault(queue.topic, {}).setdefault(queue.broker, {})
        incarnations.setdefault(str(queue.incarnation), {})[str(queue.queue_id)] = at[queue]
    return topics


def _flat(topics: Mapping[str, Any]) -> dict[SourceQueue, int]:
    return {
        SourceQueue(topic, broker, int(queue), Incarnation.of(text)): int(offset)
        for topic, brokers in topics.items()
        for broker, incarnations in brokers.items()
        for text, queues in incarnations.items()
        for queue, offset in queues.items()
    }


def backlog(
    start: Mapping[SourceQueue, int], target: Mapping[SourceQueue, int]
) -> dict[SourceQueue, int]:
    """Return the number of offsets from `start` to `target`, for queues that have some."""
    return {
        name: end - start.get(name, 0) for name, end in target.items() if end > start.get(name, 0)
    }


def take_rows(
    start: Mapping[SourceQueue, int], target: Mapping[SourceQueue, int], rows_max: int
) -> dict[SourceQueue, int]:
    """Return the ends of a trigger of `rows_max` rows, shared in proportion to the backlog.

    Each queue with a backlog gets at least one row. The sum is `rows_max` if the backlog is larger
    and there are at most `rows_max` queues.
    """
    waiting = backlog(start, target)
    total = sum(waiting.values())
    if total <= rows_max:
        return dict(target)
    shares = {name: max(1, rows * rows_max // total) for name, rows in waiting.items()}
    # Correct the rounding error row by row at the longest queues. It is smaller than the number of
    # queues.
    over = rows_max - sum(shares.values())
    by_backlog = sorted(waiting, key=lambda name: (-waiting[name], name))
    for name in by_backlog:
        if over > 0 and shares[name] < waiting[name]:
            shares[name] += 1
            over -= 1
    while over < 0:
        lessened = [name for name in by_backlog if shares[name] > 1][:-over]
        if not lessened:
            break  # More queues than rows: one row per queue.
        for name in lessened:
            shares[name] -= 1
        over += len(lessened)
    return {
        name: start.get(name, 0) + shares[name] if name in shares else end
        for name, end in target.items()
    }


def take_bytes(
    start: Mapping[SourceQueue, int],
    target: Mapping[SourceQueue, int],
    bytes_per_row: Mapping[SourceQueue, float],
    bytes_max: int,
) -> dict[SourceQueue, int]:
    """Return the ends of a trigger of about `bytes_max` bytes, by the average size of rows."""
    waiting = backlog(start, target)
    total = sum(rows * bytes_per_row.get(name, 1.0) for name, rows in waiting.items())
    if total <= bytes_max:
        return dict(target)
    return {
        name: start.get(name, 0) + max(1, int(waiting[name] * bytes_max / total))
        if name in waiting
        else end
        for name, end in target.items()
    }


def split(
    ranges: Iterable[SourceRange], *, rows_per_partition: int, partitions_min: int
) -> list[SourceRange]:
    """Split ranges into one range per task, about `partitions_min` tasks in all."""
    given = [each for each in ranges if each.rows > 0]
    total = sum(each.rows for each in given)
    if not total:
        return []
    rows_max = min(rows_per_partition, max(1, -(-total // max(1, partitions_min))))
    # Split a queue only if there are fewer queues than tasks.
    if len(given) >= partitions_min:
        rows_max = rows_per_partition
    parts = []
    for each in given:
        count = -(-each.rows // rows_max)
        for i in range(count):
            first = each.start + each.rows * i // count
            last = each.start + each.rows * (i + 1) // count
            parts.append(SourceRange(queue=each.queue, start=first, end=last))
    return parts
