"""Copies on retry and dead-letter topics.

A copy is one record that is the message and the settlement of the delivery it names as its cause:
a crash finds both or none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import Cause, MessageEntry, MessagePosition, Reason
from tidemill.broker.engine.layout.numbers import (
    DeliverySlot,
    GroupId,
    LogOffset,
    QueueId,
    QueueOffset,
    TopicId,
)
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_SUSPEND
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore, cause_of
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, Topic
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.deliveries import DeliveryBatch
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.tally import Tally
from tidemill.common.errors import MessageBodyTooLarge
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

ATTEMPTS_STORED_MAX = 0xFFFF  # a u16; what damage makes of it may be one more
NOTICES_MAX = 100  # damaged messages between two looks


class DamagedNotice(NamedTuple):
    """A damaged message, for the shell's log."""

    topic: str
    group: str
    queue_id: int
    queue_offset: int
    log_offset: int


class _Original(NamedTuple):
    """What a copy takes from the message that it is a copy of."""

    place: MessagePosition
    cause: Cause | None
    blob: bytes | memoryview
    blob_crc: int


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
        self._notices: list[DamagedNotice] = []

    def take_notices(self) -> list[DamagedNotice]:
        """Return and clear which messages were found damaged."""
        notices, self._notices = self._notices, []
        return notices

    def within_limit(
        self,
        batch: DeliveryBatch,
        attempts: Sequence[int],
        progress: PopProgress,
        group: ConsumerGroup,
        now_ms: int,
    ) -> DeliveryBatch | None:
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
                with suppress(BlockFileDamaged):  # Then it is tried again at its deadline.
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

    def revive(self, slot: int, index: int, progress: PopProgress, now_ms: int) -> None:
        """Make a message available again: a copy on the retry topic, or the dead-letter one."""
        table = self._state.table
        offset = table.offset_of(slot, index)
        if offset < progress.queue.min_offset:
            self._expire(slot, index, progress)
            return
        original = self._find_original(progress, offset)
        if original is None:
            self._bury(slot, index, progress, now_ms, 1)
            return
        is_retry = progress.topic_id != progress.named_topic_id
        attempts = original.place.attempts + 1 if is_retry else 1
        if table.flags[slot] & FLAG_SUSPEND:
            attempts -= 1
        group = self._catalog.groups[progress.group_id]
        try:
            if attempts >= group.max_attempts:
                reason = Reason.ATTEMPTS_EXHAUSTED
                self._copy_to_dlq(slot, index, progress, original, reason, now_ms, attempts)
                return
            retry = self._retry_topic(group, progress.named_topic_id, now_ms)
            reason = Reason.INVISIBLE_DURATION_ENDED
            self._copy(slot, index, progress, retry, original, reason, now_ms, attempts)
        except MessageBodyTooLarge:
            # Stored before a copy's size was thought of, or segments were larger then.
            self._bury(slot, index, progress, now_ms, attempts)
            return
        self._state.count("revived", progress, 1)
        self._state.count_redelivered(slot, progress, 1)
        self._state.ready.add((progress.group_id, progress.named_topic_id))

    def copy_to_dlq(
        self,
        slot: int,
        index: int,
        progress: PopProgress,
        reason: Reason,
        now_ms: int,
        attempts: int,
    ) -> None:
        """Move one message of a delivery to the group's dead-letter topic.

        Of a damaged one that is what is left of it. Raises BlockFileDamaged.
        """
        offset = self._state.table.offset_of(slot, index)
        if offset < progress.queue.min_offset:
            self._expire(slot, index, progress)
            return
        original = self._find_original(progress, offset)
        if original is None:
            self._bury(slot, index, progress, now_ms, attempts)
            return
        try:
            self._copy_to_dlq(slot, index, progress, original, reason, now_ms, attempts)
        except MessageBodyTooLarge:
            self._bury(slot, index, progress, now_ms, attempts)

    def bury_if_damaged(
        self, slot: int, index: int, progress: PopProgress, now_ms: int, attempts: int
    ) -> bool:
        """Settle a message that could not be read; False when it can be.

        Raises BlockFileDamaged.
        """
        offset = self._state.table.offset_of(slot, index)
        if offset < progress.queue.min_offset:
            self._expire(slot, index, progress)
        elif self._find_original(progress, offset) is None:
            self._bury(slot, index, progress, now_ms, attempts)
        else:
            return False
        return True

    def _bury(
        self, slot: int, index: int, progress: PopProgress, now_ms: int, attempts: int
    ) -> None:
        """Move what is left of a damaged message to the dead-letter topic."""
        offset = self._state.table.offset_of(slot, index)
        log_offset, size, _ = progress.queue.entry(offset)
        place = MessagePosition(progress.topic_id, progress.queue.queue_id, 0, QueueOffset(offset))
        cause, blob = self._store.remains_of(log_offset, size, place)
        original = _Original(place, cause, blob, crc32(blob))
        attempts = min(attempts, ATTEMPTS_STORED_MAX)
        self._copy_to_dlq(slot, index, progress, original, Reason.DAMAGED, now_ms, attempts)
        self._state.count("damaged", progress, 1)
        if len(self._notices) < NOTICES_MAX:
            names = self._catalog.topics[progress.topic_id], self._catalog.groups[progress.group_id]
            self._notices.append(
                DamagedNotice(names[0].name, names[1].name, place.queue_id, offset, log_offset)
            )

    def _copy_to_dlq(
        self,
        slot: int,
        index: int,
        progress: PopProgress,
        original: _Original,
        reason: Reason,
        now_ms: int,
        attempts: int,
    ) -> None:
        group = self._catalog.groups[progress.group_id]
        target = self._ensure_topic(DEAD_LETTER_TOPIC_PREFIX + group.name, now_ms)
        self._copy(slot, index, progress, target, original, reason, now_ms, attempts)
        self._state.ready_topics.add(target.id)
        self._state.count("dead_lettered", progress, 1)

    def _expire(self, slot: int, index: int, progress: PopProgress) -> None:
        """Settle a message that retention took while it was out: final, and counted."""
        self._tally.add(1)
        self._state.count("expired_before_revive", progress, 1)
        self._acks.add_expired(slot, 1 << index)

    def attempts_of(self, progress: PopProgress, offset: int) -> int:
        """Count the deliveries of a message of a group that is not ordered, this one included."""
        is_gone = offset < progress.queue.min_offset
        if is_gone or progress.topic_id == progress.named_topic_id:
            return 1
        return self.attempts_at(progress.queue.entry(offset)[0])

    def attempts_at(self, log_offset: LogOffset) -> int:
        """Count the deliveries of the message on a retry topic that lies at `log_offset`."""
        try:
            return self._store.place(log_offset).attempts + 1
        except (MessageDamaged, LookupError):
            return 1  # It goes no further than to the dead-letter topic.

    def _find_original(self, progress: PopProgress, offset: int) -> _Original | None:
        """Return what is to be copied; None: it is damaged. Raises BlockFileDamaged."""
        log_offset, _, _ = progress.queue.entry(offset)
        try:
            found = self._store.record(log_offset)
            place = MessagePosition._make(message.PLACE.unpack_from(found.body))
            if place[:2] == (progress.topic_id, progress.queue.queue_id) and place[3] == offset:
                return _Original(place, cause_of(found), found.tail, found.header.tail_crc)
        except (MessageDamaged, LookupError, struct.error):
            pass
        # What is wrong may be the entry, in a block that was intact when it was first used.
        progress.queue.check_entry(offset)
        # Where another replica may have it, it is waited for.
        self._store.check_awaited(log_offset)
        return None

    def _retry_topic(self, group: ConsumerGroup, topic_id: TopicId, now_ms: int) -> Topic:
        retry_of = group.id, topic_id
        known = self._catalog.retry_topic_ids.get(retry_of)
        if known is not None:
            return self._catalog.topics[known]
        name = f"{RETRY_TOPIC_PREFIX}{group.name}+{self._catalog.topics[topic_id].name}"
        return self._ensure_topic(name, now_ms, retry_of=retry_of)

    def _ensure_topic(
        self, name: str, now_ms: int, retry_of: tuple[GroupId, TopicId] | None = None
    ) -> Topic:
        next_id = self._catalog.next_id
        topic = ensure_system_topic(self._catalog, self._recorder, name, now_ms, retry_of=retry_of)
        # One that is new costs as much as a copy.
        self._tally.add(topic.id == next_id)
        return topic

    def _copy(
        self,
        slot: int,
        index: int,
        progress: PopProgress,
        target: Topic,
        original: _Original,
        reason: Reason,
        now_ms: int,
        attempts: int,
    ) -> None:
        """Append the copy that settles one message of a delivery."""
        table = self._state.table
        self._tally.add(1, size_bytes=len(original.blob))
        place, root = original.place, original.cause
        if root is not None:
            origin = root.origin
            root_place = root.root_topic_id, root.root_queue_id, root.root_offset
            first_popped_at_ms = root.first_popped_at_ms
        else:
            origin = self._catalog.topics[progress.named_topic_id].name
            root_place = place.topic_id, place.queue_id, place.queue_offset
            first_popped_at_ms = table.popped_at_ms[slot]
        cause = Cause(
            progress.group_id,
            DeliverySlot(slot),
            LogOffset(table.ids[slot]),
            index,
            reason,
            first_popped_at_ms,
            *root_place,
            origin,
        )
        queue = self._catalog.queue(target.id, QueueId(0))
        self._recorder.append(
            MessageEntry(
                target.id,
                queue.queue_id,
                attempts,
                queue.max_offset,
                message.FLAG_CAUSE,
                cause,
                original.blob,
                original.blob_crc,
            ),
            now_ms,
        )
