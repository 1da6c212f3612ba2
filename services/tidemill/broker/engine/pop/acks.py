"""The acks of a round: they gather here, and settle messages when their ACK record does.

Until then a decision about a delivery asks here too. `record` puts them into the log: when there
are enough for a record, so that the end of a busy round has few left to do; and whoever needs all
of them in the state does so first: an ordered pop, a reset, a deletion, revive, and the end of the
round. What retention took counts as acked: nobody can settle it any more.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.layout import ack
from tidemill.broker.engine.layout.ack import Acks
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

    def __bool__(self) -> bool:
        return bool(self._bits)

    def add(self, slot: int, bits: int) -> None:
        """Settle live messages of a delivery."""
        self._bits[slot] = self._bits.get(slot, 0) | bits

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
        for begin in range(0, len(entries), ENTRIES_A_RECORD):
            self._recorder.append(Acks(entries[begin : begin + ENTRIES_A_RECORD]), now_ms)
        for progress in owners:
            state.counts["ack", progress.group_id, progress.named_topic_id] += 1
            if progress.ordered is not None and progress.head == NIL:
                state.ready.add((progress.group_id, progress.named_topic_id))
