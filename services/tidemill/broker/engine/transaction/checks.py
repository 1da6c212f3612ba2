"""The checks of half messages: their deadlines, those that are due, and the expiry after the last.

Only the master has deadlines. A new master builds them from the table. The engine does not
know producers: the shell takes the due checks and reports the written ones (ADR 0085).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import HalfId, QueueId, TopicId
from tidemill.broker.engine.layout.transaction import CheckWritten, TransactionRow, TransactionState
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.broker.engine.transaction.halves import HalfMessages, half_of
from tidemill.broker.engine.transaction.schedule import CheckSchedule
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.common.errors import Overloaded
from tidemill.message.client_key import ClientKey

DUE_WAITING_MAX: Final = 2_000  # due checks that the shell has not taken
DUE_A_SLICE: Final = 512  # looked up in the table
COPIES_A_SLICE: Final = 64
RETRY_MS: Final = 1_000  # before an expiry or a check is tried again
# A new master waits for the reports of producers, and spreads the checks that are overdue.
REPORTS_WAIT_MS: Final = 2_000
OVERDUE_SPREAD_MS: Final = 5_000


class DueCheck(NamedTuple):
    """A half message that a producer of its topic must decide about."""

    half_id: HalfId
    topic_id: TopicId
    queue_id: QueueId
    client: ClientKey  # the sender
    stored_at_ms: int
    blob: bytes
    period_ms: int  # until the next check


@final
class HalfChecks:
    """The checks of the open half messages of one broker group."""

    def __init__(
        self,
        table: TransactionTable,
        halves: HalfMessages,
        recorder: Recorder,
        tally: Tally,
        room: DiskRoom,
    ) -> None:
        self._table = table
        self._halves = halves
        self._recorder = recorder
        self._tally = tally
        self._room = room
        self._schedule = CheckSchedule()
        self.due: deque[HalfId] = deque()  # for the shell
        self.expired: Counter[TopicId] = Counter()  # by this process

    # ------------------------------------------------------------ deadlines

    def take_over(self, now_ms: int) -> None:
        """Schedule the checks of all open half messages: this process decides from now on."""
        parts = [rows[rows["state"] == TransactionState.HALF] for rows in self._table.walk()]
        if not parts:
            return
        rows = np.concatenate(parts)
        times_ms = rows["time_ms"].astype(np.int64)
        overdue = np.flatnonzero(times_ms < now_ms + REPORTS_WAIT_MS)
        spread_ms = np.arange(len(overdue)) * OVERDUE_SPREAD_MS // max(len(overdue), 1)
        times_ms[overdue] = now_ms + REPORTS_WAIT_MS + spread_ms
        self._schedule.rebuild(rows["half_id"].astype(np.int64), times_ms)

    def add(self, half_id: HalfId, at_ms: int) -> None:
        """Add the deadline of a half message."""
        self._schedule.add(half_id, at_ms)

    def make_due(self, half_id: HalfId) -> None:
        """Make the check of an open half message due now. Raises Overloaded."""
        if len(self.due) >= DUE_WAITING_MAX:
            raise Overloaded(f"{DUE_WAITING_MAX} checks are due; this one follows in time")
        if half_id not in self.due:
            self.due.append(half_id)

    def next_due_ms(self) -> int | None:
        """Return when `due_slices` has work; None: not before another call."""
        if len(self.due) >= DUE_WAITING_MAX:
            return None  # The shell takes some first.
        return self._schedule.next_ms()

    def due_slices(self, now_ms: int, *, due_ms: int) -> Iterator[None]:
        """Find the half messages whose check is due by `due_ms`; expire those after the last one.

        Yields between slices.
        """
        while (due_at_ms := self._schedule.next_ms()) is not None and due_at_ms <= due_ms:
            limit = min(DUE_WAITING_MAX - len(self.due), DUE_A_SLICE)
            if limit <= 0:
                break
            allowance = Allowance(self._tally, items=COPIES_A_SLICE)
            for half_id in self._schedule.take_due(due_ms, limit):
                row = self._find_open(half_id)
                if row is None or row.time_ms > due_ms:
                    continue  # It has ended, or has a later check.
                if row.checks < row.checks_max:
                    self.due.append(half_id)
                elif allowance.is_spent or not self._room.may_copy:
                    self._schedule.add(half_id, due_ms + RETRY_MS)
                else:
                    self._expire(row, now_ms)
            yield
        while self._schedule.sweep(self._table.open_count, self._is_open):
            yield

    def _find_open(self, half_id: HalfId) -> TransactionRow | None:
        row = self._table.find(half_id)
        return row if row is not None and row.state == TransactionState.HALF else None

    def _is_open(self, half_id: HalfId) -> bool:
        return self._find_open(half_id) is not None

    # ------------------------------------------------------------ due checks

    def take_check(self, now_ms: int) -> DueCheck | None:
        """Return the next half message to check; None if there is none.

        The caller then calls `note_written` or `add`. If a message is damaged for good, it expires.
        """
        while self.due:
            row = self._find_open(self.due.popleft())
            if row is None:
                continue
            found = self._halves.find(row)
            if found is None:
                self._expire(row, now_ms)
                continue
            half = half_of(found)
            return DueCheck(
                row.half_id,
                half.topic_id,
                half.queue_id,
                ClientKey(half.client_id, half.owner),
                found.header.stored_at_ms,
                bytes(found.tail),
                row.period_ms,
            )
        return None

    def note_written(self, half_id: HalfId, now_ms: int) -> None:
        """Record that a check was written to a producer's stream."""
        row = self._find_open(half_id)
        if row is None:
            return
        next_check_ms = now_ms + row.period_ms
        self._recorder.append(CheckWritten(half_id, row.checks + 1, next_check_ms), now_ms)
        self._schedule.add(half_id, next_check_ms)

    def _expire(self, row: TransactionRow, now_ms: int) -> None:
        try:
            self._halves.append_expired(row, now_ms)
        except BlockFileDamaged:
            self._schedule.add(row.half_id, now_ms + RETRY_MS)  # A replica may have it.
        else:
            self.expired[row.topic_id] += 1

    # ------------------------------------------------------------ restatement

    def restate(self, end: int, now_ms: int) -> Iterator[None]:
        """Append the open half messages before log offset `end` again. Yields between slices.

        A half message that is damaged for good expires, with its intact properties.
        """
        for half_ids in self._table.open_before(end):
            allowance = Allowance(self._tally, items=COPIES_A_SLICE)
            for half_id in half_ids:
                row = self._find_open(half_id)
                if row is None or row.log_offset >= end:
                    continue
                found = self._halves.find(row)
                if found is None:
                    self._expire(row, now_ms)
                else:
                    self._halves.append_copy(row, found, now_ms)
                if allowance.is_spent:
                    yield
                    allowance = Allowance(self._tally, items=COPIES_A_SLICE)
            yield
