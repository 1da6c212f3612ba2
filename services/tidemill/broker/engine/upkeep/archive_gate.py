"""The archive gate: retention waits until an archive has sealed the messages (ADR 0053).

It waits only while the disk has room. The sealed offset of a queue is the pull offset of the
archiver's consumer group, in the catalog. The gate itself keeps only the position of its search,
which a start begins again.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.metadata.pull_offsets import Key
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

ROOM_SEGMENTS_MIN: Final = 4
QUEUES_A_LOOK: Final = 256  # 1 to 2 ms if each needs the checksum of a cold block


class GateNotice(NamedTuple):
    """The gate has begun to give way, or holds segments again."""

    gives_way: bool
    topic: str  # of a queue with unsealed messages
    room_bytes: int  # until the broker rejects sends


@final
class ArchiveGate:
    """The rule that keeps the oldest segment while it has unsealed messages."""

    def __init__(self, catalog: Catalog, room: DiskRoom, config: EngineConfig) -> None:
        self._catalog = catalog
        self._room = room
        # "": the gate holds nothing.
        self.group_name = config.archive_gate_group
        # With less room the gate gives way: sends need room while segments are retired.
        self._room_bytes_min = max(
            config.disk_reserve_bytes, ROOM_SEGMENTS_MIN * config.segment_bytes
        )
        self.is_holding = False  # a segment that is past its retention
        self.gives_way = False  # in the last notice
        self.passed_count = 0  # segments retired with unsealed messages, since the start
        # A queue that blocks the segment with this end, and the queues that are not checked yet.
        self._end = 0
        self._blocker: Key | None = None
        self._unchecked: list[Key] = []
        self._is_passing = False
        self._notices: list[GateNotice] = []
        # From feature level 2 on, of the current look at all queues:
        self._holds_queues = False
        self._passes_queues = False
        self._passed_ends: set[int] = set()  # of segments whose unsealed messages are dead

    def take_notices(self) -> list[GateNotice]:
        """Return and clear the notices for operators."""
        notices, self._notices = self._notices, []
        return notices

    def lets_go(self, end: int) -> bool:
        """Whether retention may drop the segment that ends at log offset `end`.

        Each call checks some queues, and the next call continues: the messages before `end` do not
        change, and sealed offsets only grow.
        """
        is_sealed, room_bytes = self._is_sealed(end), self._room.bytes_until_full
        self.is_holding = not is_sealed and room_bytes >= self._room_bytes_min
        self._is_passing = not is_sealed and not self.is_holding
        # One notice covers all segments that are dropped, since each makes room for one more.
        is_over = is_sealed or room_bytes >= self._room_bytes_min * 5 // 4
        if self._is_passing or (self.gives_way and is_over):
            self._note(gives_way=self._is_passing, room_bytes=room_bytes)
        return not self.is_holding

    @property
    def is_searching(self) -> bool:
        """Whether unchecked queues are left, and no blocking queue is found."""
        return self._blocker is None and bool(self._unchecked)

    def note_dropped(self) -> None:
        """Note that the oldest segment was dropped."""
        self.passed_count += self._is_passing
        self.reset()

    # ------------------------------------------------------------ from feature level 2 on

    def begin_look(self) -> None:
        """Begin a look at all queues."""
        self._holds_queues = self._passes_queues = False

    def bound(self, queue: ConsumeQueue, low: int, *, segment_end: int) -> int:
        """Return how far a queue may lose the messages before `low`.

        `segment_end` is the log offset at which the oldest segment ends. Without room, the gate
        gives way for the messages of that segment only. Raises BlockFileDamaged.
        """
        sealed = self.sealed_offset(queue.topic_id, queue.queue_id)
        if sealed is None or sealed >= low:
            return low
        if self._room.bytes_until_full >= self._room_bytes_min:
            self._holds_queues = True
            return sealed
        passed = min(low, max(sealed, queue.offset_behind(segment_end)))
        if passed > max(sealed, queue.min_offset):
            self._passes_queues = True
            self._passed_ends.add(segment_end)
            group_id = self._group_id()
            assert group_id is not None, "it has a sealed offset"
            self._blocker = group_id, queue.topic_id, queue.queue_id
        return passed

    def end_look(self) -> bool:
        """End a look; return whether the gate has given way in it."""
        self.is_holding = self._holds_queues
        room_bytes = self._room.bytes_until_full
        is_over = not self._holds_queues or room_bytes >= self._room_bytes_min * 5 // 4
        if self._passes_queues or (self.gives_way and is_over):
            self._note(gives_way=self._passes_queues, room_bytes=room_bytes)
        return self._passes_queues

    def note_end(self, end: int) -> None:
        """Note that the oldest segment was dropped; it ended at log offset `end`."""
        self.passed_count += end in self._passed_ends
        self._passed_ends.discard(end)

    # ------------------------------------------------------------ sealed offsets

    def reset(self) -> None:
        """Hold nothing and end the search: no segment is past its retention."""
        self._is_passing = self.is_holding = False
        self._blocker, self._unchecked, self._end = None, [], 0

    def sealed_offset(self, topic_id: TopicId, queue_id: QueueId) -> int | None:
        """Return the sealed offset of a queue; None if the gate does not hold the queue."""
        group_id = self._group_id()
        if group_id is None:
            return None
        return self._catalog.pull_offsets.find((group_id, topic_id, queue_id))

    def _group_id(self) -> GroupId | None:
        group = self._catalog.find_group(self.group_name) if self.group_name else None
        return None if group is None else group.id

    def _is_sealed(self, end: int) -> bool:
        if self._blocker is not None and end == self._end and self._holds(self._blocker, end):
            return False
        group_id = self._group_id()
        if group_id is None:
            self.reset()
            return True
        if end != self._end or self._blocker is not None:
            self._unchecked = self._catalog.pull_offsets.of_group(group_id)
            self._blocker, self._end = None, end
        for key in self._unchecked[-QUEUES_A_LOOK:]:
            if self._holds(key, end):
                self._blocker = key
                return False
        del self._unchecked[-QUEUES_A_LOOK:]
        return not self._unchecked

    def _holds(self, key: Key, end: int) -> bool:
        """Whether a queue has an unsealed message before log offset `end`."""
        _, topic_id, queue_id = key
        sealed = self._catalog.pull_offsets.find(key)
        queue = self._catalog.queues.get((topic_id, queue_id))
        if sealed is None or queue is None or not self._catalog.is_alive(topic_id):
            return False
        first = max(sealed, queue.min_offset)
        if first >= queue.max_offset:
            return False
        try:
            queue.check_entry(first)
            return queue.entry(first)[0] < end
        except BlockFileDamaged:
            return True  # Unknown until the file is rebuilt.

    def _note(self, *, gives_way: bool, room_bytes: int) -> None:
        if gives_way == self.gives_way:
            return
        self.gives_way = gives_way
        topic = self._catalog.topics.get(self._blocker[1]) if self._blocker is not None else None
        name = topic.name if topic is not None else ""
        self._notices.append(GateNotice(gives_way, name, room_bytes))
