"""Messages of a batch that were damaged when the broker read them for the reply.

The broker reads a batch after its pop is durable, outside a round, where it cannot change the
state. The reply omits unreadable messages, and the next round moves them to the dead-letter topic.
If not the message but its queue entry is damaged, the message waits until the queue file is
rebuilt. Then it becomes visible again.

A restart loses this list. The next pop of a damaged message finds it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import DeliverySlot, LogOffset
from tidemill.broker.engine.message_store import MessageDamaged, MessageRecord, MessageStore
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.deliveries import Delivery, DeliveryBatch
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.settlement import Settlement
from tidemill.broker.engine.pop.state import PopState
from tidemill.common.errors import ServiceError

MESSAGES_A_TURN = 64  # about a millisecond of copying


class _DamagedMessage(NamedTuple):
    """One unreadable message of a delivery, and its delivery attempt."""

    slot: DeliverySlot
    delivery_id: LogOffset
    message_index: int
    attempt: int


@final
class DamagedMessages:
    """The unreadable messages of batches, until a round settles them."""

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
        # The messages in flight bound both.
        self._found: deque[_DamagedMessage] = deque()
        self._awaiting_mend: list[_DamagedMessage] = []  # until a queue file is rebuilt

    @property
    def is_due(self) -> bool:
        """Whether a round has messages to settle."""
        return bool(self._found)

    def readable_part(self, batch: DeliveryBatch) -> tuple[DeliveryBatch, list[MessageRecord]]:
        """Return the readable part of a batch, with its messages.

        Remember its damaged messages for `settle`.
        """
        readable, records = [], []
        for n, log_offset in enumerate(batch.log_offsets):
            try:
                found = self._store.message(
                    log_offset, batch.topic_id, batch.queue_id, batch.queue_offsets[n]
                )
            except LookupError:
                continue  # Retention removed the message before the sync had ended.
            except MessageDamaged:
                self._found.append(
                    _DamagedMessage(
                        batch.slot, batch.delivery_id, batch.indexes[n], batch.delivery_attempts[n]
                    )
                )
            else:
                readable.append(n)
                records.append(found)

        def part_of(column: Sequence[int]) -> list[int]:
            return [column[n] for n in readable]

        part = batch._replace(
            indexes=part_of(batch.indexes),
            queue_offsets=part_of(batch.queue_offsets),
            delivery_attempts=part_of(batch.delivery_attempts),
            log_offsets=[batch.log_offsets[n] for n in readable],
        )
        return part, records

    def resume(self) -> None:
        """Settle again the messages whose queue file was rebuilt."""
        self._found.extend(self._awaiting_mend)
        self._awaiting_mend.clear()

    def settle(self, now_ms: int) -> None:
        """Settle one slice of the damaged messages. All acks of the round must be recorded."""
        for _ in range(min(len(self._found), MESSAGES_A_TURN)):
            found = self._found.popleft()
            progress = self._find_owner(found)
            if progress is not None:
                self._settle(found, progress, now_ms)

    def _find_owner(self, found: _DamagedMessage) -> PopProgress | None:
        """Return the progress of a message if it is still in flight."""
        table = self._state.table
        slot = found.slot
        if slot >= len(table.ids) or table.ids[slot] != found.delivery_id:
            return None
        progress = self._state.owners[table.owners[slot]]
        is_live = self._acks.live(slot) >> found.message_index & 1
        is_void = self._state.is_void(progress, found.delivery_id)
        return progress if is_live and not is_void else None

    def _settle(self, found: _DamagedMessage, progress: PopProgress, now_ms: int) -> None:
        slot, delivery_id, index, attempt = found
        try:
            is_dead = self._redelivery.dead_letter_if_damaged(
                slot, index, progress, now_ms, attempt
            )
        except BlockFileDamaged:
            self._awaiting_mend.append(found)
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
            with suppress(ServiceError):  # On failure, revive handles it at its deadline.
                self._settlement.change_invisible(
                    delivery, invisible_duration_ms=0, suspend=True, now_ms=now_ms
                )
        elif progress.ordered is not None and progress.head == NIL:
            self._state.ready.add((progress.group_id, progress.named_topic_id))
