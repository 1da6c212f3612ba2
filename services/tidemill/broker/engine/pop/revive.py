"""Revive: unsettled messages become available again at their deadline.

A renewed delivery is extended instead while its client is alive (`renewals.py`).

Each turn has a limit in messages and bytes, and each group has a limit per window. Turns rotate
over the groups, so that a group that never acks does not delay the others.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import final

from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.delivery_limits import DeliveryLimits
from tidemill.broker.engine.pop.forgetting import forget_slice, is_forgetting
from tidemill.broker.engine.pop.ordered import OrderedPop
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.renewals import Renewals
from tidemill.broker.engine.pop.revocations import Revocations
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.tally import Allowance, Tally

REVIVE_MESSAGES_A_TURN = 32  # copies and new topics for them, about a millisecond
DUE_SLOTS_A_TURN = 128  # slots removed from their deadline lists, half a millisecond
# Copies of one group per window, for fairness: 50,000 per second.
REVIVE_WINDOW_MS = 100
REVIVE_MESSAGES_A_WINDOW = 5_000


@final
class Reviver:
    """The handler of the deadlines of all deliveries."""

    def __init__(
        self,
        state: PopState,
        catalog: Catalog,
        redelivery: Redelivery,
        ordered: OrderedPop,
        renewals: Renewals,
        revocations: Revocations,
        limits: DeliveryLimits,
        tally: Tally,
        room: DiskRoom,
    ) -> None:
        self._state = state
        self._catalog = catalog
        self._redelivery = redelivery
        self._ordered = ordered
        self._renewals = renewals
        self._revocations = revocations
        self._limits = limits
        self._tally = tally
        self._room = room
        # Due deliveries that are not revived yet, by group: (slot, delivery id, revive queue).
        self._due: dict[int, deque[tuple[int, int, int]]] = {}
        # The groups of `_due`: in the order of their turns, and those that have used their window.
        self._turns: deque[int] = deque()
        self._paused: list[int] = []
        self._inherited: deque[int] = deque()  # due slots from before this engine took over
        # Slots with messages that are damaged or in a damaged queue file. They wait until a replica
        # mends the message or the file is rebuilt.
        self._awaiting_mend: list[int] = []
        self._due_counts = [0] * pop_checkpoint.REVIVE_QUEUES
        self._ran_at_ms = 0
        self._window_at_ms = 0
        self._window_used: dict[int, int] = {}

    def next_due_ms(self) -> int | None:
        """Return when `run_due` has work next, None for never."""
        deadline = self._state.table.deadlines.next_ms()
        check_ms = self._renewals.next_check_ms()
        if check_ms is not None:
            check_at_ms = self._ran_at_ms + check_ms
            deadline = check_at_ms if deadline is None else min(deadline, check_at_ms)
        revoked_at_ms = self._revocations.next_at_ms()
        if revoked_at_ms is not None:
            deadline = revoked_at_ms if deadline is None else min(deadline, revoked_at_ms)
        if self._inherited or self._turns or is_forgetting(self._state):
            return 0
        if self._limits.keeps_too_many:
            return 0
        if not self._paused:
            return deadline
        again = self._window_at_ms + REVIVE_WINDOW_MS
        return again if deadline is None else min(again, deadline)

    def lag(self, now_ms: int) -> list[tuple[int, int]]:
        """Return the number of due deliveries and the oldest one's delay, per revive queue.

        Only the oldest delivery of each group counts for the delay.
        """
        late_ms = [0] * pop_checkpoint.REVIVE_QUEUES
        for due in self._due.values():
            slot, _, number = due[0]
            late = now_ms - self._state.table.visible_at_ms[slot]
            late_ms[number] = max(late_ms[number], late)
        return list(zip(self._due_counts, late_ms, strict=True))

    def run_due(
        self, now_ms: int, *, expiry_ms: int, monotonic_ms: int, log_end: LogOffset
    ) -> bool:
        """Revive or extend one slice of the deliveries due by `expiry_ms`. Return True for more.

        All acks of the round must be recorded, and all deliveries must be below `log_end`.
        """
        self._ran_at_ms = expiry_ms
        self._renewals.find_silent(monotonic_ms=monotonic_ms, log_end=log_end)
        self._renewals.give_back_slice(now_ms, expiry_ms=expiry_ms)
        self._revocations.give_back_slice(now_ms, expiry_ms=expiry_ms)
        self._limits.end_handles(now_ms, log_end=log_end)
        slots = []
        for _ in range(min(len(self._inherited), DUE_SLOTS_A_TURN)):
            slot = self._inherited.popleft()
            if self._state.is_due(slot) and self._is_to_revive(slot):
                slots.append(slot)
        slots += self.remove_due(expiry_ms)
        for slot in self._renewals.extend(slots, now_ms):
            self._queue(slot)
        if expiry_ms - self._window_at_ms >= REVIVE_WINDOW_MS:
            self._begin_window(expiry_ms)
        allowance = Allowance(self._tally, items=REVIVE_MESSAGES_A_TURN)
        while self._turns and not allowance.is_spent and self._room.may_copy:
            self._take_turn(self._turns.popleft(), allowance, now_ms)
        following = self.next_due_ms()
        return following is not None and following <= expiry_ms and self._room.may_copy

    def _begin_window(self, expiry_ms: int) -> None:
        self._window_at_ms = expiry_ms
        self._window_used.clear()
        self._turns.extend(self._paused)
        self._paused.clear()

    def resume(self) -> None:
        """Revive deliveries after their messages were mended or their queue files rebuilt."""
        slots, self._awaiting_mend = self._awaiting_mend, []
        for slot in slots:
            if self._state.is_due(slot) and self._is_to_revive(slot):
                self._queue(slot)

    def queue_released(self, slots: list[int]) -> None:
        """Treat released deliveries as if they had run out."""
        for slot in slots:
            self._queue(slot)

    def take_over(self) -> None:
        """Begin to revive. While this engine followed, it only removed due slots from lists."""
        self._inherited.extend(self._state.table.due_slots())

    def remove_due(self, now_ms: int) -> list[int]:
        """Remove due slots from their deadline lists. Return the slots that must be revived.

        Void and settled deliveries leave the table, and a slice of deleted progress is forgotten.
        It records nothing: engines that follow do it too.
        """
        if is_forgetting(self._state):
            forget_slice(self._state)
        due = self._state.table.deadlines.take_due(now_ms, DUE_SLOTS_A_TURN)
        self._tally.add(len(due))
        return [slot for slot in due if self._is_to_revive(slot)]

    def _is_to_revive(self, slot: int) -> bool:
        """Return whether a due delivery has live messages. Discard it if it has none."""
        table = self._state.table
        progress = self._state.owners[table.owners[slot]]
        if table.live[slot] and not self._state.is_void(progress, table.ids[slot]):
            return True
        self._state.discard(slot)
        return False

    def _queue(self, slot: int) -> None:
        """Queue an expired delivery of a group for its turn."""
        table = self._state.table
        progress = self._state.owners[table.owners[slot]]
        group_id = progress.group_id
        due = self._due.get(group_id)
        if due is None:
            due = self._due[group_id] = deque()
            self._turns.append(group_id)
        number = pop_checkpoint.revive_queue_of(
            progress.topic_id, group_id, progress.queue.queue_id
        )
        due.append((slot, table.ids[slot], number))
        self._due_counts[number] += 1

    def _take_turn(self, group_id: int, allowance: Allowance, now_ms: int) -> None:
        """Revive the next due delivery of a group, within the allowance."""
        due = self._due[group_id]
        slot, delivery_id, number = due[0]
        before = self._tally.items
        if self._revive_next(slot, delivery_id, allowance, now_ms):
            due.popleft()
            self._due_counts[number] -= 1
        if self._tally.items == before:
            self._tally.add(1)  # The look at a delivery without a copy has a cost too.
        used = self._window_used.get(group_id, 0) + self._tally.items - before
        self._window_used[group_id] = used
        if not due:
            del self._due[group_id]
        elif used < REVIVE_MESSAGES_A_WINDOW:
            # After the other groups, so that the next turn continues with those.
            self._turns.append(group_id)
        else:
            self._paused.append(group_id)

    def _revive_next(self, slot: int, delivery_id: int, allowance: Allowance, now_ms: int) -> bool:
        """Revive the live messages of a delivery. Return False if the allowance ended before."""
        table = self._state.table
        if table.ids[slot] != delivery_id or not table.live[slot]:
            return True
        progress = self._state.owners[table.owners[slot]]
        if self._state.is_void(progress, delivery_id):
            self._state.discard(slot)
            return True
        if progress.ordered is not None:
            return self._expire_ordered(slot, progress, allowance, now_ms)
        is_damaged = False
        for n, index in enumerate(table.indexes_of(table.live[slot])):
            # Check the disk before each copy, which may be as large as a message.
            if n and (allowance.is_spent or not self._room.may_copy):
                return False
            try:
                self._redelivery.revive(slot, index, progress, now_ms)
            except BlockFileDamaged:
                is_damaged = True  # The other messages of the delivery do not wait for it.
        if is_damaged:
            self._awaiting_mend.append(slot)
        return True

    def _expire_ordered(
        self, slot: int, progress: PopProgress, allowance: Allowance, now_ms: int
    ) -> bool:
        """Make an ordered delivery available, and dead-letter messages without an attempt left."""
        group = self._catalog.groups[progress.group_id]
        # If the queue's file is damaged, the next pop dead-letters them.
        with suppress(BlockFileDamaged):
            if not self._ordered.dead_letter_exhausted([slot], progress, group, allowance, now_ms):
                return False
        self._state.ready.add((progress.group_id, progress.named_topic_id))
        return True
