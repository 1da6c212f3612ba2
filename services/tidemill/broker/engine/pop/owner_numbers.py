"""Owner numbers: slots of the delivery table name the progress that owns them by number.

A slot may outlive its delivery: deletions and resets make many deliveries void at once, and an
engine may stop to keep replaced deliveries (`delivery_limits.py`). A sweep through the table finds
these slots in slices. The number of a deleted progress is free after a sweep. Numbers are local to
an engine: records do not contain them.
"""

from __future__ import annotations

from array import array
from typing import final

import numpy as np

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.pop.delivery_table import FREE, DeliveryTable
from tidemill.broker.engine.pop.progress import VOID, PopProgress
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

NOBODY = 0  # the placeholder's group and topic id: real ids begin at 1
NO_NUMBER = -1
SLOTS_A_SWEEP = 65_536  # per slice, about 300 microseconds
SLOTS_FOUND_A_SWEEP = 512  # per slice: emptying them takes a millisecond


@final
class OwnerNumbers:
    """The progress of each number, and the sweep for slots that must be emptied."""

    def __init__(self, table: DeliveryTable) -> None:
        self._table = table
        self.owners: list[PopProgress] = []  # by number
        self._free = array("I")  # these name a placeholder
        self._placeholder = PopProgress(
            index=NO_NUMBER,
            group_id=GroupId(NOBODY),
            topic_id=TopicId(NOBODY),
            named_topic_id=TopicId(NOBODY),
            queue=ConsumeQueue(TopicId(NOBODY), QueueId(0)),
            void_before=VOID,
        )
        # What the next sweep looks for: numbers, and the delivery ids below which their slots must
        # be emptied, if they have live messages and if they have none.
        self._marked = array("I")
        self._live_floors = array("q")
        self._kept_floors = array("q")
        self._retired = array("I")  # those of `_marked` that are free after the sweep
        # The current sweep: its position, its floors by number, and the numbers that it frees.
        self._position = 0
        self._floors: tuple[np.ndarray, np.ndarray] | None = None
        self._swept = array("I")

    @property
    def has_marked(self) -> bool:
        """Whether a sweep has work to do."""
        return self._floors is not None or bool(self._marked)

    def next(self) -> int:
        """Return the number that `add` assigns next."""
        return self._free[-1] if self._free else len(self.owners)

    def add(self, progress: PopProgress) -> None:
        """Assign the number `next()` to an owner."""
        if self._free:
            self.owners[self._free.pop()] = progress
        else:
            self.owners.append(progress)

    def mark(self, progress: PopProgress, *, live_floor: int, kept_floor: int) -> None:
        """Let a sweep find the deliveries of an owner below two delivery ids.

        Deliveries with live messages are below `live_floor`, others below `kept_floor`.
        """
        self._marked.append(progress.index)
        self._live_floors.append(live_floor)
        self._kept_floors.append(kept_floor)

    def retire(self, progress: PopProgress) -> None:
        """Let a sweep find all deliveries of an owner, and free its number. It gets no new ones."""
        self.mark(progress, live_floor=VOID, kept_floor=VOID)
        self._retired.append(progress.index)

    def sweep(self) -> list[int]:
        """Return the slots of the next part of the table that must be emptied before the next call.

        The call after the last part frees the numbers.
        """
        live_floors, kept_floors = self._floors or self._begin_sweep()
        table, begin = self._table, self._position
        if begin >= len(table.ids):
            self._end_sweep()
            return []
        end = min(begin + SLOTS_A_SWEEP, len(table.ids))
        numbers = np.frombuffer(table.owners, dtype=np.uint32)[begin:end]
        # The last floor stands for numbers that are newer than the sweep.
        numbers = np.minimum(numbers, len(live_floors) - 1)
        ids = np.frombuffer(table.ids, dtype=np.int64)[begin:end]
        is_live = np.frombuffer(table.live, dtype=np.uint32)[begin:end] != 0
        is_found = ids < np.where(is_live, live_floors[numbers], kept_floors[numbers])
        found: list[int] = (np.flatnonzero(is_found & (ids != FREE)) + begin).tolist()
        if len(found) > SLOTS_FOUND_A_SWEEP:
            end = found[SLOTS_FOUND_A_SWEEP]
            del found[SLOTS_FOUND_A_SWEEP:]
        self._position = end
        return found

    def _end_sweep(self) -> None:
        self._floors = None
        for number in self._swept:
            self.owners[number] = self._placeholder
        self._free.extend(self._swept)
        self._swept = array("I")

    def _begin_sweep(self) -> tuple[np.ndarray, np.ndarray]:
        floors = np.zeros((2, len(self.owners) + 1), dtype=np.int64)
        marked = np.frombuffer(self._marked, dtype=np.uint32)
        for row, values in zip(floors, (self._live_floors, self._kept_floors), strict=True):
            np.maximum.at(row, marked, np.frombuffer(values, dtype=np.int64))
        self._position, self._floors = 0, (floors[0], floors[1])
        self._swept, self._retired = self._retired, array("I")
        self._forget_marks()
        return self._floors

    def _forget_marks(self) -> None:
        self._marked, self._live_floors, self._kept_floors = array("I"), array("q"), array("q")

    def renumber(self, owners: list[PopProgress]) -> None:
        """Assign the numbers from 0 to `owners`. All slots in use must belong to them."""
        numbers = np.zeros(len(self.owners) + 1, dtype=np.uint32)  # Unused slots have number 0.
        for number, progress in enumerate(owners):
            numbers[progress.index] = number
            progress.index = number
        named = np.frombuffer(self._table.owners, dtype=np.uint32)
        named[:] = numbers[named]
        self.owners[:] = owners
        self._free, self._retired, self._swept = array("I"), array("I"), array("I")
        self._floors = None
        self._forget_marks()
