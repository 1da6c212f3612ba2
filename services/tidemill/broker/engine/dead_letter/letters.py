"""Replays and discards of dead letters.

The state decides, never the caller's list alone: two operators may settle the same dead letter.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.dead_letter import (
    RANGES_A_RECORD,
    DeadLettersDiscarded,
    DeadLetterState,
    Replay,
)
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import (
    FLAG_REPLAY,
    Cause,
    MessageEntry,
    MessagePosition,
    Reason,
)
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, QueueOffset
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore, cause_of
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, Topic
from tidemill.broker.engine.metadata.settled_letters import (
    DEAD_LETTER_LEVEL,
    DEAD_LETTER_QUEUE,
    RANGES_MAX,
    SettledCounts,
)
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.tally import Tally
from tidemill.common.errors import Conflict, Repairing
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX

REPLAYS_MAX: Final = 0xFFFF  # of a message, a u16


class LetterOutcome(StrEnum):
    """The result of a settlement of one dead letter."""

    REPLAYED = "REPLAYED"
    ALREADY_REPLAYED = "ALREADY_REPLAYED"
    DISCARDED = "DISCARDED"
    TOPIC_DELETED = "TOPIC_DELETED"
    DAMAGED = "DAMAGED"
    EXPIRED = "EXPIRED"
    NOT_FOUND = "NOT_FOUND"


_OF_STATE: Final = {
    DeadLetterState.REPLAYED: LetterOutcome.ALREADY_REPLAYED,
    DeadLetterState.DISCARDED: LetterOutcome.DISCARDED,
}


class ReplacedMessage(NamedTuple):
    """The message that a copy with changes has in place of that of the dead letter."""

    blob: bytes
    crc: int


class FoundLetter(NamedTuple):
    """A dead letter in the log."""

    topic: Topic
    offset: int
    cause: Cause
    record: Record | None  # None: it is damaged


@final
class DeadLetters:
    """Finds, replays and discards the dead letters of consumer groups."""

    def __init__(
        self,
        catalog: Catalog,
        store: MessageStore,
        state: PopState,
        redelivery: Redelivery,
        acks: RoundAcks,
        recorder: Recorder,
        tally: Tally,
        room: DiskRoom,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._state = state
        self._redelivery = redelivery
        self._acks = acks
        self._recorder = recorder
        self._tally = tally
        self._room = room
        # Counts of this process: by group id, and by group id and result.
        self.replays: Counter[tuple[GroupId, LetterOutcome]] = Counter()
        self.discards: Counter[GroupId] = Counter()

    def topic_of(self, group: ConsumerGroup) -> Topic | None:
        """Return the dead-letter topic of a group; None if it has no dead letter yet."""
        return self._catalog.find_topic(DEAD_LETTER_TOPIC_PREFIX + group.name)

    def queue_of(self, topic: Topic) -> ConsumeQueue:
        """Return the queue of a dead-letter topic. Raises LookupError if the topic was deleted."""
        if topic.id not in self._catalog.topics:
            raise LookupError(f"topic {topic.name} with id {topic.id} was deleted")
        return self._catalog.queue(topic.id, DEAD_LETTER_QUEUE)

    def counts_of(self, topic: Topic) -> tuple[int, SettledCounts]:
        """Return the numbers of open and of settled dead letters of a topic.

        Raises LookupError if the topic was deleted.
        """
        queue, settled = self.queue_of(topic), self._catalog.settled_letters
        settled.trim(topic.id, queue.min_offset)
        counts = settled.counts_of(topic.id)
        return queue.max_offset - queue.min_offset - sum(counts), counts

    # ------------------------------------------------------------ decisions

    def plan_replay(
        self, group: ConsumerGroup, offset: int, *, is_replaced: bool = False
    ) -> FoundLetter | LetterOutcome:
        """Return a dead letter that can be replayed, or why not. Raises Repairing.

        The message of a damaged one must be replaced.
        """
        found = self._find_open(group, offset)
        if isinstance(found, LetterOutcome):
            return found
        if not self._catalog.is_alive(found.cause.root_topic_id):
            return LetterOutcome.TOPIC_DELETED
        is_damaged = found.record is None or found.cause.reason == Reason.DAMAGED
        return LetterOutcome.DAMAGED if is_damaged and not is_replaced else found

    def replay(
        self,
        group: ConsumerGroup,
        offset: int,
        now_ms: int,
        *,
        operation_id: int = 0,
        replacement: ReplacedMessage | None = None,
    ) -> LetterOutcome:
        """Store the message of an open dead letter on the retry topic of its group.

        Raises Conflict, DiskFull, Repairing, MessageBodyTooLarge.
        """
        self.check_level()
        found = self.plan_replay(group, offset, is_replaced=replacement is not None)
        if isinstance(found, FoundLetter):
            self._append_replay(group, found, now_ms, operation_id, replacement)
            outcome = LetterOutcome.REPLAYED
        else:
            outcome = found
        self.replays[group.id, outcome] += 1
        return outcome

    def _append_replay(
        self,
        group: ConsumerGroup,
        found: FoundLetter,
        now_ms: int,
        operation_id: int,
        replacement: ReplacedMessage | None,
    ) -> None:
        self._check_room(found.topic, 1)
        if not self._room.may_copy:
            raise self._room.copies_rejected("replays no dead letters")
        cause = found.cause
        self._acks.record(now_ms)  # Required before a new retry topic.
        target = self._redelivery.retry_topic(group, cause.root_topic_id, now_ms)
        # As for retries: the queue of a message of a PRIORITY topic is its level.
        level = cause.root_queue_id
        queue = self._catalog.queue(target.id, level if level < target.queues else QueueId(0))
        if replacement is not None:
            blob, crc = replacement
        else:
            assert found.record is not None, "checked by the plan"
            blob, crc = bytes(found.record.tail), found.record.header.tail_crc
        replay = Replay(
            operation_id,
            group.id,
            found.topic.id,
            found.offset,
            min(cause.replays + 1, REPLAYS_MAX),
            cause.first_popped_at_ms,
            cause.root_topic_id,
            cause.root_queue_id,
            cause.root_offset,
            cause.origin,
        )
        self._tally.add(1, size_bytes=len(blob))
        self._recorder.append(
            MessageEntry(
                target.id, queue.queue_id, 0, queue.max_offset, FLAG_REPLAY, replay, blob, crc
            ),
            now_ms,
        )
        self._state.ready.add((group.id, cause.root_topic_id))

    def plan_discard(self, group: ConsumerGroup, offset: int) -> LetterOutcome:
        """Return the result of a discard of a dead letter. Raises Repairing."""
        found = self._find_open(group, offset)
        return LetterOutcome.DISCARDED if isinstance(found, FoundLetter) else found

    def discard(
        self, group: ConsumerGroup, offsets: Sequence[int], now_ms: int, *, operation_id: int = 0
    ) -> list[LetterOutcome]:
        """Settle open dead letters without a copy, with one record; return one result each.

        Raises Conflict, Repairing.
        """
        self.check_level()
        outcomes, chosen = [], set()
        topic = self.topic_of(group)
        for offset in offsets:
            found = self._find_open(group, offset)
            if isinstance(found, FoundLetter):
                chosen.add(offset)
            outcomes.append(LetterOutcome.DISCARDED if isinstance(found, FoundLetter) else found)
        if chosen:
            assert topic is not None, "it has a dead letter"
            ranges = _ranges_of(sorted(chosen))
            assert len(ranges) <= RANGES_A_RECORD, "the caller bounds a slice"
            self._check_room(topic, len(ranges))
            self._tally.add(len(chosen))
            entry = DeadLettersDiscarded(group.id, topic.id, operation_id, ranges)
            self._recorder.append(entry, now_ms)
            self.discards[group.id] += len(chosen)
        return outcomes

    def check_level(self) -> None:
        """Raise Conflict if the log of this broker group may not have these records yet."""
        level = self._catalog.feature_level
        if level < DEAD_LETTER_LEVEL:
            raise Conflict(
                f"a replay or a discard of dead letters needs feature level {DEAD_LETTER_LEVEL},"
                f" and broker group {self._catalog.broker_name} has {level}; upgrade all its"
                f" replicas, and remove feature_level_max"
            )

    def _check_room(self, topic: Topic, count: int) -> None:
        """Raise Conflict if a topic may not get so many ranges more."""
        settled = self._catalog.settled_letters
        if not settled.has_room(topic.id, count):
            settled.trim(topic.id, self.queue_of(topic).min_offset)
        if not settled.has_room(topic.id, count):
            raise Conflict(
                f"the settled dead letters of {topic.name} form {RANGES_MAX} ranges of offsets, the"
                f" limit; settle the ones between them, or wait until retention deletes the oldest"
            )

    # ------------------------------------------------------------ look-up

    def _find_open(self, group: ConsumerGroup, offset: int) -> FoundLetter | LetterOutcome:
        topic = self.topic_of(group)
        if topic is None:
            return LetterOutcome.NOT_FOUND
        queue = self.queue_of(topic)
        if not 0 <= offset < queue.max_offset:
            return LetterOutcome.NOT_FOUND
        if offset < queue.min_offset:
            return LetterOutcome.EXPIRED
        state = self._catalog.settled_letters.state_of(topic.id, offset)
        if state is not DeadLetterState.OPEN:
            return _OF_STATE[state]
        self._tally.add(1)
        try:
            found = self.read(topic, offset)
        except LookupError:
            return LetterOutcome.EXPIRED
        if found is None:
            return LetterOutcome.NOT_FOUND
        self._tally.add(0, size_bytes=0 if found.record is None else len(found.record.tail))
        return found

    def read(self, topic: Topic, offset: int) -> FoundLetter | None:
        """Return the dead letter at an offset; None if the message there is not a dead letter.

        Raises LookupError if retention has freed it or the topic was deleted, and Repairing if it
        may be mended.
        """
        queue = self.queue_of(topic)
        if offset >= queue.max_offset:
            raise LookupError(f"topic {topic.name} has no message at offset {offset}")
        try:
            log_offset, size, _ = queue.entry(offset)
            try:
                found = self._store.record(log_offset)
                place = MessagePosition._make(message.PLACE.unpack_from(found.body))
                if (place.topic_id, place.queue_offset) == (topic.id, offset):
                    cause = cause_of(found)
                    return _letter(topic, offset, cause, found)
            except (MessageDamaged, struct.error):
                pass
            # The queue entry may be wrong, although its block was intact when it was first used.
            queue.check_entry(offset)
            self._store.check_awaited(log_offset)
            place = MessagePosition(topic.id, DEAD_LETTER_QUEUE, 0, QueueOffset(offset))
            cause, _ = self._store.remains_of(log_offset, size, place)
        except BlockFileDamaged as error:
            raise Repairing from error
        return _letter(topic, offset, cause, None)


def _letter(
    topic: Topic, offset: int, cause: Cause | Replay | None, record: Record | None
) -> FoundLetter | None:
    if not isinstance(cause, Cause) or cause.reason == Reason.INVISIBLE_DURATION_ENDED:
        return None
    return FoundLetter(topic, offset, cause, record)


def _ranges_of(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending offsets as ranges."""
    ranges: list[tuple[int, int]] = []
    for offset in offsets:
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = ranges[-1][0], offset + 1
        else:
            ranges.append((offset, offset + 1))
    return ranges


def replaced(blob: bytes) -> ReplacedMessage:
    """Return a message that replaces that of a dead letter."""
    return ReplacedMessage(blob, crc32(blob))
