"""The deadlines of checks: half ids in buckets of 100 ms.

An entry stays until its time, also if its half message ends before. The caller asks the table. If
most entries are of ended half messages, `sweep` removes some of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import final

import numpy as np

from tidemill.broker.engine.layout.numbers import HalfId

BUCKET_MS = 100
ENTRIES_KEPT = 65_536  # half a megabyte: with fewer entries, nothing is swept
_EMPTY = array("q")
SWEPT_A_SLICE = 2_048  # entries looked up in the table: a millisecond


@final
class CheckSchedule:
    """The deadlines of the open half messages."""

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._heap: list[int] = []  # each bucket once
        self.entry_count = 0
        self._swept: list[int] = []  # buckets that the sweep under way has not reached
        self._swept_from = 0  # in the last of them

    def add(self, half_id: HalfId, at_ms: int) -> None:
        """Add a deadline. It is never due early, and at most 100 ms late."""
        key = -(-at_ms // BUCKET_MS)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = array("q")
            heappush(self._heap, key)
        bucket.append(half_id)
        self.entry_count += 1

    def rebuild(self, half_ids: np.ndarray, times_ms: np.ndarray) -> None:
        """Replace all deadlines."""
        keys = -(-times_ms // BUCKET_MS)
        order = np.argsort(keys, kind="stable")
        keys, half_ids = keys[order], half_ids[order].astype(np.int64)
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        ends = [*begins[1:].tolist(), len(keys)][: len(begins)]
        self._buckets = {
            key: array("q", half_ids[begin:end].tobytes())
            for key, begin, end in zip(keys[begins].tolist(), begins.tolist(), ends, strict=True)
        }
        self._heap = list(self._buckets)
        heapify(self._heap)
        self.entry_count, self._swept = len(keys), []

    def next_ms(self) -> int | None:
        """Return the first deadline; None if there is none."""
        return self._heap[0] * BUCKET_MS if self._heap else None

    def take_due(self, now_ms: int, limit: int) -> list[HalfId]:
        """Remove and return up to `limit` entries that are due, the oldest bucket first."""
        due: list[int] = []
        while self._heap and self._heap[0] * BUCKET_MS <= now_ms and len(due) < limit:
            bucket = self._buckets[self._heap[0]]
            # From its end: a large bucket is not moved.
            taken = bucket[-(limit - len(due)) :]
            due += taken
            del bucket[len(bucket) - len(taken) :]
            if not bucket:
                del self._buckets[heappop(self._heap)]
        self.entry_count -= len(due)
        return [HalfId(half_id) for half_id in due]

    def sweep(self, open_count: int, keep: Callable[[HalfId], bool]) -> bool:
        """Remove some entries that `keep` rejects, if there are too many; return whether it did.

        One call is one slice.
        """
        if self.entry_count <= 2 * open_count + ENTRIES_KEPT:
            return False
        if not self._swept:
            self._swept = list(self._buckets)
            self._swept_from = 0
        seen = 0
        while self._swept and seen < SWEPT_A_SLICE:
            bucket, begin = self._buckets.get(self._swept[-1], _EMPTY), self._swept_from
            part = bucket[begin : begin + SWEPT_A_SLICE - seen]
            if not part:
                self._swept.pop()
                self._swept_from = 0
                continue
            kept = array("q", _filtered(part, keep))
            seen += len(part)
            self.entry_count -= len(part) - len(kept)
            bucket[begin : begin + len(part)] = kept
            self._swept_from = begin + len(kept)
        return True

    def clear(self) -> None:
        """Remove all deadlines: no half message is open."""
        if self._heap:
            self._buckets, self._heap, self._swept = {}, [], []
            self.entry_count = 0


def _filtered(half_ids: Iterable[int], keep: Callable[[HalfId], bool]) -> list[int]:
    return [half_id for half_id in half_ids if keep(HalfId(half_id))]
