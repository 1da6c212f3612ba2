"""Forgetting of deleted topics and groups: in slices, on each engine by its own clock.

A deletion makes all deliveries void at once. Forgetting then removes the progress, and gives its
owner number free. While an engine catches up, a deletion is forgotten at once.
"""

from __future__ import annotations

from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, TopicId
from tidemill.broker.engine.pop.progress import VOID, PopProgress
from tidemill.broker.engine.pop.state import PopState

FORGOTTEN_A_SLICE = 256  # deleted queues, two microseconds each
# Counters by group and by the topic that consumers name. The last three are results of acks.
COUNTED = (
    "ck",
    "ack",
    "revived",
    "dead_lettered",
    "damaged",
    "expired",
    "expired_before_revive",
    "filtered_retry",
    "again_expired",
    "again_nack",
    "lock_conflict",
    "extended",
    "given_back_ended",
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
    forget_slice(state)
    # The end of the catch-up drops and renumbers all of it at once.
    while state.catch_up is not None and has_deleted(state):
        forget_slice(state)


def has_deleted(state: PopState) -> bool:
    """Return whether progress of deleted groups or topics remains."""
    return bool(state.index.deleted or state.catalog.orphans)


def is_forgetting(state: PopState) -> bool:
    """Return whether `forget_slice` has work to do."""
    return has_deleted(state) or state.index.numbers.has_retired


def forget_slice(state: PopState) -> None:
    """Forget a bounded number of deleted queues, or sweep a part of the delivery table."""
    index, catalog, count = state.index, state.catalog, 0
    while catalog.orphans and count < FORGOTTEN_A_SLICE:
        index.delete_topic(catalog.forget_next_orphan())
        count += 1
    while count < FORGOTTEN_A_SLICE and (progress := index.take_deleted()) is not None:
        _forget(state, progress)
        count += 1
    state.tally.add(count)
    if not count and index.numbers.has_retired:
        index.numbers.sweep()


def _forget(state: PopState, progress: PopProgress) -> None:
    state.void(progress, LogOffset(VOID))
    if state.index.remove(progress) and state.catch_up is None:
        state.index.numbers.retire(progress)
    pair = progress.group_id, progress.topic_id
    if progress.queue.queue_id == 0:  # Once for all queues.
        state.subscriptions.pop(pair, None)
        for name in COUNTED:
            state.counts.pop((name, *pair), None)
        state.ack_times_ms.drop(pair)
