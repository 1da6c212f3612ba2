"""The change of a due time that an operator asks for, for one timer and for rows of the table."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tidemill.broker.engine.layout.operation import OperationKind

SPREAD_MS_MAX: Final = 30 * 24 * 3_600_000
_HASH_FACTOR: Final = 0x9E3779B1  # spreads neighbouring ids over 32 bits
_MASK: Final = 0xFFFFFFFF
assert SPREAD_MS_MAX < _MASK, "a product with 32 bits fits into 64 bits"


class TimerChange(NamedTuple):
    """What a bulk change does with each timer."""

    kind: int  # an OperationKind
    due_at_ms: int | None = None  # of a reschedule: the new due time; None: shifted
    shift_ms: int = 0
    spread_ms: int = 0

    def due_of(self, timer_id: int, due_at_ms: int, *, firing_ms: int) -> int:
        """Return the new due time of a timer."""
        if self.kind == OperationKind.FIRE_TIMERS:
            return firing_ms
        base_ms = due_at_ms + self.shift_ms if self.due_at_ms is None else self.due_at_ms
        chance = timer_id * _HASH_FACTOR & _MASK
        return max(base_ms + (chance * (self.spread_ms + 1) >> 32), firing_ms)

    def due_of_rows(self, ids: np.ndarray, due: np.ndarray, *, firing_ms: int) -> np.ndarray | None:
        """Return the new due times of a reschedule, as `due_of` does; None of another change."""
        if self.kind != OperationKind.RESCHEDULE_TIMERS:
            return None
        base = due + self.shift_ms if self.due_at_ms is None else np.full_like(due, self.due_at_ms)
        chances = ids.astype(np.uint64) * np.uint64(_HASH_FACTOR) & np.uint64(_MASK)
        later = chances * np.uint64(self.spread_ms + 1) >> np.uint64(32)
        new_due: np.ndarray = np.maximum(base + later.astype(np.int64), firing_ms)
        return new_due
