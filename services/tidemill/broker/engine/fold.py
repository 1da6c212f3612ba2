"""The fold: records change state here only.

    append(entry, now_ms)   a command has decided: encode the entry, log it, apply it
    apply(record)           recovery, or a replica that follows: decode the record, apply it

Both call the same function with the same entry. The kinds of records change this state:

    EXPIRE               progress: groups skip the messages that retention drops
    FLOOR                the state floor of the log
    AUDIT                the audit log; the next record is the first one of the audited change
    TRIM                 queues: they begin later
    MESSAGE              queue and index; the delivery, timer or transaction that it settles; a new
                         timer or half message; a dedup key; the dead letter that it replays
    DEAD_LETTER          settled dead letters; the cursor of an operation
    OPERATION            operations
    CK, ACK, RENEW       deliveries and progress
    CONFIG               topics and groups; resets and deletions void deliveries
    TIMER, FRONTIER      timers
    TRANSACTION          transactions
    STATE                items that are unknown here; the offset of the record that states an item

To add a record kind, add a row to `_BODIES`, `_DECODERS` and `_appliers`.

It is one module, because the two ways must stay the same for each kind of record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast, final
from zlib import crc32

import numpy as np

from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.layout import (
    ack,
    audit,
    config,
    dead_letter,
    delivery_rows,
    expiry,
    floor,
    message,
    operation,
    pop_checkpoint,
    renewal,
    state,
    timer_control,
    transaction,
    trim,
)
from tidemill.broker.engine.layout.ack import Acks
from tidemill.broker.engine.layout.audit import Audit, AuditRow
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.dead_letter import (
    DeadLettersDiscarded,
    DeadLetterState,
    Replay,
    SettledRange,
    StatedLetters,
)
from tidemill.broker.engine.layout.dedup import (
    NO_PIN,
    DedupKey,
    StatedKeys,
    pin_of_half,
    pin_of_timer,
)
from tidemill.broker.engine.layout.entry import Entry, EpochStart
from tidemill.broker.engine.layout.expiry import Expiry
from tidemill.broker.engine.layout.floor import Floor, Gap, decode_gap
from tidemill.broker.engine.layout.message import (
    FLAG_KEYED,
    Cause,
    CommittedTimer,
    HalfMessage,
    HalfOutcome,
    KeyedMessage,
    MessageEntry,
    OutcomeReason,
    RecoveredHalf,
    SalvagedTimer,
    TimerCause,
    TimerTarget,
)
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, QueueId, QueueOffset, TopicId
from tidemill.broker.engine.layout.operation import (
    ItemsFailed,
    OperationBegun,
    OperationEnded,
    StatedOperations,
)
from tidemill.broker.engine.layout.pop_checkpoint import PopCheckpoint
from tidemill.broker.engine.layout.record import RecordKind, UnknownRecord, is_gap
from tidemill.broker.engine.layout.renewal import Renewal
from tidemill.broker.engine.layout.state import (
    State,
    StatedAudit,
    StatedConfig,
    StatedDeliveries,
    StatedProgress,
    StatedQueues,
)
from tidemill.broker.engine.layout.timer_control import Frontier, TimerControl, TimerOperation
from tidemill.broker.engine.layout.transaction import CheckWritten, RolledBack
from tidemill.broker.engine.layout.trim import Trim
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.audit_log import AUDIT_LEVEL, AuditedChange
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.forgetting import end_handles, forget_group, forget_topic
from tidemill.broker.engine.pop.moved_positions import apply_expiry, apply_reset
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.pop.stated_rows import (
    apply_stated_deliveries,
    apply_stated_progress,
    delivery_rows_of,
)
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import REPLACED_QUEUE
from tidemill.broker.engine.transaction.table import TransactionEvent, TransactionTable
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX

_pack_place = message.PLACE.pack
# Makes a named tuple without a call of Python code: every keyed message makes one.
_tuple = tuple.__new__
# Entries that become the body of a record without a tail.
_BODIES: Final[dict[type, tuple[RecordKind, Callable[[Any], bytes]]]] = {
    PopCheckpoint: (RecordKind.CK, pop_checkpoint.encode),
    Expiry: (RecordKind.EXPIRE, expiry.encode),
    Trim: (RecordKind.TRIM, trim.encode),
    Floor: (RecordKind.FLOOR, floor.encode),
    ConfigItem: (RecordKind.CONFIG, lambda entry: config.encode_item(entry.item)),
    TimerControl: (RecordKind.TIMER, timer_control.encode),
    Frontier: (RecordKind.FRONTIER, timer_control.encode_frontier),
    CheckWritten: (RecordKind.TRANSACTION, transaction.encode),
    RolledBack: (RecordKind.TRANSACTION, transaction.encode),
    DeadLettersDiscarded: (RecordKind.DEAD_LETTER, dead_letter.encode),
    EpochStart: (RecordKind.EPOCH_START, lambda _: b""),
}


# Decoders of the body and tail of a record, by kind. Messages are decoded in `apply`.
_DECODERS: Final[dict[int, Callable[[memoryview, memoryview], Entry]]] = {
    RecordKind.CK: lambda body, _: pop_checkpoint.decode(body),
    RecordKind.ACK: lambda body, _: ack.decode(body),
    RecordKind.RENEW: lambda body, _: renewal.decode(body),
    RecordKind.EXPIRE: lambda body, _: expiry.decode(body),
    RecordKind.TRIM: lambda body, _: trim.decode(body),
    RecordKind.FLOOR: lambda body, _: floor.decode(body),
    RecordKind.CONFIG: lambda body, _: ConfigItem(config.decode_item(body)),
    RecordKind.STATE: state.decode,
    RecordKind.TIMER: lambda body, _: timer_control.decode(body),
    RecordKind.FRONTIER: lambda body, _: timer_control.decode_frontier(body),
    RecordKind.AUDIT: audit.decode,
    RecordKind.TRANSACTION: lambda body, _: transaction.decode(body),
    RecordKind.DEAD_LETTER: lambda body, _: dead_letter.decode(body),
    RecordKind.OPERATION: operation.decode,
    RecordKind.EPOCH_START: lambda _body, _tail: EpochStart(),
}
_MESSAGE = int(RecordKind.MESSAGE)
_EPOCH_START = int(RecordKind.EPOCH_START)
_OUTCOME_EVENTS: Final[dict[int, TransactionEvent]] = {
    OutcomeReason.COMMITTED: TransactionEvent.COMMITTED,
    OutcomeReason.EXPIRED: TransactionEvent.EXPIRED,
    OutcomeReason.RECOVERED: TransactionEvent.RECOVERED,
}
# Of a rollback or an expiry whose half message is before the state floor.
_UNKNOWN_TOPIC: Final = TopicId(0)
NEXT_ID: Final = "nextId"  # a configuration item that keeps ids unique
# Flags in the header of a record, by kind; others have none. `message.decode` checks its own.
_FLAGS_KNOWN: Final[dict[int, int]] = {
    RecordKind.CK: pop_checkpoint.GIVEN_BACK,
    RecordKind.ACK: ack.FLAG_EXPIRED | ack.FLAG_KEPT,
}


class StateBehindGap(Exception):
    """The log lacks records, so state must be taken from the state floor on only (ADR 0069)."""

    def __init__(self, gap: Gap) -> None:
        super().__init__(f"the log lacks records before its state floor {gap.floor}")
        self.gap = gap


@final
class Fold:
    """The log and the state that its records produce.

    It is one class, because no other code changes the state.
    """

    def __init__(
        self,
        log: CommitLog,
        catalog: Catalog,
        store: MessageStore,
        pops: PopState,
        timers: TimerIndex,
        transactions: TransactionTable,
        keys: KeyTables,
    ) -> None:
        self._keys = keys
        self._log = log
        self._catalog = catalog
        self._store = store
        self._pops = pops
        self._timers = timers
        self._transactions = transactions
        # A change that is recorded in the audit log in front of its first record.
        self._audited: AuditedChange | None = None
        self._audit_log = catalog.audit
        # The snapshot contains the catalog before the first offset. The timer files contain the
        # timers before the second offset. Earlier records are not applied again.
        self.catalog_from = 0
        self.timers_from = 0
        # A state floor: packs may lack records before it. Those that are left produce entries of
        # queues and of the index, and no state.
        self.state_from = 0
        self._appliers: Final[dict[type, Callable[[Any, LogOffset, int], None]]] = {
            PopCheckpoint: pops.apply_checkpoint,
            Acks: pops.apply_acks,
            Renewal: pops.apply_renewal,
            Expiry: lambda entry, at, _: apply_expiry(pops, entry, at),
            Trim: self._trim,
            Floor: self._floor,
            Audit: self._audit,
            ConfigItem: self._config,
            TimerControl: self._timer,
            Frontier: self._frontier,
            CheckWritten: self._check_written,
            RolledBack: self._rolled_back,
            DeadLettersDiscarded: self._discarded,
            OperationBegun: self._operation_begun,
            OperationEnded: self._operation_ended,
            ItemsFailed: self._items_failed,
            EpochStart: self._epoch_start,
            StatedConfig: self._stated_config,
            StatedQueues: self._stated_queues,
            StatedProgress: lambda entry, at, _: apply_stated_progress(pops, entry, at),
            StatedDeliveries: lambda entry, at, _: apply_stated_deliveries(pops, entry, at),
            StatedAudit: self._stated_audit,
            StatedKeys: self._stated_keys,
            StatedLetters: self._stated_letters,
            StatedOperations: self._stated_operations,
        }

    def append(self, entry: Entry, now_ms: int) -> LogOffset:
        """Put `entry` into the pending round, apply it, and return its log offset.

        If the entry is larger than a segment, raises MessageBodyTooLarge and changes nothing.
        """
        log, type_ = self._log, type(entry)
        if self._audited is not None and not _prepares(entry):
            self._record_audited(now_ms)
        elif type_ is EpochStart and self._audit_log.is_open:
            self._audit_log.drop_open()
        row = _BODIES.get(type_)
        if row is not None:
            kind, encode = row
            flags = 0
            if type_ is PopCheckpoint and cast("PopCheckpoint", entry).superseded is not None:
                flags = self._flags_of_change(cast("PopCheckpoint", entry))
            log_offset = log.append(kind, encode(entry), now_ms, flags)
        elif isinstance(entry, MessageEntry):
            body, crc = message.encode(entry), entry.blob_crc
            log_offset = log.append(RecordKind.MESSAGE, body, now_ms, entry.flags, entry.blob, crc)
            self._message(entry, log_offset, log.log_end - log_offset, now_ms)
            return log_offset
        elif isinstance(entry, Acks):
            body, tail = ack.encode(entry), self._rows_not_in_log(entry.entries)
            log_offset = log.append(RecordKind.ACK, body, now_ms, entry.flags, tail, crc32(tail))
        elif isinstance(entry, Renewal):
            body, table = renewal.encode(entry), self._pops.table
            tail = renewal.encode_live([table.live[slot] for slot, _ in entry.entries])
            tail += self._rows_not_in_log(entry.entries)
            log_offset = log.append(RecordKind.RENEW, body, now_ms, 0, tail, crc32(tail))
        elif isinstance(entry, (OperationBegun, OperationEnded, ItemsFailed)):
            body, tail = operation.encode(entry)
            log_offset = log.append(RecordKind.OPERATION, body, now_ms, 0, tail, crc32(tail))
        else:
            body, tail = state.encode(cast("State", entry))
            log_offset = log.append(RecordKind.STATE, body, now_ms, 0, tail, crc32(tail))
        self._appliers[type_](entry, log_offset, now_ms)
        return log_offset

    def _flags_of_change(self, ck: PopCheckpoint) -> int:
        assert ck.superseded is not None, "it replaces a delivery"
        slot, table = ck.superseded[0], self._pops.table
        is_later = ck.visible_at_ms > table.visible_at_ms[slot]
        is_renewed = is_later and not table.flags[slot] & pop_checkpoint.FLAG_RENEWS
        return 0 if is_renewed else pop_checkpoint.GIVEN_BACK

    def _rows_not_in_log(self, entries: Sequence[tuple[int, ...]]) -> bytes:
        """Return the rows of deliveries with a CK before the state floor, mostly none.

        The log may not contain these deliveries any longer, so the record must.
        """
        low = self._log.state_floor
        if not low:
            return b""
        slots = [entry[0] for entry in entries if entry[1] < low]
        return delivery_rows.encode(delivery_rows_of(self._pops, np.array(slots))) if slots else b""

    def append_message(self, entry: MessageEntry, now_ms: int) -> None:
        """Append a message that settles no delivery and is not delayed.

        Does the same as `append`, but faster: nearly all entries are such messages.
        """
        log = self._log
        if self._audited is not None:
            self._record_audited(now_ms)
        log_offset = log.append(
            RecordKind.MESSAGE, _pack_place(*entry[:4]), now_ms, 0, entry.blob, entry.blob_crc
        )
        self._store.apply_message(entry, log_offset, log.log_end - log_offset)

    def append_keyed(
        self,
        topic_id: TopicId,
        queue_id: QueueId,
        queue_offset: QueueOffset,
        key: DedupKey,
        blob: bytes | memoryview,
        crc: int,
        now_ms: int,
    ) -> None:
        """Append a message with a dedup key that is not delayed and has no transaction.

        Does the same as `append`, but faster: most messages with keys are such messages.
        """
        log = self._log
        if self._audited is not None:
            self._record_audited(now_ms)
        body = message.encode_keyed(topic_id, queue_id, queue_offset, key)
        log_offset = log.append(RecordKind.MESSAGE, body, now_ms, FLAG_KEYED, blob, crc)
        fields = topic_id, queue_id, 0, queue_offset, FLAG_KEYED, None, blob, crc
        entry = _tuple(MessageEntry, fields)
        self._store.apply_message(entry, log_offset, log.log_end - log_offset)
        self._keys.apply_new_key(topic_id, key, log_offset, now_ms)

    @contextlib.contextmanager
    def audited(self, change: AuditedChange | None) -> Iterator[None]:
        """Record a change in the audit log in front of the first record of the block.

        If the block appends nothing, the audit log gets nothing. Below feature level 3 neither.
        """
        assert self._audited is None, "changes are not nested"
        is_due = change is not None and not change.is_recorded
        if is_due and self._catalog.feature_level >= AUDIT_LEVEL:
            self._audited = change
        try:
            yield
        finally:
            self._audited = None

    def record_audit(self, change: AuditedChange, now_ms: int) -> None:
        """Record an action that another process applies."""
        with self.audited(change):
            if self._audited is None:
                return
            self._record_audited(now_ms)
            # A record of its own, because a start drops an AUDIT record without a successor.
            item = {"op": NEXT_ID, "nextId": self._catalog.next_id}
            self.append(ConfigItem(item), now_ms)

    def _record_audited(self, now_ms: int) -> None:
        change, self._audited = self._audited, None
        assert change is not None, "an audited change is in progress"
        known = self._audit_log
        entry = Audit(known.last_sequence + 1, change.encode())
        body, tail = audit.encode(entry)
        log_offset = self._log.append(RecordKind.AUDIT, body, now_ms, 0, tail, crc32(tail))
        # The record of the change follows at once, so nothing is left to decide.
        known.add(AuditRow(entry.sequence, now_ms, tail), log_offset)
        known.recorded_count += 1
        change.is_recorded = True

    def apply(self, found: Record) -> None:
        """Apply a record of an earlier process or of the master.

        Raises UnknownRecord, and StateBehindGap at a gap from `state_from` on.
        """
        header, body, tail = found
        if header.log_offset < self.state_from:
            if header.kind == _MESSAGE:
                sent = message.decode(body, header.flags, tail, header.tail_crc)
                self._store.apply_message(sent, header.log_offset, header.size)
            return
        if self._audit_log.is_open:
            self._decide_audit(header.kind, header.log_offset)
        if header.kind == _MESSAGE:
            sent = message.decode(body, header.flags, tail, header.tail_crc)
            if header.flags:
                self._message(sent, header.log_offset, header.size, header.stored_at_ms)
                if header.flags & FLAG_KEYED:
                    self._keys.follow()
            else:
                self._store.apply_message(sent, header.log_offset, header.size)
            return
        decode = _DECODERS.get(header.kind)
        if decode is None:
            raise UnknownRecord(f"record of kind {header.kind}")
        if header.flags and header.flags & ~_FLAGS_KNOWN.get(header.kind, 0):
            if is_gap(header):
                raise StateBehindGap(decode_gap(body))
            kind = RecordKind(header.kind).name
            raise UnknownRecord(f"{kind} record with flags {header.flags} in its header")
        entry = decode(body, tail)
        self._appliers[type(entry)](entry, header.log_offset, header.stored_at_ms)

    # ------------------------------------------------------------ one method per entry

    def _message(
        self, entry: MessageEntry, log_offset: LogOffset, size: int, stored_at_ms: int
    ) -> None:
        self._store.apply_message(entry, log_offset, size)
        cause = entry.cause
        if isinstance(cause, Cause):
            self._pops.settle_copied(cause, log_offset, stored_at_ms)
            return
        if isinstance(cause, Replay):
            self._replayed(cause, log_offset, stored_at_ms)
            return
        if isinstance(cause, KeyedMessage):
            if log_offset >= self.catalog_from:
                self._key(cause, entry, log_offset, stored_at_ms)
            cause = cause.cause
        elif self._keys.tables and type(cause) is TimerCause and log_offset >= self.catalog_from:
            self._keys.apply_timer_end(cause.timer_id, self._timers.topic_of(cause.timer_id))
        if isinstance(cause, (HalfMessage, HalfOutcome, CommittedTimer, RecoveredHalf)):
            self._transaction(cause, entry.topic_id, log_offset, stored_at_ms)
            cause = cause.target if isinstance(cause, CommittedTimer) else None
        if cause is None or log_offset < self.timers_from:
            return
        if isinstance(cause, TimerTarget):
            if entry.queue_id == REPLACED_QUEUE:
                self._timers.apply_replacement(cause, log_offset, size, stored_at_ms)
                return
            self._timers.apply_schedule(
                cause, log_offset, size, stored_at_ms, queue_id=entry.queue_id
            )
        elif isinstance(cause, TimerCause):
            self._timers.apply_outcome(cause)
        elif isinstance(cause, SalvagedTimer):
            self._timers.apply_schedule(
                cause.target, log_offset, size, stored_at_ms, queue_id=entry.queue_id
            )

    def _key(
        self, keyed: KeyedMessage, entry: MessageEntry, log_offset: LogOffset, stored_at_ms: int
    ) -> None:
        """Apply the dedup key of a message. A timer or a half message keeps it."""
        pin, topic_id, cause = NO_PIN, entry.topic_id, keyed.cause
        is_replacement = isinstance(cause, TimerTarget) and entry.queue_id == REPLACED_QUEUE
        if isinstance(cause, TimerTarget):
            pin, topic_id = pin_of_timer(cause.timer_id), cause.topic_id
        elif cause is not None:
            half = cause if isinstance(cause, HalfMessage) else cause.half
            pin, topic_id = pin_of_half(half.half_id or log_offset), half.topic_id
        self._keys.apply_key(
            topic_id, keyed.key, log_offset, stored_at_ms, pin=pin, is_replacement=is_replacement
        )

    def _transaction(
        self,
        cause: HalfMessage | HalfOutcome | CommittedTimer | RecoveredHalf,
        topic_id: TopicId,
        log_offset: LogOffset,
        stored_at_ms: int,
    ) -> None:
        # The snapshot has the table as of the moment of the catalog.
        if log_offset < self.catalog_from:
            return
        if not isinstance(cause, HalfMessage):
            outcome = cause if isinstance(cause, HalfOutcome) else cause.outcome
            if isinstance(cause, CommittedTimer):
                topic_id = cause.target.topic_id
            elif outcome.reason == OutcomeReason.EXPIRED:
                topic_id = _UNKNOWN_TOPIC  # The message is on the dead-letter topic.
            event = _OUTCOME_EVENTS[outcome.reason]
            of_topic = self._topic_of_half(outcome.half_id)
            self._transactions.apply_result(
                outcome.half_id, event, topic_id, log_offset, stored_at_ms
            )
            self._keys.apply_half_end(
                outcome.half_id,
                of_topic,
                is_committed=outcome.reason == OutcomeReason.COMMITTED,
                timer=cause.target.timer_id if isinstance(cause, CommittedTimer) else None,
            )
        if isinstance(cause, (HalfMessage, RecoveredHalf)):
            half = cause.half if isinstance(cause, RecoveredHalf) else cause
            half_id = half.half_id or HalfId(log_offset)
            self._transactions.apply_half(half_id, half, log_offset)

    def _check_written(
        self, entry: CheckWritten, log_offset: LogOffset, _stored_at_ms: int
    ) -> None:
        if log_offset >= self.catalog_from:
            self._transactions.apply_check(*entry)

    def _rolled_back(self, entry: RolledBack, log_offset: LogOffset, stored_at_ms: int) -> None:
        if log_offset >= self.catalog_from:
            of_topic = self._topic_of_half(entry.half_id)
            self._transactions.apply_result(
                entry.half_id,
                TransactionEvent.ROLLED_BACK,
                _UNKNOWN_TOPIC,
                log_offset,
                stored_at_ms,
            )
            self._keys.apply_half_end(entry.half_id, of_topic, is_committed=False, timer=None)

    def _topic_of_half(self, half_id: HalfId) -> int:
        """Return the topic id of a half message before its end; 0 if it is unknown."""
        row = self._transactions.find(half_id)
        return 0 if row is None else row.topic_id

    def _config(self, entry: ConfigItem, log_offset: LogOffset, stored_at_ms: int) -> None:
        item = entry.item
        if item["op"] == "reset":
            apply_reset(self._pops, item["group_id"], item["offsets"], log_offset)
            return
        if log_offset >= self.catalog_from:
            self._apply_item(item, log_offset, stored_at_ms)
        match item["op"]:
            case "deleteTopic":
                self._catalog.deaths += 1
                forget_topic(self._pops, item["id"])
                if log_offset >= self.catalog_from:
                    self._transactions.forget_topic(item["id"])
                    self._keys.forget_topic(item["id"])
            case "deleteGroup":
                forget_group(self._pops, item["id"])
            case "endHandles" if self._pops.catch_up is None:
                end_handles(self._pops, item["group"])
            case "topic" if item["topic"]["retry_of"]:
                group_id, topic_id = item["topic"]["retry_of"]
                self._pops.add_retry_topic(group_id, topic_id, item["topic"]["id"])

    def _apply_item(
        self,
        item: dict[str, Any],
        log_offset: LogOffset,
        stored_at_ms: int,
        *,
        is_stated: bool = False,
    ) -> None:
        """Apply an item to the catalog, and the deduplication of a topic to its keys."""
        self._catalog.apply(item, log_offset, is_stated=is_stated)
        if item["op"] == "topic":
            topic = self._catalog.topics[item["topic"]["id"]]
            self._keys.apply_topic(topic, item, stored_at_ms)

    def _trim(self, entry: Trim, log_offset: LogOffset, _stored_at_ms: int) -> None:
        self._catalog.deaths += 1
        for topic_id, queue_id, _, low in entry.queues:
            self._catalog.queue(topic_id, queue_id).trim(QueueOffset(low), log_offset)

    def _floor(self, entry: Floor, log_offset: LogOffset, _stored_at_ms: int) -> None:
        self._log.note_floor(entry.floor, log_offset)
        self._catalog.deaths += 1  # Packs before it need less.

    def _audit(self, entry: Audit, log_offset: LogOffset, stored_at_ms: int) -> None:
        """Add a record of an earlier process or of the master. The next record decides about it."""
        if log_offset >= self.catalog_from:
            row = AuditRow(entry.sequence, stored_at_ms, entry.fields, is_open=True)
            self._audit_log.add(row, log_offset)

    def _decide_audit(self, kind: int, log_offset: LogOffset) -> None:
        """Drop the newest audit record at the begin of an epoch: its change was not applied."""
        if log_offset < self.catalog_from:
            return  # The snapshot has the audit record, and the log before it.
        if kind == _EPOCH_START:
            self._audit_log.drop_open()
        else:
            self._audit_log.is_open = False

    def _stated_audit(self, entry: StatedAudit, log_offset: LogOffset, _stored_at_ms: int) -> None:
        if log_offset >= self.catalog_from:
            for row in entry.rows:
                self._audit_log.add(row, log_offset)

    def _timer(self, entry: TimerControl, log_offset: LogOffset, stored_at_ms: int) -> None:
        if log_offset >= self.catalog_from:
            if entry.operation == TimerOperation.CANCEL:
                self._keys.apply_timer_cancel(entry.timer_id, self._timers.topic_of(entry.timer_id))
            if entry.operation_id:
                self._catalog.operations.note_items(
                    entry.operation_id, cursor=entry.timer_id + 1, count=1
                )
        if log_offset >= self.timers_from:
            self._timers.apply_control(entry, stored_at_ms)

    def _frontier(self, entry: Frontier, log_offset: LogOffset, stored_at_ms: int) -> None:
        if log_offset >= self.timers_from:
            self._timers.apply_frontier(entry, stored_at_ms)

    def _epoch_start(self, _entry: EpochStart, _log_offset: int, _stored_at_ms: int) -> None:
        """Change nothing: the epoch is in every header. `_decide_audit` was called before."""

    def _stated_config(self, entry: StatedConfig, log_offset: LogOffset, stored_at_ms: int) -> None:
        if log_offset >= self.catalog_from:
            self._apply_item(entry.item, log_offset, stored_at_ms, is_stated=True)

    def _stated_keys(self, entry: StatedKeys, log_offset: LogOffset, _stored_at_ms: int) -> None:
        if log_offset >= self.catalog_from:
            self._keys.apply_stated(entry.rows)

    def _replayed(self, replay: Replay, log_offset: LogOffset, stored_at_ms: int) -> None:
        offset = replay.dead_offset
        if log_offset >= self.catalog_from:
            settled = SettledRange(
                offset, offset + 1, stored_at_ms, replay.operation_id, DeadLetterState.REPLAYED
            )
            self._catalog.settled_letters.settle(replay.dead_topic_id, [settled], log_offset)
            self._catalog.operations.note_items(replay.operation_id, cursor=offset + 1, count=1)

    def _discarded(
        self, entry: DeadLettersDiscarded, log_offset: LogOffset, stored_at_ms: int
    ) -> None:
        if log_offset >= self.catalog_from:
            operation_id, state = entry.operation_id, DeadLetterState.DISCARDED
            ranges = [
                SettledRange(begin, end, stored_at_ms, operation_id, state)
                for begin, end in entry.ranges
            ]
            self._catalog.settled_letters.settle(entry.topic_id, ranges, log_offset)
            count = sum([end - begin for begin, end in entry.ranges])
            self._catalog.operations.note_items(
                operation_id, cursor=entry.ranges[-1][1], count=count
            )

    def _operation_begun(
        self, entry: OperationBegun, log_offset: LogOffset, stored_at_ms: int
    ) -> None:
        if log_offset >= self.catalog_from:
            self._catalog.operations.begin(entry, log_offset, stored_at_ms)

    def _operation_ended(
        self, entry: OperationEnded, log_offset: LogOffset, stored_at_ms: int
    ) -> None:
        if log_offset >= self.catalog_from:
            self._catalog.operations.end(entry, stored_at_ms)

    def _items_failed(self, entry: ItemsFailed, log_offset: LogOffset, _stored_at_ms: int) -> None:
        if log_offset >= self.catalog_from:
            self._catalog.operations.note_failures(entry)

    def _stated_operations(
        self, entry: StatedOperations, log_offset: LogOffset, _stored_at_ms: int
    ) -> None:
        if log_offset >= self.catalog_from:
            self._catalog.operations.apply_stated(entry, log_offset)

    def _stated_letters(
        self, entry: StatedLetters, log_offset: LogOffset, _stored_at_ms: int
    ) -> None:
        if log_offset >= self.catalog_from:
            self._catalog.settled_letters.settle(entry.topic_id, entry.ranges, log_offset)

    def _stated_queues(
        self, entry: StatedQueues, log_offset: LogOffset, _stored_at_ms: int
    ) -> None:
        for topic_id, queue_id, end_offset in entry.ends:
            self._catalog.queue(topic_id, queue_id).restart_at(end_offset, log_offset)


def _prepares(entry: Entry) -> bool:
    """Whether an entry only precedes a change: without the change, it has the same meaning."""
    return isinstance(entry, Acks) or (
        isinstance(entry, ConfigItem)
        and (
            entry.item["op"] == NEXT_ID
            or (
                entry.item["op"] == "topic"
                and entry.item["topic"]["name"].startswith(HIDDEN_TOPIC_PREFIX)
            )
        )
    )
