"""Offsets of a read: the document that Spark keeps, what a trigger may take, and how it is split.

Pure. A stream's document is `{"v": 1, "o": {"orders": {"broker-a": {"LOG/7": {"0": 123}}}}}` with
keys sorted, so equal offsets are equal texts. `LOG/7` is the incarnation: offsets mean something in
the one log and the one topic that they were told of (ADR 0054).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from tidemill_pipeline.errors import PipelineError

VERSION: Final = 1  # of the document


class Incarnation(NamedTuple):
    """Which log, and which topic in it, a name means; an empty log id is of whichever there is."""

    log_id: str
    topic_id: int

    def __str__(self) -> str:
        return f"{self.log_id}/{self.topic_id}"

    @classmethod
    def of(cls, text: str) -> Incarnation:
        """Read what `str` wrote."""
        log_id, _, topic_id = text.rpartition("/")
        return cls(log_id, int(topic_id))


class QueueName(NamedTuple):
    """One queue of one topic at one broker group, as people write it."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic} at {self.broker}"


class SourceQueue(NamedTuple):
    """A queue for as long as its offsets mean the same."""

    topic: str
    broker: str
    queue_id: int
    incarnation: Incarnation

    @property
    def name(self) -> QueueName:
        """Return what it is called, as others before and behind it are."""
        return QueueName(self.topic, self.broker, self.queue_id)

    def __str__(self) -> str:
        return str(self.name)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEnds:
    """Where a queue begins and ends."""

    queue: SourceQueue
    min_offset: int
    max_offset: int
    bytes: int = 0  # that all its messages take, about

    @property
    def bytes_per_row(self) -> float:
        """Return what one message takes on average, from 1."""
        rows = self.max_offset - self.min_offset
        return max(1.0, self.bytes / rows) if rows > 0 else 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRange:
    """Offsets of one queue: from `start`, before `end`."""

    queue: SourceQueue
    start: int
    end: int

    @property
    def rows(self) -> int:
        """Return how many offsets it has."""
        return self.end - self.start


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """A place in every queue.

    `knows_archive`: queues that only the archive of `readMode=auto` has are among them, too. A
    checkpoint of before, or of another mode, has none of those, though they may have been read.
    `passed`: those of them of which nothing was asked for, and where they ended then. That they are
    there no more is nobody's loss; when a broker has one again, it is read from there.
    """

    at: Mapping[SourceQueue, int]
    knows_archive: bool = False
    passed: Mapping[SourceQueue, int] = field(default_factory=dict)

    def as_document(self) -> dict[str, Any]:
        """Return what Spark keeps."""
        known = {"archive": True} if self.knows_archive else {}
        passed = {"passed": _as_places(self.passed)} if self.passed else {}
        return {"v": VERSION, "o": _as_places(self.at), **known, **passed}

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
            at=_of_places(document["o"]),
            knows_archive=bool(document.get("archive", False)),
            passed=_of_places(document.get("passed", {})),
        )


def with_report(
    document: dict[str, Any], *, group: str, connection: Mapping[str, str]
) -> dict[str, Any]:
    """Return a document that says, to whoever hears of it, where progress is to be published.

    It is no place, and no reader of the offsets looks at it.
    """
    if not group:
        return document
    return {**document, "report": {"as": group, "at": dict(sorted(connection.items()))}}


def _as_places(at: Mapping[SourceQueue, int]) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    places: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for queue in sorted(at):
        brokers = places.setdefault(queue.topic, {})
        of = brokers.setdefault(queue.broker, {}).setdefault(str(queue.incarnation), {})
        of[str(queue.queue_id)] = at[queue]
    return places


def _of_places(places: Mapping[str, Any]) -> dict[SourceQueue, int]:
    return {
        SourceQueue(topic, broker, int(queue), Incarnation.of(text)): int(offset)
        for topic, brokers in places.items()
        for broker, incarnations in brokers.items()
        for text, queues in incarnations.items()
        for queue, offset in queues.items()
    }


def backlog(
    start: Mapping[SourceQueue, int], target: Mapping[SourceQueue, int]
) -> dict[SourceQueue, int]:
    """Return how many offsets lie between, of the queues that have some."""
    return {
        name: end - start.get(name, 0) for name, end in target.items() if end > start.get(name, 0)
    }


def take_rows(
    start: Mapping[SourceQueue, int], target: Mapping[SourceQueue, int], rows_max: int
) -> dict[SourceQueue, int]:
    """Return how far a trigger of `rows_max` rows goes: shared in proportion to the backlog.

    Exactly `rows_max` in sum where there are so many and not more queues than that; each queue that
    has something gets at least one.
    """
    waiting = backlog(start, target)
    total = sum(waiting.values())
    if total <= rows_max:
        return dict(target)
    shares = {name: max(1, rows * rows_max // total) for name, rows in waiting.items()}
    # What rounding left over, or has handed out too much of, one by one at the longest queues.
    # There are never more of them than queues.
    over = rows_max - sum(shares.values())
    by_backlog = sorted(waiting, key=lambda name: (-waiting[name], name))
    for name in by_backlog:
        if over > 0 and shares[name] < waiting[name]:
            shares[name] += 1
            over -= 1
    while over < 0:
        lessened = [name for name in by_backlog if shares[name] > 1][:-over]
        if not lessened:
            break  # More queues than rows: one each.
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
    """Return how far a trigger of about `bytes_max` bytes goes, by what rows take on average."""
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
    """Return what one task each reads: no more rows than that, and about so many tasks."""
    given = [each for each in ranges if each.rows > 0]
    total = sum(each.rows for each in given)
    if not total:
        return []
    rows_max = min(rows_per_partition, max(1, -(-total // max(1, partitions_min))))
    # A queue is split only where more tasks are wanted than there are queues.
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
