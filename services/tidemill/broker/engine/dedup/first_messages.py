"""The first messages of dedup keys: what a repeat is answered with."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, final

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.dedup import HASH_SIZE, KeyRow
from tidemill.broker.engine.layout.message import (
    FLAG_HALF,
    FLAG_KEYED,
    FLAG_SCHEDULE,
    HalfMessage,
    KeyedMessage,
    MessageEntry,
    RecoveredHalf,
    TimerTarget,
)
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, TimerId
from tidemill.broker.engine.layout.record import RecordHeader, RecordKind, UnknownRecord
from tidemill.broker.engine.layout.timer_entry import TimerEntryDamaged
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.message import stored_message

# Makes a named tuple without a call of Python code: every repeat makes one.
_tuple = tuple.__new__
# Of a record with a dedup key alone: magic, kind, flags, log offset, size of the head, queue, queue
# offset, and the hash of the key.
_PLAIN = struct.Struct(f">I13xBH12xq4xH6xH2xq{HASH_SIZE}s").unpack_from
# Of a stored message: the number of keys, the place and the size of its id.
_ID_FIELDS = struct.Struct(">4xHHH").unpack_from
_KEYS_AT: Final = stored_message.FIXED_SIZE
# Errors from damaged bytes, and from records that retention has freed.
_UNREADABLE: Final = (CorruptStore, LookupError, UnknownRecord, struct.error, ValueError)


class FirstMessage(NamedTuple):
    """The message with a dedup key, as its sender got it in the answer."""

    message_id: str
    queue_offset: int  # of a delayed message: its timer id
    due_at_ms: int  # 0: it is not delayed
    half_id: int  # 0: it has no transaction
    queue_id: int = 0  # also of a delayed message


@final
class FirstMessages:
    """Reads the messages of dedup keys."""

    def __init__(self, log: CommitLog, timers: TimerIndex, transactions: TransactionTable) -> None:
        self._log = log
        self._timers = timers
        self._transactions = transactions

    def find(self, row: KeyRow) -> FirstMessage | None:
        """Return the message of a key, also of a dead one; None if retention has freed it."""
        try:
            if (first := self._find_plain(row)) is not None:
                return first
            entry, header = self._read(row.log_offset)
            cause = entry.cause
            # Another record may be there if the bytes are damaged.
            if isinstance(cause, KeyedMessage) and cause.key.hash == row.hash:
                return _first_of(entry, header.log_offset)
        except _UNREADABLE:
            pass
        return self._find_copy(row)

    def _find_plain(self, row: KeyRow) -> FirstMessage | None:
        """Return the message of a key if it is written, not delayed and has no transaction.

        Most first messages are such messages. One unpacking takes less time than `read`.
        """
        found = self._log.find_written(row.log_offset)
        if found is None:
            return None
        view, at = found
        magic, kind, flags, log_offset, head_size, queue_id, queue_offset, hash_ = _PLAIN(view, at)
        if (
            magic != record.MAGIC
            or kind != RecordKind.MESSAGE
            or flags != FLAG_KEYED
            or log_offset != row.log_offset
            or hash_ != row.hash
        ):
            return None
        at += head_size
        key_count, id_at, id_size = _ID_FIELDS(view, at)
        at += _KEYS_AT + key_count * stored_message.KEY_HASH_SIZE + id_at
        message_id = str(view[at : at + id_size], "utf-8")
        return _tuple(FirstMessage, (message_id, queue_offset, 0, 0, queue_id))

    def is_pin_stale(self, row: KeyRow) -> bool:
        """Whether the timer of a key has ended, but no record of that is left."""
        return row.pin > 0 and self._timers.is_settled(TimerId(row.pin - 1))

    def _find_copy(self, row: KeyRow) -> FirstMessage | None:
        """Return the message of a pending timer or an open half from its newest copy."""
        try:
            if row.pin > 0:
                known = self._timers.get(TimerId(row.pin - 1))
                entry, header = self._read(known.log_offset)
                return _first_of(entry, header.log_offset) if _is_timer(entry, row.pin) else None
            if row.pin < 0:
                half = self._transactions.find(-row.pin)
                if half is not None:
                    entry, header = self._read(half.log_offset)
                    if header.flags & FLAG_HALF:
                        return _first_of(entry, HalfId(-row.pin))
        except (*_UNREADABLE, TimerEntryDamaged):
            pass
        return None

    def _read(self, log_offset: LogOffset) -> tuple[MessageEntry, RecordHeader]:
        """Return the message at a log offset. Raises as `_UNREADABLE` has it."""
        found = self._log.record_at(log_offset)
        if found.header.kind != RecordKind.MESSAGE:
            raise LookupError(log_offset)
        # A stub has the position, the key and the message id, too.
        return message.decode(found.body, found.header.flags, found.tail, 0), found.header


def _is_timer(entry: MessageEntry, pin: int) -> bool:
    cause = entry.cause.cause if isinstance(entry.cause, KeyedMessage) else entry.cause
    return (
        bool(entry.flags & FLAG_SCHEDULE)
        and isinstance(cause, TimerTarget)
        and cause.timer_id == pin - 1
    )


def _first_of(entry: MessageEntry, log_offset: int) -> FirstMessage:
    cause = entry.cause.cause if isinstance(entry.cause, KeyedMessage) else entry.cause
    message_id = stored_message.message_id_of(entry.blob)
    match cause:
        case TimerTarget():
            return FirstMessage(message_id, cause.timer_id, cause.due_at_ms, 0, cause.queue_id)
        case HalfMessage():
            return FirstMessage(message_id, 0, 0, cause.half_id or log_offset)
        case RecoveredHalf():
            return FirstMessage(message_id, 0, 0, log_offset)
        case _:
            return FirstMessage(message_id, entry.queue_offset, 0, 0, entry.queue_id)
