"""Offsets of a read: the document that Spark keeps, what a trigger may take, and how it is split.

Pure. A stream's document is `{"v": 1, "o": {"orders": {"broker-a": {"0": 123}}}, "t": {...}}` with
keys sorted, so equal offsets are equal texts. `t` has the id of each topic at each broker group: a
topic that was deleted and made again is another one, whose offsets begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from tidemill.pipeline.errors import PipelineError

VERSION: Final = 1  # of the document


class QueueName(NamedTuple):
    """One queue of one topic at one broker group."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic} at {self.broker}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEnds:
    """Where a queue begins and ends."""

    name: QueueName
    topic_id: int
    log_id: str
    min_offset: int
    max_offset: int
    bytes: int = 0  # that all its messages take, about

    @property
    def incarnation(self) -> str:
        """What tells its offsets from those of an earlier queue of the same name."""
        return f"{self.log_id}/{self.topic_id}"

    @property
    def bytes_per_row(self) -> float:
        """Return what one message takes on average, from 1."""
        rows = self.max_offset - self.min_offset
        return max(1.0, self.bytes / rows) if rows > 0 else 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRange:
    """Offsets of one queue: from `start`, before `end`."""

    name: QueueName
    start: int
    end: int

    @property
    def rows(self) -> int:
        """Return how many offsets it has."""
        return self.end - self.start


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """A place in every queue, and the topic each was of."""

    at: Mapping[QueueName, int]
    topic_ids: Mapping[tuple[str, str], int]  # by topic and broker group

    def as_document(self) -> dict[str, Any]:
        """Return what Spark keeps."""
        places: dict[str, dict[str, dict[str, int]]] = {}
        for name in sorted(self.at):
            queues = places.setdefault(name.topic, {}).setdefault(name.broker, {})
            queues[str(name.queue_id)] = self.at[name]
        topics: dict[str, dict[str, int]] = {}
        for topic, broker in sorted(self.topic_ids):
            topics.setdefault(topic, {})[broker] = self.topic_ids[topic, broker]
        return {"v": VERSION, "o": places, "t": topics}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Offsets:
        """Read what `as_document` made."""
        if document.get("v") != VERSION:
            raise PipelineError(
                f"the checkpoint has offsets of version {document.get('v')}, and this program reads"
                f" version {VERSION}: start it with a new checkpoint"
            )
        return cls(
            at={
                QueueName(topic, broker, int(queue)): int(offset)
                for topic, brokers in document["o"].items()
                for broker, queues in brokers.items()
                for queue, offset in queues.items()
            },
            topic_ids={
                (topic, broker): int(topic_id)
                for topic, brokers in document.get("t", {}).items()
                for broker, topic_id in brokers.items()
            },
        )


def topic_ids(queues: Iterable[QueueEnds]) -> dict[tuple[str, str], int]:
    """Return which topic each name is at each broker group."""
    return {(queue.name.topic, queue.name.broker): queue.topic_id for queue in queues}


def backlog(
    start: Mapping[QueueName, int], target: Mapping[QueueName, int]
) -> dict[QueueName, int]:
    """Return how many offsets lie between, of the queues that have some."""
    return {
        name: end - start.get(name, 0) for name, end in target.items() if end > start.get(name, 0)
    }


def take_rows(
    start: Mapping[QueueName, int], target: Mapping[QueueName, int], rows_max: int
) -> dict[QueueName, int]:
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
    return {name: start.get(name, 0) + shares[name] if name in shares else end
            for name, end in target.items()}  # fmt: skip


def take_bytes(
    start: Mapping[QueueName, int],
    target: Mapping[QueueName, int],
    bytes_per_row: Mapping[QueueName, float],
    bytes_max: int,
) -> dict[QueueName, int]:
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
    ranges: Iterable[QueueRange], *, rows_per_partition: int, partitions_min: int
) -> list[QueueRange]:
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
            parts.append(QueueRange(name=each.name, start=first, end=last))
    return parts
