"""Where in the queues of a topic the messages of a time begin.

Times of the log rise within a process. A start whose clock was set back is noted with where it
began (`Catalog.falls`): each stretch between two of these is searched by itself, the oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.log_times import NEVER_MS, bounds_of_time
from tidemill.common.errors import Repairing

QUEUES_A_STEP = 16  # of a look-up by time: a block or two of each, and a few records


@dataclass(slots=True)
class _Stretch:
    """Log offsets: what is known of a stretch of the log, and its end."""

    low: LogOffset
    high: LogOffset
    end: LogOffset


@final
class TimeSearch:
    """One look-up under way: call `step` until it returns False, then read `offsets`."""

    def __init__(
        self,
        store: MessageStore,
        queues: Sequence[ConsumeQueue],
        time_ms: int,
        *,
        falls: Sequence[int] = (),
    ) -> None:
        self._store = store
        self._queues = deque(queues)
        self._time_ms = time_ms
        # Of each stretch of the log in which times rise: what stands before the first was stored
        # before that time, at or behind the second not; and where it ends.
        low, high = bounds_of_time(store.log, time_ms)
        end = bounds_of_time(store.log, NEVER_MS)[1]
        bounds = [one for one in falls if store.log.min_offset < one < end]
        self._stretches = [_Stretch(low, high, end)]
        if bounds:
            begins = [store.log.min_offset, *map(LogOffset, bounds)]
            ends = [*begins[1:], end]
            self._stretches = [_Stretch(*each) for each in zip(begins, ends, ends, strict=True)]
        # Of each queue the first offset whose message was stored at that time or later.
        self.offsets: list[int] = []

    def step(self) -> bool:
        """Do one slice; True while there is more to do. Raises Repairing."""
        try:
            for _ in range(min(QUEUES_A_STEP, len(self._queues))):
                self.offsets.append(self._find(self._queues.popleft()))
        except BlockFileDamaged as error:
            raise Repairing from error
        return bool(self._queues)

    def _find(self, queue: ConsumeQueue) -> int:
        """Return the first offset that matches, the end of the queue where there is none."""
        low = 0
        for stretch in self._stretches:
            low = self._bisect(queue, stretch)
            if low < queue.offset_behind(stretch.end):
                break
        return low

    def _bisect(self, queue: ConsumeQueue, stretch: _Stretch) -> int:
        """Bisect a queue; what is learned of the log spares the next queues most of it."""
        low, high = queue.offset_behind(stretch.low), queue.offset_behind(stretch.high)
        while low < high:
            middle = (low + high) // 2
            log_offset = queue.entry(middle)[0]
            if self._store.stored_at_ms(log_offset) < self._time_ms:
                low, stretch.low = middle + 1, LogOffset(log_offset + 1)
            else:
                high, stretch.high = middle, log_offset
        return low
