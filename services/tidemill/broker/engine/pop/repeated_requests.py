"""Requests about a delivery that a proxy sends again, because the link broke before the answer.

The log tells whether the first request was done: the CK record of a replaced delivery's replacement
names the replaced one. A new master has the same log. So a repeated request changes nothing twice,
and gets the answer of the first one.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.numbers import DeliverySlot, LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_SUPERSEDES
from tidemill.broker.engine.pop.deliveries import Delivery
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.store.segment import CorruptStore

if TYPE_CHECKING:
    from tidemill.broker.engine.pop.state import PopState
    from tidemill.broker.engine.store.commit_log import CommitLog

# Deliveries of one queue since the replaced one, which a search visits: 0.8 ms as measured. Beyond
# it, the client keeps its old handle, and the message returns when its invisible duration ends.
SEARCHED_MAX: Final = 5_000
VISITS_PER_ITEM: Final = 64  # about the time of another request of a slice


@final
class RepeatedRequests:
    """The search for the effect of a request whose answer was lost."""

    def __init__(self, state: PopState, log: CommitLog) -> None:
        self._state = state
        self._log = log

    def find_replacement(self, delivery: Delivery) -> Delivery | None:
        """Return the live delivery that replaced one message of `delivery`; None: it has none."""
        table = self._state.table
        slot, index = delivery.slot, delivery.message_index
        if slot >= len(table.ids) or table.ids[slot] != delivery.delivery_id:
            return None
        if not table.superseded[slot] >> index & 1 or not table.is_owned(slot, delivery.owner):
            return None
        progress = self._state.owners[table.owners[slot]]
        if (progress.group_id, progress.named_topic_id) != (delivery.group_id, delivery.topic_id):
            return None
        queue_offset = table.offset_of(slot, index)
        found, visited = progress.tail, 0
        # Replacements are younger than the replaced delivery, and the list is in order of age.
        while found != NIL and table.ids[found] > delivery.delivery_id and visited < SEARCHED_MAX:
            if (
                table.flags[found] & FLAG_SUPERSEDES
                and table.starts[found] == queue_offset
                and self._replaces(LogOffset(table.ids[found]), delivery)
            ):
                break
            found = table.previous[found]
            visited += 1
        else:
            found = NIL
        self._state.tally.add(visited // VISITS_PER_ITEM)
        if found == NIL:
            return None
        return delivery._replace(
            slot=DeliverySlot(found),
            delivery_id=LogOffset(table.ids[found]),
            message_index=0,
            visible_at_ms=table.visible_at_ms[found],
        )

    def _replaces(self, replacement_id: LogOffset, delivery: Delivery) -> bool:
        """Return whether a CK record names `delivery` as replaced. An unreadable one does not."""
        try:
            record = self._log.record_at(replacement_id)
            checkpoint = pop_checkpoint.decode(record.body)
        except (LookupError, CorruptStore, struct.error):
            return False
        return checkpoint.superseded == (
            delivery.slot,
            delivery.delivery_id,
            delivery.message_index,
        )
