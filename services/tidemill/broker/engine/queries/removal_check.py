"""The backlog of a broker: messages that consumers would lose if the broker were removed.

A rule states the backlog of a group (ADR 0034):

    the group                                its backlog
    is given a topic (`Inspection`)          its lag: the messages after its position
    pulls a queue                            the messages after its pull offset
    reads no topic anywhere                  all messages, unless it starts at the latest
    is the archive that retention waits for  the messages after its pull offsets (ADR 0053)

Topics without a reader count as a whole. The archive does not count as a reader. An open half
message counts, because it may still be committed. A known dedup key counts, because another broker
group would store its repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice, product
from typing import NamedTuple, final

from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, Topic
from tidemill.broker.engine.queries.inspection import Inspection
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX

COUNTED_A_SLICE = 64  # queues that a group reads, or topics
ITEMS_MAX = 64  # lines of a topic and a group; enough for an operator to see a pattern

# Consumer groups and the topics that they are given at the home; ids of the home.
Readers = Mapping[int, AbstractSet[int]]


class RemovalBacklogItem(NamedTuple):
    """The backlog of a consumer group in a topic."""

    topic: str
    group: str  # "": no group reads the topic
    ready_count: int
    in_flight_count: int
    is_unread: bool  # the group has not begun to read it here
    pulled_queue_id: int | None = None  # the queue, if the group pulls


@dataclass(slots=True)
class RemovalBacklog:
    """The sums of a broker's backlog, with the first items."""

    ready_count: int = 0
    in_flight_count: int = 0
    delayed_count: int = 0
    half_count: int = 0  # open half messages
    key_count: int = 0  # known dedup keys
    items: list[RemovalBacklogItem] = field(default_factory=list)
    unnamed_count: int = 0

    def __bool__(self) -> bool:
        counts = self.ready_count, self.in_flight_count, self.delayed_count, self.half_count
        return any(counts) or self.key_count > 0

    def add(self, item: RemovalBacklogItem) -> None:
        """Count an item; keep the first `ITEMS_MAX` items."""
        if not (item.ready_count or item.in_flight_count):
            return
        self.ready_count += item.ready_count
        self.in_flight_count += item.in_flight_count
        if len(self.items) < ITEMS_MAX:
            self.items.append(item)
        else:
            self.unnamed_count += 1


class _TopicBacklog(NamedTuple):
    """A topic with messages."""

    topic: Topic
    message_count: int


@final
class RemovalCount:
    """One count of the backlog. All slices run in one round."""

    def __init__(
        self,
        backlog: RemovalBacklog,
        catalog: Catalog,
        inspection: Inspection,
        readers: Readers,
        *,
        archive_group: str,
    ) -> None:
        """`archive_group` is the group that retention waits for; "": none."""
        self._backlog = backlog
        self._archive_group = archive_group
        self._catalog = catalog
        self._inspection = inspection
        self._readers = readers
        self._topics: dict[TopicId, _TopicBacklog] = {}
        self._read_ids: set[TopicId] = set()  # topics that a group has begun to read, or pulls

    def run(self) -> Iterator[None]:
        """Count the whole backlog, in slices."""
        yield from self._find_topics()
        idle = []
        for group in list(self._catalog.groups.values()):
            at_home = self._topic_ids_at_home(group)
            given_ids = set(self._inspection.topics_given(group, also=at_home))
            is_archive = group.name == self._archive_group
            pulled_ids = set() if is_archive else self._inspection.topics_pulled(group)
            self._count_pulled(group, is_archive=is_archive)
            self._read_ids |= given_ids | pulled_ids
            if given_ids:
                yield from self._count_given(group, at_home)
            elif not (group.start_from_latest or pulled_ids or is_archive):
                idle.append(group)
            yield
        self._count_idle(idle)
        for stored in self._topics.values():
            if stored.topic.id not in self._read_ids and (stored.topic.is_system or not idle):
                self._backlog.add(
                    RemovalBacklogItem(
                        stored.topic.name, "", stored.message_count, 0, is_unread=True
                    )
                )

    def _find_topics(self) -> Iterator[None]:
        for n, topic in enumerate(list(self._catalog.topics.values()), 1):
            if topic.retry_of is None and not topic.name.startswith(HIDDEN_TOPIC_PREFIX):
                statuses = self._inspection.queue_status(topic)
                count = sum(each.max_offset - each.min_offset for each in statuses)
                if count:
                    self._topics[topic.id] = _TopicBacklog(topic, count)
            if n % COUNTED_A_SLICE == 0:
                yield

    def _topic_ids_at_home(self, group: ConsumerGroup) -> set[TopicId]:
        """Return the topics here that a group is given at the home."""
        known = self._catalog.topic_ids_at_home
        at_home = self._readers.get(group.home_id, ()) if group.home_id else ()
        return {known[id_] for id_ in at_home if id_ in known}

    def _count_pulled(self, group: ConsumerGroup, *, is_archive: bool) -> None:
        """Count the messages after the pull offsets of a group.

        If the group pulls other queues of a topic, a queue without a pull offset counts as a whole.
        This does not hold for the archive (ADR 0053).
        """
        found = self._inspection.pulled_by(group)
        if not is_archive:
            found += self._inspection.unpulled_by(group)
        for pulled in found:
            count = pulled.max_offset - max(pulled.offset, pulled.min_offset)
            item = RemovalBacklogItem(
                pulled.topic, group.name, count, 0, is_unread=False, pulled_queue_id=pulled.queue_id
            )
            self._backlog.add(item)

    def _count_given(self, group: ConsumerGroup, at_home: AbstractSet[TopicId]) -> Iterator[None]:
        read_ids = self._inspection.topics_read(group)
        ready: Counter[str] = Counter()
        in_flight: Counter[str] = Counter()
        read_here: set[str] = set()
        for n, key in enumerate(self._inspection.queues_given(group, also=at_home), 1):
            progress = self._inspection.find_progress(key)
            if progress is not None:
                ready[progress.topic] += progress.ready_count
                in_flight[progress.topic] += progress.in_flight_count
                if key[1] in read_ids:
                    read_here.add(progress.topic)
            if n % COUNTED_A_SLICE == 0:
                yield
        for topic in ready:
            item = RemovalBacklogItem(
                topic, group.name, ready[topic], in_flight[topic], is_unread=topic not in read_here
            )
            self._backlog.add(item)

    def _count_idle(self, idle: list[ConsumerGroup]) -> None:
        """Count all user topics for each group that reads no topic anywhere."""
        backlog = self._backlog
        topics = [stored for stored in self._topics.values() if not stored.topic.is_system]
        # Groups times topics may be a large number: iterate over the kept items only.
        room = ITEMS_MAX - len(backlog.items)
        for group, stored in islice(product(idle, topics), room):
            item = RemovalBacklogItem(
                stored.topic.name, group.name, stored.message_count, 0, is_unread=True
            )
            backlog.items.append(item)
        backlog.ready_count += len(idle) * sum(stored.message_count for stored in topics)
        backlog.unnamed_count += max(len(idle) * len(topics) - room, 0)
