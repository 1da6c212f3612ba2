"""The acks of a round: they gather here, and settle messages when their ACK record does.

Until then a decision about a delivery asks here too. `record` puts them into the log: when there
are enough for a record, so that the end of a busy round has few left to do; and whoever needs all
of them in the state does so first: an ordered pop, a reset, a deletion, revive, and the end of the
round. What retention took counts as acked: nobody can settle it any more.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.layout import ack
from tidemill.broker.engine.layout.ack import FLAG_EXPIRED, Acks
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.pop.delivery_table import NIL
from tidemill.broker.engine.pop.state import PopState

ENTRIES_A_RECORD = 512  # settled in about a millisecond
assert ENTRIES_A_RECORD <= ack.ENTRIES_MAX


@final
class RoundAcks:
    """Messages that are settled, and not yet in the log."""

    def __init__(self, state: PopState, recorder: Recorder) -> None:
        self._state = state
        self._recorder = recorder
        self._bits: dict[int, int] = {}  # by slot
        self._expired: dict[int, int] = {}  # of these what retention took, and no client acked

    def __bool__(self) -> bool:
        return bool(self._bits)

    @property
    def gathered_count(self) -> int:
        """How many messages are settled by what is not in the log yet."""
        return sum(map(int.bit_count, self._bits.values()))

    def add_expired(self, slot: int, bits: int) -> None:
        """Settle live messages of a delivery that retention took."""
        self._bits[slot] = self._bits.get(slot, 0) | bits
        self._expired[slot] = self._expired.get(slot, 0) | bits

    def add_live(self, slot: int, bit: int, now_ms: int) -> bool:
        """Settle a message of a delivery; False when it is not live."""
        gathered = self._bits
        bits = gathered.get(slot, 0)
        if not self._state.table.live[slot] & ~bits & bit:
            return False
        gathered[slot] = bits | bit
        if len(gathered) >= ENTRIES_A_RECORD:
            self.record(now_ms)
        return True

    def live(self, slot: int) -> int:
        """Return the bits of the messages of a delivery that are not settled."""
        return self._state.table.live[slot] & ~self._bits.get(slot, 0)

    def record(self, now_ms: int) -> None:
        """Put the round's acks into the log, one entry a delivery."""
        if not self._bits:
            return
        state, table = self._state, self._state.table
        gathered, self._bits = self._bits, {}
        entries = [(slot, table.ids[slot], bits) for slot, bits in gathered.items()]
        owners = [state.owners[table.owners[slot]] for slot in gathered]
        if self._expired:
            expired, self._expired = self._expired, {}
            self._append(
                [(slot, table.ids[slot], bits) for slot, bits in expired.items()],
                now_ms,
                FLAG_EXPIRED,
            )
            acked = [
                (slot, delivery_id, bits & ~expired.get(slot, 0))
                for slot, delivery_id, bits in entries
            ]
            self._append([entry for entry in acked if entry[2]], now_ms)
        else:
            self._append(entries, now_ms)
        for progress, (slot, _, bits) in zip(owners, entries, strict=True):
            pair = progress.group_id, progress.named_topic_id
            state.counts["ack", *pair] += 1
            # Nobody else has had the slot meanwhile: nothing is popped here.
            held_ms = now_ms - table.popped_at_ms[slot]
            state.ack_times_ms.observe(pair, held_ms, bits.bit_count())
            if progress.ordered is not None and progress.head == NIL:
                state.ready.add(pair)

    def _append(self, entries: list[tuple[int, int, int]], now_ms: int, flags: int = 0) -> None:
        for begin in range(0, len(entries), ENTRIES_A_RECORD):
            self._recorder.append(Acks(entries[begin : begin + ENTRIES_A_RECORD], flags), now_ms)
