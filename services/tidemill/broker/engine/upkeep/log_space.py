"""The space of the log: its bytes by state, the state floor, and the topics that hold the space.

All values are those of the last count of live bytes, except the sizes of derived files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.topic_retention import TopicRetention
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.log_times import NEVER_MS, first_stored_at_ms
from tidemill.broker.engine.store.segment import Segment
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes
from tidemill.broker.engine.upkeep.retention import Retention
from tidemill.message.resource_names import HALF_TOPIC, HIDDEN_TOPICS, TIMER_TOPIC

STUB_BYTES: Final = 170  # of a removed message in a pack, on average
# A slice of topics takes about a millisecond, whichever comes first.
TOPICS_A_SLICE: Final = 64
QUEUES_A_SLICE: Final = 1_024


class LogBytes(NamedTuple):
    """The bytes of the log by state. Their sum is the size of the files of the log.

    The unused end of the newest file is not counted.
    """

    live: int  # messages that a consumer or a reader can still get
    dead: int  # messages that are known to be dead, and that no pack has freed yet
    stub: int  # what packs keep of dead messages
    # All other records, messages that are not counted yet, and dead messages that are not known.
    control: int
    pinned: int  # messages of pending timers, and files that are kept for them


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedBytes:
    """The sizes of the queue and index files. Messages enter them with the next checkpoint."""

    queues: int  # about 20 bytes per message of a queue
    index: int  # about 16 bytes per key or message id


class TopicSpace(NamedTuple):
    """The space that one topic holds."""

    name: str
    live_bytes: int
    log_bytes: int  # live ones, and known dead ones that no pack has freed yet
    # About, and at most: a segment returns space when enough of it is dead. With the retry topics
    # of all consumer groups.
    freed_by_deletion_bytes: int
    retention: TopicRetention  # with the `ms` of the broker, if the topic has none
    waits_for_archive: bool  # its oldest messages are kept only for the archive


@final
class LogSpace:
    """The space of the log of one broker."""

    def __init__(
        self,
        store: MessageStore,
        catalog: Catalog,
        live_bytes: LiveBytes,
        timer_index: TimerIndex,
        retention: Retention,
        transactions: TransactionTable,
    ) -> None:
        self._transactions = transactions
        self._store = store
        self._log = store.log
        self._catalog = catalog
        self._live_bytes = live_bytes
        self._timer_index = timer_index
        self._retention = retention

    # ------------------------------------------------------------ the log

    def find_bytes(self) -> LogBytes | None:
        """Return the bytes of the log by state; None until all messages are counted."""
        if not self._live_bytes.is_complete:
            return None
        self._live_bytes.note_packs()
        total = live = dead = stub = 0
        for segment in self._log.segments:
            size = _written_size(self._log, segment)
            live_here = min(self._live_bytes.live_bytes_in(segment.start), size)
            stub_here = 0 if segment.pack is None else segment.pack.header.stub_bytes
            stub_here = min(stub_here, size - live_here)
            dead_here = self._live_bytes.dead_bytes_in(segment.start)
            dead += min(dead_here, size - live_here - stub_here)
            total, live, stub = total + size, live + live_here, stub + stub_here
        control = total - live - dead - stub
        # Messages of hidden topics are counted as live. Those of settled timers and half messages
        # are dead.
        timer_bytes = min(self._hidden_bytes(TIMER_TOPIC), live)
        half_bytes = min(self._hidden_bytes(HALF_TOPIC), live - timer_bytes)
        pinned = min(self._timer_index.pinned_bytes, timer_bytes)
        pinned += self._open_half_bytes(half_bytes)
        live -= timer_bytes + half_bytes
        dead += timer_bytes + half_bytes - pinned
        pinned += sum(one.file_size for one in self._log.held)
        return LogBytes(live, dead, stub, control, pinned)

    def _hidden_bytes(self, name: str) -> int:
        topic_id = self._catalog.topic_ids.get(name)
        return 0 if topic_id is None else self._live_bytes.bytes_of_topic(topic_id)

    def _open_half_bytes(self, half_bytes: int) -> int:
        """Estimate the bytes of open half messages from the mean size of all in the log."""
        topic = self._catalog.find_topic(HALF_TOPIC)
        queues = [] if topic is None else self._catalog.queues_of(topic)
        count = sum(queue.max_offset - queue.min_offset for queue in queues)
        open_count = min(self._transactions.open_count, count)
        return half_bytes * open_count // count if count else 0

    @property
    def derived_bytes(self) -> DerivedBytes:
        """The sizes of the queue and index files. The cost is O(files)."""
        return DerivedBytes(
            queues=sum(file.size_bytes for file in self._store.queue_files),
            index=sum(file.size_bytes for file in self._store.index.files),
        )

    @property
    def floor_offset(self) -> int:
        """The state floor: no state is stated only before this log offset."""
        return self._log.state_floor

    def floor_stored_at_ms(self) -> int | None:
        """Return when the record at the state floor was stored; None if there is none."""
        log, floor = self._log, self.floor_offset
        if floor >= log.written_offset:
            return None
        number = next(n for n, one in enumerate(log.segments) if one.end > floor)
        stored_at_ms = first_stored_at_ms(log, number)
        return None if stored_at_ms == NEVER_MS else stored_at_ms

    # ------------------------------------------------------------ topics

    @property
    def is_known(self) -> bool:
        """Whether all messages are counted."""
        return self._live_bytes.is_complete

    def topic_names(self) -> list[str]:
        """Return the names of all topics with messages of their own, in order."""
        alive = self._catalog.is_alive
        topics = self._catalog.topics.values()
        return sorted(one.name for one in topics if one.name not in HIDDEN_TOPICS and alive(one.id))

    def find_topics(self, names: Sequence[str], now_ms: int) -> tuple[list[TopicSpace], int]:
        """Return the space of the first topics, as many as a slice allows, and their number.

        A topic that was deleted meanwhile is omitted, but counts.
        """
        found, queue_count = [], 0
        for number, name in enumerate(names, 1):
            space = self.find_topic(name, now_ms)
            if space is not None:
                found.append(space)
                queue_count += self._catalog.topics[self._catalog.topic_ids[name]].queues
            if number == TOPICS_A_SLICE or queue_count >= QUEUES_A_SLICE:
                return found, number
        return found, len(names)

    def find_topic(self, name: str, now_ms: int) -> TopicSpace | None:
        """Return the space of a topic; None if it was deleted meanwhile."""
        topic = self._catalog.find_topic(name)
        if topic is None or not self._catalog.is_alive(topic.id):
            return None
        rules = self._retention.rules
        retention, ms = self._catalog.retention_of(topic), rules.ms_of(topic)
        kept = TopicRetention(
            ms=-1 if ms is None else ms, bytes=retention.bytes, frees_acked=retention.frees_acked
        )
        retries = [] if topic.retry_of else self._catalog.retry_topics_for(topic.id)
        live = self._live_bytes.bytes_of_topic(topic.id)
        return TopicSpace(
            name,
            live,
            live + self._live_bytes.dead_bytes_of_topic(topic.id),
            sum(map(self._freed_by_deletion, [topic.id, *retries])),
            kept,
            self._waits_for_archive(topic, kept, live, now_ms),
        )

    def _freed_by_deletion(self, topic_id: TopicId) -> int:
        topic = self._catalog.topics[topic_id]
        queues = self._catalog.queues_of(topic)
        messages = sum(int(one.max_offset - one.min_offset) for one in queues)
        live = self._live_bytes.bytes_of_topic(topic_id)
        freed = max(live - messages * STUB_BYTES, 0)
        return freed + self._live_bytes.dead_bytes_of_topic(topic_id)

    def _waits_for_archive(
        self, topic: Topic, kept: TopicRetention, live: int, now_ms: int
    ) -> bool:
        gate = self._retention.gate
        if not gate.is_holding:
            return False
        is_bounded = kept.frees_acked or (kept.bytes is not None and live > kept.bytes)
        for queue in self._catalog.queues_of(topic):
            sealed = gate.sealed_offset(topic.id, queue.queue_id)
            # The gate lets the begin of a queue come as far as the sealed offset.
            if sealed is None or sealed > queue.min_offset or queue.min_offset == queue.max_offset:
                continue
            if is_bounded or self._is_old(queue, kept.ms, now_ms):
                return True
        return False

    def _is_old(self, queue: ConsumeQueue, ms: int | None, now_ms: int) -> bool:
        if ms is None or ms < 0:
            return False
        try:
            return self._store.stored_at(queue, queue.min_offset)[1] + ms <= now_ms
        except BlockFileDamaged:
            return False  # Unknown until the rebuild.


def _written_size(log: CommitLog, segment: Segment) -> int:
    if segment.pack is not None:
        return segment.file_size
    return max(min(segment.size, log.log_end - segment.start), 0)
