"""Messages that turned out to be damaged when they were to leave.

A batch is read when its pop is durable, outside of a round, and nothing is decided there: what
cannot be read is left out of the answer and noted. The next round moves it to the dead-letter
topic. If it was the queue's entry that was damaged, and not the message, that waits until the queue
file is repaired, and makes the message visible again, which nobody has got.

Nothing here survives a restart: whoever pops the message again notes it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import DeliverySlot, LogOffset
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.deliveries import Delivery, DeliveryBatch
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.settlement import Settlement
from tidemill.broker.engine.pop.state import PopState
from tidemill.common.errors import ServiceError

MESSAGES_A_TURN = 64  # about a millisecond of copying, as of what is revived


class _Noted(NamedTuple):
    """One message of a delivery, and which delivery attempt it was."""

    slot: DeliverySlot
    delivery_id: LogOffset
    message_index: int
    attempt: int


@final
class DamagedMessages:
    """What was noted, and settling it."""

    def __init__(
        self,
        state: PopState,
        store: MessageStore,
        acks: RoundAcks,
        redelivery: Redelivery,
        settlement: Settlement,
    ) -> None:
        self._state = state
        self._store = store
        self._acks = acks
        self._redelivery = redelivery
        self._settlement = settlement
        # Both bounded by the messages in flight.
        self._noted: deque[_Noted] = deque()
        self._held: list[_Noted] = []  # until a queue file is repaired

    @property
    def is_due(self) -> bool:
        """Whether a round has something to settle."""
        return bool(self._noted)

    def left_of(self, batch: DeliveryBatch) -> DeliveryBatch:
        """Return what of a batch can be read; what is damaged is noted, what is gone is not."""
        left = []
        for n, log_offset in enumerate(batch.log_offsets):
            try:
                self._store.message(
                    log_offset, batch.topic_id, batch.queue_id, batch.queue_offsets[n]
                )
            except LookupError:
                continue  # Retention was faster than the sync: what it took nobody gets.
            except MessageDamaged:
                self._noted.append(
                    _Noted(
                        batch.slot, batch.delivery_id, batch.indexes[n], batch.delivery_attempts[n]
                    )
                )
            else:
                left.append(n)

        def chosen(column: Sequence[int]) -> list[int]:
            return [column[n] for n in left]

        return batch._replace(
            indexes=chosen(batch.indexes),
            queue_offsets=chosen(batch.queue_offsets),
            delivery_attempts=chosen(batch.delivery_attempts),
            log_offsets=[batch.log_offsets[n] for n in left],
        )

    def resume(self) -> None:
        """Go on with what lay in a damaged file, which has been derived again."""
        self._noted.extend(self._held)
        self._held.clear()

    def settle(self, now_ms: int) -> None:
        """Settle one slice of what was noted. No ack of the round may be unrecorded."""
        for _ in range(min(len(self._noted), MESSAGES_A_TURN)):
            noted = self._noted.popleft()
            progress = self._find_owner(noted)
            if progress is not None:
                self._settle(noted, progress, now_ms)

    def _find_owner(self, noted: _Noted) -> PopProgress | None:
        """Return the progress of a message that is still out."""
        table = self._state.table
        slot = noted.slot
        if slot >= len(table.ids) or table.ids[slot] != noted.delivery_id:
            return None
        progress = self._state.owners[table.owners[slot]]
        is_live = self._acks.live(slot) >> noted.message_index & 1
        is_void = self._state.is_void(progress, noted.delivery_id)
        return progress if is_live and not is_void else None

    def _settle(self, noted: _Noted, progress: PopProgress, now_ms: int) -> None:
        slot, delivery_id, index, attempt = noted
        try:
            is_dead = self._redelivery.bury_if_damaged(slot, index, progress, now_ms, attempt)
        except BlockFileDamaged:
            self._held.append(noted)
            return
        if not is_dead:
            delivery = Delivery(
                progress.group_id,
                progress.named_topic_id,
                slot,
                delivery_id,
                index,
                self._state.table.visible_at_ms[slot],
            )
            with suppress(ServiceError):  # Then it comes at its deadline.
                self._settlement.change_invisible(
                    delivery, invisible_duration_ms=0, suspend=True, now_ms=now_ms
                )
        elif progress.ordered is not None and progress.head == NIL:
            self._state.ready.add((progress.group_id, progress.named_topic_id))
