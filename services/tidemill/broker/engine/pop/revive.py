"""Revive: what was not settled in time becomes available again, the moment its time is up.

What renews is extended instead while its client lives (`renewals.py`).

Work is bounded a turn, in messages and bytes, and a group a window, and goes round over the
groups: one that never acks delays nobody else.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import final

from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.ordered import OrderedPop
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.renewals import Renewals
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.tally import Allowance, Tally

REVIVE_MESSAGES_A_TURN = 32  # copies, and topics for them: about a millisecond
DUE_SLOTS_A_TURN = 128  # taken out of their deadline's list, half a millisecond
# Fairness and a bound: copies a group may cost in one window; 50,000 a second.
REVIVE_WINDOW_MS = 100
REVIVE_MESSAGES_A_WINDOW = 5_000


@final
class Reviver:
    """Works off the deadlines of all deliveries."""

    def __init__(
        self,
        state: PopState,
        catalog: Catalog,
        redelivery: Redelivery,
        ordered: OrderedPop,
        renewals: Renewals,
        tally: Tally,
        room: DiskRoom,
    ) -> None:
        self._state = state
        self._catalog = catalog
        self._redelivery = redelivery
        self._ordered = ordered
        self._renewals = renewals
        self._tally = tally
        self._room = room
        # Per group, what is due and not yet revived: (slot, delivery id, revive queue).
        self._due: dict[int, deque[tuple[int, int, int]]] = {}
        # The groups of `_due`: in the order of their turns, and those whose window is used up.
        self._turns: deque[int] = deque()
        self._resting: list[int] = []
        self._inherited: deque[int] = deque()  # due slots of an engine that followed until now
        # Slots of what lies in a damaged queue file, or is damaged itself and asked for: it waits
        # until that is repaired.
        self._held: list[int] = []
        self._due_counts = [0] * pop_checkpoint.REVIVE_QUEUES
        self._ran_at_ms = 0
        self._window_at_ms = 0
        self._window_used: dict[int, int] = {}

    def next_due_ms(self) -> int | None:
        """Return when `run_due` has something to do next, None: never."""
        deadline = self._state.table.deadlines.next_ms()
        look_ms = self._renewals.next_look_ms()
        if look_ms is not None:
            look_at_ms = self._ran_at_ms + look_ms
            deadline = look_at_ms if deadline is None else min(deadline, look_at_ms)
        if self._inherited or self._turns or self._state.is_forgetting:
            return 0
        if not self._resting:
            return deadline
        again = self._window_at_ms + REVIVE_WINDOW_MS
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

    def run_due(
        self, now_ms: int, *, expiry_ms: int, monotonic_ms: int, log_end: LogOffset
    ) -> bool:
        """Revive, or extend, one slice of what is due by `expiry_ms`; True: more is.

        No ack of the round may be unrecorded, and no delivery made so far lies at `log_end`.
        """
        self._ran_at_ms = expiry_ms
        self._renewals.look(monotonic_ms=monotonic_ms, log_end=log_end)
        self._renewals.give_back_some(now_ms, expiry_ms=expiry_ms)
        slots = []
        for _ in range(min(len(self._inherited), DUE_SLOTS_A_TURN)):
            slot = self._inherited.popleft()
            if self._state.is_due(slot) and self._is_to_revive(slot):
                slots.append(slot)
        slots += self.pass_time(expiry_ms)
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
        self._turns.extend(self._resting)
        self._resting.clear()

    def resume(self) -> None:
        """Go on with what lay in a damaged file, which has been derived again."""
        held, self._held = self._held, []
        for slot in held:
            if self._state.is_due(slot) and self._is_to_revive(slot):
                self._queue(slot)

    def released(self, slots: list[int]) -> None:
        """Do with deliveries that were released what is done with those that have run out."""
        for slot in slots:
            self._queue(slot)

    def take_over(self) -> None:
        """Begin to revive: what is due already was only taken out of its list so far."""
        self._inherited.extend(self._state.table.due_slots())

    def pass_time(self, now_ms: int) -> list[int]:
        """Take what is due out of its deadline's list; return the slots that are to be revived.

        What is void or settled leaves the table, and what was deleted the memory. Decides nothing:
        engines that follow do it too.
        """
        if self._state.is_forgetting:
            self._state.forget_slice()
        due = self._state.table.deadlines.take_due(now_ms, DUE_SLOTS_A_TURN)
        self._tally.add(len(due))
        return [slot for slot in due if self._is_to_revive(slot)]

    def _is_to_revive(self, slot: int) -> bool:
        """Whether a due delivery has live messages; one that has none leaves the table."""
        table = self._state.table
        progress = self._state.owners[table.owners[slot]]
        if table.live[slot] and not self._state.is_void(progress, table.ids[slot]):
            return True
        self._state.discard(slot)
        return False

    def _queue(self, slot: int) -> None:
        """Let a delivery that has run out wait for its turn."""
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
        """Revive the next due delivery of a group, as far as allowed."""
        due = self._due[group_id]
        slot, delivery_id, number = due[0]
        before = self._tally.items
        if self._revive_next(slot, delivery_id, allowance, now_ms):
            due.popleft()
            self._due_counts[number] -= 1
        if self._tally.items == before:
            self._tally.add(1)  # Nothing was copied, but looked at.
        used = self._window_used.get(group_id, 0) + self._tally.items - before
        self._window_used[group_id] = used
        if not due:
            del self._due[group_id]
        elif used < REVIVE_MESSAGES_A_WINDOW:
            # Behind the others: the next turn goes on with those that had none in this one.
            self._turns.append(group_id)
        else:
            self._resting.append(group_id)

    def _revive_next(self, slot: int, delivery_id: int, allowance: Allowance, now_ms: int) -> bool:
        """Revive what is live of a delivery; False: what was allowed has left some of it."""
        table = self._state.table
        if table.ids[slot] != delivery_id or not table.live[slot]:
            return True
        progress = self._state.owners[table.owners[slot]]
        if self._state.is_void(progress, delivery_id):
            self._state.discard(slot)
            return True
        if progress.ordered is not None:
            return self._expire_ordered(slot, progress, allowance, now_ms)
        is_held = False
        for n, index in enumerate(table.indexes_of(table.live[slot])):
            # Each copy may be as large as a message: on a full disk room is asked for each.
            if n and (allowance.is_spent or not self._room.may_copy):
                return False
            try:
                self._redelivery.revive(slot, index, progress, now_ms)
            except BlockFileDamaged:
                is_held = True  # The others of its delivery do not wait for it.
        if is_held:
            self._held.append(slot)
        return True

    def _expire_ordered(
        self, slot: int, progress: PopProgress, allowance: Allowance, now_ms: int
    ) -> bool:
        """Let the next pop have an ordered delivery, without what has no attempt left."""
        group = self._catalog.groups[progress.group_id]
        # Where the queue's file is damaged, the pop that comes next does it.
        with suppress(BlockFileDamaged):
            if not self._ordered.dead_letter_exhausted([slot], progress, group, allowance, now_ms):
                return False
        self._state.ready.add((progress.group_id, progress.named_topic_id))
        return True
