"""The near wheel: timers that are loaded, in order of their due time to the millisecond.

What arrives in small portions waits in a buffer of its second and is sorted when that begins; what
is due within a second goes to a heap; what a slot's chain yields is sorted run by run. All of it is
compact: about 40 bytes a timer, and no Python object but in the heap. Volatile: rebuilt by loading.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import final

import numpy as np

ITEM = np.dtype(
    [("due", "<i8"), ("timer_id", "<i8"), ("topic_id", "<i8"), ("size", "<i8"), ("slot", "<i8")]
)
FIELDS = 5
RUN_ITEMS_MAX = 4096  # sorted in 0.2 ms


@final
class NearWheel:
    """Loaded timers that are not due yet, and how many of each slot are not final."""

    def __init__(self) -> None:
        # [due time of the next item, number, items sorted by due time, position of the next]
        self._runs: list[tuple[int, int, np.ndarray]] = []
        self._run_count = 0
        self._soon: list[tuple[int, int, int, int, int]] = []  # a heap of items
        self._buffers: dict[int, array[int]] = {}  # by second: the fields of items in a row
        self.outstanding: Counter[int] = Counter()  # loaded and not final, by slot second
        self.outstanding_count = 0

    def add(
        self, due_at_ms: int, timer_id: int, topic_id: int, size: int, slot_s: int, now_ms: int
    ) -> None:
        """Add one timer."""
        self.outstanding[slot_s] += 1
        self.outstanding_count += 1
        if due_at_ms < now_ms + 1000:
            heapq.heappush(self._soon, (due_at_ms, timer_id, topic_id, size, slot_s))
            return
        second = due_at_ms // 1000
        buffer = self._buffers.get(second)
        if buffer is None:
            buffer = self._buffers[second] = array("q")
        buffer.extend((due_at_ms, timer_id, topic_id, size, slot_s))

    def add_run(self, items: np.ndarray) -> None:
        """Add timers of one slot."""
        slot_s = int(items["slot"][0])
        self.outstanding[slot_s] += len(items)
        self.outstanding_count += len(items)
        self._push(items)

    def _push(self, items: np.ndarray) -> None:
        for begin in range(0, len(items), RUN_ITEMS_MAX):
            part = items[begin : begin + RUN_ITEMS_MAX]
            part = part[np.argsort(part["due"], kind="stable")]
            self._run_count += 1
            heapq.heappush(self._runs, (int(part["due"][0]), self._run_count, part))

    def settled(self, slot_s: int) -> None:
        """Note that one timer of a slot is final, or will be loaded again."""
        self.outstanding_count -= 1
        left = self.outstanding[slot_s] - 1
        if left:
            self.outstanding[slot_s] = left
        else:
            del self.outstanding[slot_s]

    def release(self, now_ms: int) -> Iterator[np.ndarray]:
        """Yield what is due, in portions that are each sorted by due time."""
        if self._buffers:
            for second in [s for s in self._buffers if s * 1000 <= now_ms + 1000]:
                self._push(np.frombuffer(self._buffers.pop(second), ITEM))
        while self._runs and self._runs[0][0] <= now_ms:
            _, number, items = heapq.heappop(self._runs)
            end = int(np.searchsorted(items["due"], now_ms, side="right"))
            if end < len(items):
                rest = items[end:]
                heapq.heappush(self._runs, (int(rest["due"][0]), number, rest))
            yield items[:end]
        due = []
        while self._soon and self._soon[0][0] <= now_ms:
            due.append(heapq.heappop(self._soon))
        if due:
            yield np.array(due, ITEM)

    def next_due_ms(self) -> int | None:
        """Return when the first timer is due, at the latest when its second must be sorted."""
        dues = [self._runs[0][0]] if self._runs else []
        if self._soon:
            dues.append(self._soon[0][0])
        if self._buffers:
            dues.append(min(self._buffers) * 1000 - 1000)
        return min(dues, default=None)
