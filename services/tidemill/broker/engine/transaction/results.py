"""The order in which transactions ended: the oldest result is forgotten first."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import final

CUT_PLACES = 65_536  # empty places at the begin, before the arrays are cut


@final
class ResultOrder:
    """Log offsets and half ids of results, in the order of their records."""

    def __init__(self, memory_ms: int) -> None:
        self.memory_ms = memory_ms  # how long a result is remembered
        self._log_offsets = array("q")
        self._half_ids = array("q")
        self._begin = 0  # the places before it are empty

    def __len__(self) -> int:
        return len(self._half_ids) - self._begin

    def add(self, log_offset: int, half_id: int) -> None:
        """Add the newest result."""
        self._log_offsets.append(log_offset)
        self._half_ids.append(half_id)

    def load(self, log_offsets: Iterable[int], half_ids: Iterable[int]) -> None:
        """Replace all results; they are in order."""
        self._log_offsets, self._half_ids = array("q", log_offsets), array("q", half_ids)
        self._begin = 0

    @property
    def oldest(self) -> tuple[int, int]:
        """The log offset and the half id of the oldest result. Raises IndexError."""
        return self._log_offsets[self._begin], self._half_ids[self._begin]

    def drop_oldest(self) -> None:
        """Remove the oldest result."""
        self._begin += 1
        if self._begin >= CUT_PLACES and self._begin * 2 >= len(self._half_ids):
            del self._log_offsets[: self._begin], self._half_ids[: self._begin]
            self._begin = 0
