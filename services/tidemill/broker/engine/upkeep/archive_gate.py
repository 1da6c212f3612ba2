"""Retention waits for an archive: what it has not sealed is kept while there is room (ADR 0053).

How far each queue is sealed is the pull offset of one consumer group, by the archiver's word. State
is the catalog's; what is kept here is where the look at it stands, and is made again by a start.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.metadata.pull_offsets import Key
from tidemill.broker.engine.room import DiskRoom

ROOM_SEGMENTS_MIN: Final = 4
QUEUES_A_LOOK: Final = 256  # 1 to 2 ms where each has to sum a block that is cold


class GateNotice(NamedTuple):
    """The gate has begun to give way, or holds again."""

    gives_way: bool
    topic: str  # of a queue whose messages are not sealed
    room_bytes: int  # before messages are refused


@final
class ArchiveGate:
    """Whether the oldest segment holds what is not sealed yet."""

    def __init__(self, catalog: Catalog, room: DiskRoom, config: EngineConfig) -> None:
        self._catalog = catalog
        self._room = room
        # Without a name nothing is held.
        self.group_name = config.archive_gate_group
        # With less room than this everything goes: sends need it while segments are retired.
        self._room_bytes_min = max(
            config.disk_reserve_bytes, ROOM_SEGMENTS_MIN * config.segment_bytes
        )
        self.is_holding = False  # a segment that has served its time
        self.gives_way = False  # as it was told last
        self.passed_count = 0  # segments that went with what was not sealed, since the start
        # What blocks the segment that ends there, and the queues that were not looked at yet.
        self._end = 0
        self._witness: Key | None = None
        self._unseen: list[Key] = []
        self._is_passing = False
        self._notices: list[GateNotice] = []

    def take_notices(self) -> list[GateNotice]:
        """Return and forget what an operator should learn of."""
        notices, self._notices = self._notices, []
        return notices

    def lets_go(self, end: int) -> bool:
        """Whether the segment that ends at log offset `end`, and has served its time, may go.

        A call looks at some queues, and the next one goes on: what is stored before `end` is known,
        and how far a queue is sealed grows.
        """
        is_sealed, room_bytes = self._is_sealed(end), self._room.bytes_until_full
        self.is_holding = not is_sealed and room_bytes >= self._room_bytes_min
        self._is_passing = not is_sealed and not self.is_holding
        # Each segment that goes makes room for one: an operator is told once of them all.
        is_over = is_sealed or room_bytes >= self._room_bytes_min * 5 // 4
        if self._is_passing or (self.gives_way and is_over):
            self._tell(gives_way=self._is_passing, room_bytes=room_bytes)
        return not self.is_holding

    @property
    def is_looking(self) -> bool:
        """Whether queues are left to be looked at, and none was found that holds."""
        return self._witness is None and bool(self._unseen)

    def note_gone(self) -> None:
        """Hear that the oldest segment has gone."""
        self.passed_count += self._is_passing
        self.rest()

    def rest(self) -> None:
        """Hear that no segment is to go: nothing is held, and nothing looked for."""
        self._is_passing = self.is_holding = False
        self._witness, self._unseen, self._end = None, [], 0

    def sealed_offset(self, topic_id: TopicId, queue_id: QueueId) -> int | None:
        """Return how far a queue is sealed; None: nothing holds it."""
        group_id = self._group_id()
        if group_id is None:
            return None
        return self._catalog.pull_offsets.find((group_id, topic_id, queue_id))

    def _group_id(self) -> GroupId | None:
        group = self._catalog.find_group(self.group_name) if self.group_name else None
        return None if group is None else group.id

    def _is_sealed(self, end: int) -> bool:
        if self._witness is not None and end == self._end and self._holds(self._witness, end):
            return False
        group_id = self._group_id()
        if group_id is None:
            self.rest()
            return True
        if end != self._end or self._witness is not None:
            self._unseen = self._catalog.pull_offsets.of_group(group_id)
            self._witness, self._end = None, end
        for key in self._unseen[-QUEUES_A_LOOK:]:
            if self._holds(key, end):
                self._witness = key
                return False
        del self._unseen[-QUEUES_A_LOOK:]
        return not self._unseen

    def _holds(self, key: Key, end: int) -> bool:
        """Whether a queue has a message before log offset `end` that is not sealed."""
        _, topic_id, queue_id = key
        sealed = self._catalog.pull_offsets.find(key)
        queue = self._catalog.queues.get((topic_id, queue_id))
        if sealed is None or queue is None or not self._catalog.is_alive(topic_id):
            return False
        first = max(sealed, queue.min_offset)
        if first >= queue.max_offset:
            return False
        try:
            return queue.entry(first)[0] < end
        except BlockFileDamaged:
            return True  # Nobody can say before it is repaired.

    def _tell(self, *, gives_way: bool, room_bytes: int) -> None:
        if gives_way == self.gives_way:
            return
        self.gives_way = gives_way
        topic = self._catalog.topics.get(self._witness[1]) if self._witness is not None else None
        name = topic.name if topic is not None else ""
        self._notices.append(GateNotice(gives_way, name, room_bytes))
