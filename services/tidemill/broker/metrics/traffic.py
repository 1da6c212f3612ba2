"""Counts of messages and bytes on the hot paths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.pop.state import DELIVERY_BUCKETS_MS
from tidemill.common.histogram import Histogram
from tidemill.message.stored_message import MESSAGE_TYPE_AT

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.common.metrics import Labels

KIB = 1024
SIZE_BUCKETS = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 512 * KIB, 1 << 20, 2 << 20, 4 << 20)  # bytes
# By the number in a stored message; a larger number counts as 0, without a type.
MESSAGE_TYPES: Final = ("normal", "normal", "fifo", "delay", "transaction", "lite", "priority")
_TYPE_MAX = len(MESSAGE_TYPES) - 1


@final
class Traffic:
    """Messages and bytes of the hot paths, counted by id."""

    def __init__(self) -> None:
        # Sizes in bytes, by topic id and message type.
        self.received: Histogram[tuple[TopicId, int]] = Histogram(SIZE_BUCKETS)
        # By topic id and group id: messages and bytes, then those of repeated deliveries.
        self.sent: dict[tuple[TopicId, GroupId], list[int]] = {}
        # By topic id and group id: one count for each AckResult.
        self.acks: dict[tuple[TopicId, GroupId], list[int]] = {}
        # By group id: the topic ids of the two above.
        self.topics_of_group: dict[GroupId, set[TopicId]] = {}
        # Milliseconds from ready to handed to a consumer, by topic id, group id and message type.
        self.waits: Histogram[tuple[TopicId, GroupId, int]] = Histogram(DELIVERY_BUCKETS_MS)
        # Milliseconds from the arrival of a frame to its reply, by RPC_LABELS.
        self.latencies: Histogram[Labels] = Histogram()

    def appended(self, topic_id: TopicId, blob: bytes) -> None:
        """Count a stored message."""
        kind = blob[MESSAGE_TYPE_AT]
        self.received.observe((topic_id, kind if kind <= _TYPE_MAX else 0), len(blob))

    def polled(self, topic_id: TopicId, group_id: GroupId) -> None:
        """Let the series of a group that consumes a topic start at zero."""
        if (topic_id, group_id) not in self.sent:
            self.sent[topic_id, group_id] = [0, 0, 0, 0]
            self.acks[topic_id, group_id] = [0, 0, 0, 0]
            self.topics_of_group.setdefault(group_id, set()).add(topic_id)

    def forget(self, topic_id: TopicId, group_id: GroupId) -> None:
        """Drop the counts of a deleted topic or group."""
        self.sent.pop((topic_id, group_id), None)
        self.acks.pop((topic_id, group_id), None)
        topic_ids = self.topics_of_group.get(group_id, set())
        topic_ids.discard(topic_id)
        if not topic_ids:
            self.topics_of_group.pop(group_id, None)

    def delivered(
        self, topic_id: TopicId, group_id: GroupId, attempts: Sequence[int], size: int
    ) -> None:
        """Count one delivered batch."""
        self.polled(topic_id, group_id)
        counts = self.sent[topic_id, group_id]
        # A batch is from one queue, so all of it is redelivered or none.
        at = 2 if attempts and attempts[0] > 1 else 0
        counts[at] += len(attempts)
        counts[at + 1] += size

    def handed_over(
        self, topic_id: TopicId, group_id: GroupId, waits_ms: Sequence[int], blobs: Sequence[bytes]
    ) -> None:
        """Count the waits of a batch, whose messages are in the order of one queue."""
        kind = blobs[0][MESSAGE_TYPE_AT]
        label = topic_id, group_id, kind if kind <= _TYPE_MAX else 0
        # The first message is the oldest: if first and last fall into one bucket, all do. A topic
        # has one message type. For a mixed topic, the first message counts for its batch.
        first, last = waits_ms[0], waits_ms[-1]
        observe = self.waits.observe
        if first == last or bisect_left(DELIVERY_BUCKETS_MS, first) == bisect_left(
            DELIVERY_BUCKETS_MS, last
        ):
            observe(label, sum(waits_ms) / len(waits_ms), len(waits_ms))
            return
        for wait_ms in waits_ms:
            observe(label, wait_ms)

    def acked(self, topic_id: TopicId, group_id: GroupId, result: int) -> None:
        """Count an ack."""
        counts = self.acks.get((topic_id, group_id))
        if counts is not None:
            counts[result] += 1
