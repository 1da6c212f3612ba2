"""Forgetting of deleted topics and groups: in slices, on each engine by its own clock.

A deletion makes all deliveries void at once. Forgetting then removes the progress, empties the
slots of its deliveries, and gives its owner number free. It also empties the slots of deliveries
that a reset made void, and of those that an engine keeps no longer (`end_handles`). While an engine
catches up, a deletion is forgotten at once.
"""

from __future__ import annotations

from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, TopicId
from tidemill.broker.engine.pop.moved_positions import void
from tidemill.broker.engine.pop.progress import VOID, PopProgress
from tidemill.broker.engine.pop.state import PopState

FORGOTTEN_A_SLICE = 256  # deleted queues, two microseconds each
# Counters by group and by the topic that consumers name. The last three are results of acks.
COUNTED = (
    "ck",
    "ack",
    "revived",
    "dead_lettered",
    "dead_letter_kept",
    "rejected",
    "damaged",
    "expired",
    "expired_before_revive",
    "filtered_retry",
    "scanned_tag",
    "scanned_sql",
    "matched_tag",
    "matched_sql",
    "filter_unknown",
    "again_expired",
    "again_nack",
    "lock_conflict",
    "extended",
    "given_back_ended",
    "given_back_revoked",
    "given_back_silent",
    "given_back_unread",
    "given_back_released",
    "APPLIED",
    "ALREADY",
    "GONE",
)


def forget_topic(state: PopState, topic_id: TopicId) -> None:
    """Void everything of a topic that the catalog has deleted, and of its retry topics."""
    state.index.delete_topic(topic_id)
    _start(state)


def forget_group(state: PopState, group_id: GroupId) -> None:
    """Void everything of a group that the catalog has deleted."""
    state.index.delete_group(group_id)
    _start(state)


def _start(state: PopState) -> None:
    _forget_deleted(state)
    # The end of the catch-up drops and renumbers all of it at once.
    while state.catch_up is not None and has_deleted(state):
        _forget_deleted(state)


def has_deleted(state: PopState) -> bool:
    """Return whether progress of deleted groups or topics remains."""
    return bool(state.index.deleted or state.catalog.orphans)


def is_forgetting(state: PopState) -> bool:
    """Return whether `forget_slice` has work to do."""
    return has_deleted(state) or state.index.numbers.has_marked


def end_handles(state: PopState, group_id: GroupId) -> None:
    """Let a sweep empty the slots of a group that only reject handles that have ended.

    Costs 3 ms per 10,000 queues of the group, and is rare.
    """
    before = state.catalog.ended_handles.of_group[group_id]
    for progress in state.index.of_group(group_id):
        state.index.numbers.mark(progress, live_floor=0, kept_floor=before)


def forget_slice(state: PopState) -> None:
    """Forget a bounded number of deleted queues, or sweep a part of the delivery table.

    All acks of the round must be recorded.
    """
    if has_deleted(state):
        _forget_deleted(state)
    else:
        slots = state.index.numbers.sweep()
        for slot in slots:
            state.discard(slot)
        state.tally.add(len(slots))


def _forget_deleted(state: PopState) -> None:
    index, catalog, count = state.index, state.catalog, 0
    while catalog.orphans and count < FORGOTTEN_A_SLICE:
        index.delete_topic(catalog.forget_next_orphan())
        count += 1
    while count < FORGOTTEN_A_SLICE and (progress := index.take_deleted()) is not None:
        _forget(state, progress)
        count += 1
    state.tally.add(count)


def _forget(state: PopState, progress: PopProgress) -> None:
    void(state, progress, LogOffset(VOID))
    if state.index.remove(progress) and state.catch_up is None:
        state.index.numbers.retire(progress)
    pair = progress.group_id, progress.topic_id
    if progress.queue.queue_id == 0:  # Once for all queues.
        state.subscriptions.pop(pair, None)
        state.delivered_by_level.pop(pair, None)
        for name in COUNTED:
            state.counts.pop((name, *pair), None)
        state.ack_times_ms.drop(pair)
