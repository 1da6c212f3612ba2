"""What consumer groups do, in one place; and the pop of a group that is not ordered.

Each decision reads the state, appends one record that says what happened, and changes the state in
the way in which a replay of that record changes it. Nothing is decided twice: what a pop hides is
in its CK, what an ack settles in its ACK, what a revive or dead letter settles in the copy itself.

    consumption  which queues a pop looks at          settlement  ack, change-invisible, dead-letter
    scan, room   which messages match, how many       revive      deadlines
    ordered      the next batch of an ordered queue   copies      retry and dead-letter copies
    deliveries   the CK of what goes out              state       the fold that all of them share
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, Group, Topic
from tidemill.broker.engine.pop.copies import Copies
from tidemill.broker.engine.pop.deliveries import AckResult, Batch, Deliveries, Delivery
from tidemill.broker.engine.pop.ordered import OrderedPop
from tidemill.broker.engine.pop.progress import Progress, Subscription
from tidemill.broker.engine.pop.revive import Revive
from tidemill.broker.engine.pop.room import Room
from tidemill.broker.engine.pop.scan import Scan
from tidemill.broker.engine.pop.settlement import Settlement
from tidemill.broker.engine.pop.state import PopState
from tidemill.common.errors import GroupNotFound, Overloaded, TopicNotFound

__all__ = ["AckResult", "Batch", "Consumption", "Delivery"]

RETRY_SHARE = 5  # every fifth pop looks at the retry topic first, as in the reference (20 %)
RETRY_WAIT_MAX_MS = 1_000  # a retry message that has waited this long goes first in any case


@final
class Consumption:
    """All that consumer groups do."""

    def __init__(
        self, state: PopState, store: MessageStore, catalog: Catalog, *, deliveries_max: int
    ) -> None:
        self._state = state
        self._store = store
        self._catalog = catalog
        self._deliveries_max = deliveries_max
        self._scan = Scan(state, store)
        self._deliveries = Deliveries(state)
        self._copies = Copies(state, store, catalog)
        self._ordered = OrderedPop(state, self._scan, self._deliveries, self._copies)
        self.settlement = Settlement(state, catalog, self._copies, deliveries_max=deliveries_max)
        self.revive = Revive(state, catalog, self._copies, self._ordered)

    def pop(
        self,
        group_id: int,
        topic_id: int,
        *,
        max_messages: int,
        invisible_duration_ms: int,
        tags: frozenset[str],
        attempt_id: str,
        now_ms: int,
    ) -> list[Batch]:
        """Take up to `max_messages` and POP_BYTES_MAX for a group and hide them from it.

        An empty list is a normal answer. Raises TopicNotFound, GroupNotFound, Overloaded.
        """
        subscription = self._subscription(group_id, topic_id, now_ms)
        table = self._state.table
        if table.used_count + len(subscription.queues) >= self._deliveries_max:
            raise Overloaded(
                f"{self._deliveries_max} deliveries are in flight, the broker's limit "
                f"(deliveries_max); ack messages, or poll again later"
            )
        group = self._catalog.groups[group_id]
        subscription.turn += 1
        visible_at_ms = now_ms + invisible_duration_ms
        want, taken_bytes = max_messages, 0
        batches: list[Batch] = []
        if group.is_ordered:
            sources = _rotated(subscription.queues, subscription.turn)
        else:
            sources = self._sources(subscription, now_ms)
        for progress in sources:
            room = Room(want, taken_bytes=taken_bytes, is_untouched=not batches)
            if group.is_ordered:
                batch = self._ordered.pop(
                    progress, group, room, visible_at_ms, tags, attempt_id, now_ms
                )
            else:
                batch = self._pop_any(progress, group, room, visible_at_ms, tags, now_ms)
            if batch is not None:
                batches.append(batch)
                taken_bytes += batch.size_bytes
                want -= len(batch.indexes)
                if want <= 0:
                    break
        return batches

    def _sources(self, subscription: Subscription, now_ms: int) -> list[Progress]:
        """Return the queues with something ready, in the order in which to look at them."""
        ready = [
            progress
            for progress in _rotated(subscription.queues, subscription.turn)
            if progress.pop_offset < progress.queue.max_offset
        ]
        retry = subscription.retry
        if retry is not None and retry.pop_offset < retry.queue.max_offset:
            is_first = subscription.turn % RETRY_SHARE == 0 or (
                bool(ready) and self._waits_since(retry, now_ms) < now_ms - RETRY_WAIT_MAX_MS
            )
            ready.insert(0 if is_first else len(ready), retry)
        return ready

    def _waits_since(self, progress: Progress, now_ms: int) -> int:
        offset = max(progress.pop_offset, progress.queue.min_offset)
        if offset == progress.queue.max_offset:
            return now_ms  # Retention took all of it.
        return self._store.stored_at_ms(progress.queue.entry(offset)[0])

    def _subscription(self, group_id: int, topic_id: int, now_ms: int) -> Subscription:
        topic = self._catalog.topics.get(topic_id)
        if topic is None:
            raise TopicNotFound("the topic was deleted; query its route again")
        subscription = self._state.subscriptions.get((group_id, topic_id))
        if subscription is not None and subscription.version == topic.version:
            return subscription
        group = self._catalog.groups.get(group_id)
        if group is None:
            raise GroupNotFound("the consumer group was deleted; create it and poll again")
        return self._subscribe(group, topic, now_ms)

    def _subscribe(self, group: Group, topic: Topic, now_ms: int) -> Subscription:
        is_new = (group.id, topic.id, 0) not in self._state.progress
        queues = [
            self._state.progress_of(group.id, topic.id, number) for number in range(topic.queues)
        ]
        if is_new and group.start_from_latest:
            # In the log, since a restart must not move the start past what arrived meanwhile.
            for progress in queues:
                progress.pop_offset = progress.queue.max_offset
            self._store.append_state(
                self._store.PROGRESS, self._state.encode_progress(queues), now_ms
            )
        retry_id = self._catalog.retry_topic_ids.get((group.id, topic.id))
        retry = None if retry_id is None else self._state.progress_of(group.id, retry_id, 0)
        subscription = Subscription(
            group_id=group.id, topic_id=topic.id, version=topic.version, queues=queues, retry=retry
        )
        self._state.subscriptions[group.id, topic.id] = subscription
        return subscription

    def _pop_any(
        self,
        progress: Progress,
        group: Group,
        room: Room,
        visible_at_ms: int,
        tags: frozenset[str],
        now_ms: int,
    ) -> Batch | None:
        self._scan.skip_expired(progress)
        taken = self._scan.take(progress, progress.pop_offset, room, tags)
        if taken is None:
            return None
        offsets, log_offsets, next_offset = taken
        progress.pop_offset = next_offset
        if not offsets:
            return None
        batch = self._deliveries.deliver(
            progress, offsets, log_offsets, visible_at_ms, now_ms, size_bytes=room.taken_bytes
        )
        if progress.named_topic_id == progress.topic_id:
            return batch
        attempts = [self._store.place(offset).attempts + 1 for offset in log_offsets]
        return self._copies.within_limit(batch, attempts, progress, group, now_ms)


def _rotated(queues: list[Progress], turn: int) -> list[Progress]:
    first = turn % len(queues)
    return queues[first:] + queues[:first]
