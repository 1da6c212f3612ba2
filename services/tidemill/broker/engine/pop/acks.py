"""The acks of a round: they gather here, and settle messages when their one ACK record does.

Until then a decision about a delivery asks here too. `record` puts them into the log; whoever needs
all of them in the state does so first: an ordered pop, a reset, a deletion, revive, and the end of
the round. What retention took counts as acked: nobody can settle it any more.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.layout.ack import ENTRIES_MAX, Acks
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.pop.delivery_table import NIL
from tidemill.broker.engine.pop.state import PopState


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

    def add_live(self, slot: int, bit: int) -> bool:
        """Settle a message of a delivery; False when it is not live."""
        bits = self._bits.get(slot, 0)
        if not self._state.table.live[slot] & ~bits & bit:
            return False
        self._bits[slot] = bits | bit
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
        for begin in range(0, len(entries), ENTRIES_MAX):
            self._recorder.append(Acks(entries[begin : begin + ENTRIES_MAX]), now_ms)
        for progress in owners:
            state.counts["ack", progress.group_id, progress.named_topic_id] += 1
            if progress.ordered is not None and progress.head == NIL:
                state.ready.add((progress.group_id, progress.named_topic_id))
