"""The checks of half messages: their deadlines, those that are due, and the expiry after the last.

Only the master has deadlines. A new master builds them from the table. The engine does not
know producers: the shell takes the due checks and reports the written ones (ADR 0085).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import HalfId, QueueId, TopicId
from tidemill.broker.engine.layout.transaction import CheckWritten, TransactionRow, TransactionState
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.sorted_search import is_among
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.broker.engine.transaction.halves import HalfMessages, half_of
from tidemill.broker.engine.transaction.schedule import CheckSchedule
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.message.client_key import ClientKey

DUE_MAX: Final = 65_536  # due half messages in lines: 8 MB of memory
DUE_A_TOPIC_MAX: Final = 1_024  # in the line of one topic
DUE_A_SLICE: Final = 512  # entries of the schedule, looked up in the table
SLICES_A_CALL: Final = 2  # no command is applied between the slices of a call
BLOCKS_A_CALL: Final = 8  # of the table, searched for due half messages
COPIES_A_SLICE: Final = 64
RETRY_MS: Final = 1_000  # before an expiry is tried again
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
        # The lines of due half messages, by topic; a dictionary is a line without duplicates.
        self.due: dict[TopicId, dict[HalfId, None]] = {}
        self._due_count = 0
        # Topics with due half messages that are in no line: it was full, or nobody can be asked.
        self.unlisted: set[TopicId] = set()
        self._searched: set[TopicId] = set()  # by the search of the table under way
        self._searched_to = -1  # the last half id
        self._searched_next: set[TopicId] = set()
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

    def next_due_ms(self) -> int | None:
        """Return when `due_slices` has work; None: not before another call."""
        if not self._table.open_count:
            self._schedule.clear()
        return 0 if self._searched or self._searched_next else self._schedule.next_ms()

    def due_slices(self, now_ms: int, *, due_ms: int) -> Iterator[None]:
        """Put a bounded number of due half messages into their lines, or expire them.

        Yields between slices.
        """
        for _ in range(SLICES_A_CALL):
            due_at_ms = self._schedule.next_ms()
            if due_at_ms is None or due_at_ms > due_ms:
                break
            self._find_due(now_ms, due_ms)
            yield
        if not self._searched and self._searched_next:
            self._searched, self._searched_next = self._searched_next, set()
            self._searched_to = -1
        if self._searched:
            self._search(due_ms)
            yield
        if self._schedule.sweep(self._table.open_count, self._is_open):
            yield

    def _find_due(self, now_ms: int, due_ms: int) -> None:
        allowance = Allowance(self._tally, items=COPIES_A_SLICE)
        for half_id in self._schedule.take_due(due_ms, DUE_A_SLICE):
            row = self._find_open(half_id)
            if row is None or row.time_ms > due_ms:
                continue  # It has ended, or has a later check.
            if row.checks < row.checks_max:
                self._list(row.topic_id, half_id)
            elif allowance.is_spent:
                self._schedule.add(half_id, due_ms)
            elif not self._room.may_copy:
                self._schedule.add(half_id, due_ms + RETRY_MS)
            else:
                self._expire(row, now_ms)

    # ------------------------------------------------------------ lines

    def _list(self, topic_id: TopicId, half_id: HalfId) -> None:
        line = self.due.get(topic_id)
        if self._due_count >= DUE_MAX or (line is not None and len(line) >= DUE_A_TOPIC_MAX):
            self.unlisted.add(topic_id)
            return
        if line is None:
            line = self.due[topic_id] = {}
        if half_id not in line:
            line[half_id] = None
            self._due_count += 1

    def make_due(self, row: TransactionRow) -> None:
        """Make the check of an open half message due now."""
        self._list(row.topic_id, row.half_id)

    def unlist(self, topic_id: TopicId) -> int:
        """Empty the line of a topic without a producer; return the number of half messages in it.

        They stay due: `list_again` finds them in the table.
        """
        count = len(self.due.pop(topic_id, ()))
        self._due_count -= count
        self.unlisted.add(topic_id)
        return count

    def list_again(self, topic_id: TopicId) -> None:
        """Search the table for due half messages of a topic, because its line has room."""
        if topic_id in self.unlisted:
            self.unlisted.discard(topic_id)
            self._searched_next.add(topic_id)

    def _search(self, due_ms: int) -> None:
        """Search some blocks of the table."""
        blocks = self._table.walk(self._searched_to)
        for rows in islice(blocks, BLOCKS_A_CALL):
            is_due = (rows["state"] == TransactionState.HALF) & (rows["time_ms"] <= due_ms)
            is_due &= rows["checks"] < rows["checks_max"]
            is_due &= is_among(np.array(sorted(self._searched)), rows["topic_id"])
            for topic_id, half_id in zip(
                rows["topic_id"][is_due].tolist(), rows["half_id"][is_due].tolist(), strict=True
            ):
                self._list(TopicId(topic_id), HalfId(half_id))
            self._searched_to = int(rows["half_id"][-1])
        if next(blocks, None) is None:
            self._searched.clear()

    def _find_open(self, half_id: HalfId) -> TransactionRow | None:
        row = self._table.find(half_id)
        return row if row is not None and row.state == TransactionState.HALF else None

    def _is_open(self, half_id: HalfId) -> bool:
        return self._find_open(half_id) is not None

    # ------------------------------------------------------------ due checks

    def take_check(self, topic_id: TopicId, now_ms: int) -> DueCheck | None:
        """Return the next half message of a topic to check; None if there is none.

        The caller then calls `note_written` or `give_back`. If a message is damaged for good, it
        expires.
        """
        line = self.due.get(topic_id, {})
        while line:
            half_id = next(iter(line))
            del line[half_id]
            self._due_count -= 1
            if not line:
                del self.due[topic_id]
            row = self._find_open(half_id)
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

    def give_back(self, check: DueCheck) -> None:
        """Put a half message back into its line: no producer got its check."""
        if self._is_open(check.half_id):
            self._list(check.topic_id, check.half_id)

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
            self._halves.observe_end(row, now_ms)

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
