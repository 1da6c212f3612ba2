"""Transactions: the commands of clients and operators, and the half messages with a due check.

Each command records one entry, which the fold applies to the table. The engine knows no producer:
it names the half messages that are due, and the shell sends their checks (ADR 0085).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol, final
from zlib import crc32

import numpy as np

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import (
    FLAG_HALF,
    FLAG_OUTCOME,
    HalfMessage,
    HalfOutcome,
    MessageCause,
    MessageEntry,
    OutcomeReason,
    RecoveredHalf,
)
from tidemill.broker.engine.layout.numbers import HalfId, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import cut_client
from tidemill.broker.engine.layout.transaction import (
    CheckWritten,
    RolledBack,
    TransactionActor,
    TransactionRow,
    TransactionState,
)
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.metadata.transaction_policy import TRANSACTION_LEVEL
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.broker.engine.transaction.schedule import CheckSchedule
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.common.errors import (
    Conflict,
    InvalidTransactionId,
    Overloaded,
    Repairing,
    TransactionNotFound,
    VersionUnsupported,
)
from tidemill.message import stored_message
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey
from tidemill.message.resource_names import HALF_DEAD_LETTER_TOPIC, HALF_TOPIC

HALF_QUEUE: Final = QueueId(0)  # first records
COPY_QUEUE: Final = QueueId(1)  # copies after a restatement
DUE_WAITING_MAX: Final = 2_000  # due checks that the shell has not taken
DUE_A_SLICE: Final = 512  # looked up in the table
COPIES_A_SLICE: Final = 64
RETRY_MS: Final = (
    1_000  # until a check that no producer got, and an expiry that failed, is repeated
)
# A new master waits for the reports of producers, and spreads the checks that are overdue.
REPORTS_WAIT_MS: Final = 2_000
OVERDUE_SPREAD_MS: Final = 5_000
_DUE_AT = stored_message.DUE_AT


class HalfSender(NamedTuple):
    """The sender of a half message, and the time until its first check."""

    client: ClientKey = UNKNOWN_CLIENT
    first_check_ms: int | None = None  # None: the policy of the topic decides


class DueCheck(NamedTuple):
    """A half message that a producer of its topic must decide about."""

    half_id: HalfId
    topic_id: TopicId
    queue_id: QueueId
    client: ClientKey  # the sender
    stored_at_ms: int
    blob: bytes
    period_ms: int  # until the next check


class TransactionStatus(NamedTuple):
    """One transaction, for operators."""

    half_id: HalfId
    state: TransactionState
    topic_id: TopicId
    topic: str  # "" if the topic was deleted
    time_ms: int  # of the next check, or of the end
    checks: int
    checks_max: int
    sent_at_ms: int  # 0: unknown, as the next two
    message_id: str
    client: ClientKey


class TimerSchedule(Protocol):
    """Schedules a committed message with a future due time."""

    def __call__(
        self,
        topic: Topic,
        queue_id: QueueId,
        blob: bytes | memoryview,
        crc: int,
        *,
        due_at_ms: int,
        now_ms: int,
        firing_ms: int,
        outcome: HalfOutcome | None = None,
    ) -> object:
        """Store a message until it is due. Raises Overloaded."""
        ...


@final
class Transactions:
    """The transactions of one broker group."""

    def __init__(
        self,
        table: TransactionTable,
        store: MessageStore,
        catalog: Catalog,
        recorder: Recorder,
        tally: Tally,
        room: DiskRoom,
        *,
        schedule_timer: TimerSchedule,
        ready: Callable[[TopicId], None],
        open_max: int,
    ) -> None:
        self.table = table
        self._store = store
        self._catalog = catalog
        self._recorder = recorder
        self._tally = tally
        self._room = room
        self._schedule_timer = schedule_timer
        self._ready = ready
        self._open_max = open_max
        self._schedule = CheckSchedule()
        self.due: deque[HalfId] = deque()  # checks for the shell
        # Called with each half message about which a client has answered.
        self.answered: Callable[[HalfId], None] = _ignore
        # Counts of this process, by topic id.
        self.committed: Counter[TopicId] = Counter()
        self.rolled_back: Counter[TopicId] = Counter()
        self.expired: Counter[TopicId] = Counter()
        self.recovered: Counter[TopicId] = Counter()

    # ------------------------------------------------------------ clients

    def send_half(
        self,
        topic: Topic,
        queue_id: QueueId,
        blob: bytes,
        crc: int,
        sender: HalfSender,
        *,
        now_ms: int,
    ) -> HalfId:
        """Store a half message, which the caller has checked. Raises Overloaded."""
        if self._catalog.feature_level < TRANSACTION_LEVEL:
            raise VersionUnsupported(
                f"transactions need feature level {TRANSACTION_LEVEL}, and the broker group"
                f" {self._catalog.broker_name} has {self._catalog.feature_level}; upgrade all of"
                f" its replicas, and raise feature_level_max if it is set"
            )
        if self.table.open_count >= self._open_max:
            raise Overloaded(
                f"{self._open_max} half messages of the broker group {self._catalog.broker_name}"
                f" are open, the limit of transaction_open_max; commit or roll back some of them"
            )
        policy, client = topic.transaction, cut_client(sender.client)
        first_ms = sender.first_check_ms or policy.first_check_ms
        half = HalfMessage(
            HalfId(0),
            topic.id,
            queue_id,
            0,
            now_ms + first_ms,
            policy.period_ms,
            policy.attempts,
            client.owner,
            client.client_id,
        )
        return self._append_half(FLAG_HALF, half, blob, crc, now_ms)

    def _append_half(
        self,
        flags: int,
        cause: HalfMessage | RecoveredHalf,
        blob: bytes | memoryview,
        crc: int,
        now_ms: int,
    ) -> HalfId:
        """Append a first HALF record, and schedule its check."""
        queue = self._hidden_queue(HALF_QUEUE, now_ms)
        entry = MessageEntry(
            queue.topic_id, queue.queue_id, 0, queue.max_offset, flags, cause, blob, crc
        )
        half_id = HalfId(self._recorder.append(entry, now_ms))
        half = cause.half if isinstance(cause, RecoveredHalf) else cause
        self._schedule.add(half_id, half.next_check_ms)
        return half_id

    def _hidden_queue(self, queue_id: QueueId, now_ms: int) -> ConsumeQueue:
        topic_id = self._catalog.topic_ids.get(HALF_TOPIC)
        if topic_id is None:
            topic_id = ensure_system_topic(
                self._catalog, self._recorder, HALF_TOPIC, now_ms, queues=2
            ).id
        return self._catalog.queue(topic_id, queue_id)

    def commit(
        self, half_id: HalfId, *, topic_id: TopicId | None = None, now_ms: int, firing_ms: int
    ) -> None:
        """Deliver a half message. It may be committed already.

        Raises InvalidTransactionId, TransactionNotFound, Repairing, DiskFull, Overloaded.
        """
        row = self._row(half_id, topic_id)
        self.answered(half_id)
        if row.state == TransactionState.COMMITTED:
            return
        if row.state != TransactionState.HALF:
            raise _already(row)
        if not self._room.may_copy:
            raise self._room.copies_rejected("accepts no commits, so the half message stays open,")
        found = self._read(row)
        topic = self._catalog.topics[row.topic_id]
        half = _half_of(found)
        outcome = HalfOutcome(half_id, OutcomeReason.COMMITTED, row.checks, "")
        due_at_ms = int.from_bytes(found.tail[_DUE_AT : _DUE_AT + 8], "big", signed=True)
        blob, crc = found.tail, found.header.tail_crc
        if due_at_ms > firing_ms:
            self._schedule_timer(
                topic,
                half.queue_id,
                blob,
                crc,
                due_at_ms=due_at_ms,
                now_ms=now_ms,
                firing_ms=firing_ms,
                outcome=outcome,
            )
        else:
            queue = self._catalog.queue(topic.id, half.queue_id)
            self._append(queue, outcome, blob, crc, now_ms)
        self.committed[row.topic_id] += 1

    def roll_back(
        self,
        half_id: HalfId,
        *,
        topic_id: TopicId | None = None,
        actor: TransactionActor = TransactionActor.CLIENT,
        now_ms: int,
    ) -> None:
        """Drop a half message. It may be rolled back already.

        Raises InvalidTransactionId, TransactionNotFound.
        """
        row = self._row(half_id, topic_id)
        self.answered(half_id)
        if row.state == TransactionState.ROLLED_BACK:
            return
        if row.state != TransactionState.HALF:
            raise _already(row)
        self._recorder.append(RolledBack(half_id, actor), now_ms)
        self.rolled_back[row.topic_id] += 1

    def note_unsure(self, half_id: HalfId, *, topic_id: TopicId | None = None) -> None:
        """Take an answer without a decision. Raises TransactionNotFound."""
        self._row(half_id, topic_id)
        self.answered(half_id)

    def _row(self, half_id: HalfId, topic_id: TopicId | None) -> TransactionRow:
        row = self.table.find(half_id)
        if row is None or topic_id not in {None, row.topic_id}:
            raise TransactionNotFound(
                "the transaction is unknown: its topic was deleted, or it ended so long ago that"
                " its result is forgotten"
            )
        return row

    def _read(self, row: TransactionRow) -> Record:
        """Return the newest record with a half message. Raises Repairing."""
        try:
            return self._store.record(row.log_offset)
        except (MessageDamaged, LookupError):
            raise Repairing(
                f"the half message {row.half_id} is damaged and cannot be delivered now; try again"
                f" when the broker has mended it from a replica"
            ) from None

    def _append(
        self,
        queue: ConsumeQueue,
        cause: MessageCause,
        blob: bytes | memoryview,
        crc: int,
        now_ms: int,
    ) -> None:
        self._recorder.append(
            MessageEntry(
                queue.topic_id, queue.queue_id, 0, queue.max_offset, FLAG_OUTCOME, cause, blob, crc
            ),
            now_ms,
        )
        self._ready(queue.topic_id)

    # ------------------------------------------------------------ operators

    def recover(self, half_id: HalfId, *, now_ms: int) -> HalfId:
        """Open an expired half message again, and return its new half id.

        Raises TransactionNotFound, Conflict, Repairing, Overloaded, DiskFull.
        """
        row = self._row(half_id, None)
        if row.state != TransactionState.EXPIRED:
            state = TransactionState(row.state).name.lower()
            raise Conflict(f"only an expired transaction can be recovered; this one is {state}")
        topic = self._catalog.topics.get(row.topic_id)
        if topic is None:
            raise Conflict("the topic of the transaction was deleted; it cannot be recovered")
        if self.table.open_count >= self._open_max:
            raise Overloaded(f"{self._open_max} half messages are open, the limit")
        if not self._room.may_copy:
            raise self._room.copies_rejected("recovers no transactions")
        found = self._read(row)
        policy = topic.transaction
        half = HalfMessage(
            HalfId(0),
            topic.id,
            QueueId(half_id % topic.queues),
            0,
            now_ms + policy.first_check_ms,
            policy.period_ms,
            policy.attempts,
            UNKNOWN_CLIENT.owner,
            UNKNOWN_CLIENT.client_id,
        )
        cause = RecoveredHalf(half, HalfOutcome(half_id, OutcomeReason.RECOVERED, row.checks, ""))
        flags, crc = FLAG_HALF | FLAG_OUTCOME, found.header.tail_crc
        self.recovered[row.topic_id] += 1
        return self._append_half(flags, cause, found.tail, crc, now_ms)

    def check_now(self, half_id: HalfId) -> None:
        """Make the check of an open half message due. Raises TransactionNotFound, Conflict."""
        row = self._row(half_id, None)
        if row.state != TransactionState.HALF:
            state = TransactionState(row.state).name.lower()
            raise Conflict(f"only an open transaction is checked; this one is {state}")
        if len(self.due) >= DUE_WAITING_MAX:
            raise Overloaded(f"{DUE_WAITING_MAX} checks are due; this one follows in time")
        if half_id not in self.due:
            self.due.append(half_id)

    def status(self, half_id: HalfId) -> TransactionStatus:
        """Return the state and the fields of a transaction. Raises TransactionNotFound."""
        return self.describe(self._row(half_id, None))

    def describe(self, row: TransactionRow) -> TransactionStatus:
        """Return the fields of a row of the table, with those of its message if it is readable."""
        sent_at_ms, message_id, client = 0, "", UNKNOWN_CLIENT
        try:
            found = self._store.record(row.log_offset)
            message_id = stored_message.message_id_of(found.tail)
            if row.state == TransactionState.HALF:
                half = _half_of(found)
                client = ClientKey(half.client_id, half.owner)
                sent_at_ms = found.header.stored_at_ms
        except (MessageDamaged, LookupError, ValueError):
            pass  # A rolled-back message has only its record; a damaged one has no fields.
        return TransactionStatus(
            row.half_id,
            TransactionState(row.state),
            row.topic_id,
            self._catalog.topic_name(row.topic_id),
            row.time_ms,
            row.checks,
            row.checks_max,
            sent_at_ms,
            message_id,
            client,
        )

    # ------------------------------------------------------------ checks

    def take_over(self, now_ms: int) -> None:
        """Schedule the checks of all open half messages: this process decides from now on."""
        parts = [rows[rows["state"] == TransactionState.HALF] for rows in self.table.walk()]
        if not parts:
            return
        rows = np.concatenate(parts)
        times_ms = rows["time_ms"].astype(np.int64)
        overdue = np.flatnonzero(times_ms < now_ms + REPORTS_WAIT_MS)
        spread_ms = np.arange(len(overdue)) * OVERDUE_SPREAD_MS // max(len(overdue), 1)
        times_ms[overdue] = now_ms + REPORTS_WAIT_MS + spread_ms
        self._schedule.rebuild(rows["half_id"].astype(np.int64), times_ms)

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
                row = self.table.find(half_id)
                if row is None or row.state != TransactionState.HALF or row.time_ms > due_ms:
                    continue  # It has ended, or has a later check.
                if row.checks < row.checks_max:
                    self.due.append(half_id)
                elif allowance.is_spent or not self._room.may_copy:
                    self._schedule.add(half_id, due_ms + RETRY_MS)
                else:
                    self._expire(row, now_ms)
            yield
        while self._schedule.sweep(self.table.open_count, self._is_open):
            yield

    def _is_open(self, half_id: HalfId) -> bool:
        row = self.table.find(half_id)
        return row is not None and row.state == TransactionState.HALF

    def take_check(self, now_ms: int) -> DueCheck | None:
        """Return the next half message to check; None if there is none.

        The caller then calls `note_written` or `postpone`. A message that is damaged for good
        expires: nobody can deliver it any more.
        """
        while self.due:
            half_id = self.due.popleft()
            row = self.table.find(half_id)
            if row is None or row.state != TransactionState.HALF:
                continue
            try:
                found = self._store.record(row.log_offset)
            except (MessageDamaged, LookupError):
                self._expire(row, now_ms)
                continue
            half = _half_of(found)
            return DueCheck(
                half_id,
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
        row = self.table.find(half_id)
        if row is None or row.state != TransactionState.HALF:
            return
        next_check_ms = now_ms + row.period_ms
        self._recorder.append(CheckWritten(half_id, row.checks + 1, next_check_ms), now_ms)
        self._schedule.add(half_id, next_check_ms)

    def postpone(self, half_id: HalfId, at_ms: int) -> None:
        """Try a check again later: no producer got it, so it does not count."""
        self._schedule.add(half_id, at_ms)

    def _expire(self, row: TransactionRow, now_ms: int) -> None:
        """Copy a half message without a decision to the dead-letter topic of half messages."""
        try:
            blob, crc = self._content(row)
        except BlockFileDamaged:
            self._schedule.add(row.half_id, now_ms + RETRY_MS)
            return
        target = ensure_system_topic(self._catalog, self._recorder, HALF_DEAD_LETTER_TOPIC, now_ms)
        outcome = HalfOutcome(
            row.half_id, OutcomeReason.EXPIRED, row.checks, self._catalog.topic_name(row.topic_id)
        )
        self._append(self._catalog.queue(target.id, QueueId(0)), outcome, blob, crc, now_ms)
        self._tally.add(1, size_bytes=len(blob))
        self.expired[row.topic_id] += 1

    def _content(self, row: TransactionRow) -> tuple[bytes | memoryview, int]:
        """Return the message with its CRC, or what is intact of it.

        Raises BlockFileDamaged if the message may be mended.
        """
        try:
            found = self._store.record(row.log_offset)
        except (MessageDamaged, LookupError):
            self._store.check_awaited(row.log_offset)
            salvaged = self._salvage(row)
            return salvaged, crc32(salvaged)
        return found.tail, found.header.tail_crc

    def _salvage(self, row: TransactionRow) -> bytes:
        """Return the intact properties of a damaged half message. Raises BlockFileDamaged."""
        topic_id = self._catalog.topic_ids[HALF_TOPIC]
        for queue_id in (HALF_QUEUE, COPY_QUEUE):
            queue = self._catalog.queue(topic_id, queue_id)
            offset = queue.offset_behind(row.log_offset)
            if offset < queue.max_offset and queue.entry(offset)[0] == row.log_offset:
                return self._store.remains_of(row.log_offset, queue.entry(offset)[1])[1]
        return self._store.remains_of(row.log_offset, 0)[1]

    # ------------------------------------------------------------ restatement

    def restate(self, end: int, now_ms: int) -> Iterator[None]:
        """Append the open half messages before log offset `end` again. Yields between slices.

        A half message that is damaged for good expires, with its intact properties.
        """
        for half_ids in self.table.open_before(end):
            allowance = Allowance(self._tally, items=COPIES_A_SLICE)
            for half_id in half_ids:
                row = self.table.find(half_id)
                if row is None or row.state != TransactionState.HALF or row.log_offset >= end:
                    continue
                self._copy(row, now_ms)
                if allowance.is_spent:
                    yield
                    allowance = Allowance(self._tally, items=COPIES_A_SLICE)
            yield

    def has_open_before(self, end: int) -> bool:
        """Whether an open half message has its newest record before log offset `end`."""
        return any(self.table.open_before(end))

    def _copy(self, row: TransactionRow, now_ms: int) -> None:
        try:
            found = self._store.record(row.log_offset)
        except (MessageDamaged, LookupError):
            self._expire(row, now_ms)  # It waits if a replica may have the message.
            return
        half = _half_of(found)._replace(
            half_id=row.half_id, checks=row.checks, next_check_ms=row.time_ms
        )
        queue = self._hidden_queue(COPY_QUEUE, now_ms)
        crc = found.header.tail_crc
        entry = MessageEntry(
            queue.topic_id, queue.queue_id, 0, queue.max_offset, FLAG_HALF, half, found.tail, crc
        )
        self._recorder.append(entry, now_ms)
        self._tally.add(1, size_bytes=len(found.tail))


def _ignore(_half_id: HalfId) -> None:
    pass


def _half_of(found: Record) -> HalfMessage:
    """Return the part HALF of a record that the table names."""
    return message.decode_half(found.body)


def _already(row: TransactionRow) -> InvalidTransactionId:
    state = TransactionState(row.state).name.lower().replace("_", " ")
    return InvalidTransactionId(f"the transaction was {state} at {row.time_ms} ms since 1970")
