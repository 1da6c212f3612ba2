"""Revive: what was not settled in time becomes available again, the moment its time is up.

Work is bounded a turn, and a group a window, and goes round over the groups: one that never acks
delays nobody else.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import final

from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import GroupId
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.ordered import OrderedPop
from tidemill.broker.engine.pop.progress import Progress
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.state import PopState

REVIVE_MESSAGES_A_TURN = 64  # about a millisecond of copying
DUE_SLOTS_A_TURN = 1024  # taken out of their deadline's list, under a millisecond
# Fairness and a bound: copies a group may cost in one window; 50,000 a second.
REVIVE_WINDOW_MS = 100
REVIVE_MESSAGES_A_WINDOW = 5_000


@final
class Revive:
    """Works off the deadlines of all deliveries."""

    def __init__(
        self, state: PopState, catalog: Catalog, redelivery: Redelivery, ordered: OrderedPop
    ) -> None:
        self._state = state
        self._catalog = catalog
        self._redelivery = redelivery
        self._ordered = ordered
        # Per group, what is due and not yet revived: (slot, delivery id, revive queue).
        self._due: dict[int, deque[tuple[int, int, int]]] = {}
        self._inherited: deque[int] = deque()  # due slots of an engine that followed until now
        # What lies in a damaged queue file: it waits until that is repaired. Group id in front.
        self._held: list[tuple[GroupId, tuple[int, int, int]]] = []
        self._due_counts = [0] * pop_checkpoint.REVIVE_QUEUES
        self._window_at_ms = 0
        self._window_used: dict[int, int] = {}

    def next_due_ms(self) -> int | None:
        """Return when `run_due` has something to do next, None: never."""
        deadline = self._state.table.next_deadline_ms()
        if self._inherited:
            return 0
        if not self._due:
            return deadline
        open_groups = [
            group_id
            for group_id in self._due
            if self._window_used.get(group_id, 0) < REVIVE_MESSAGES_A_WINDOW
        ]
        again = 0 if open_groups else self._window_at_ms + REVIVE_WINDOW_MS
        return again if deadline is None else min(again, deadline)

    def lag(self, now_ms: int) -> list[tuple[int, int]]:
        """Return of each revive queue how many deliveries are due, and how late the oldest is.

        Looks at one delivery a group: the oldest of each, whatever its queue.
        """
        late_ms = [0] * pop_checkpoint.REVIVE_QUEUES
        for due in self._due.values():
            slot, _, number = due[0]
            late = now_ms - self._state.table.visible_at_ms[slot]
            late_ms[number] = max(late_ms[number], late)
        return list(zip(self._due_counts, late_ms, strict=True))

    def run_due(self, now_ms: int) -> bool:
        """Revive one slice of what is due; True: more is. No ack of the round may be unrecorded."""
        for _ in range(min(len(self._inherited), DUE_SLOTS_A_TURN)):
            slot = self._inherited.popleft()
            if self._state.is_due(slot) and self._is_to_revive(slot):
                self._queue(slot, now_ms)
        for slot in self.pass_time(now_ms):
            self._queue(slot, now_ms)
        if now_ms - self._window_at_ms >= REVIVE_WINDOW_MS:
            self._window_at_ms = now_ms
            self._window_used.clear()
        left = REVIVE_MESSAGES_A_TURN
        while left > 0 and self._due:
            before = left
            for group_id in list(self._due):
                if left <= 0:
                    break
                # Behind the others: the next turn goes on with those that had none in this one.
                self._due[group_id] = self._due.pop(group_id)
                if self._window_used.get(group_id, 0) < REVIVE_MESSAGES_A_WINDOW:
                    left -= self._revive_next(GroupId(group_id), now_ms)
            if left == before:
                break
        following = self.next_due_ms()
        return following is not None and following <= now_ms

    def resume(self) -> None:
        """Go on with what lay in a damaged file, which has been derived again."""
        held, self._held = self._held, []
        for group_id, due in held:
            self._due.setdefault(group_id, deque()).append(due)

    def take_over(self) -> None:
        """Begin to revive: what is due already was only taken out of its list so far."""
        self._inherited.extend(self._state.table.due_slots())

    def pass_time(self, now_ms: int) -> list[int]:
        """Take what is due out of its deadline's list; return the slots that are to be revived.

        What is void or settled leaves the table. Decides nothing: engines that follow do it too.
        """
        due = self._state.table.take_due(now_ms, DUE_SLOTS_A_TURN)
        return [slot for slot in due if self._is_to_revive(slot)]

    def _is_to_revive(self, slot: int) -> bool:
        """Whether a due delivery has live messages; one that has none leaves the table."""
        table = self._state.table
        progress = self._state.owners[table.owners[slot]]
        if table.live[slot] and table.ids[slot] >= progress.void_before:
            return True
        self._state.discard(slot)
        return False

    def _queue(self, slot: int, now_ms: int) -> None:
        """Let a delivery that has run out wait for its turn; an ordered one waits for a pop."""
        table = self._state.table
        progress = self._state.owners[table.owners[slot]]
        if progress.ordered is not None:
            self._expire_ordered(slot, progress, now_ms)
            return
        due = self._due.setdefault(progress.group_id, deque())
        number = pop_checkpoint.revive_queue_of(
            progress.topic_id, progress.group_id, progress.queue.queue_id
        )
        due.append((slot, table.ids[slot], number))
        self._due_counts[number] += 1

    def _revive_next(self, group_id: GroupId, now_ms: int) -> int:
        """Revive the next due delivery of a group; return what it cost, in messages."""
        due = self._due[group_id]
        slot, delivery_id, number = due.popleft()
        self._due_counts[number] -= 1
        if not due:
            del self._due[group_id]
        table = self._state.table
        if table.ids[slot] != delivery_id or not table.live[slot]:
            return 1
        progress = self._state.owners[table.owners[slot]]
        if delivery_id < progress.void_before:
            self._state.discard(slot)
            return 1
        indexes = table.indexes_of(table.live[slot])
        try:
            for index in indexes:
                self._redelivery.revive(slot, index, progress, now_ms)
        except BlockFileDamaged:
            self._held.append((group_id, (slot, delivery_id, number)))
            self._due_counts[number] += 1
        self._window_used[group_id] = self._window_used.get(group_id, 0) + len(indexes)
        return len(indexes)

    def _expire_ordered(self, slot: int, progress: Progress, now_ms: int) -> None:
        group = self._catalog.groups[progress.group_id]
        # Where the queue's file is damaged, the pop that comes next does it.
        with suppress(BlockFileDamaged):
            self._ordered.dead_letter_exhausted([slot], progress, group, now_ms)
        self._state.ready.add((progress.group_id, progress.named_topic_id))
