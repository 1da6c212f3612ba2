"""The order of the levels of a PRIORITY topic for an ordered group (ADR 0086).

Each level is one ordered queue, and a batch in flight blocks its level only. A pop takes one batch
from one level. The batch is one slot. A strict slot takes the highest level that is not blocked. A
fair slot takes the lower level with the oldest message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.metadata.priority import FACTOR_MAX
from tidemill.broker.engine.pop.level_pop import capped_credit, count_delivered

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup
    from tidemill.broker.engine.pop.deliveries import DeliveryBatch
    from tidemill.broker.engine.pop.ordered import OrderedPop
    from tidemill.broker.engine.pop.progress import PopProgress, PopSubscription
    from tidemill.broker.engine.pop.state import PopState

NO_LEVEL = -1


@final
class LevelTurns:
    """The order of the levels of the current pop of an ordered group."""

    def __init__(self, state: PopState, ordered: OrderedPop) -> None:
        self._state = state
        self._ordered = ordered
        self._lowest = NO_LEVEL  # the lowest level that the pop may take from
        self._fair = NO_LEVEL  # the level of a fair slot; NO_LEVEL: the slot is strict

    def order(
        self,
        subscription: PopSubscription,
        group: ConsumerGroup,
        attempt_id: str,
        now_ms: int,
        *,
        own_factor: int | None = None,
        level_below: int = 0,
    ) -> list[PopProgress]:
        """Return the queues for a pop: it takes one batch from the first queue that has one.

        A pop with its `own_factor` does not use the credit. A `level_below` of 0 is no bound.
        """
        queues = subscription.queues[::-1]
        if subscription.retries:  # They have replayed dead letters, which come behind their level.
            queues = sorted([*queues, *subscription.retries], key=lambda one: -one.queue.queue_id)
        if level_below:
            queues = [one for one in queues if one.queue.queue_id < level_below]
        available = [
            progress
            for progress in queues
            if not self._ordered.is_unavailable(progress, attempt_id, now_ms)
        ]
        factor = group.priority_factor
        subscription.credit = credit = capped_credit(subscription.credit, factor)
        if own_factor is not None:
            factor, credit = own_factor, own_factor
        self._lowest = available[-1].queue.queue_id if available else NO_LEVEL
        self._fair = NO_LEVEL
        lower = [one for one in available if one.queue.queue_id < available[0].queue.queue_id]
        if lower and factor < FACTOR_MAX and credit >= factor:
            oldest = min(lower if factor else available, key=_first_log_offset)
            self._fair = oldest.queue.queue_id
            queues = [oldest, *(progress for progress in queues if progress is not oldest)]
        return queues

    def note_batch(
        self,
        subscription: PopSubscription,
        group: ConsumerGroup,
        batch: DeliveryBatch,
        *,
        has_credit: bool = True,
    ) -> None:
        """Note the batch that the pop took, and its level. Change the credit if `has_credit`."""
        factor, level, count = group.priority_factor, batch.queue_id, len(batch.indexes)
        is_fair = level == self._fair
        count_delivered(self._state, subscription, level, count, count if is_fair else 0)
        if not has_credit:
            return
        if is_fair:
            subscription.credit -= factor
        elif self._lowest < level:
            subscription.credit += FACTOR_MAX - factor


def _first_log_offset(progress: PopProgress) -> int:
    """Return the log offset of the first ready message of a queue, to compare ages."""
    queue, ordered = progress.queue, progress.ordered
    assert ordered is not None, "the progress of an ordered group knows its order"
    offset = max(min(ordered.pending, default=progress.position), queue.min_offset)
    if offset >= queue.max_offset:
        return 0  # The pop settles its expired messages first.
    try:
        return queue.entry(offset)[0]
    except BlockFileDamaged:
        return 0  # The pop notes that the queue is stalled.
