"""Pending timers whose messages have a key, by the index of messages, in slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.message import FLAG_SCHEDULE
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore
from tidemill.common.errors import Repairing
from tidemill.message import stored_message

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import LogOffset, TimerId
    from tidemill.broker.engine.layout.timer_entry import TimerEntry
    from tidemill.broker.engine.timer.index import TimerIndex

OFFSETS_A_STEP: Final = 256  # records with the key
KEY_MATCHES_MAX: Final = 10_000  # records with the same key that are read, the newest first


@final
class KeyedTimers:
    """A walk over the newest records with a key: call `step` until it returns None."""

    def __init__(self, index: TimerIndex, store: MessageStore, key: str) -> None:
        self._index = index
        self._store = store
        self._key = key
        self._matches = store.index.find(stored_message.key_hash("key", key), is_strict=True)
        self._matches_left = KEY_MATCHES_MAX
        self._offsets: list[LogOffset] = []  # the next matches to read
        self._seen: set[int] = set()
        self.is_cut = False  # whether older records were not read

    def step(self) -> list[tuple[TimerId, TimerEntry]] | None:
        """Return the pending timers among the next records; None if there are no more.

        Raises Repairing if a file of the index is damaged. The walk cannot continue after it.
        """
        if not self._offsets:
            try:
                matches = next(self._matches, None)
            except BlockFileDamaged as error:
                raise Repairing from error
            if matches is None or not self._matches_left:
                self.is_cut |= matches is not None
                return None
            self._offsets = matches[: self._matches_left]
            self.is_cut |= len(self._offsets) < len(matches)
            self._matches_left -= len(self._offsets)
        part, self._offsets = self._offsets[:OFFSETS_A_STEP], self._offsets[OFFSETS_A_STEP:]
        found = []
        for log_offset in part:
            timer = self._read(log_offset)
            if timer is not None:
                found.append(timer)
        return found

    def _read(self, log_offset: LogOffset) -> tuple[TimerId, TimerEntry] | None:
        if log_offset < self._store.log.state_floor:
            return None
        try:
            found = self._store.record(log_offset)
        except (MessageDamaged, LookupError):
            return None  # The timer of a damaged record is unknown.
        if found.header.kind != RecordKind.MESSAGE or not found.header.flags & FLAG_SCHEDULE:
            return None
        timer_id = message.decode_target(found.body).timer_id
        entry = self._index.find_pending(timer_id)
        if (
            entry is None
            or timer_id in self._seen
            or not stored_message.has_key(found.tail, self._key)
        ):
            return None
        self._seen.add(timer_id)
        return timer_id, entry
