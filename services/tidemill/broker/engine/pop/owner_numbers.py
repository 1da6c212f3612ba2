"""The numbers by which slots of the delivery table name their owners, given out again.

A slot may outlive the progress that owns it: a group that is deleted leaves its deliveries in the
table until their deadlines. Then its number is retired, and what it names is nobody, of whom every
delivery is void. A sweep through the table lets the slots name nobody by themselves; behind its end
the numbers are free. Each engine has numbers of its own: no record says any.
"""

from __future__ import annotations

from array import array
from typing import final

import numpy as np

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.pop.delivery_table import DeliveryTable
from tidemill.broker.engine.pop.progress import VOID, PopProgress
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

NOBODY = 0  # as group and topic id, which are given out from 1 on
NO_NUMBER = -1
SLOTS_A_SWEEP = 65_536  # looked at in one slice: about 200 microseconds


@final
class OwnerNumbers:
    """Which progress each number names."""

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
        # Numbers that name nobody, while slots may still have them; those that the sweep under way
        # makes free, and how far in the table it is.
        self._retired = array("I")
        self._swept = array("I")
        self._swept_to = 0

    @property
    def has_retired(self) -> bool:
        """Whether there is something to sweep."""
        return bool(self._retired or self._swept)

    def next(self) -> int:
        """Return the number that `add` gives the next owner."""
        return self._free[-1] if self._free else len(self.owners)

    def add(self, progress: PopProgress) -> None:
        """Let `next` name an owner."""
        if self._free:
            self.owners[self._free.pop()] = progress
        else:
            self.owners.append(progress)

    def retire(self, progress: PopProgress) -> None:
        """Let an owner's number name nobody: all its deliveries are void from here on."""
        self.owners[progress.index] = self._nobody
        if self._nobody.index == NO_NUMBER:
            self._nobody.index = progress.index  # The first one's, for good.
        else:
            self._retired.append(progress.index)

    def sweep(self) -> None:
        """Let the slots of one part of the table, whose owners were retired, name nobody."""
        if not self._swept:
            self._swept, self._retired = self._retired, array("I")
            self._swept_to = 0
        is_retired = np.zeros(len(self.owners), dtype=bool)
        is_retired[np.frombuffer(self._swept, dtype=np.uint32)] = True
        end = self._swept_to + SLOTS_A_SWEEP
        named = np.frombuffer(self._table.owners, dtype=np.uint32)[self._swept_to : end]
        named[is_retired[named]] = self._nobody.index
        self._swept_to = end
        # Invariant: nothing is placed for an owner that was retired, so what lies behind stays
        # clean.
        if end >= len(self._table.owners):
            self._free.extend(self._swept)
            self._swept = array("I")

    def renumber(self, owners: list[PopProgress]) -> None:
        """Give `owners` new numbers, and no other has one; all slots in use are theirs."""
        numbers = np.zeros(len(self.owners) + 1, dtype=np.uint32)  # Slots never used say 0.
        for number, progress in enumerate(owners):
            numbers[progress.index] = number
            progress.index = number
        named = np.frombuffer(self._table.owners, dtype=np.uint32)
        named[:] = numbers[named]
        self.owners[:] = owners
        self._nobody.index = NO_NUMBER
        self._free, self._retired, self._swept = array("I"), array("I"), array("I")
