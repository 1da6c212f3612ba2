"""An engine in memory for the commands of the link, without a store and without a clock.

It answers like the engine: appends by queue, acks with their three results, deliveries replaced by
change-invisible, dead letters, delayed messages and their cancel, creation by use. Only a call of
the test makes a message available again or delivers a delayed message.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidemill.broker.engine.commands import Sent
from tidemill.broker.engine.layout.config import encode_item
from tidemill.broker.engine.layout.numbers import DeliverySlot, GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import MESSAGES_MAX
from tidemill.broker.engine.message_filter import MATCH, MessageFilter
from tidemill.broker.engine.metadata.catalog import (
    ConfigChanges,
    ConsumerGroup,
    ExponentialRetry,
    Topic,
    TopicType,
)
from tidemill.broker.engine.metadata.membership import Membership
from tidemill.broker.engine.metadata.security_items import SecurityItems, key_of
from tidemill.broker.engine.pop.consumption import AckResult, Delivery, DeliveryBatch
from tidemill.broker.engine.pop.readiness import READY_COUNT_MAX, ReadyMessages
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.transaction.transactions import HalfSender
from tidemill.common.errors import (
    BadRequest,
    Forbidden,
    GroupNotFound,
    InvalidReceiptHandle,
    InvalidTransactionId,
    MessageCorrupted,
    MessageNotFound,
    Overloaded,
    TopicNotFound,
    TransactionNotFound,
)
from tidemill.message import stored_message
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX

SECRET = bytes(range(32))
NOW_MS = 1_790_000_000_123  # the constant time
MIXED = TopicType.MIXED
_RETRY = ExponentialRetry(initial_ms=10_000, max_ms=7_200_000, multiplier=2.0)


@dataclass
class Message:
    """A message with its position."""

    topic_id: int
    queue_id: int
    queue_offset: int
    blob: bytes
    attempts: int = 0
    origin_topic: str = ""


@dataclass
class DeliveredBatch:
    """The messages of one pop from one queue."""

    messages: list[Message]
    state: list[AckResult] = field(default_factory=list)  # result of the next ack, by index


class Record(NamedTuple):
    """A message in the form that replies read."""

    blob: bytes
    stored_at_ms: int
    origin_topic: str


class MemoryCatalog:
    """Topics and groups by name."""

    def __init__(self) -> None:
        self.handle_secret = SECRET
        self.broker_name = "broker-0"
        self.membership = Membership()
        self.security = SecurityItems()
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, ConsumerGroup] = {}
        # The names are the keys, as in the catalog of the engine.
        self.topic_ids, self.group_ids = self.topics, self.groups

    def find_topic(self, name: str) -> Topic | None:
        return self.topics.get(name)

    def find_group(self, name: str) -> ConsumerGroup | None:
        return self.groups.get(name)


class MemoryTimers:
    """Delayed messages by timer id."""

    def __init__(self) -> None:
        self.commands = self
        self.messages: list[Message | None] = []  # None: delivered
        self.cancelled: set[int] = set()

    def cancel(self, timer_id: int, *, topic_id: int, now_ms: int) -> None:
        timer = self.messages[timer_id] if timer_id < len(self.messages) else None
        if timer is None or timer.topic_id != topic_id:
            raise MessageNotFound("no such timer")
        self.cancelled.add(timer_id)


class MemoryTransactions:
    """Half messages by half id."""

    def __init__(self, store: Callable[[int, int, bytes], int]) -> None:
        self._store = store
        self.halves: dict[int, Message] = {}
        self.senders: list[HalfSender] = []
        self.states: dict[int, str] = {}

    def open(self, message: Message, sender: HalfSender) -> int:
        half_id = 1_000 + len(self.states)
        self.halves[half_id], self.states[half_id] = message, "half"
        self.senders.append(sender)
        return half_id

    def commit(self, half_id: int, *, topic_id: int, now_ms: int, firing_ms: int) -> None:
        half = self._find(half_id, topic_id)
        if self._end(half_id, "committed"):
            self._store(half.topic_id, half.queue_id, half.blob)

    def roll_back(self, half_id: int, *, topic_id: int, now_ms: int) -> None:
        self._find(half_id, topic_id)
        self._end(half_id, "rolled back")

    def note_unsure(self, half_id: int, *, topic_id: int) -> None:
        self._find(half_id, topic_id)

    def _find(self, half_id: int, topic_id: int) -> Message:
        half = self.halves.get(half_id)
        if half is None or half.topic_id != topic_id:
            raise TransactionNotFound("no such transaction")
        return half

    def _end(self, half_id: int, state: str) -> bool:
        if self.states[half_id] not in {"half", state}:
            raise InvalidTransactionId(f"the transaction was {self.states[half_id]}")
        is_first, self.states[half_id] = self.states[half_id] == "half", state
        return is_first


class MemoryEngine:
    """The state and the commands that change it."""

    def __init__(self, *, auto_create: bool = True) -> None:
        self.auto_create_topics = self.auto_create_groups = auto_create
        # This object plays all parts that the link calls.
        self.administration = self.commands = self.consumption = self.renewals = self.store = self
        self.state = self.index = self.reported_subscriptions = self.deduplication = self
        self.catalog = MemoryCatalog()
        self.timers = MemoryTimers()
        self.transactions = MemoryTransactions(self.store_message)
        self.tally = Tally()
        self.log: list[Message] = []
        self.refused_queues: set[int] = set()  # reject appends with Overloaded
        self.why_unconfirmed = ""
        self.alive_clients: list[str] = []  # reported ids, in order
        self.ended_clients: list[str] = []
        self.revoked: list[tuple[ClientKey, str, str]] = []  # client, consumer group and topic
        self.disconnected_clients: list[str] = []
        self.subscriptions: list[tuple[int, int]] = []  # ids of reported groups and topics
        self.handed_over_ids: list[int] = []  # delivery ids, in the order of their reports
        self.pops: list[tuple[str, bool]] = []  # client id, and whether it renews
        self._changes = ConfigChanges()
        self._taken: set[tuple[int, int]] = set()  # (group id, position in the log)
        self._deliveries: dict[int, DeliveredBatch] = {}
        self.replacements: dict[Delivery, Delivery] = {}
        self._ids = 0

    # ------------------------------------------------------------ topics and groups

    def has_known_key(self, _topic_id: TopicId, _blob: bytes) -> bool:
        return False  # No topic has dedup keys.

    def prepare_pop(self, _group_id: GroupId, _topic_id: TopicId) -> bool:
        return False

    def put_topic(self, name: str, *, kind: int = MIXED, queues: int = 8) -> Topic:
        topic = self.catalog.topics[name] = Topic(
            id=TopicId(self._new_id()),
            version=1,
            name=name,
            type=kind,  # type: ignore[arg-type]  # also a number that has no name
            queues=queues,
            is_system=name.startswith("%"),
        )
        self._changes.topics[topic.id] = topic
        return topic

    def put_group(self, name: str, *, is_ordered: bool = False) -> ConsumerGroup:
        group = self.catalog.groups[name] = ConsumerGroup(
            id=GroupId(self._new_id()),
            version=1,
            name=name,
            is_ordered=is_ordered,
            exponential=_RETRY,
        )
        self._changes.groups[group.id] = group
        return group

    def put_security_item(self, item: dict[str, Any]) -> None:
        """Put or delete a security item, or set the mode, as the next version."""
        security = self.catalog.security
        security.version += 1
        numbered = {**item, "version": security.version}
        security.apply(numbered)
        self._changes.security_items[key_of(numbered)] = encode_item(numbered)
        self._changes.security_version = security.version

    def delete_topic(self, name: str) -> None:
        self._changes.deleted_topic_ids.add(self.catalog.topics.pop(name).id)

    def delete_group(self, name: str) -> None:
        self._changes.deleted_group_ids.add(self.catalog.groups.pop(name).id)

    def ensure(self, topic: str, group: str, now_ms: int) -> None:
        if topic and topic not in self.catalog.topics:
            self.put_topic(topic)
        if group and group not in self.catalog.groups:
            self.put_group(group)

    def _topic(self, topic_id: int) -> Topic:
        for topic in self.catalog.topics.values():
            if topic.id == topic_id:
                return topic
        raise TopicNotFound("no such topic")

    def _group(self, group_id: int) -> ConsumerGroup:
        for group in self.catalog.groups.values():
            if group.id == group_id:
                return group
        raise GroupNotFound("no such group")

    def take_config_changes(self) -> ConfigChanges:
        changes, self._changes = self._changes, ConfigChanges()
        return changes

    # ------------------------------------------------------------ messages

    def send_unless_repeated(
        self,
        topic_id: int,
        queue_id: int,
        blob: bytes,
        crc: int,
        *,
        now_ms: int,
        firing_ms: int,
        sender: HalfSender | None = None,
        key_version: int = 0,
    ) -> Sent:
        assert not key_version, "its topics have no dedup keys"
        topic = self._topic(topic_id)
        if topic.is_system:
            raise Forbidden("a topic of the broker's own")
        if queue_id >= topic.queues:
            raise BadRequest("no such queue")
        if queue_id in self.refused_queues:
            raise Overloaded("full")
        if zlib.crc32(blob) != crc or not stored_message.is_well_formed(blob):
            raise MessageCorrupted("damaged on its way")
        if sender is not None:
            return self.transactions.open(Message(topic_id, queue_id, 0, blob), sender), 0
        due_at_ms = stored_message.decode(blob).due_at_ms
        if due_at_ms <= firing_ms:
            return self.store_message(topic_id, queue_id, blob), 0
        self.timers.messages.append(Message(topic_id, queue_id, 0, blob))
        return len(self.timers.messages) - 1, due_at_ms

    def find_sent(self, topic_id: int, queue_id: int, blob: bytes) -> int | None:
        for message in self.log:
            if (message.topic_id, message.queue_id, message.blob) == (topic_id, queue_id, blob):
                return message.queue_offset
        return None

    def store_message(
        self, topic_id: int, queue_id: int, blob: bytes, origin_topic: str = ""
    ) -> int:
        queue_offset = sum(
            (message.topic_id, message.queue_id) == (topic_id, queue_id) for message in self.log
        )
        self.log.append(Message(topic_id, queue_id, queue_offset, blob, origin_topic=origin_topic))
        return queue_offset

    def deliver_timer(self, timer_id: int) -> None:
        """Store a delayed message as if its due time had come."""
        timer = self.timers.messages[timer_id]
        assert timer is not None, "delivered before"
        assert timer_id not in self.timers.cancelled
        self.timers.messages[timer_id] = None
        self.store_message(timer.topic_id, timer.queue_id, timer.blob)

    # ------------------------------------------------------------ deliveries

    def note_alive(self, alive: Iterable[ClientKey], *, monotonic_ms: int) -> None:
        self.alive_clients += [client.client_id for client in alive]

    def note(self, group_id: GroupId, topic_id: TopicId) -> None:
        self.subscriptions.append((group_id, topic_id))

    def end_clients(self, clients: Iterable[ClientKey]) -> None:
        self.ended_clients += [client.client_id for client in clients]

    def revoke_deliveries(self, client: ClientKey, *, group: str, topic: str) -> None:
        self.revoked.append((client, group, topic))

    def disconnect_clients(self, clients: Iterable[ClientKey], *, monotonic_ms: int) -> None:
        self.disconnected_clients += [client.client_id for client in clients]

    def begin_handover(self, batches: Iterable[DeliveryBatch]) -> None:
        """Do nothing: deliveries do not expire here."""

    def confirm_handovers(self, deliveries: Iterable[tuple[int, int]], *, now_ms: int) -> None:
        self.handed_over_ids += [delivery_id for _, delivery_id in deliveries]

    def pop(
        self,
        group_id: int,
        topic_id: int,
        *,
        max_messages: int,
        invisible_duration_ms: int,
        wanted: MessageFilter,
        attempt_id: str,
        now_ms: int,
        client: ClientKey = UNKNOWN_CLIENT,  # unused: this engine locks no queue
        renews: bool = False,  # unused: deliveries do not expire here
        level_min: int = 0,  # unused: this engine knows no levels
        priority_factor: int | None = None,  # unused
        level_below: int = 0,  # unused
    ) -> list[DeliveryBatch]:
        if not 1 <= max_messages <= MESSAGES_MAX:
            raise BadRequest("too few or too many messages")
        self.pops.append((client.client_id, renews))
        self._topic(topic_id)
        self._group(group_id)
        by_queue: dict[int, list[int]] = {}
        count = 0
        for position, message in enumerate(self.log):
            if message.topic_id == topic_id and (group_id, position) not in self._taken:
                if wanted.evaluate(message.blob) != MATCH:
                    self._taken.add((group_id, position))  # The group never gets it again.
                    continue
                by_queue.setdefault(message.queue_id, []).append(position)
                count += 1
                if count == max_messages:
                    break
        return [
            self._deliver(group_id, positions, now_ms, now_ms + invisible_duration_ms)
            for positions in by_queue.values()
        ]

    def ready_count(
        self,
        group_id: int,
        topic_id: int,
        *,
        wanted: MessageFilter,
        now_ms: int,
        level_min: int = 0,
    ) -> ReadyMessages:
        assert not level_min, "this engine knows no levels"
        self._topic(topic_id)
        self._group(group_id)
        count = sum(
            message.topic_id == topic_id
            and (group_id, position) not in self._taken
            and wanted.evaluate(message.blob) == MATCH
            for position, message in enumerate(self.log)
        )
        return ReadyMessages(min(count, READY_COUNT_MAX))

    def _deliver(
        self, group_id: int, positions: list[int], now_ms: int, visible_at_ms: int
    ) -> DeliveryBatch:
        messages = [self.log[position] for position in positions]
        for position, message in zip(positions, messages, strict=True):
            self._taken.add((group_id, position))
            message.attempts += 1
        delivery_id = self._new_delivery(messages)
        return DeliveryBatch(
            slot=DeliverySlot(delivery_id),
            delivery_id=LogOffset(delivery_id),
            popped_at_ms=now_ms,
            visible_at_ms=visible_at_ms,
            topic_id=TopicId(0),
            queue_id=QueueId(messages[0].queue_id),
            indexes=range(len(messages)),
            queue_offsets=[message.queue_offset for message in messages],
            delivery_attempts=[message.attempts for message in messages],
            log_offsets=[LogOffset(position) for position in positions],
            size_bytes=sum(len(message.blob) for message in messages),
        )

    def read_batch(self, batch: DeliveryBatch) -> tuple[DeliveryBatch, list[Record]]:
        messages = [self.log[position] for position in batch.log_offsets]
        return batch, [Record(message.blob, NOW_MS, message.origin_topic) for message in messages]

    def ack(self, delivery: Delivery, now_ms: int) -> AckResult:
        delivered = self._deliveries.get(delivery.delivery_id)
        if delivered is None:
            return AckResult.GONE
        result = delivered.state[delivery.message_index]
        if result is AckResult.APPLIED:
            delivered.state[delivery.message_index] = AckResult.ALREADY
        return result

    def forget_deliveries(self) -> None:
        """Forget the states of deliveries, as the engine does after their expiry."""
        self._deliveries.clear()

    def change_invisible(
        self, delivery: Delivery, *, invisible_duration_ms: int, suspend: bool, now_ms: int
    ) -> Delivery:
        message = self._take_back(delivery, AckResult.GONE)
        if suspend:
            message.attempts -= 1
        if not invisible_duration_ms:
            self._taken.discard((delivery.group_id, self.log.index(message)))
        new_id = self._new_delivery([message])
        replacement = self.replacements[delivery] = delivery._replace(
            slot=DeliverySlot(new_id),
            delivery_id=LogOffset(new_id),
            message_index=0,
            visible_at_ms=now_ms + invisible_duration_ms,
        )
        return replacement

    def change_invisible_again(
        self, delivery: Delivery, *, invisible_duration_ms: int, suspend: bool, now_ms: int
    ) -> Delivery:
        return self.replacements.get(delivery) or self.change_invisible(
            delivery, invisible_duration_ms=invisible_duration_ms, suspend=suspend, now_ms=now_ms
        )

    def give_back(self, delivery: Delivery, *, invisible_duration_ms: int, now_ms: int) -> Delivery:
        return self.change_invisible(
            delivery, invisible_duration_ms=invisible_duration_ms, suspend=True, now_ms=now_ms
        )

    def dead_letter(self, delivery: Delivery, now_ms: int) -> None:
        message = self._take_back(delivery, AckResult.ALREADY)
        group, origin = self._group(delivery.group_id), self._topic(delivery.topic_id)
        name = DEAD_LETTER_TOPIC_PREFIX + group.name
        dead = self.catalog.find_topic(name) or self.put_topic(name, queues=1)
        self.store_message(dead.id, 0, message.blob, message.origin_topic or origin.name)

    def dead_letter_again(self, delivery: Delivery, now_ms: int) -> None:
        delivered = self._deliveries.get(delivery.delivery_id)
        if delivered is None or delivered.state[delivery.message_index] is not AckResult.ALREADY:
            self.dead_letter(delivery, now_ms)

    def _take_back(self, delivery: Delivery, later: AckResult) -> Message:
        """End a delivery without an ack; `later` is the result of a later ack."""
        delivered, index = self._deliveries.get(delivery.delivery_id), delivery.message_index
        if delivered is None or delivered.state[index] is not AckResult.APPLIED:
            raise InvalidReceiptHandle("no such delivery")
        delivered.state[index] = later
        return delivered.messages[index]

    def _new_delivery(self, messages: list[Message]) -> int:
        delivery_id = self._new_id()
        self._deliveries[delivery_id] = DeliveredBatch(
            messages, [AckResult.APPLIED] * len(messages)
        )
        return delivery_id

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids
