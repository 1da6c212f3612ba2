"""The acks of a round. They are gathered here and settle messages when `record` logs them.

Until then, decisions about a delivery must use `live`. `record` runs when there are enough acks for
one record, so that the end of a busy round has little left to do. An ordered pop, a reset, a
deletion, revive and the end of the round also call it, because they need all acks in the state.
Messages that retention removed, and dead letters that stay in their topic, are settled here too.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.layout import ack
from tidemill.broker.engine.layout.ack import FLAG_EXPIRED, FLAG_KEPT, Acks
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.state import PopState

ENTRIES_A_RECORD = 512  # a millisecond of settling
assert ENTRIES_A_RECORD <= ack.ENTRIES_MAX


@final
class RoundAcks:
    """The acks of settled messages that are not in the log yet."""

    def __init__(self, state: PopState, recorder: Recorder) -> None:
        self._state = state
        self._recorder = recorder
        self._bits: dict[int, int] = {}  # by slot
        # The parts of `_bits` that no client acked, by the flag of their record.
        self._unacked: dict[int, dict[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._bits)

    @property
    def gathered_count(self) -> int:
        """The number of acked messages that are not in the log yet."""
        return sum(map(int.bit_count, self._bits.values()))

    def add_expired(self, slot: int, bits: int) -> None:
        """Settle live messages of a delivery that retention removed."""
        self._add_unacked(slot, bits, FLAG_EXPIRED)

    def add_kept(self, slot: int, bits: int) -> None:
        """Settle live messages of a delivery that stay in their dead-letter topic."""
        self._add_unacked(slot, bits, FLAG_KEPT)

    def _add_unacked(self, slot: int, bits: int, flag: int) -> None:
        self._bits[slot] = self._bits.get(slot, 0) | bits
        unacked = self._unacked.setdefault(flag, {})
        unacked[slot] = unacked.get(slot, 0) | bits

    def add_live(self, slot: int, bit: int, now_ms: int) -> bool:
        """Settle a message of a delivery. Return False if it is not live."""
        gathered = self._bits
        bits = gathered.get(slot, 0)
        if not self._state.table.live[slot] & ~bits & bit:
            return False
        gathered[slot] = bits | bit
        if len(gathered) >= ENTRIES_A_RECORD:
            self.record(now_ms)
        return True

    def live(self, slot: int) -> int:
        """Return the bits of a delivery's unsettled messages."""
        return self._state.table.live[slot] & ~self._bits.get(slot, 0)

    def record(self, now_ms: int) -> None:
        """Log the gathered acks, one entry per delivery."""
        if not self._bits:
            return
        state, table = self._state, self._state.table
        gathered, self._bits = self._bits, {}
        entries = [(slot, table.ids[slot], bits) for slot, bits in gathered.items()]
        owners = [state.owners[table.owners[slot]] for slot in gathered]
        if self._unacked:
            unacked, self._unacked = self._unacked, {}
            acked = gathered.copy()
            for flag, found in unacked.items():
                for slot, bits in found.items():
                    acked[slot] &= ~bits
                parts = [(slot, table.ids[slot], bits) for slot, bits in found.items()]
                self._append(parts, now_ms, flag)
            parts = [(slot, table.ids[slot], bits) for slot, bits in acked.items() if bits]
            self._append(parts, now_ms)
        else:
            self._append(entries, now_ms)
        for progress, (slot, _, bits) in zip(owners, entries, strict=True):
            pair = progress.group_id, progress.named_topic_id
            state.counts["ack", *pair] += 1
            # The slot still has the time of this delivery, because no pop runs in between.
            held_ms = now_ms - table.popped_at_ms[slot]
            state.ack_times_ms.observe(pair, held_ms, bits.bit_count())
            if progress.ordered is not None and progress.head == NIL:
                state.ready.add(pair)

    def _append(self, entries: list[tuple[int, int, int]], now_ms: int, flags: int = 0) -> None:
        for begin in range(0, len(entries), ENTRIES_A_RECORD):
            self._recorder.append(Acks(entries[begin : begin + ENTRIES_A_RECORD], flags), now_ms)
