"""Counts of timers by topic and due time: one walk over the table, in slices.

The scaler starts consumers ahead of delayed messages with a count of soon due timers (ADR 0037),
and the console shows a histogram. A timer that changes during the walk is counted as before or
after the change. A quarantined timer is not counted.
"""

from __future__ import annotations

from collections import Counter
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
BUCKETS_MAX = 1_000
TABLE_PAGES_A_STEP = 32  # 16,384 entries, about a millisecond


class DueWalk:
    """A walk over the pending timers, which are not quarantined, in slices."""

    def __init__(
        self,
        index: TimerIndex,
        tally: Tally,
        quarantined: Sequence[int],
        topic_id: TopicId | None = None,
    ) -> None:
        """Walk over all timers; over none if the topic has no pending ones."""
        self._index = index
        self._tally = tally
        self._quarantined = np.array(sorted(quarantined), dtype=np.int64)
        is_empty = topic_id is not None and not index.counts.pending[topic_id]
        files = {} if is_empty else dict(index.counts.file_live)
        self._pages = index.table.live_page_numbers(files)

    def step(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the topic ids and due times (ms) of one slice; None at the end."""
        numbers = list(islice(self._pages, TABLE_PAGES_A_STEP))
        if not numbers:
            return None
        rows = np.concatenate([self._index.table.rows(number) for number in numbers])
        self._tally.add(len(rows))
        is_counted = rows["state"] == TimerState.PENDING
        if len(self._quarantined):
            first_ids = np.array(numbers, dtype=np.int64) * PAGE_ENTRIES
            ids = (first_ids[:, None] + np.arange(PAGE_ENTRIES)).reshape(-1)
            is_counted &= ~is_among(self._quarantined, ids)
        counted = rows[is_counted]
        return counted["topic_id"].astype(np.int64), counted["due"].astype(np.int64)


@final
class DueCount:
    """A count in progress: call `step` until it returns False, then read `counts`."""

    def __init__(self, walk: DueWalk, within_ms: Sequence[int], *, firing_ms: int) -> None:
        if not 1 <= len(within_ms) <= WITHIN_MAX or min(within_ms) < 0:
            raise BadRequest(
                f"{len(within_ms)} horizons; pass 1 to {WITHIN_MAX} horizons of 0 ms or more"
            )
        if list(within_ms) != sorted(within_ms):
            raise BadRequest("the horizons are not in ascending order; sort them")
        self._walk = walk
        self._edges = firing_ms + np.array(within_ms, dtype=np.int64)
        # By topic id, the number due between each horizon and the one before.
        self._between: dict[int, np.ndarray] = {}

    def step(self) -> bool:
        """Do one slice. Return True while more remains."""
        found = self._walk.step()
        if found is None:
            return False
        topic_ids, due = found
        is_near = due <= self._edges[-1]
        if is_near.any():
            self._add(topic_ids[is_near], due[is_near])
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


@final
class DueHistogram:
    """A histogram in progress: call `step` until it returns False, then read the counts."""

    def __init__(
        self,
        walk: DueWalk,
        step_ms: int,
        buckets: int,
        *,
        firing_ms: int,
        topic_id: TopicId | None = None,
    ) -> None:
        """Count the timers of a topic, or all, in buckets that begin at multiples of `step_ms`.

        The first bucket has the current time. Raises BadRequest.
        """
        if not 1 <= buckets <= BUCKETS_MAX or step_ms < 1:
            raise BadRequest(f"a histogram has 1 to {BUCKETS_MAX} buckets of 1 ms or more")
        self._walk = walk
        self._topic_id = topic_id
        self._step_ms = step_ms
        self.as_of_ms = firing_ms
        self.from_ms = firing_ms - firing_ms % step_ms
        self.counts = np.zeros(buckets, dtype=np.int64)
        self.overdue = 0  # Due before the first bucket.
        self.later = 0  # Due after the last bucket.
        self.by_topic: Counter[TopicId] = Counter()

    def step(self) -> bool:
        """Do one slice. Return True while more remains."""
        found = self._walk.step()
        if found is None:
            return False
        topic_ids, due = found
        if self._topic_id is not None:
            due = due[topic_ids == self._topic_id]
        else:
            ids, sizes = np.unique(topic_ids, return_counts=True)
            self.by_topic.update(dict(zip(map(TopicId, ids.tolist()), sizes.tolist(), strict=True)))
        places = (due - self.from_ms) // self._step_ms
        is_inside = (places >= 0) & (places < len(self.counts))
        self.counts += np.bincount(places[is_inside], minlength=len(self.counts))
        self.overdue += int((places < 0).sum())
        self.later += int((places >= len(self.counts)).sum())
        return True
