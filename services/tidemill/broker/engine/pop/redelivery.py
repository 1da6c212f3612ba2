"""Copies on retry and dead-letter topics.

A copy is one record that is the message and the settlement of the delivery it names as its cause:
a crash finds both or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import Cause, Message, Place, Reason
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, Slot, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_SUSPEND
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, Group, Topic
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.deliveries import Batch
from tidemill.broker.engine.pop.progress import Progress
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.tally import Tally
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, RETRY_TOPIC_PREFIX


@final
class Redelivery:
    """Makes messages available again, or dead."""

    def __init__(
        self,
        state: PopState,
        store: MessageStore,
        catalog: Catalog,
        recorder: Recorder,
        acks: RoundAcks,
        tally: Tally,
    ) -> None:
        self._state = state
        self._store = store
        self._catalog = catalog
        self._recorder = recorder
        self._acks = acks
        self._tally = tally

    def within_limit(
        self,
        batch: Batch,
        attempts: Sequence[int],
        progress: Progress,
        group: Group,
        now_ms: int,
    ) -> Batch | None:
        """Fill in the attempts, and dead-letter the messages that have none left.

        The limit is checked when an invisible duration ends; it may have been lowered since.
        """
        if max(attempts) <= group.max_attempts:
            return batch._replace(delivery_attempts=attempts)
        kept = []
        for index, attempt in enumerate(attempts):
            if attempt <= group.max_attempts:
                kept.append(index)
            else:
                self.copy_to_dlq(
                    batch.slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, attempt - 1
                )
        if not kept:
            # What follows was not looked at.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
            return None
        return batch._replace(
            indexes=kept,
            queue_offsets=[batch.queue_offsets[index] for index in kept],
            delivery_attempts=[attempts[index] for index in kept],
            log_offsets=[batch.log_offsets[index] for index in kept],
        )

    def revive(self, slot: int, index: int, progress: Progress, now_ms: int) -> None:
        """Make a message available again: a copy on the retry topic, or the dead-letter one."""
        table = self._state.table
        offset = table.offset_of(slot, index)
        if offset < progress.queue.min_offset:
            self._expire(slot, index, progress)
            return
        attempts = self.attempts_of(progress, offset)
        if table.flags[slot] & FLAG_SUSPEND:
            attempts -= 1
        group = self._catalog.groups[progress.group_id]
        if attempts >= group.max_attempts:
            self.copy_to_dlq(slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, attempts)
            return
        retry = self._retry_topic(group, progress.named_topic_id, now_ms)
        self._copy(slot, index, progress, retry, Reason.INVISIBLE_DURATION_ENDED, now_ms, attempts)
        self._state.count("revived", progress, 1)
        self._state.ready.add((progress.group_id, progress.named_topic_id))

    def copy_to_dlq(
        self, slot: int, index: int, progress: Progress, reason: Reason, now_ms: int, attempts: int
    ) -> None:
        """Move one message of a delivery to the group's dead-letter topic."""
        if self._state.table.offset_of(slot, index) < progress.queue.min_offset:
            self._expire(slot, index, progress)
            return
        group = self._catalog.groups[progress.group_id]
        target = ensure_system_topic(
            self._catalog, self._recorder, DEAD_LETTER_TOPIC_PREFIX + group.name, now_ms
        )
        self._copy(slot, index, progress, target, reason, now_ms, attempts)
        self._state.ready_topics.add(target.id)
        self._state.count("dead_lettered", progress, 1)

    def _expire(self, slot: int, index: int, progress: Progress) -> None:
        """Settle a message that retention took while it was out: final, and counted."""
        self._tally.add(1)
        self._state.count("expired_before_revive", progress, 1)
        self._acks.add(slot, 1 << index)

    def attempts_of(self, progress: Progress, offset: int) -> int:
        """Count the deliveries of a message of a group that is not ordered, this one included."""
        is_gone = offset < progress.queue.min_offset
        if is_gone or progress.topic_id == progress.named_topic_id:
            return 1
        return self._store.place(progress.queue.entry(offset)[0]).attempts + 1

    def _retry_topic(self, group: Group, topic_id: TopicId, now_ms: int) -> Topic:
        retry_of = group.id, topic_id
        known = self._catalog.retry_topic_ids.get(retry_of)
        if known is not None:
            return self._catalog.topics[known]
        name = f"{RETRY_TOPIC_PREFIX}{group.name}+{self._catalog.topics[topic_id].name}"
        return ensure_system_topic(self._catalog, self._recorder, name, now_ms, retry_of=retry_of)

    def _copy(
        self,
        slot: int,
        index: int,
        progress: Progress,
        target: Topic,
        reason: Reason,
        now_ms: int,
        attempts: int,
    ) -> None:
        """Append the copy that settles one message of a delivery."""
        table = self._state.table
        offset = table.offset_of(slot, index)
        original = self._store.record(progress.queue.entry(offset)[0])
        self._tally.add(1, size_bytes=original.header.size)
        place = Place._make(message.PLACE.unpack_from(original.body))
        if original.header.flags & message.FLAG_CAUSE:
            root = message.decode_cause(original.body)
            origin = root.origin
            root_place = root.root_topic_id, root.root_queue_id, root.root_offset
            first_popped_at_ms = root.first_popped_at_ms
        else:
            origin = self._catalog.topics[progress.named_topic_id].name
            root_place = place.topic_id, place.queue_id, place.queue_offset
            first_popped_at_ms = table.popped_at_ms[slot]
        cause = Cause(
            progress.group_id, Slot(slot), LogOffset(table.ids[slot]), index, reason,
            first_popped_at_ms, *root_place, origin,
        )  # fmt: skip
        queue = self._catalog.queue(target.id, QueueId(0))
        self._recorder.append(
            Message(
                target.id, queue.queue_id, attempts, queue.max_offset,
                message.FLAG_CAUSE, cause, original.tail, original.header.tail_crc,
            ),
            now_ms,
        )  # fmt: skip
