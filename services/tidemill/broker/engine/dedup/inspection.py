"""The dedup keys of a topic for operators, and the end of a key before its window is over."""

from __future__ import annotations

from typing import NamedTuple, final

from tidemill.broker.engine.dedup.deduplication import Deduplication
from tidemill.broker.engine.dedup.first_messages import FirstMessages
from tidemill.broker.engine.dedup.row_blocks import NEVER_MS
from tidemill.broker.engine.layout.dedup import FREED, NO_PIN, KeyRow, StatedKeys
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import HalfId, TimerId, TopicId
from tidemill.broker.engine.metadata.catalog import Topic
from tidemill.common.errors import Conflict, DedupKeyNotFound


class KeyUsage(NamedTuple):
    """The keys of a topic at this broker group; counts are since the start."""

    keys: int
    memory_bytes: int
    memory_bytes_max: int
    # Wall time of the oldest key without a pin, as of the last sweep; 0: there was none.
    oldest_at_ms: int
    hits: int
    mismatches: int
    rejected: int
    replaced: int
    pending_keys: int


class KnownKey(NamedTuple):
    """A key that is not free. Times are of the wall clock."""

    row: KeyRow
    first_id: str  # of its message; "": retention has freed it
    stored_at_ms: int
    window_end_ms: int
    timer_id: TimerId | None  # of the pending delayed message
    half_id: HalfId | None  # of the open half message


@final
class KeyInspection:
    """Describes the dedup keys of one broker group."""

    def __init__(
        self, deduplication: Deduplication, firsts: FirstMessages, recorder: Recorder
    ) -> None:
        self._deduplication = deduplication
        self._tables = deduplication.tables
        self._firsts = firsts
        self._recorder = recorder

    def usage_of(self, topic_id: TopicId) -> KeyUsage:
        """Return the keys of a topic with deduplication."""
        deduplication, table = self._deduplication, self._tables.tables[topic_id]
        has_oldest = len(table) and table.oldest_ms != NEVER_MS
        return KeyUsage(
            keys=len(table),
            memory_bytes=table.memory_bytes,
            memory_bytes_max=deduplication.memory.bound_of(topic_id),
            oldest_at_ms=self._tables.clock.wall_ms(table.oldest_ms) if has_oldest else 0,
            hits=sum([n for (id_, _), n in deduplication.hits.items() if id_ == topic_id]),
            mismatches=deduplication.mismatches[topic_id],
            rejected=sum([n for (id_, _), n in deduplication.rejected.items() if id_ == topic_id]),
            replaced=deduplication.replaced[topic_id],
            pending_keys=table.pinned_count,
        )

    def find(self, topic: Topic, key: bytes, message_group: str) -> KnownKey:
        """Return a key that is not free: of the property, else of a message id.

        Raises DedupKeyNotFound.
        """
        policy, clock = topic.dedup, self._tables.clock
        assert policy is not None, "the caller has checked it"
        row = None
        for is_message_id in (False, True):
            hash_ = self._deduplication.hash_of(
                topic.id, message_group.encode(), key, is_message_id
            )
            row = row or self._deduplication.find_known(topic.id, policy, hash_)
        if row is None:
            raise DedupKeyNotFound(
                f"no message of topic {topic.name} has this dedup key, or its window is over"
            )
        first = self._firsts.find(row)
        return KnownKey(
            row,
            "" if first is None else first.message_id,
            clock.wall_ms(row.taken_at_ms),
            clock.wall_ms(row.taken_at_ms + policy.window_ms),
            TimerId(row.pin - 1) if row.pin > 0 else None,
            HalfId(-row.pin) if row.pin < 0 else None,
        )

    def check_free(self, known: KnownKey) -> None:
        """Raise Conflict if a key cannot be freed: another message could then have it, too."""
        if known.row.pin != NO_PIN:
            raise Conflict(
                f"the delayed message of the key (timer {known.timer_id}) is pending: cancel it,"
                f" which frees the key"
                if known.timer_id is not None
                else "the half message of the key is open: roll it back, which frees the key, or"
                " free the key after the commit; `tidemill dedup-key show` prints the transaction"
            )

    def free(self, topic: Topic, known: KnownKey, now_ms: int) -> None:
        """Free a key. Raises Conflict as `check_free`."""
        self.check_free(known)
        freed = known.row._replace(log_offset=FREED)
        self._recorder.append(StatedKeys([(topic.id, freed)]), now_ms)
