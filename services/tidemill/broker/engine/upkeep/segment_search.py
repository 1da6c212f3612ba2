"""The search for a queue with a live message in the oldest segments, a slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

QUEUES_A_LOOK = 256  # 1 to 2 ms if each queue checks a block that is not cached


@final
class SegmentSearch:
    """A search for a queue that needs the oldest segment.

    Each call checks some queues, and the next call continues: no message is added before the end of
    the segment.
    """

    def __init__(self) -> None:
        self._witness: ConsumeQueue | None = None  # a queue that needs the segment
        self._unseen: list[ConsumeQueue] = []  # for the segment that ends at `_end`
        self._end = 0

    def is_over(
        self,
        queues: Mapping[tuple[TopicId, QueueId], ConsumeQueue],
        end: int,
        is_needed_by: Callable[[ConsumeQueue], bool],
    ) -> bool:
        """Whether no queue needs the segment that ends at log offset `end`."""
        if self._witness is not None and is_needed_by(self._witness):
            return False
        self._witness = None
        if end != self._end:
            self._unseen, self._end = [], end
        unseen = self._unseen = self._unseen or list(queues.values())
        for queue in unseen[-QUEUES_A_LOOK:]:
            if is_needed_by(queue):
                self._witness, self._unseen = queue, []
                return False
        del unseen[-QUEUES_A_LOOK:]
        return not unseen
