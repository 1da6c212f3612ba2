"""Copies on retry and dead-letter topics.

One record is both the copy and the settlement of the delivery that it names as its cause. After a
crash the log has both or neither.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.dead_letter import Replay
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
from tidemill.broker.engine.metadata.catalog import (
    Catalog,
    ConsumerGroup,
    Topic,
    TopicType,
    topic_item,
)
from tidemill.broker.engine.metadata.priority import PRIORITY_LEVEL
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.deliveries import DeliveryBatch
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.tally import Tally
from tidemill.common.errors import MessageBodyTooLarge
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

ATTEMPTS_STORED_MAX = 0xFFFF  # a u16; a damaged record plus one may exceed it
NOTICES_MAX = 100  # damaged messages until the shell takes the notices


class DamagedNotice(NamedTuple):
    """A damaged message, for the shell's log."""

    topic: str
    group: str
    queue_id: int
    queue_offset: int
    log_offset: int


class KeptNotice(NamedTuple):
    """Dead letters without an attempt left that stay in their topic, for the shell's log."""

    topic: str
    group: str
    message_count: int


class DeadNotice(NamedTuple):
    """Messages that a group has failed for the last time, for the shell's log."""

    group: str
    reasons: dict[str, int]  # messages by reason


class _OriginalMessage(NamedTuple):
    """The parts of a message that its copy contains."""

    position: MessagePosition
    cause: Cause | Replay | None
    blob: bytes | memoryview
    blob_crc: int


@final
class Redelivery:
    """The writer of retry and dead-letter copies."""

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
        self._kept: Counter[tuple[GroupId, TopicId]] = Counter()  # since `take_kept_notices`
        # Since `take_dead_notices`: by group id, messages by reason.
        self._dead: defaultdict[GroupId, Counter[str]] = defaultdict(Counter)

    def take_damaged_notices(self) -> list[DamagedNotice]:
        """Return and clear the notices of damaged messages."""
        notices, self._notices = self._notices, []
        return notices

    def take_dead_notices(self) -> list[DeadNotice]:
        """Return and clear the notices of new dead letters, one for each group."""
        dead, self._dead = self._dead, defaultdict(Counter)
        groups = self._catalog.groups
        return [
            DeadNotice(groups[group_id].name, dict(reasons))
            for group_id, reasons in dead.items()
            if group_id in groups
        ]

    def take_kept_notices(self) -> list[KeptNotice]:
        """Return and clear the notices of dead letters that stay in their topic."""
        kept, self._kept = self._kept, Counter()
        topics, groups = self._catalog.topics, self._catalog.groups
        return [
            KeptNotice(topics[topic_id].name, groups[group_id].name, count)
            for (group_id, topic_id), count in kept.items()
            if topic_id in topics and group_id in groups
        ]

    def apply_attempt_limit(
        self,
        batch: DeliveryBatch,
        attempts: Sequence[int],
        progress: PopProgress,
        group: ConsumerGroup,
        now_ms: int,
    ) -> DeliveryBatch | None:
        """Fill in the attempts, and dead-letter the messages that have none left.

        Revive has checked the limit already, but the limit may be lower since then.
        """
        if max(attempts) <= group.max_attempts:
            return batch._replace(delivery_attempts=attempts)
        allowed = []
        for index, attempt in enumerate(attempts):
            if attempt <= group.max_attempts:
                allowed.append(index)
            else:
                with suppress(BlockFileDamaged):  # On failure, revive handles it at its deadline.
                    self.copy_to_dlq(
                        batch.slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, attempt - 1
                    )
        if not allowed:
            # The messages after this batch were not read.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
            return None
        return batch._replace(
            indexes=allowed,
            queue_offsets=[batch.queue_offsets[index] for index in allowed],
            delivery_attempts=[attempts[index] for index in allowed],
            log_offsets=[batch.log_offsets[index] for index in allowed],
        )

    def revive(self, slot: int, index: int, progress: PopProgress, now_ms: int) -> None:
        """Copy a message to the retry topic, or to the dead-letter topic if no attempt is left."""
        table = self._state.table
        offset = table.offset_of(slot, index)
        if offset < progress.queue.min_offset:
            self._expire(slot, index, progress)
            return
        original = self._find_original(progress, offset)
        if original is None:
            self._dead_letter_damaged(slot, index, progress, now_ms, 1)
            return
        is_retry = progress.topic_id != progress.named_topic_id
        attempts = original.position.attempts + 1 if is_retry else 1
        if table.flags[slot] & FLAG_SUSPEND:
            attempts -= 1
        group = self._catalog.groups[progress.group_id]
        try:
            if attempts >= group.max_attempts:
                reason = Reason.ATTEMPTS_EXHAUSTED
                self._copy_to_dlq(slot, index, progress, original, reason, now_ms, attempts)
                return
            retry = self.retry_topic(group, progress.named_topic_id, now_ms)
            reason = Reason.INVISIBLE_DURATION_ENDED
            self._copy(slot, index, progress, retry, original, reason, now_ms, attempts)
        except MessageBodyTooLarge:
            # The message was stored when segments were larger.
            self._dead_letter_damaged(slot, index, progress, now_ms, attempts)
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

        Only the intact properties of a damaged message are copied. Raises BlockFileDamaged.
        """
        offset = self._state.table.offset_of(slot, index)
        if offset < progress.queue.min_offset:
            self._expire(slot, index, progress)
            return
        original = self._find_original(progress, offset)
        if original is None:
            self._dead_letter_damaged(slot, index, progress, now_ms, attempts)
            return
        try:
            self._copy_to_dlq(slot, index, progress, original, reason, now_ms, attempts)
        except MessageBodyTooLarge:
            self._dead_letter_damaged(slot, index, progress, now_ms, attempts)

    def dead_letter_if_damaged(
        self, slot: int, index: int, progress: PopProgress, now_ms: int, attempts: int
    ) -> bool:
        """Settle a message that is damaged or expired. Return False if it is intact.

        Raises BlockFileDamaged.
        """
        offset = self._state.table.offset_of(slot, index)
        if offset < progress.queue.min_offset:
            self._expire(slot, index, progress)
        elif self._find_original(progress, offset) is None:
            self._dead_letter_damaged(slot, index, progress, now_ms, attempts)
        else:
            return False
        return True

    def _dead_letter_damaged(
        self, slot: int, index: int, progress: PopProgress, now_ms: int, attempts: int
    ) -> None:
        """Copy the intact properties of a damaged message to the dead-letter topic."""
        if self._keep_dead_letter(slot, index, progress, now_ms):
            return
        offset = self._state.table.offset_of(slot, index)
        log_offset, size, _ = progress.queue.entry(offset)
        position = MessagePosition(
            progress.topic_id, progress.queue.queue_id, 0, QueueOffset(offset)
        )
        cause, blob = self._store.remains_of(log_offset, size, position)
        original = _OriginalMessage(position, cause, blob, crc32(blob))
        attempts = min(attempts, ATTEMPTS_STORED_MAX)
        self._copy_to_dlq(slot, index, progress, original, Reason.DAMAGED, now_ms, attempts)
        self._state.count("damaged", progress, 1)
        if len(self._notices) < NOTICES_MAX:
            names = self._catalog.topics[progress.topic_id], self._catalog.groups[progress.group_id]
            self._notices.append(
                DamagedNotice(names[0].name, names[1].name, position.queue_id, offset, log_offset)
            )

    def _copy_to_dlq(
        self,
        slot: int,
        index: int,
        progress: PopProgress,
        original: _OriginalMessage,
        reason: Reason,
        now_ms: int,
        attempts: int,
    ) -> None:
        if self._keep_dead_letter(slot, index, progress, now_ms):
            return
        group = self._catalog.groups[progress.group_id]
        target = self._ensure_topic(DEAD_LETTER_TOPIC_PREFIX + group.name, now_ms)
        self._copy(slot, index, progress, target, original, reason, now_ms, attempts)
        self._state.ready_topics.add(target.id)
        self._state.count("dead_lettered", progress, 1)
        self._dead[group.id][reason.name.lower()] += 1

    def _keep_dead_letter(self, slot: int, index: int, progress: PopProgress, now_ms: int) -> bool:
        """Settle a message of a dead-letter topic, which stays there; False for another topic.

        A group that consumes its own dead-letter topic would otherwise copy each message to the end
        of that topic without end.
        """
        name = self._catalog.topics[progress.named_topic_id].name
        if not name.startswith(DEAD_LETTER_TOPIC_PREFIX):
            return False
        self._tally.add(1)
        self._state.count("dead_letter_kept", progress, 1)
        self._kept[progress.group_id, progress.named_topic_id] += 1
        self._acks.add_kept(slot, 1 << index)
        if progress.ordered is not None:
            self._acks.record(now_ms)  # Before the pop chooses the next batch.
        return True

    def _expire(self, slot: int, index: int, progress: PopProgress) -> None:
        """Settle and count a message that retention removed while it was in flight."""
        self._tally.add(1)
        self._state.count("expired_before_revive", progress, 1)
        self._acks.add_expired(slot, 1 << index)

    def attempts_of(self, progress: PopProgress, offset: int) -> int:
        """Return the delivery attempt of a message of a group that is not ordered."""
        is_expired = offset < progress.queue.min_offset
        if is_expired or progress.topic_id == progress.named_topic_id:
            return 1
        return self.attempts_at(progress.queue.entry(offset)[0])

    def attempts_at(self, log_offset: LogOffset) -> int:
        """Return the delivery attempt of the retry message at `log_offset`."""
        try:
            return self._store.place(log_offset).attempts + 1
        except (MessageDamaged, LookupError):
            return 1  # A damaged message goes to the dead-letter topic, whatever its attempt.

    def _find_original(self, progress: PopProgress, offset: int) -> _OriginalMessage | None:
        """Return the original of a copy, None if it is damaged. Raises BlockFileDamaged."""
        log_offset, _, _ = progress.queue.entry(offset)
        try:
            found = self._store.record(log_offset)
            position = MessagePosition._make(message.PLACE.unpack_from(found.body))
            if (
                position[:2] == (progress.topic_id, progress.queue.queue_id)
                and position[3] == offset
            ):
                return _OriginalMessage(
                    position, cause_of(found), found.tail, found.header.tail_crc
                )
        except (MessageDamaged, LookupError, struct.error):
            pass
        # The queue entry may be wrong, although its block was intact when it was first used.
        progress.queue.check_entry(offset)
        # Raises if another replica may still deliver an intact copy.
        self._store.check_awaited(log_offset)
        return None

    def retry_topic(self, group: ConsumerGroup, topic_id: TopicId, now_ms: int) -> Topic:
        """Return the retry topic of a group for a topic. Create it if it is new."""
        retry_of = group.id, topic_id
        known = self._catalog.retry_topic_ids.get(retry_of)
        topic, queues = self._catalog.topics[topic_id], 1
        if topic.type is TopicType.PRIORITY and self._catalog.feature_level >= PRIORITY_LEVEL:
            queues = topic.queues  # One for each level. Older programs read only the first queue.
        if known is None:
            name = f"{RETRY_TOPIC_PREFIX}{group.name}+{topic.name}"
            return self._ensure_topic(name, now_ms, retry_of=retry_of, queues=queues)
        retry = self._catalog.topics[known]
        if retry.queues < queues:
            retry = replace(retry, queues=queues, version=retry.version + 1)
            self._recorder.append(ConfigItem(topic_item(retry)), now_ms)
        return retry

    def _ensure_topic(
        self,
        name: str,
        now_ms: int,
        *,
        retry_of: tuple[GroupId, TopicId] | None = None,
        queues: int = 1,
    ) -> Topic:
        next_id = self._catalog.next_id
        topic = ensure_system_topic(
            self._catalog, self._recorder, name, now_ms, retry_of=retry_of, queues=queues
        )
        # A new topic costs as much as a copy.
        self._tally.add(topic.id == next_id)
        return topic

    def _copy(
        self,
        slot: int,
        index: int,
        progress: PopProgress,
        target: Topic,
        original: _OriginalMessage,
        reason: Reason,
        now_ms: int,
        attempts: int,
    ) -> None:
        """Append the copy that settles one message of a delivery."""
        table = self._state.table
        self._tally.add(1, size_bytes=len(original.blob))
        position, root = original.position, original.cause
        if root is not None:
            origin = root.origin
            root_position = root.root_topic_id, root.root_queue_id, root.root_offset
            first_popped_at_ms = root.first_popped_at_ms
        else:
            origin = self._catalog.topics[progress.named_topic_id].name
            root_position = position.topic_id, position.queue_id, position.queue_offset
            first_popped_at_ms = table.popped_at_ms[slot]
        cause = Cause(
            progress.group_id,
            DeliverySlot(slot),
            LogOffset(table.ids[slot]),
            index,
            reason,
            first_popped_at_ms,
            *root_position,
            origin,
            0 if root is None else root.replays,
        )
        # The queue of a message of a PRIORITY topic is its level, here and on the retry topic.
        level = progress.queue.queue_id
        queue = self._catalog.queue(target.id, level if level < target.queues else QueueId(0))
        self._recorder.append(
            MessageEntry(
                target.id,
                queue.queue_id,
                attempts,
                queue.max_offset,
                message.copy_flags(cause),
                cause,
                original.blob,
                original.blob_crc,
            ),
            now_ms,
        )
