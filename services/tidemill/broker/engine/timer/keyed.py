"""Pending timers whose messages have a key, by the index of messages, in slices."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.message import FLAG_SCHEDULE
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.common.errors import Repairing
from tidemill.message import stored_message

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import TimerId
    from tidemill.broker.engine.layout.timer_entry import TimerEntry
    from tidemill.broker.engine.timer.index import TimerIndex

OFFSETS_A_STEP: Final = 256  # records with the key
KEY_MATCHES_MAX: Final = 10_000  # records with the same key that are read, the newest first
# The remedy for a key of more messages.
OTHER_FILTER: Final = "choose the timers by topic, and by due times or tag, without the key"


@final
class KeyedTimers:
    """A walk over the newest records with a key: call `step` until it returns None."""

    def __init__(
        self,
        index: TimerIndex,
        store: MessageStore,
        tally: Tally,
        key: str,
        *,
        before: LogOffset | None = None,
    ) -> None:
        """Begin a walk. Records from log offset `before` on do not count towards the limit.

        They may be newer copies of messages that were before it. Default: a look-up, which counts
        all records and skips damaged ones.
        """
        self._index = index
        self._store = store
        self._tally = tally
        self._is_strict = before is not None
        self._before = LogOffset(1 << 62) if before is None else before
        self._key = key
        hash_ = stored_message.key_hash("key", key)
        self._matches = store.index.find(hash_, is_strict=self._is_strict)
        self._matches_left = KEY_MATCHES_MAX
        self._offsets: deque[LogOffset] = deque()  # the next matches to read
        self._seen: set[int] = set()
        self.damaged: list[LogOffset] = []  # messages that no replica can mend
        self.is_cut = False  # whether older records were not read

    def step(self) -> list[tuple[TimerId, TimerEntry]] | None:
        """Return the pending timers among the next records; None if there are no more.

        Raises Repairing if a file of the index or a message is damaged and can be mended. The walk
        cannot continue after it.
        """
        try:
            return self._step()
        except BlockFileDamaged as error:
            raise Repairing from error

    def _step(self) -> list[tuple[TimerId, TimerEntry]] | None:
        if not self._offsets:
            if self.is_cut:
                return None
            matches = next(self._matches, None)
            if matches is None:
                return None
            floor = self._store.log.state_floor
            older = [one for one in matches if floor <= one < self._before]
            self._offsets.extend(one for one in matches if one >= self._before)
            self._offsets.extend(older[: self._matches_left])
            self.is_cut = len(older) > self._matches_left
            self._matches_left = max(self._matches_left - len(older), 0)
        found = []
        allowance = Allowance(self._tally, items=OFFSETS_A_STEP)
        while self._offsets and not allowance.is_spent:
            timer = self._read(self._offsets.popleft())
            self._tally.add(1)
            if timer is not None:
                found.append(timer)
        return found

    def _read(self, log_offset: LogOffset) -> tuple[TimerId, TimerEntry] | None:
        if log_offset < self._store.log.state_floor:
            return None
        try:
            found = self._store.record(log_offset)
        except LookupError:
            return None
        except MessageDamaged:
            if self._is_strict:
                self._store.check_awaited(log_offset)
            self.damaged.append(log_offset)
            return None
        self._tally.add(0, size_bytes=len(found.tail))
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
