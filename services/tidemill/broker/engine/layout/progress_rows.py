"""Progress of groups, in snapshots and STATE records: a JSON array, one object per queue.

    [{"group": id, "topic": id, "queue": id, "namedTopic": id, "pop": offset,
      "voidBefore": log offset, "statedAt": log offset,
      "ordered": null | {"pending": [[queue offset, attempt], ...],
                         "attemptId": text, "batchId": log offset}}, ...]

pop: the first offset that no pop has taken or skipped. voidBefore: deliveries with a lower id are
void. statedAt: the newest record that states this progress. ordered: only for ordered groups.
pending: the attempt of the next delivery of each message, if its current delivery does not fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId


class OrderedRow(NamedTuple):
    """The additional progress of an ordered group in a queue."""

    pending: list[tuple[int, int]]
    attempt_id: str
    batch_id: int


class ProgressRow(NamedTuple):
    """The progress of one (group, topic, queue)."""

    group_id: GroupId
    topic_id: TopicId
    queue_id: QueueId
    named_topic_id: TopicId
    pop_offset: int
    void_before: int
    stated_at: int
    ordered: OrderedRow | None


def encode(rows: Iterable[ProgressRow]) -> bytes:
    """Encode the progress of some queues."""
    return json.dumps([_fields(row) for row in rows]).encode()


def _fields(row: ProgressRow) -> dict[str, object]:
    ordered = row.ordered
    return {
        "group": row.group_id,
        "topic": row.topic_id,
        "queue": row.queue_id,
        "namedTopic": row.named_topic_id,
        "pop": row.pop_offset,
        "voidBefore": row.void_before,
        "statedAt": row.stated_at,
        "ordered": ordered
        and {
            "pending": ordered.pending,
            "attemptId": ordered.attempt_id,
            "batchId": ordered.batch_id,
        },
    }


def decode(data: bytes | memoryview) -> list[ProgressRow]:
    """Decode the progress of some queues."""
    rows = []
    for fields in json.loads(bytes(data)):
        ordered = fields["ordered"]
        if ordered is not None:
            pending = [(int(offset), int(count)) for offset, count in ordered["pending"]]
            ordered = OrderedRow(pending, ordered["attemptId"], ordered["batchId"])
        rows.append(
            ProgressRow(
                fields["group"],
                fields["topic"],
                fields["queue"],
                fields["namedTopic"],
                fields["pop"],
                fields["voidBefore"],
                fields["statedAt"],
                ordered,
            )
        )
    return rows
