"""Read-only queries about topics, consumer groups and messages."""

from __future__ import annotations

import struct
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.beginnings import begun_since_ms, topics_begun
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, Topic
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.progress_index import ProgressKey
from tidemill.broker.engine.pop.queue_queries import (
    consumer_offset,
    held_offsets,
    locking_slots,
    waiting_offsets,
)
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.queries.in_flight import (
    InFlightFilter,
    InFlightListing,
    PopOrder,
    PopPosition,
    QueueOrder,
    QueuePosition,
)
from tidemill.broker.engine.queries.queue_reader import ENDLESS, MessageSearch, QueueReader
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.time_search import TimeSearch
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.common.errors import Repairing
from tidemill.message import stored_message
from tidemill.message.client_key import ClientKey


class QueueStatus(NamedTuple):
    """The begin and the end of a queue."""

    queue_id: QueueId
    min_offset: int
    max_offset: int


class QueueProgress(NamedTuple):
    """The progress of a consumer group in a queue."""

    topic: str
    queue_id: QueueId
    is_retry: bool
    min_offset: int
    max_offset: int
    pop_offset: int
    consumer_offset: int
    ready_count: int
    in_flight_count: int
    oldest_unacked_at_ms: int  # 0: no message is unacked
    oldest_ready_at_ms: int  # 0: no message is ready
    oldest_popped_at_ms: int  # 0: no message is in flight
    is_locked: bool  # a batch in flight locks the queue of an ordered group

    @property
    def blocked_count(self) -> int:
        """The ready messages that wait for the end of the lock."""
        return self.ready_count if self.is_locked else 0


class PulledQueue(NamedTuple):
    """The stored pull offset of a group in a queue, with the ends of the queue."""

    topic: str
    queue_id: QueueId
    offset: int
    min_offset: int
    max_offset: int


class TopicContents(NamedTuple):
    """The counts of a topic."""

    stored_count: int  # messages that entered its queues so far
    message_count: int  # messages in its queues, acked or not
    timer_count: int  # delayed messages that will be delivered to it


class TopicUse(NamedTuple):
    """The contents and readers of a topic."""

    message_count: int  # messages in its queues, acked or not
    timer_count: int  # delayed messages that will be delivered to it
    groups: list[str]  # names of consumer groups that read it


class QueueLock(NamedTuple):
    """The messages in flight that lock a queue for an ordered group."""

    message_count: int
    # The first of those messages; its id is "" if it is unreadable.
    queue_offset: int
    message_id: str
    client_id: str  # the consumer that has them; "" if the broker has restarted since
    popped_at_ms: int
    until_ms: int
    waiting_count: int  # ready messages that wait for the end of the lock


# Samples of a queue's entries, for an estimate of its bytes in the log.
STRETCHES = 4
ENTRIES_A_STRETCH = 64


@final
class Inspection:
    """Queries for operators and metrics."""

    def __init__(
        self,
        catalog: Catalog,
        store: MessageStore,
        pops: PopState,
        tally: Tally,
        timer_index: TimerIndex,
    ) -> None:
        self._catalog = catalog
        self._timer_index = timer_index
        self._store = store
        self._pops = pops
        self._tally = tally

    def queue_status(self, topic: Topic) -> list[QueueStatus]:
        """Return the begin and the end of each queue of a topic."""
        return [
            QueueStatus(queue.queue_id, queue.min_offset, queue.max_offset)
            for queue in self._catalog.queues_of(topic)
        ]

    def consumer_offsets(self, group: ConsumerGroup, topic: Topic) -> list[int]:
        """Return a group's consumer offset in each queue of a topic; -1: it has not read it."""
        found = [
            self._pops.progress.get((group.id, topic.id, queue.queue_id))
            for queue in self._catalog.queues_of(topic)
        ]
        return [-1 if each is None else consumer_offset(self._pops, each) for each in found]

    def contents_of(self, topic: Topic) -> TopicContents:
        """Return the counts of a topic. The cost is O(queues)."""
        stored = messages = 0
        for queue in self._catalog.queues_of(topic):
            stored += queue.max_offset
            messages += queue.max_offset - queue.min_offset
        return TopicContents(stored, messages, self._timer_index.counts.pending[topic.id])

    def use_of(self, topic: Topic) -> TopicUse:
        """Return the uses of a topic."""
        contents = self.contents_of(topic)
        group_ids = self._pops.index.group_ids_of(topic.id)
        return TopicUse(
            contents.message_count,
            contents.timer_count,
            sorted(self._catalog.groups[group_id].name for group_id in group_ids),
        )

    def oldest_stored_at_ms(self, queue: ConsumeQueue) -> int | None:
        """Return when the first message of a queue was stored, in ms; None if it is unknown."""
        if queue.min_offset == queue.max_offset:
            return None
        with suppress(BlockFileDamaged):
            return self._store.stored_at(queue, queue.min_offset)[1]
        return None

    def log_bytes(self, queue: ConsumeQueue) -> int:
        """Return how many bytes of the log a queue's messages take.

        The result is exact for up to 256 messages. For more it is an estimate from 256 messages, in
        four samples from the oldest to the newest. Samples in a damaged file are omitted.
        """
        count = queue.max_offset - queue.min_offset
        if count <= STRETCHES * ENTRIES_A_STRETCH:
            stretches = [(int(queue.min_offset), count)] if count else []
        else:
            last = count - ENTRIES_A_STRETCH
            begins = [last * n // (STRETCHES - 1) for n in range(STRETCHES)]
            stretches = [(queue.min_offset + begin, ENTRIES_A_STRETCH) for begin in begins]
        sizes: list[int] = []
        for offset, entry_count in stretches:
            with suppress(BlockFileDamaged):
                sizes += [size for _, size, _ in queue.entries(offset, entry_count)]
        self._tally.add(len(sizes))
        return sum(sizes) * count // len(sizes) if sizes else 0

    def group_progress(
        self, group: ConsumerGroup, *, also: AbstractSet[TopicId] = frozenset()
    ) -> list[QueueProgress]:
        """Return a group's progress in each queue of the topics that it is given.

        The number has no bound. A caller on the event loop reads `queues_given` in slices.
        """
        return list(filter(None, map(self.find_progress, self.queues_given(group, also=also))))

    def queues_given(
        self, group: ConsumerGroup, *, also: AbstractSet[TopicId] = frozenset()
    ) -> list[ProgressKey]:
        """Return the queues whose messages a group is given here: its lag is in them.

        The progress, the metrics, the scaling of consumers and the backlog of a removal share this
        function and `find_progress`.
        """
        return [
            (group.id, topic_id, QueueId(queue_id))
            for topic_id in self.topics_given(group, also=also)
            for queue_id in range(self._catalog.topics[topic_id].queues)
        ]

    def topics_given(
        self, group: ConsumerGroup, *, also: AbstractSet[TopicId] = frozenset()
    ) -> list[TopicId]:
        """Return the topics whose messages a group is given here.

        These are the topics that it has read at any broker group, those that its consumers
        subscribe to, their retry topics, and `also`.
        """
        catalog, pops = self._catalog, self._pops
        found = pops.index.topic_ids_of(group.id) | topics_begun(group, catalog) | also
        found |= pops.index.reported_subscriptions.topics_of(group.id)
        for retry_id in catalog.retry_topics_of(group.id):
            retry_of = catalog.topics[retry_id].retry_of
            assert retry_of is not None, "a retry topic names its topic"
            found |= {retry_id, retry_of[1]}
        return sorted(filter(catalog.is_alive, found))

    def has_popped(self, group: ConsumerGroup) -> bool:
        """Return whether a group has begun to read any topic here."""
        return self._pops.index.has_popped(group.id)

    def topics_read(self, group: ConsumerGroup) -> set[TopicId]:
        """Return the topics that a group has begun to read here, retry topics included."""
        return self._pops.index.topic_ids_of(group.id)

    def find_progress(self, key: ProgressKey) -> QueueProgress | None:
        """Return a group's progress in a queue, also if unread; None if one of them is deleted.

        An unread queue has the progress with which the first pop would begin.
        """
        group_id, topic_id, _ = key
        self._tally.add(1)
        group, topic = self._catalog.groups.get(group_id), self._catalog.topics.get(topic_id)
        if group is None or topic is None or not self._catalog.is_alive(topic_id):
            return None
        progress = self._pops.index.peek(key)
        if progress.index == NIL and group.start_from_latest:
            begin = self._begin_of(group, topic, progress.queue)
            progress.pop_offset = progress.position = begin
        return self.queue_progress(progress)

    def _begin_of(self, group: ConsumerGroup, topic: Topic, queue: ConsumeQueue) -> int:
        """Return the begin of a group that starts at the latest, in a queue that it has not read.

        Queues that were added later, and retry topics, are read from their begin.
        """
        is_read = (group.id, topic.id, 0) in self._pops.progress
        if is_read or topic.retry_of is not None:
            return 0
        since_ms = begun_since_ms(group, topic, self._catalog)
        if since_ms is None:
            return queue.max_offset
        search = TimeSearch(self._store, [queue], since_ms, falls=self._catalog.clock_falls)
        with suppress(Repairing):  # Unknown until the rebuild: count all messages.
            while search.step():
                pass
            return search.offsets[0]
        return 0

    def pulled_by(self, group: ConsumerGroup) -> list[PulledQueue]:
        """Return the queues with a pull offset of a group."""
        found = []
        for key in self._catalog.pull_offsets.of_group(group.id):
            _, topic_id, queue_id = key
            if self._catalog.is_alive(topic_id):
                found.append(self._pulled(key, self._catalog.queue(topic_id, queue_id)))
        self._tally.add(len(found))
        return found

    def unpulled_by(self, group: ConsumerGroup) -> list[PulledQueue]:
        """Return the other queues of the topics that a group pulls: those without an offset."""
        found, said = [], self._catalog.pull_offsets.all
        for topic_id in self.topics_pulled(group):
            if self._catalog.is_alive(topic_id):
                for queue in self._catalog.queues_of(self._catalog.topics[topic_id]):
                    key = group.id, topic_id, queue.queue_id
                    if key not in said:
                        found.append(self._pulled(key, queue))
        self._tally.add(len(found))
        return found

    def _pulled(self, key: ProgressKey, queue: ConsumeQueue) -> PulledQueue:
        _, topic_id, queue_id = key
        offset = self._catalog.pull_offsets.find(key)
        at = queue.min_offset if offset is None else offset
        name = self._catalog.topics[topic_id].name
        return PulledQueue(name, queue_id, at, queue.min_offset, queue.max_offset)

    def topics_pulled(self, group: ConsumerGroup) -> set[TopicId]:
        """Return the topics with pull offsets of a group."""
        return {topic_id for _, topic_id, _ in self._catalog.pull_offsets.of_group(group.id)}

    def queue_progress(self, progress: PopProgress) -> QueueProgress:
        """Return a group's progress in one queue."""
        queue = progress.queue
        name = self._catalog.topics[progress.named_topic_id].name
        in_flight, waiting, is_locked = progress.in_flight, list[int](), False
        if progress.ordered is not None:
            is_locked = bool(locking_slots(self._pops, progress))
            # Pending messages that no client holds wait at their position for the next pop.
            held = held_offsets(self._pops, progress)
            in_flight, waiting = len(held), waiting_offsets(progress, held)
        is_retry = progress.named_topic_id != progress.topic_id
        ready_at = 0
        if waiting or progress.ready_count > 0:
            ready_at = self._entry_stored_at(queue, min(waiting, default=progress.next_offset))
        unacked_at, popped_at = ready_at, 0
        if progress.head != NIL:
            oldest = self._pops.table.starts[progress.head]
            first_at = self._entry_stored_at(queue, oldest)
            unacked_at = min(filter(None, (first_at, ready_at)), default=0)
            popped_at = self._pops.table.popped_at_ms[progress.head]
        return QueueProgress(
            name,
            queue.queue_id,
            is_retry,
            queue.min_offset,
            queue.max_offset,
            progress.position,
            consumer_offset(self._pops, progress),
            max(progress.ready_count, 0) + len(waiting),
            in_flight,
            unacked_at,
            ready_at,
            popped_at,
            is_locked,
        )

    def in_flight_of(self, client: ClientKey) -> int:
        """Return how many messages a client has in flight."""
        return self._pops.table.in_flight_of(client)

    def find_lock(self, key: ProgressKey) -> QueueLock | None:
        """Return the lock of a queue of an ordered group; None if it is not locked."""
        progress = self._pops.progress.get(key)
        slots = locking_slots(self._pops, progress) if progress is not None else []
        if progress is None or not slots:
            return None
        self._tally.add(len(slots))
        table = self._pops.table
        held = held_offsets(self._pops, progress)
        assert progress.ordered is not None, "only ordered queues are locked"
        return QueueLock(
            len(held),
            min(held),
            self._message_id(progress.queue, min(held)),
            progress.ordered.holder_id or table.client_of(slots[0]).client_id,
            min(table.popped_at_ms[slot] for slot in slots),
            max(table.visible_at_ms[slot] for slot in slots),
            max(progress.ready_count, 0) + len(waiting_offsets(progress, held)),
        )

    def _message_id(self, queue: ConsumeQueue, offset: int) -> str:
        """Return the id of a message, unverified; "" if it is unreadable."""
        with suppress(BlockFileDamaged, LookupError, struct.error, ValueError):
            _, blob = self._store.log.read(queue.entry(offset)[0])
            return stored_message.message_id_of(blob)
        return ""

    def _entry_stored_at(self, queue: ConsumeQueue, offset: int) -> int:
        if offset < queue.min_offset:
            return 0
        try:
            return self._store.stored_at(queue, offset)[1]
        except BlockFileDamaged:
            return 0  # Unknown until the rebuild.

    def look_up_time(self, topic: Topic, timestamp_ms: int) -> TimeSearch:
        """Begin a search for the first messages of a topic's queues at or after a time."""
        catalog = self._catalog
        queues = catalog.queues_of(topic)
        return TimeSearch(self._store, queues, timestamp_ms, falls=catalog.clock_falls)

    def search(
        self, topic: Topic, *, message_id: str = "", key: str = "", max_messages: int = 32
    ) -> MessageSearch:
        """Begin a search for messages of a topic, and their copies, by id or by key."""
        return MessageSearch(
            self._catalog,
            self._store,
            self._tally,
            topic,
            message_id=message_id,
            key=key,
            max_messages=max_messages,
        )

    def read(
        self,
        queue: ConsumeQueue,
        from_offset: int,
        *,
        wanted: MessageFilter = EVERY_MESSAGE,
        max_messages: int,
        max_bytes: int,
        until_offset: int = ENDLESS,
        with_bodies: bool = True,
    ) -> QueueReader:
        """Begin a read of the committed messages of a queue, in order."""
        return QueueReader(
            self._store,
            self._tally,
            queue,
            from_offset,
            wanted=wanted,
            max_messages=max_messages,
            max_bytes=max_bytes,
            until_offset=until_offset,
            with_bodies=with_bodies,
        )

    def in_flight(
        self, wanted: InFlightFilter, *, after: PopPosition | None, max_messages: int
    ) -> InFlightListing[PopPosition]:
        """Begin a page of messages in flight, by pop time."""
        order = PopOrder(self._pops, after)
        return InFlightListing(
            self._store, self._pops, self._tally, wanted, order, max_messages=max_messages
        )

    def in_flight_by_queue(
        self, wanted: InFlightFilter, *, first: QueuePosition, max_messages: int
    ) -> InFlightListing[QueuePosition]:
        """Begin a page of messages in flight, by consumer group, topic, queue and offset."""
        order = QueueOrder(self._pops, self._tally, wanted, first)
        return InFlightListing(
            self._store, self._pops, self._tally, wanted, order, max_messages=max_messages
        )
