"""Operations of a broker group, as the log states them (ADR 0093).

    state       event                                next state
    (unknown)   OPERATION, begun                     RUNNING
    RUNNING     a record that names the operation    RUNNING, with its cursor behind the item
    RUNNING     OPERATION, items failed              RUNNING, with its cursor behind the items
    RUNNING     OPERATION, ended                     DONE, CANCELLED or FAILED
    an end      any                                  as before
    any         STATE or snapshot                    that of the row, if the operation is unknown

Operations are forgotten 7 days after their ends. At most 1,000 ended ones are known. Beyond that,
the one that ended first is forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import copy
from typing import Final, final

from tidemill.broker.engine.layout import operation
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.operation import (
    FAILURES_KEPT_MAX,
    ItemsFailed,
    Operation,
    OperationBegun,
    OperationEnded,
    StatedOperations,
)

RUNNING_MAX: Final = 16
ENDED_MAX: Final = 1_000
ENDED_KEPT_MS: Final = 7 * 24 * 3_600_000
OPERATIONS_A_BLOCK: Final = 64  # of a STATE record or a section: some 40 KB, 400 KB at most


@final
class Operations:
    """The running operations, and the newest of those that have ended."""

    def __init__(self) -> None:
        self.by_id: dict[LogOffset, Operation] = {}  # in the order of their ids
        self._running: dict[LogOffset, Operation] = {}  # in the same order
        self._stated_at: dict[LogOffset, LogOffset] = {}

    @property
    def running(self) -> list[Operation]:
        """The operations that have not ended, the oldest first."""
        return list(self._running.values())

    def known(self, now_ms: int) -> list[Operation]:
        """Return the operations that run, or ended not long ago, the oldest first."""
        return [
            one
            for one in self.by_id.values()
            if one.is_running or one.ended_at_ms > now_ms - ENDED_KEPT_MS
        ]

    def find_by_key(self, key: str, now_ms: int) -> Operation | None:
        """Return the operation of an Idempotency-Key."""
        encoded = json.dumps(key)
        for one in self.known(now_ms):
            # Most have another key. The comparison saves a decoder for each.
            if encoded in one.details and json.loads(one.details).get("key") == key:
                return one
        return None

    # ------------------------------------------------------------ fold

    def begin(self, entry: OperationBegun, log_offset: LogOffset, stored_at_ms: int) -> None:
        """Apply the begin of an operation."""
        one = Operation(log_offset, *entry, stored_at_ms, cursor=entry.begin)
        self._add(one, log_offset)
        self._forget(stored_at_ms)

    def note_items(self, operation_id: int, *, cursor: int, count: int) -> None:
        """Apply a record that changes items for an operation, up to a cursor."""
        one = self.by_id.get(LogOffset(operation_id))
        if one is not None and one.is_running and cursor > one.cursor:
            one.cursor = cursor
            one.done += count

    def note_failures(self, entry: ItemsFailed) -> None:
        """Apply a record of items that an operation could not change."""
        one = self.by_id.get(entry.operation_id)
        if one is not None and one.is_running and entry.cursor > one.cursor:
            one.cursor = entry.cursor
            one.failed += len(entry.failures)
            # Another list, because a frozen copy has the one of its moment.
            one.failures = [*one.failures, *entry.failures][:FAILURES_KEPT_MAX]

    def end(self, entry: OperationEnded, stored_at_ms: int) -> None:
        """Apply the end of an operation."""
        one = self.by_id.get(entry.operation_id)
        if one is not None and one.is_running:
            one.state, one.ended_at_ms, one.error = entry.state, stored_at_ms, entry.error
            del self._running[one.id]
            self._forget(stored_at_ms)

    def apply_stated(self, entry: StatedOperations, log_offset: LogOffset) -> None:
        """Apply operations of a STATE record or a snapshot."""
        for one in entry.operations:
            if one.id in self.by_id:
                self._stated_at[one.id] = log_offset
            else:
                self._add(one, log_offset)
        self._forget()

    def _add(self, one: Operation, log_offset: LogOffset) -> None:
        is_last = one.id > next(reversed(self.by_id), -1)
        self.by_id[one.id] = one
        if one.is_running:
            self._running[one.id] = one
        if not is_last:  # An old one is stated behind younger ones.
            self.by_id = dict(sorted(self.by_id.items()))
            self._running = dict(sorted(self._running.items()))
        self._stated_at[one.id] = log_offset

    def _forget(self, now_ms: int = 0) -> None:
        """Forget operations that ended long ago, and the first ends beyond the bound."""
        ended = [(one.ended_at_ms, one.id) for one in self.by_id.values() if not one.is_running]
        excess = max(len(ended) - ENDED_MAX, 0)
        for at, (ended_at_ms, id_) in enumerate(sorted(ended)):
            if at >= excess and ended_at_ms > now_ms - ENDED_KEPT_MS:
                break
            del self.by_id[id_], self._stated_at[id_]

    # ------------------------------------------------------------ the state floor, snapshots

    def stated_before(self, log_offset: int, now_ms: int) -> Iterator[StatedOperations]:
        """Yield the operations that only records before a log offset state."""
        due = [one for one in self.known(now_ms) if self._stated_at[one.id] < log_offset]
        for first in range(0, len(due), OPERATIONS_A_BLOCK):
            yield StatedOperations(due[first : first + OPERATIONS_A_BLOCK])

    def freeze(self) -> Iterator[bytes]:
        """Return the sections of a snapshot, as of this call, even if they are read later."""
        # An operation that has ended does not change.
        all_ = [copy(one) if one.is_running else one for one in self.by_id.values()]
        return (
            operation.encode_operations(all_[first : first + OPERATIONS_A_BLOCK])
            for first in range(0, len(all_), OPERATIONS_A_BLOCK)
        )

    @property
    def section_count(self) -> int:
        """The number of sections of a snapshot."""
        return -(-len(self.by_id) // OPERATIONS_A_BLOCK)
