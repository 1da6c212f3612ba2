"""Bulk changes of timers: the outcome of each timer, and the work of an operation (ADR 0098)."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, final

from tidemill.broker.engine.layout.numbers import LogOffset, TimerId
from tidemill.broker.engine.layout.operation import ItemFailure, Operation, OperationKind
from tidemill.broker.engine.layout.timer_entry import TimerEntry, TimerEntryDamaged
from tidemill.broker.engine.operation.runner import OperationTurn, WorkResult
from tidemill.broker.engine.timer.bulk_matches import (
    TABLE_PAGES_A_STEP,
    TimerFilter,
    TimerMatches,
    TimerParts,
)
from tidemill.broker.engine.timer.due_change import TimerChange
from tidemill.broker.engine.timer.keyed import KEY_MATCHES_MAX, OTHER_FILTER
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import Conflict, IllegalDeliveryTime

if TYPE_CHECKING:
    from tidemill.broker.engine.timer.admission import Admission
    from tidemill.broker.engine.timer.commands import TimerCommands


class TimerOutcome(StrEnum):
    """The result of a bulk change of one timer."""

    DONE = "DONE"
    ALREADY_DELIVERED = "ALREADY_DELIVERED"
    ALREADY_CANCELLED = "ALREADY_CANCELLED"
    QUARANTINED = "QUARANTINED"
    DROPPED = "DROPPED"
    NOT_FOUND = "NOT_FOUND"
    TOO_LATE = "TOO_LATE"
    DAMAGED = "DAMAGED"


_DONE: Final = TimerOutcome.DONE
# Of a timer that is still pending.
FAILURES: Final = frozenset({TimerOutcome.QUARANTINED, TimerOutcome.TOO_LATE, TimerOutcome.DAMAGED})
_OF_STATE: Final = {
    TimerState.UNUSED: TimerOutcome.NOT_FOUND,
    TimerState.DELIVERED: TimerOutcome.ALREADY_DELIVERED,
    TimerState.CANCELLED: TimerOutcome.ALREADY_CANCELLED,
    TimerState.DROPPED: TimerOutcome.DROPPED,
    TimerState.FORGOTTEN: TimerOutcome.NOT_FOUND,
}


@final
class TimerChanges:
    """Changes timers one by one, with an outcome in place of an error."""

    def __init__(
        self,
        parts: TimerParts,
        commands: TimerCommands,
        admission: Admission,
        quarantined: dict[int, int],
    ) -> None:
        self.parts = parts
        self._index = parts.index
        self._commands = commands
        self._admission = admission
        self._quarantined = quarantined

    def plan(self, change: TimerChange, timer_id: TimerId, firing_ms: int) -> TimerOutcome:
        """Return the outcome that `apply` would have."""
        outcome, _ = self._plan(change, timer_id, firing_ms)
        return outcome

    def topic_id_of(self, timer_id: TimerId) -> int:
        """Return the topic id of a timer; 0: it is unknown, or its entry is damaged."""
        return self._index.topic_of(timer_id) if timer_id < self._index.next_id else 0

    def _plan(
        self, change: TimerChange, timer_id: TimerId, firing_ms: int
    ) -> tuple[TimerOutcome, int]:
        """Return the outcome and the new due time."""
        index = self._index
        index.link_gathered()
        if not 0 <= timer_id < index.next_id:
            return TimerOutcome.NOT_FOUND, 0
        try:
            entry: TimerEntry = index.get(timer_id)
        except TimerEntryDamaged:
            return TimerOutcome.DAMAGED, 0
        if entry.state != TimerState.PENDING:
            return _OF_STATE[TimerState(entry.state)], 0
        if change.kind == OperationKind.CANCEL_TIMERS:
            return _DONE, 0
        if timer_id in self._quarantined:
            return TimerOutcome.QUARANTINED, 0
        due_at_ms = change.due_of(timer_id, entry.due_at_ms, firing_ms=firing_ms)
        try:
            self._admission.check_due(due_at_ms, now_ms=firing_ms)
        except IllegalDeliveryTime:
            return TimerOutcome.TOO_LATE, 0
        return _DONE, due_at_ms

    def apply(
        self,
        change: TimerChange,
        timer_id: TimerId,
        *,
        now_ms: int,
        firing_ms: int,
        operation_id: int = 0,
    ) -> TimerOutcome:
        """Change a timer if it can be changed. Each change is one record."""
        outcome, due_at_ms = self._plan(change, timer_id, firing_ms)
        if outcome is not _DONE:
            return outcome
        self.parts.tally.add(1)
        if change.kind == OperationKind.CANCEL_TIMERS:
            self._commands.cancel(timer_id, now_ms=now_ms, operation_id=operation_id)
        else:
            self._commands.reschedule(
                timer_id,
                due_at_ms=due_at_ms,
                now_ms=now_ms,
                firing_ms=firing_ms,
                operation_id=operation_id,
            )
        return outcome


@final
class _Running:
    """A running operation, decoded."""

    def __init__(self, parts: TimerParts, operation: Operation) -> None:
        details: dict[str, Any] = json.loads(operation.details)
        self.count_max: int = details["max_count"]
        self.change = TimerChange(operation.kind, **details["change"])
        wanted = TimerFilter(operation.topic_id, **details["filter"])
        self.matches = TimerMatches(
            parts,
            wanted,
            end=operation.end,
            before=operation.id,
            replaced_from=details["replaced_from"],
        )


@final
class TimerWork:
    """The work of operations on timers."""

    def __init__(self, changes: TimerChanges) -> None:
        self._changes = changes
        self._catalog = changes.parts.catalog
        self._running: dict[LogOffset, _Running] = {}

    def run(self, operation: Operation, position: int, turn: OperationTurn) -> WorkResult:
        """Change some timers of an operation. Raises ServiceError."""
        running = self._running.get(operation.id)
        if running is None:
            by_id = self._catalog.operations.by_id
            ended = [one for one in self._running if one not in by_id or not by_id[one].is_running]
            for one in ended:
                del self._running[one]
            running = self._running[operation.id] = _Running(self._changes.parts, operation)
        change = running.change
        found = running.matches.find(position, turn.items_max, pages_max=TABLE_PAGES_A_STEP)
        if running.matches.is_cut:
            raise Conflict(
                f"more than {KEY_MATCHES_MAX} messages had this key at the begin, because more were"
                f" sent after the count; {OTHER_FILTER}"
            )
        changed_count = 0
        failures: list[ItemFailure] = []
        for timer_id in map(TimerId, found.ids.tolist()):
            is_damaged = timer_id in found.damaged
            is_last = operation.done >= running.count_max
            # The record of failures is before those of later timers.
            if (
                (failures or is_last)
                and not is_damaged
                and self._changes.plan(change, timer_id, turn.firing_ms) is _DONE
            ):
                if failures or changed_count:
                    return WorkResult(timer_id, changed_count, failures)
                raise Conflict(
                    f"more than the {running.count_max} timers of maxCount match, because due"
                    f" times were changed after the count; look at them again with a dry run"
                )
            outcome = (
                TimerOutcome.DAMAGED
                if is_damaged
                else self._changes.apply(
                    change,
                    timer_id,
                    now_ms=turn.now_ms,
                    firing_ms=turn.firing_ms,
                    operation_id=operation.id,
                )
            )
            if outcome in FAILURES:
                failures.append(ItemFailure(timer_id, outcome))
            elif outcome is _DONE:
                changed_count += 1
        return WorkResult(found.position, changed_count, failures)
