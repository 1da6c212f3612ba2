"""Owner numbers: slots of the delivery table name the progress that owns them by number.

A slot may outlive its progress, because the deliveries of a deleted group stay in the table until
their deadlines. The number of a deleted progress is retired: it names a placeholder, whose
deliveries are all void. A sweep through the table then gives these slots the placeholder's own
number. After the sweep the retired numbers are free. Numbers are local to an engine: records do
not contain them.
"""

from __future__ import annotations

from array import array
from typing import final

import numpy as np

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.pop.delivery_table import DeliveryTable
from tidemill.broker.engine.pop.progress import VOID, PopProgress
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

NOBODY = 0  # the placeholder's group and topic id: real ids begin at 1
NO_NUMBER = -1
SLOTS_A_SWEEP = 65_536  # per slice, about 200 microseconds


@final
class OwnerNumbers:
    """The progress of each number."""

    def __init__(self, table: DeliveryTable) -> None:
        self._table = table
        self._nobody = PopProgress(
            index=NO_NUMBER,
            group_id=GroupId(NOBODY),
            topic_id=TopicId(NOBODY),
            named_topic_id=TopicId(NOBODY),
            queue=ConsumeQueue(TopicId(NOBODY), QueueId(0)),
            void_before=VOID,
        )
        self.owners: list[PopProgress] = []  # by number
        self._free = array("I")
        self._retired = array("I")  # numbers that slots may still have
        self._swept = array("I")  # numbers that the current sweep frees
        self._swept_until = 0  # position of the sweep in the table

    @property
    def has_retired(self) -> bool:
        """Whether a sweep has work to do."""
        return bool(self._retired or self._swept)

    def next(self) -> int:
        """Return the number that `add` assigns next."""
        return self._free[-1] if self._free else len(self.owners)

    def add(self, progress: PopProgress) -> None:
        """Assign the number `next()` to an owner."""
        if self._free:
            self.owners[self._free.pop()] = progress
        else:
            self.owners.append(progress)

    def retire(self, progress: PopProgress) -> None:
        """Make an owner's number name the placeholder. All its deliveries become void."""
        self.owners[progress.index] = self._nobody
        if self._nobody.index == NO_NUMBER:
            self._nobody.index = progress.index  # The first retired number, permanently.
        else:
            self._retired.append(progress.index)

    def sweep(self) -> None:
        """Replace retired numbers in one part of the table by the placeholder's number."""
        if not self._swept:
            self._swept, self._retired = self._retired, array("I")
            self._swept_until = 0
        is_retired = np.zeros(len(self.owners), dtype=bool)
        is_retired[np.frombuffer(self._swept, dtype=np.uint32)] = True
        end = self._swept_until + SLOTS_A_SWEEP
        named = np.frombuffer(self._table.owners, dtype=np.uint32)[self._swept_until : end]
        named[is_retired[named]] = self._nobody.index
        self._swept_until = end
        # Invariant: a retired owner gets no new deliveries, so that swept slots stay clean.
        if end >= len(self._table.owners):
            self._free.extend(self._swept)
            self._swept = array("I")

    def renumber(self, owners: list[PopProgress]) -> None:
        """Assign the numbers from 0 to `owners`. All slots in use must belong to them."""
        numbers = np.zeros(len(self.owners) + 1, dtype=np.uint32)  # Unused slots have number 0.
        for number, progress in enumerate(owners):
            numbers[progress.index] = number
            progress.index = number
        named = np.frombuffer(self._table.owners, dtype=np.uint32)
        named[:] = numbers[named]
        self.owners[:] = owners
        self._nobody.index = NO_NUMBER
        self._free, self._retired, self._swept = array("I"), array("I"), array("I")
