"""The number of timers of each topic that are due soon: one walk over the table, in slices.

The scaler starts consumers ahead of delayed messages with it (ADR 0037). A timer that changes
during the walk is counted as before or after the change. A quarantined timer is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import final

import numpy as np

from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.sorted_search import is_among
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.engine.timer.table import PAGE_ENTRIES
from tidemill.common.errors import BadRequest

WITHIN_MAX = 80  # 64 horizons of triggers, which are configured by hand, and times between counts
TABLE_PAGES_A_STEP = 32  # 16,384 entries, about a millisecond


@final
class DueCount:
    """A count in progress: call `step` until it returns False, then read `counts`."""

    def __init__(
        self,
        index: TimerIndex,
        tally: Tally,
        quarantined: Sequence[int],
        within_ms: Sequence[int],
        *,
        firing_ms: int,
    ) -> None:
        if not 1 <= len(within_ms) <= WITHIN_MAX or min(within_ms) < 0:
            raise BadRequest(
                f"{len(within_ms)} horizons; pass 1 to {WITHIN_MAX} horizons of 0 ms or more"
            )
        if list(within_ms) != sorted(within_ms):
            raise BadRequest("the horizons are not in ascending order; sort them")
        self._index = index
        self._tally = tally
        self._quarantined = np.array(sorted(quarantined), dtype=np.int64)
        self._edges = firing_ms + np.array(within_ms, dtype=np.int64)
        self._pages = index.table.live_page_numbers(dict(index.counts.file_live))
        # By topic id, the number due between each horizon and the one before.
        self._between: dict[int, np.ndarray] = {}

    def step(self) -> bool:
        """Do one slice. Return True while more remains."""
        numbers = list(islice(self._pages, TABLE_PAGES_A_STEP))
        if not numbers:
            return False
        rows = np.concatenate([self._index.table.rows(number) for number in numbers])
        self._tally.add(len(rows))
        due = rows["due"].astype(np.int64)
        is_counted = (rows["state"] == TimerState.PENDING) & (due <= self._edges[-1])
        if len(self._quarantined):
            first_ids = np.array(numbers, dtype=np.int64) * PAGE_ENTRIES
            ids = (first_ids[:, None] + np.arange(PAGE_ENTRIES)).reshape(-1)
            is_counted &= ~is_among(self._quarantined, ids)
        if is_counted.any():
            self._add(rows["topic_id"][is_counted].astype(np.int64), due[is_counted])
        return True

    def _add(self, topic_ids: np.ndarray, due: np.ndarray) -> None:
        width = len(self._edges)
        keys = topic_ids * width + np.searchsorted(self._edges, due, side="left")
        found, counts = np.unique(keys, return_counts=True)
        for key, count in zip(found.tolist(), counts.tolist(), strict=True):
            topic_id, index = divmod(key, width)
            if topic_id not in self._between:
                self._between[topic_id] = np.zeros(width, dtype=np.int64)
            self._between[topic_id][index] += count

    @property
    def counts(self) -> dict[TopicId, list[int]]:
        """The number of timers due within each horizon, by topic id."""
        return {
            TopicId(topic_id): np.cumsum(between).tolist()
            for topic_id, between in self._between.items()
        }
