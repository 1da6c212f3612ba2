"""The near wheel: the loaded timers, in order of due time to the millisecond.

Single timers wait in a buffer of their second, which is sorted when the second begins. Timers due
within a second go to a heap. The timers of a slot's chain are sorted in runs. A timer needs about
40 bytes, and a Python object only in the heap. After a start, loading fills it again.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from typing import final

import numpy as np

from tidemill.broker.engine.layout.numbers import TimerId, TopicId

ITEM = np.dtype(
    [("due", "<i8"), ("timer_id", "<i8"), ("topic_id", "<i8"), ("size", "<i8"), ("slot", "<i8")]
)
FIELDS = 5
RUN_ITEMS_MAX = 4096  # sorted in half a millisecond
TAKEN_ITEMS_MAX = 4096  # returned at once by `take_due`
SOON_ITEMS_MAX = 512  # the part of these from the heap, one by one: half a millisecond
SORT_AHEAD_MS = 1000  # the buffer of a second is sorted this long before the second begins


@final
class NearWheel:
    """The loaded timers that are not due, and the number of unsettled timers of each slot."""

    def __init__(self) -> None:
        # A heap of (due time of the first item, number, items sorted by due time and id).
        self._runs: list[tuple[int, int, np.ndarray]] = []
        self._run_count = 0
        self._soon: list[tuple[int, int, int, int, int]] = []  # a heap of items
        self._buffers: dict[int, array[int]] = {}  # flat fields of items, by second
        self.outstanding: Counter[int] = Counter()  # loaded and unsettled, by second of the slot
        self.outstanding_count = 0

    def add(
        self,
        due_at_ms: int,
        timer_id: TimerId,
        topic_id: TopicId,
        size: int,
        slot_s: int,
        now_ms: int,
    ) -> None:
        """Add one timer."""
        self.outstanding[slot_s] += 1
        self.outstanding_count += 1
        if due_at_ms < now_ms + SORT_AHEAD_MS:
            heapq.heappush(self._soon, (due_at_ms, timer_id, topic_id, size, slot_s))
            return
        second = due_at_ms // 1000
        buffer = self._buffers.get(second)
        if buffer is None:
            buffer = self._buffers[second] = array("q")
        buffer.extend((due_at_ms, timer_id, topic_id, size, slot_s))

    def add_run(self, items: np.ndarray) -> None:
        """Add at most RUN_ITEMS_MAX timers of one slot, sorted as by `in_order`."""
        slot_s = int(items["slot"][0])
        self.outstanding[slot_s] += len(items)
        self.outstanding_count += len(items)
        self._push(items)

    def _push(self, items: np.ndarray) -> None:
        self._run_count += 1
        heapq.heappush(self._runs, (int(items["due"][0]), self._run_count, items))

    def note_settled(self, slot_s: int) -> None:
        """Record that a timer of a slot is settled, or will be loaded again."""
        self.outstanding_count -= 1
        remaining = self.outstanding[slot_s] - 1
        if remaining:
            self.outstanding[slot_s] = remaining
        else:
            del self.outstanding[slot_s]

    def take_due(self, now_ms: int) -> np.ndarray | None:
        """Remove and return the first due timers, at most TAKEN_ITEMS_MAX, None if none is due.

        They are sorted by due time and id.
        """
        self._sort_ahead(now_ms)
        cutoff_ms = self._cutoff(now_ms)
        soon: list[tuple[int, int, int, int, int]] = []
        while self._soon and self._soon[0][0] <= cutoff_ms and len(soon) < SOON_ITEMS_MAX:
            soon.append(heapq.heappop(self._soon))
        if self._soon and self._soon[0][0] <= cutoff_ms:
            cutoff_ms = soon[-1][0]  # The remaining timers of the heap come before later ones.
        parts = [np.array(soon, ITEM)] if soon else []
        room = TAKEN_ITEMS_MAX - len(soon)
        while self._runs and self._runs[0][0] <= cutoff_ms and room > 0:
            _, number, items = heapq.heappop(self._runs)
            end = min(int(np.searchsorted(items["due"], cutoff_ms, side="right")), room)
            if end < len(items):
                later = items[end:]
                heapq.heappush(self._runs, (int(later["due"][0]), number, later))
            parts.append(items[:end])
            room -= end
        if not parts:
            return None
        due = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return in_order(due) if len(parts) > 1 else due

    def put_back(self, items: np.ndarray) -> None:
        """Put sorted timers from `take_due` back."""
        self._push(items)

    def _sort_ahead(self, now_ms: int) -> None:
        """Sort the buffer of a second that is about to begin."""
        second = min(self._buffers, default=None)
        if second is None or second * 1000 > now_ms + SORT_AHEAD_MS:
            return
        fields = self._buffers[second]
        size = RUN_ITEMS_MAX * FIELDS
        self._push(in_order(np.frombuffer(fields[:size], ITEM)))
        if len(fields) <= size:
            del self._buffers[second]
        else:
            self._buffers[second] = fields[size:]

    def _cutoff(self, now_ms: int) -> int:
        """Return the due time up to which about TAKEN_ITEMS_MAX timers are due."""
        if len(self._runs) < 2:
            return now_ms
        first_ms = self._runs[0][0]
        runs = [items["due"] for due_at_ms, _, items in self._runs if due_at_ms <= now_ms]
        cutoff_ms = now_ms
        while cutoff_ms > first_ms:
            count = sum(int(np.searchsorted(due, cutoff_ms, side="right")) for due in runs)
            if count <= TAKEN_ITEMS_MAX:
                break
            cutoff_ms = first_ms + (cutoff_ms - first_ms) // 2
        return cutoff_ms

    def next_due_ms(self) -> int | None:
        """Return when the first timer is due, or when its buffer must be sorted before that."""
        dues = [self._runs[0][0]] if self._runs else []
        if self._soon:
            dues.append(self._soon[0][0])
        if self._buffers:
            dues.append(min(self._buffers) * 1000 - SORT_AHEAD_MS)
        return min(dues, default=None)


def in_order(items: np.ndarray) -> np.ndarray:
    """Return `items` sorted by due time and id."""
    return items[np.lexsort((items["timer_id"], items["due"]))]
