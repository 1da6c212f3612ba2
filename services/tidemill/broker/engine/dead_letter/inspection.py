"""Dead letters for operators: the fields of one, a page of them, and a summary.

A page begins with the newest dead letter. The dead letters of all consumer groups of a broker group
are in one log, so their order is that of their log offsets.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final, NamedTuple, final

from tidemill.broker.engine.dead_letter.authors import SettlementAuthors
from tidemill.broker.engine.dead_letter.letters import DeadLetters, FoundLetter
from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.dead_letter import DeadLetterState
from tidemill.broker.engine.layout.message import Reason
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, Topic
from tidemill.broker.engine.metadata.settled_letters import SettledCounts
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.common.errors import BadRequest, MessageNotFound, Repairing
from tidemill.message import stored_message
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX

PAGE_SIZE_MAX: Final = 1_000
LETTERS_A_STEP: Final = 64  # each with one record
GROUPS_A_STEP: Final = 2_048  # looked up at the begin of a search, 0.3 ms
TOPICS_A_STEP: Final = 64  # dead-letter topics at the begin of a search, each with one entry
BYTES_A_STEP: Final = 1 << 20  # of the messages that are read
SCANNED_MAX: Final = 100_000  # dead letters of one search; the next page continues there
AUDIT_RECORDS_A_STEP: Final = 256  # that are read for the authors of settlements
NO_END: Final = LogOffset(1 << 62)
_DAMAGED: Final = Reason.DAMAGED.name.lower()


class LetterStatus(NamedTuple):
    """One dead letter, for operators."""

    group: str
    offset: int
    log_offset: LogOffset
    origin_topic: str
    is_topic_deleted: bool
    reason: str
    attempts: int  # deliveries that were made
    replays: int  # before this dead letter
    first_popped_at_ms: int
    dead_at_ms: int  # 0: unknown, the record is damaged
    state: DeadLetterState
    settled_at_ms: int  # 0: it is open, or the time is unknown
    settled_by: str  # "": unknown
    operation_id: int
    body_size: int
    head: bytes  # the stored message without its body; empty if it is damaged
    size: int  # of the record


class LetterQuery(NamedTuple):
    """A page of dead letters, the newest first. An empty text matches everything."""

    page_size: int
    group: ConsumerGroup | None = None
    topic: str = ""
    reason: str = ""
    tag: str = ""
    state: DeadLetterState | None = None
    from_ms: int = 0
    to_ms: int = 0  # exclusive; 0: no end
    before: LogOffset = NO_END  # only older ones


class LetterCounts(NamedTuple):
    """The dead letters of one group."""

    group: str
    open: int
    settled: SettledCounts
    oldest_open_at_ms: int  # 0: none is open
    deleted_from_at_ms: int  # when retention may delete the oldest open one; 0: never


class _Head(NamedTuple):
    """The newest dead letter of a topic that a search has not looked at."""

    order: int  # the negative log offset
    topic: Topic
    queue: ConsumeQueue
    offset: int


@final
class LetterInspection:
    """Describes the dead letters of one broker group."""

    def __init__(self, letters: DeadLetters, catalog: Catalog, *, retention_ms: int) -> None:
        self.letters = letters
        self.catalog = catalog
        self._retention_ms = retention_ms

    def status(self, group: ConsumerGroup, offset: int) -> tuple[LetterStatus, bytes]:
        """Return a dead letter and its stored message; empty if it is damaged.

        Raises MessageNotFound, Repairing.
        """
        topic = self.letters.topic_of(group)
        queue = None if topic is None else self.letters.queue_of(topic)
        found = None
        if topic is not None and queue is not None and 0 <= offset < queue.max_offset:
            removed = MessageNotFound(
                f"retention or a purge has removed dead letter {offset} of group {group.name}"
            )
            if offset < queue.min_offset:
                raise removed
            try:
                found = self.letters.read(topic, offset)
            except LookupError:
                raise removed from None
        if found is None:
            raise MessageNotFound(
                f"consumer group {group.name} has no dead letter {offset} at this broker group"
            )
        status = self.describe(found, SettlementAuthors(self.catalog))
        return status, b"" if found.record is None else bytes(found.record.tail)

    def describe(self, found: FoundLetter, authors: SettlementAuthors) -> LetterStatus:
        """Return the fields of a dead letter."""
        topic, offset, cause, record = found
        settled = self.catalog.settled_letters.find(topic.id, offset)
        head, body_size, attempts, dead_at_ms, size = b"", 0, 0, 0, 0
        if record is not None:
            attempts = message.PLACE.unpack_from(record.body)[2]
            fields = stored_message.decode(record.tail)
            head = bytes(record.tail[: fields.body_wire_at])
            body_size, size = fields.body_size, len(record.tail)
            dead_at_ms = record.header.stored_at_ms
        group = topic.name.removeprefix(DEAD_LETTER_TOPIC_PREFIX)
        return LetterStatus(
            group,
            offset,
            self.letters.queue_of(topic).entry(offset)[0],
            cause.origin,
            not self.catalog.is_alive(cause.root_topic_id),
            reason_of(found),
            attempts,
            cause.replays,
            cause.first_popped_at_ms,
            dead_at_ms,
            DeadLetterState.OPEN if settled is None else DeadLetterState(settled.state),
            0 if settled is None else settled.settled_at_ms,
            "" if settled is None else authors.find(group, settled),
            0 if settled is None else settled.operation_id,
            body_size,
            head,
            size,
        )

    def counts(self, topic: Topic) -> LetterCounts:
        """Count the dead letters of a group.

        Raises Repairing, and LookupError if the topic was deleted.
        """
        open_count, counts = self.letters.counts_of(topic)
        queue = self.letters.queue_of(topic)
        oldest_at_ms = self._oldest_open_at_ms(topic, queue) if open_count else 0
        retention_ms = self.catalog.retention_of(topic).ms
        keep_ms = self._retention_ms if retention_ms is None else retention_ms
        return LetterCounts(
            topic.name.removeprefix(DEAD_LETTER_TOPIC_PREFIX),
            open_count,
            counts,
            oldest_at_ms,
            oldest_at_ms + keep_ms if oldest_at_ms and keep_ms >= 0 else 0,
        )

    def _oldest_open_at_ms(self, topic: Topic, queue: ConsumeQueue) -> int:
        offset = self.catalog.settled_letters.first_open(topic.id, queue.min_offset)
        try:
            found = self.letters.read(topic, offset)
        except LookupError:
            return 0
        return 0 if found is None or found.record is None else found.record.header.stored_at_ms


@final
class _TopicWalk:
    """The dead-letter topics of consumer groups, in slices."""

    def __init__(self, catalog: Catalog, groups: Iterable[str]) -> None:
        self._catalog = catalog
        self._groups = deque(groups)

    @property
    def is_complete(self) -> bool:
        """Whether `take` has returned all topics."""
        return not self._groups

    def take(self) -> list[Topic]:
        """Return the topics of the next slice, maybe none. All of them exist."""
        topics: list[Topic] = []
        for _ in range(min(len(self._groups), GROUPS_A_STEP)):
            topic = self._catalog.find_topic(DEAD_LETTER_TOPIC_PREFIX + self._groups.popleft())
            if topic is not None:
                topics.append(topic)
                if len(topics) == TOPICS_A_STEP:
                    break
        return topics


@final
class LetterSearch:
    """A search in progress: call `step` until it returns False, then read the result."""

    def __init__(self, inspection: LetterInspection, query: LetterQuery) -> None:
        if not 1 <= query.page_size <= PAGE_SIZE_MAX:
            raise BadRequest(f"the page size {query.page_size} is not from 1 to {PAGE_SIZE_MAX}")
        self._inspection = inspection
        self._letters = inspection.letters
        self._settled = inspection.catalog.settled_letters
        self._authors = SettlementAuthors(inspection.catalog)
        self._query = query
        self._tag_hash = stored_message.tag_hash(query.tag) if query.tag else 0
        groups = inspection.catalog.group_ids if query.group is None else [query.group.name]
        self._topics = _TopicWalk(inspection.catalog, groups)
        self._heads: list[_Head] = []
        self._scanned_left = SCANNED_MAX
        self.found: list[LetterStatus] = []
        self.has_more = False  # whether there may be another page
        self.before = query.before  # the place of the next page

    def step(self) -> bool:
        """Do one slice. Return False when the page is complete. Raises Repairing."""
        try:
            return self._scan() if self._topics.is_complete else self._begin()
        except BlockFileDamaged as error:
            raise Repairing from error

    def _begin(self) -> bool:
        """Find the newest dead letters of some topics."""
        for topic in self._topics.take():
            queue = self._letters.queue_of(topic)
            before = self._query.before
            end = queue.max_offset if before == NO_END else queue.offset_behind(before)
            self._push(topic, queue, end - 1)
        return True

    def _push(self, topic: Topic, queue: ConsumeQueue, offset: int) -> None:
        if offset >= queue.min_offset:
            order = -queue.entry(offset)[0]
            heapq.heappush(self._heads, _Head(order, topic, queue, offset))

    def _scan(self) -> bool:
        size, records_end = 0, self._authors.records_read + AUDIT_RECORDS_A_STEP
        for _ in range(LETTERS_A_STEP):
            if not self._heads:
                return False
            if len(self.found) == self._query.page_size or not self._scanned_left:
                self.has_more = True
                return False
            order, topic, queue, offset = heapq.heappop(self._heads)
            self._scanned_left -= 1
            self.before = LogOffset(-order)
            is_last, status = self._look(topic, queue, offset)
            if status is not None:
                size += status.size
                self.found.append(status)
            if not is_last:
                self._push(topic, queue, offset - 1)
            if size >= BYTES_A_STEP or self._authors.records_read >= records_end:
                break
        return True

    def _look(
        self, topic: Topic, queue: ConsumeQueue, offset: int
    ) -> tuple[bool, LetterStatus | None]:
        """Return whether no older dead letter matches, and this one if it matches."""
        query = self._query
        if offset < queue.min_offset or topic.id not in self._inspection.catalog.topics:
            return True, None  # Retention or a deletion has removed it between two slices.
        if query.state is not None and self._settled.state_of(topic.id, offset) != query.state:
            return False, None
        if self._tag_hash and queue.entry(offset)[2] != self._tag_hash:
            return False, None
        try:
            found = self._letters.read(topic, offset)
        except LookupError:
            return True, None
        if found is None:
            return False, None
        at_ms = 0 if found.record is None else found.record.header.stored_at_ms
        if at_ms and query.from_ms > at_ms:
            # Without a step of the clock, all earlier ones are older.
            return not self._inspection.catalog.clock_falls, None
        if query.to_ms and at_ms >= query.to_ms:
            return False, None
        if query.topic and found.cause.origin != query.topic:
            return False, None
        if query.reason and reason_of(found) != query.reason:
            return False, None
        return False, self._inspection.describe(found, self._authors)


@final
class LetterSummary:
    """The dead letters of all groups, in numbers: call `step` until it returns False."""

    def __init__(self, inspection: LetterInspection, *, with_causes: bool = True) -> None:
        """Count also the causes of open dead letters, which reads them."""
        self._inspection = inspection
        self._with_causes = with_causes
        self._topics = _TopicWalk(inspection.catalog, inspection.catalog.group_ids)
        self._walks: deque[tuple[Topic, int]] = deque()  # with the next offset, downwards
        self._scanned_left = SCANNED_MAX
        self.groups: list[LetterCounts] = []
        # Of open dead letters, by group, origin topic and reason; of the newest ones only, if
        # `is_partial`.
        self.causes: Counter[tuple[str, str, str]] = Counter()
        self.is_partial = False

    def step(self) -> bool:
        """Do one slice: count groups, then look at open dead letters. Raises Repairing."""
        try:
            return self._scan() if self._topics.is_complete else self._count()
        except BlockFileDamaged as error:
            raise Repairing from error

    def _count(self) -> bool:
        for topic in self._topics.take():
            counts = self._inspection.counts(topic)
            if counts.open or any(counts.settled):
                self.groups.append(counts)
            if counts.open and self._with_causes:
                queue = self._inspection.letters.queue_of(topic)
                self._walks.append((topic, queue.max_offset - 1))
        return True

    def _scan(self) -> bool:
        letters, settled = self._inspection.letters, self._inspection.catalog.settled_letters
        size = 0
        for _ in range(LETTERS_A_STEP):
            if not self._walks:
                return False
            if not self._scanned_left:
                self.is_partial = True
                return False
            self._scanned_left -= 1
            topic, offset = self._walks.popleft()
            try:
                if offset < letters.queue_of(topic).min_offset:
                    continue
                self._walks.appendleft((topic, offset - 1))
                if settled.state_of(topic.id, offset) is not DeadLetterState.OPEN:
                    continue
                found = letters.read(topic, offset)
            except LookupError:
                continue  # Retention or a deletion has removed it between two slices.
            if found is not None:
                size += 0 if found.record is None else len(found.record.tail)
                self._note(found)
            if size >= BYTES_A_STEP:
                break
        return True

    def _note(self, found: FoundLetter) -> None:
        group = found.topic.name.removeprefix(DEAD_LETTER_TOPIC_PREFIX)
        self.causes[group, found.cause.origin, reason_of(found)] += 1


def reason_of(found: FoundLetter) -> str:
    """Return in a word why a message is a dead letter."""
    return _DAMAGED if found.record is None else Reason(found.cause.reason).name.lower()
