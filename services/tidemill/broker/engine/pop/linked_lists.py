"""Doubly linked lists through the slots of the delivery table: two arrays of slot numbers."""

from __future__ import annotations

from array import array

import numpy as np

NIL = 0xFFFFFFFF  # end of a list


def link_runs(
    previous: array[int], following: array[int], slots: np.ndarray, begins: np.ndarray
) -> None:
    """Link `slots` into lists. Each list begins at one of the positions `begins`."""
    before = np.empty(len(slots), dtype=np.uint32)
    after = np.empty(len(slots), dtype=np.uint32)
    before[1:], after[:-1] = slots[:-1], slots[1:]
    if len(slots):
        before[begins] = NIL
        after[begins[1:] - 1] = NIL
        after[-1] = NIL
    np.frombuffer(previous, dtype=np.uint32)[slots] = before
    np.frombuffer(following, dtype=np.uint32)[slots] = after


def run_begins(keys: np.ndarray) -> np.ndarray:
    """Return the positions in sorted `keys` at which a different key begins."""
    if not len(keys):
        return np.empty(0, dtype=np.int64)
    return np.append(0, np.flatnonzero(np.diff(keys)) + 1)
