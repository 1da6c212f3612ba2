"""Transactions: the commands of clients and operators (ADR 0085).

Each command records one entry, which the fold applies to the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol, final

from tidemill.broker.engine.layout.dedup import DedupKey
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import (
    HalfMessage,
    HalfOutcome,
    OutcomeReason,
    RecoveredHalf,
)
from tidemill.broker.engine.layout.numbers import HalfId, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import cut_client
from tidemill.broker.engine.layout.transaction import (
    RolledBack,
    TransactionActor,
    TransactionRow,
    TransactionState,
)
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.transaction_policy import TRANSACTION_LEVEL
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.transaction.checks import HalfChecks
from tidemill.broker.engine.transaction.halves import HalfMessages, half_of, outcome_of
from tidemill.broker.engine.transaction.inspection import TransactionInspection, TransactionStatus
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.common.errors import (
    Conflict,
    InvalidTransactionId,
    Overloaded,
    TransactionNotFound,
    VersionUnsupported,
)
from tidemill.message import stored_message
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey

_DUE_AT = stored_message.DUE_AT


class HalfSender(NamedTuple):
    """The sender of a half message, and the time until its first check."""

    client: ClientKey = UNKNOWN_CLIENT
    first_check_ms: int | None = None  # None: the policy of the topic decides


class RecoverableHalf(NamedTuple):
    """An expired half message with its record and its topic."""

    row: TransactionRow
    found: Record
    topic: Topic


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
        due_max_ms: int | None = None,
        outcome: HalfOutcome | None = None,
    ) -> object:
        """Store a message until it is due, or until `due_max_ms`. Raises Overloaded."""
        ...


@final
class Transactions:
    """The transactions of one broker group."""

    def __init__(
        self,
        table: TransactionTable,
        halves: HalfMessages,
        checks: HalfChecks,
        inspection: TransactionInspection,
        catalog: Catalog,
        recorder: Recorder,
        room: DiskRoom,
        *,
        schedule_timer: TimerSchedule,
        take_key: Callable[[Topic, bytes], DedupKey | None],
        due_max: Callable[[Topic, HalfId, int], int | None],
        open_max: int,
    ) -> None:
        self.table = table
        self.checks = checks
        self._halves = halves
        self.inspection = inspection
        self._catalog = catalog
        self._recorder = recorder
        self._room = room
        self._schedule_timer = schedule_timer
        # Returns the dedup key of a recovered message. Raises Conflict if another message has it.
        self._take_key = take_key
        # Returns the latest due time of a committed message, from the firing time.
        self._due_max = due_max
        self._open_max = open_max
        # Called with each half message about which a client has answered.
        self.answered: Callable[[HalfId], None] = _ignore
        # Counts of this process, by topic id.
        self.committed: Counter[TopicId] = Counter()
        self.rolled_back: Counter[TopicId] = Counter()
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
        key: DedupKey | None = None,
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
        half_id = self._halves.append_first(half, blob, crc, now_ms, key=key)
        self.checks.add(half_id, half.next_check_ms)
        return half_id

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
        found = self._halves.read(row)
        due_at_ms = int.from_bytes(found.tail[_DUE_AT : _DUE_AT + 8], "big", signed=True)
        if due_at_ms > firing_ms:
            topic = self._catalog.topics[row.topic_id]
            due_max_ms = self._due_max(topic, half_id, firing_ms)
            self._schedule_timer(
                topic,
                half_of(found).queue_id,
                found.tail,
                found.header.tail_crc,
                due_at_ms=due_at_ms if due_max_ms is None else min(due_at_ms, due_max_ms),
                due_max_ms=due_max_ms,
                now_ms=now_ms,
                firing_ms=firing_ms,
                outcome=HalfOutcome(half_id, OutcomeReason.COMMITTED, row.checks, ""),
            )
        else:
            self._halves.append_committed(row, found, now_ms)
        self.committed[row.topic_id] += 1
        self._halves.observe_end(row, now_ms)

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
        self._halves.observe_end(row, now_ms)

    def note_unsure(self, half_id: HalfId, *, topic_id: TopicId | None = None) -> None:
        """Take an answer without a decision. Raises TransactionNotFound."""
        self._row(half_id, topic_id)
        self.answered(half_id)

    def _row(self, half_id: HalfId, topic_id: TopicId | None) -> TransactionRow:
        row = self.table.find(half_id)
        # The topic of a rollback is unknown if the log before the state floor had the half message.
        if row is None or (row.topic_id and topic_id not in {None, row.topic_id}):
            raise TransactionNotFound(
                "the transaction is unknown: its topic was deleted, or it ended so long ago that"
                " its result is forgotten"
            )
        return row

    # ------------------------------------------------------------ operators

    def check_end(self, half_id: HalfId, state: TransactionState) -> None:
        """Check that a transaction is open, or has ended in a state.

        Raises InvalidTransactionId, TransactionNotFound.
        """
        row = self._row(half_id, None)
        if row.state not in {TransactionState.HALF, state}:
            raise _already(row)

    def check_recover(self, half_id: HalfId) -> RecoverableHalf:
        """Return what a recovery of a transaction needs.

        Raises TransactionNotFound, Conflict, Repairing, Overloaded, DiskFull.
        """
        row = self._row(half_id, None)
        if row.state != TransactionState.EXPIRED:
            state = TransactionState(row.state).name.lower()
            raise Conflict(f"only an expired transaction can be recovered; this one is {state}")
        found = self._halves.read(row)
        # After a replay from the state floor on, only the dead letter names the topic.
        topic = (
            self._catalog.topics.get(row.topic_id)
            if row.topic_id
            else self._catalog.find_topic(outcome_of(found).origin)
        )
        if topic is None:
            raise Conflict("the topic of the transaction was deleted; it cannot be recovered")
        if self.table.open_count >= self._open_max:
            raise Overloaded(f"{self._open_max} half messages are open, the limit")
        if not self._room.may_copy:
            raise self._room.copies_rejected("recovers no transactions")
        self._take_key(topic, bytes(found.tail))
        return RecoverableHalf(row, found, topic)

    def recover(self, half_id: HalfId, *, now_ms: int) -> HalfId:
        """Open an expired half message again, and return its new half id.

        Raises as `check_recover`.
        """
        row, found, topic = self.check_recover(half_id)
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
        key = self._take_key(topic, bytes(found.tail))
        new_id = self._halves.append_first(
            cause, found.tail, found.header.tail_crc, now_ms, key=key
        )
        self.checks.add(new_id, half.next_check_ms)
        self.recovered[topic.id] += 1
        return new_id

    def check_check(self, half_id: HalfId) -> TransactionRow:
        """Return a half message that can be checked now. Raises TransactionNotFound, Conflict."""
        row = self._row(half_id, None)
        if row.state != TransactionState.HALF:
            state = TransactionState(row.state).name.lower()
            raise Conflict(f"only an open transaction is checked; this one is {state}")
        return row

    def check_now(self, half_id: HalfId) -> None:
        """Make the check of an open half message due. Raises as `check_check`."""
        self.checks.make_due(self.check_check(half_id))

    def status(self, half_id: HalfId) -> TransactionStatus:
        """Return the state and the fields of a transaction. Raises TransactionNotFound."""
        return self.inspection.describe(self._row(half_id, None))


def _ignore(_half_id: HalfId) -> None:
    pass


def _already(row: TransactionRow) -> InvalidTransactionId:
    state = TransactionState(row.state).name.lower().replace("_", " ")
    return InvalidTransactionId(f"the transaction was {state} at {row.time_ms} ms since 1970")
