"""Records that move a group's position in a queue: retention of unread messages, and resets."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.broker.engine.layout.expiry import Expiry
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import OrderedState, PopProgress
from tidemill.broker.engine.pop.state import PopState


def apply_expiry(state: PopState, expiry: Expiry, log_offset: LogOffset) -> None:
    """Apply an EXPIRE record: move groups past messages that retention removes unpopped."""
    for group_id, topic_id, queue_id, begin, end in expiry.ranges:
        progress = state.progress_of(group_id, topic_id, queue_id)
        if state.catch_up and not state.catch_up.is_new_to_progress(progress, log_offset):
            continue
        if progress.ordered is not None:
            pending = progress.ordered.pending
            for offset in [offset for offset in pending if begin <= offset < end]:
                del pending[offset]
        if progress.position < end:
            progress.pop_offset = progress.position = end


def apply_reset(
    state: PopState,
    group_id: GroupId,
    offsets: Iterable[tuple[TopicId, QueueId, int]],
    log_offset: LogOffset,
) -> None:
    """Set positions (topic id, queue id, offset). All earlier deliveries become void."""
    for topic_id, queue_id, offset in offsets:
        progress = state.progress_of(group_id, topic_id, queue_id)
        if state.catch_up and not state.catch_up.is_new_to_progress(progress, log_offset):
            continue
        void(state, progress, log_offset)
        progress.pop_offset = progress.position = offset
        if progress.ordered is not None:
            progress.ordered = OrderedState()
        state.ready.add((progress.group_id, progress.named_topic_id))


def void(state: PopState, progress: PopProgress, log_offset: LogOffset) -> None:
    """Void all deliveries of a queue that were made before `log_offset`."""
    # A sweep empties the slots, so that the cost of a reset does not depend on their number.
    if progress.head != NIL and state.catch_up is None:
        state.index.numbers.mark(progress, live_floor=log_offset, kept_floor=0)
    progress.void_before = log_offset
    progress.head = progress.tail = progress.oldest = NIL
    progress.in_flight = 0
    progress.stated_at = log_offset
