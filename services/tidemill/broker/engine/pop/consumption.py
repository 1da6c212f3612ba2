"""The operations of consumer groups, and the pop of a group that is not ordered.

Each decision reads the state and records one entry. The fold applies the entry. No decision is
made twice: a CK contains the messages that a pop hides, an ACK the messages that acks settle. A
copy settles the message that it revives or dead-letters.

    consumption        queues that a pop reads         settlement  acks, changes, dead letters
    message_selection  matching messages, in a budget  revive      deadlines
    readiness          messages that a pop would find  redelivery  retry and dead-letter copies
    ordered            next batch of an ordered queue  damaged     unreadable messages
    deliveries         CK of a pop                     acks        acks of a round
    state              state from the records          renewals    deliveries of live clients
    revocations        deliveries of clients that have lost a right
    stated_rows        state as rows                   catch_up    state from a snapshot
    delivery_limits    shares of consumer groups       moved_positions  resets, retention
    first_pops         begin of a group in a topic    retry_turns  order of retries
    level_pop          pop of a PRIORITY topic         level_turns  levels of ordered groups
    ready_levels       levels of ready messages
"""

from __future__ import annotations

from itertools import repeat
from typing import final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import MESSAGES_MAX
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter
from tidemill.broker.engine.message_store import MessageDamaged, MessageRecord, MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, TopicType
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.budget import PopBudget
from tidemill.broker.engine.pop.damaged import DamagedMessages
from tidemill.broker.engine.pop.deliveries import AckResult, Delivery, DeliveryBatch, DeliveryWriter
from tidemill.broker.engine.pop.delivery_limits import DeliveryLimits
from tidemill.broker.engine.pop.first_pops import FirstPops
from tidemill.broker.engine.pop.level_pop import LevelPop
from tidemill.broker.engine.pop.level_turns import LevelTurns
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.message_selection import MessageSelection, MessageSelector
from tidemill.broker.engine.pop.ordered import OrderedPop, is_repeated
from tidemill.broker.engine.pop.progress import PopProgress, PopSubscription
from tidemill.broker.engine.pop.progress_index import ProgressKey
from tidemill.broker.engine.pop.readiness import PopReadiness, ReadyMessages
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.renewals import Renewals
from tidemill.broker.engine.pop.retry_turns import is_retry_first
from tidemill.broker.engine.pop.revive import Reviver
from tidemill.broker.engine.pop.revocations import Revocations
from tidemill.broker.engine.pop.settlement import Settlement
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.tally import Tally
from tidemill.common.errors import GroupNotFound, Overloaded, TopicNotFound
from tidemill.message.client_key import ClientKey

__all__ = ["AckResult", "Consumption", "Delivery", "DeliveryBatch"]


@final
class Consumption:
    """The operations of consumer groups."""

    def __init__(
        self,
        state: PopState,
        store: MessageStore,
        catalog: Catalog,
        recorder: Recorder,
        tally: Tally,
        room: DiskRoom,
        *,
        deliveries_max: int,
    ) -> None:
        self._state = state
        self._store = store
        self._catalog = catalog
        # (group, topic) with a queue whose file is damaged. At most one per pair.
        self._stalled: set[tuple[GroupId, TopicId]] = set()
        self._reader = MessageSelector(state, store, tally)
        self._deliveries = DeliveryWriter(state, recorder)
        self.acks = RoundAcks(state, recorder)
        self._first_pops = FirstPops(state, store, catalog, recorder, tally, self.acks)
        self._limits = DeliveryLimits(state, recorder, deliveries_max=deliveries_max)
        self.redelivery = Redelivery(state, store, catalog, recorder, self.acks, tally)
        self._levels = LevelPop(state, store, self._reader, self._stalled, deliver=self._deliver)
        self._ordered = OrderedPop(
            state, self._reader, self._deliveries, self.acks, self.redelivery, tally, recorder
        )
        self._level_turns = LevelTurns(state, self._ordered)
        self.settlement = Settlement(
            state, catalog, recorder, self.acks, self.redelivery, self._limits
        )
        self.renewals = Renewals(state, recorder, tally)
        self.revocations = Revocations(state, self.settlement, tally)
        self.reviver = Reviver(
            state,
            catalog,
            self.redelivery,
            self._ordered,
            self.renewals,
            self.revocations,
            self._limits,
            tally,
            room,
        )
        self._readiness = PopReadiness(
            state,
            catalog,
            store,
            tally,
            is_blocked=self._ordered.is_unavailable,
            settle_acks=self.acks.record,
        )
        self.damaged = DamagedMessages(state, store, self.acks, self.redelivery, self.settlement)

    def pop(
        self,
        group_id: GroupId,
        topic_id: TopicId,
        *,
        max_messages: int,
        invisible_duration_ms: int,
        wanted: MessageFilter,
        attempt_id: str,
        client: ClientKey,
        renews: bool,
        now_ms: int,
        level_min: int = 0,
        priority_factor: int | None = None,
        level_below: int = 0,
    ) -> list[DeliveryBatch]:
        """Take up to `max_messages` and POP_BYTES_MAX for a group and hide them from it.

        Return an empty list if no message is ready, or, for a PRIORITY topic, none of `level_min`
        or higher. A `level_below` leaves out the other levels. A `priority_factor` replaces the
        factor and the credit of the group. Raises TopicNotFound, GroupNotFound, Overloaded. It is
        one function because every receive calls it and its queues share a budget.
        """
        group = self._catalog.groups.get(group_id)
        if group is None:
            raise GroupNotFound("the consumer group was deleted; create it and poll again")
        state = self._state
        subscription = state.subscriptions.get((group_id, topic_id))
        topic = self._catalog.topics.get(topic_id)
        if topic is None:
            raise TopicNotFound("the topic was deleted; query its route again")
        if subscription is None or subscription.version != topic.version:
            subscription = self._first_pops.subscribe(group, topic, now_ms)
        if group.is_paused(now_ms):
            return []
        is_ordered = group.is_ordered
        refusal: Overloaded | None = None
        try:
            room = self._limits.room_for_pop(group, subscription.queues[0], now_ms)
        except Overloaded as error:
            if not is_ordered:
                raise
            # Ended deliveries of an ordered group stay in the table until the next batch of their
            # queue replaces them. That batch needs no room.
            room, refusal = MESSAGES_MAX, error
        subscription.turn += 1
        visible_at_ms = now_ms + invisible_duration_ms
        self._deliveries.client, self._deliveries.renews = client, renews
        missing, taken_bytes = max_messages, 0
        batches: list[DeliveryBatch] = []
        if is_ordered:
            self._ordered.begin_pop(client, now_ms)
        if wanted is not EVERY_MESSAGE:
            self._reader.begin_scan()
        is_locked = False  # Whether another client's batch locks one of the queues.
        has_levels = topic.type is TopicType.PRIORITY
        if has_levels and not is_ordered:
            return self._levels.pop(
                subscription,
                group,
                max_messages=max_messages,
                room=room,
                visible_at_ms=visible_at_ms,
                wanted=wanted,
                now_ms=now_ms,
                level_min=level_min,
                own_factor=priority_factor,
                level_below=level_below,
            )
        sources = self._sources(subscription, is_ordered=is_ordered, now_ms=now_ms)
        if has_levels:
            sources = self._level_turns.order(
                subscription,
                group,
                attempt_id,
                now_ms,
                own_factor=priority_factor,
                level_below=level_below,
            )
        repeated = 0  # queues, the first ones
        if is_ordered and attempt_id:
            # A repeated attempt gets all its batches: they are hidden until their time ends.
            again = [one for one in sources if is_repeated(one, attempt_id)]
            if repeated := len(again):
                sources = again + [one for one in sources if not is_repeated(one, attempt_id)]
        for number, progress in enumerate(sources):
            # A thousand queues may have nothing for this pop, so skipping one must be cheap.
            if is_ordered:
                if refusal is not None and progress.head == NIL:
                    continue
                if self._ordered.is_unavailable(progress, attempt_id, now_ms):
                    is_locked |= progress.head != NIL
                    continue
            elif progress.position >= progress.queue.max_offset:
                continue
            budget = PopBudget(max(missing, 0), taken_bytes=taken_bytes, is_untouched=not batches)
            try:
                if is_ordered:
                    batch = self._ordered.pop(
                        progress, group, budget, visible_at_ms, wanted, attempt_id, now_ms
                    )
                else:
                    batch = self._pop_unordered(
                        progress, group, budget, visible_at_ms, wanted, now_ms
                    )
            except BlockFileDamaged:
                # `resume` wakes polls when the file is mended or rebuilt.
                self._stalled.add((group_id, topic_id))
                continue
            if batch is not None:
                batches.append(batch)
                taken_bytes += batch.size_bytes
                missing -= len(batch.indexes)
                is_full = missing <= 0 or budget.is_alone or len(batches) >= room or has_levels
                if is_full and number + 1 >= repeated:
                    break
        if has_levels and len(batches) > repeated:
            self._level_turns.note_batch(
                subscription, group, batches[-1], has_credit=priority_factor is None
            )
        if refusal is not None and not batches:
            raise refusal
        if is_locked and not batches:
            state.counts["lock_conflict", group_id, topic_id] += 1
        return batches

    def _sources(
        self, subscription: PopSubscription, *, is_ordered: bool, now_ms: int
    ) -> list[PopProgress]:
        """Return the queues of a pop: in rotated order, with the retry topic if it has messages."""
        queues = subscription.queues
        if is_ordered and subscription.retries:
            queues = queues + subscription.retries  # They have replayed dead letters.
        first = subscription.turn % len(queues)
        sources = queues[first:] + queues[:first]
        if not is_ordered:
            # More than one only if the topic had type PRIORITY before.
            for retry in subscription.retries:
                if retry.position < retry.queue.max_offset:
                    is_first = is_retry_first(self._store, subscription.turn, retry, now_ms)
                    sources.insert(0 if is_first else len(sources), retry)
        return sources

    def prepare_pop(self, group_id: GroupId, topic_id: TopicId) -> bool:
        """Prepare a part of the first pop of a wide topic. Return True while more is missing."""
        return self._first_pops.prepare(group_id, topic_id)

    def ready_count(
        self,
        group_id: GroupId,
        topic_id: TopicId,
        *,
        wanted: MessageFilter,
        now_ms: int,
        level_min: int = 0,
    ) -> ReadyMessages:
        """Count the messages that a pop would find. Raises TopicNotFound, GroupNotFound.

        Of a PRIORITY topic, only messages of `level_min` or higher count.
        """
        self._limits.note_poll(group_id, now_ms)
        return self._readiness.count(
            group_id, topic_id, wanted=wanted, now_ms=now_ms, level_min=level_min
        )

    def remaining_count(self, group_id: GroupId, topic_id: TopicId) -> ReadyMessages | None:
        """Count the ready messages of a PRIORITY topic; None for others and ordered groups."""
        return self._readiness.count_remaining(group_id, topic_id)

    def release_lock(self, key: ProgressKey, now_ms: int) -> bool:
        """Release the deliveries that lock an ordered queue. Return False if there are none."""
        progress = self._state.progress.get(key)
        slots = self._ordered.release(progress, now_ms) if progress is not None else []
        self.reviver.queue_released(slots)
        return bool(slots)

    def read_batch(self, batch: DeliveryBatch) -> tuple[DeliveryBatch, list[MessageRecord]]:
        """Return the part of a batch that can be read, with its messages.

        The next round moves damaged messages to the dead-letter topic.
        """
        try:
            return batch, self._read(batch)
        except (LookupError, MessageDamaged):
            # Each message is read once: a second read may find a directory damaged meanwhile.
            return self.damaged.readable_part(batch)

    def _read(self, batch: DeliveryBatch) -> list[MessageRecord]:
        topics, queues = repeat(batch.topic_id), repeat(batch.queue_id)
        offsets = batch.queue_offsets
        return list(map(self._store.message, batch.log_offsets, topics, queues, offsets))

    def resume(self) -> None:
        """Continue with the files and messages that were mended, rebuilt or given up."""
        self._state.ready.update(self._stalled)
        self._stalled.clear()
        self.reviver.resume()
        self.damaged.resume()

    def _pop_unordered(
        self,
        progress: PopProgress,
        group: ConsumerGroup,
        budget: PopBudget,
        visible_at_ms: int,
        wanted: MessageFilter,
        now_ms: int,
    ) -> DeliveryBatch | None:
        if progress.position < progress.queue.min_offset:
            self._reader.skip_expired(progress)
        selection = self._reader.select(progress, budget, wanted)
        if selection is None or not selection.offsets:
            return None
        return self._deliver(progress, group, selection, budget.taken_bytes, visible_at_ms, now_ms)

    def _deliver(
        self,
        progress: PopProgress,
        group: ConsumerGroup,
        selection: MessageSelection,
        size_bytes: int,
        visible_at_ms: int,
        now_ms: int,
    ) -> DeliveryBatch | None:
        """Hide chosen messages. Dead-letter those without an attempt left."""
        batch = self._deliveries.deliver(
            progress, selection, visible_at_ms, now_ms, size_bytes=size_bytes
        )
        if progress.named_topic_id == progress.topic_id:
            return batch
        try:
            attempts = [self._store.place(offset).attempts + 1 for offset in selection.log_offsets]
        except (MessageDamaged, LookupError):
            attempts = [self.redelivery.attempts_at(offset) for offset in selection.log_offsets]
        return self.redelivery.apply_attempt_limit(batch, attempts, progress, group, now_ms)
