"""The commands of clients: send, pop, ack, change, give back, dead-letter, renew.

A command checks its arguments and decides. It records its decision as one entry, which the fold
applies to the state and adds to the pending round. The caller may answer when `committed_offset`
has reached the log end of that round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias, final
from zlib import crc32

from tidemill.broker.engine.dedup.deduplication import Deduplication, KeyedSend, RepeatedSend
from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.dedup import DedupKey
from tidemill.broker.engine.layout.message import HEAD_BYTES_MAX, MessageEntry
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import ATTEMPT_ID_BYTES_MAX, MESSAGES_MAX
from tidemill.broker.engine.layout.record import HEADER_SIZE
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.priority import FACTOR_MAX
from tidemill.broker.engine.pop.consumption import AckResult, Consumption, Delivery, DeliveryBatch
from tidemill.broker.engine.pop.delivery_table import HANDOVER_PENDING
from tidemill.broker.engine.pop.repeated_requests import RepeatedRequests
from tidemill.broker.engine.pop.revocations import Scope
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.timer.delayed_messages import DelayedMessages
from tidemill.broker.engine.timer.patch import due_time, with_due_time
from tidemill.broker.engine.transaction.transactions import HalfSender, Transactions
from tidemill.common.errors import (
    BadRequest,
    Forbidden,
    GroupDraining,
    MessageBodyTooLarge,
    MessageCorrupted,
    TooFewInSync,
    TopicNotFound,
)
from tidemill.message import stored_message
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey

# A client id with at most this many characters is never cut: a character has up to 4 bytes.
CLIENT_ID_CHARS_SURE: Final = pop_checkpoint.HOLDER_BYTES_MAX // 4
# The outcome of a send: the queue offset and 0, or of a delayed message its timer id and due time.
# A plain tuple, since every send makes one.
Sent: TypeAlias = tuple[int, int]
_TYPE_AT, _DELAY = stored_message.MESSAGE_TYPE_AT, stored_message.TYPE_DELAY
_TRANSACTION = stored_message.TYPE_TRANSACTION
_is_well_formed = stored_message.is_well_formed
_FIFO = stored_message.TYPE_FIFO  # the higher types are those with more than one record
# Makes a named tuple of a tuple without a call of Python code: every message makes one.
_tuple = tuple.__new__


@final
class Commands:
    """The commands of clients, for one engine.

    It is one class, because all commands check the same topics, room and state.
    """

    def __init__(
        self,
        log: CommitLog,
        catalog: Catalog,
        state: PopState,
        fold: Fold,
        consumption: Consumption,
        timers: DelayedMessages,
        transactions: Transactions,
        deduplication: Deduplication,
        room: DiskRoom,
        *,
        segment_bytes: int,
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._state = state
        self._fold = fold
        self._consumption = consumption
        self._settlement = consumption.settlement
        self._repeated = RepeatedRequests(state, log)
        self._timers = timers
        self._transactions = transactions
        self._deduplication = deduplication
        self._key_tables = deduplication.tables.tables
        self._room = room
        # The copy for a retry must fit into a segment, too. Otherwise no revive could make it.
        self._blob_bytes_max = segment_bytes - HEADER_SIZE - HEAD_BYTES_MAX
        # Whether too few replicas are in sync to confirm a message. Replication sets it.
        self.why_unconfirmed = ""  # Why no message can be confirmed; empty if one can.

    # ------------------------------------------------------------ send

    def send(
        self,
        topic_id: TopicId,
        queue_id: QueueId,
        blob: bytes,
        blob_crc: int,
        *,
        now_ms: int,
        firing_ms: int,
        delay_ms: int | None = None,
        sender: HalfSender | None = None,
        key_version: int = 0,
    ) -> Sent:
        """Store a message. Keep a message of type DELAY until its due time.

        The due time is `delay_ms` from now, or the one in the message. A message that is already
        due is stored at once. A message of type TRANSACTION needs its `sender`, and becomes a half
        message; the result is its half id and 0. On a topic with deduplication, the time of the
        round must be noted before (`Deduplication.note_time`). `key_version` is that of
        `Deduplication.admit`.

        Raises RepeatedSend if nothing is stored, because the message repeats a dedup key.
        Raises TopicNotFound, Forbidden, BadRequest, MessageCorrupted, MessageBodyTooLarge,
        DiskFull, TooFewInSync, GroupDraining; for a delayed message also IllegalDeliveryTime and
        Overloaded; for a message with a dedup key also Overloaded and KeyOwnerChanged.
        """
        sent = self.send_unless_repeated(
            topic_id,
            queue_id,
            blob,
            blob_crc,
            now_ms=now_ms,
            firing_ms=firing_ms,
            delay_ms=delay_ms,
            sender=sender,
            key_version=key_version,
        )
        if isinstance(sent, RepeatedSend):
            raise sent
        return sent

    def send_unless_repeated(
        self,
        topic_id: TopicId,
        queue_id: QueueId,
        blob: bytes,
        blob_crc: int,
        *,
        now_ms: int,
        firing_ms: int,
        delay_ms: int | None = None,
        sender: HalfSender | None = None,
        key_version: int = 0,
    ) -> Sent | RepeatedSend:
        """Do as `send`, but return RepeatedSend: frames may have many repeats.

        It is one function because every send passes here.
        """
        queues = self._catalog.open_queues.get(topic_id)
        if queues is None:
            raise self._no_such_topic(topic_id)
        if self._catalog.is_draining and not self._deduplication.has_known_key(topic_id, blob):
            raise self._draining()
        if queue_id >= len(queues):
            raise BadRequest(f"the topic has {len(queues)} queues, and no queue {queue_id}")
        if self._log.log_end > self._room.send_limit or self.why_unconfirmed:
            self.check_sends()
        if len(blob) > self._blob_bytes_max:
            raise self._too_large(blob)
        if crc32(blob) != blob_crc or not _is_well_formed(blob):
            raise _damaged()
        if topic_id in self._key_tables:
            topic = self._catalog.topics[topic_id]
            keyed = self._deduplication.admit(
                topic, blob, firing_ms=firing_ms, key_version=key_version
            )
            if isinstance(keyed, DedupKey) and blob[_TYPE_AT] <= _FIFO:
                queue_offset = queues[queue_id].max_offset
                self._fold.append_keyed(
                    topic_id, queue_id, queue_offset, keyed, blob, blob_crc, now_ms
                )
                self._state.ready_topics.add(topic_id)
                return queue_offset, 0
            if isinstance(keyed, RepeatedSend):
                return keyed
            if keyed is not None:
                return self._send_keyed(
                    topic,
                    queue_id,
                    blob,
                    blob_crc,
                    KeyedSend(keyed) if isinstance(keyed, DedupKey) else keyed,
                    now_ms=now_ms,
                    firing_ms=firing_ms,
                    delay_ms=delay_ms,
                    sender=sender,
                )
        kind = blob[_TYPE_AT]
        if kind > _FIFO and kind == _TRANSACTION:
            topic = self._catalog.topics[topic_id]
            return self._send_half(topic, queue_id, blob, blob_crc, sender, now_ms, firing_ms)
        if kind == _DELAY:
            timers = self._timers
            due_at_ms = timers.commands.due_of(blob, delay_ms, firing_ms)
            if due_at_ms > firing_ms:
                return timers.commands.schedule(
                    self._catalog.topics[topic_id],
                    queue_id,
                    blob,
                    blob_crc,
                    due_at_ms=due_at_ms,
                    now_ms=now_ms,
                    firing_ms=firing_ms,
                )
            data, blob_crc = with_due_time(blob, blob_crc, due_at_ms)
        else:
            data = blob
        queue_offset = queues[queue_id].max_offset
        entry = _tuple(MessageEntry, (topic_id, queue_id, 0, queue_offset, 0, None, data, blob_crc))
        self._fold.append_message(entry, now_ms)
        self._state.ready_topics.add(topic_id)
        return queue_offset, 0

    def _send_keyed(
        self,
        topic: Topic,
        queue_id: QueueId,
        blob: bytes,
        blob_crc: int,
        keyed: KeyedSend,
        *,
        now_ms: int,
        firing_ms: int,
        delay_ms: int | None,
        sender: HalfSender | None,
    ) -> Sent:
        """Store a message with its dedup key. Raises as `send`."""
        kind, key = blob[_TYPE_AT], keyed.key
        if kind == _TRANSACTION:
            return self._send_half(
                topic, queue_id, blob, blob_crc, sender, now_ms, firing_ms, key=key
            )
        timers, due_at_ms = self._timers.commands, firing_ms
        if kind == _DELAY:
            due_at_ms = timers.due_of(blob, delay_ms, firing_ms)
            if keyed.due_max_ms is not None:
                due_at_ms = min(due_at_ms, keyed.due_max_ms)
        if keyed.replaced is not None:
            return timers.replace(
                keyed.replaced,
                topic,
                queue_id,
                blob,
                blob_crc,
                due_at_ms=min(due_at_ms, keyed.due_max_ms or due_at_ms),
                key=key,
                now_ms=now_ms,
                firing_ms=firing_ms,
            )
        if due_at_ms > firing_ms:
            return timers.schedule(
                topic,
                queue_id,
                blob,
                blob_crc,
                due_at_ms=due_at_ms,
                due_max_ms=keyed.due_max_ms,
                now_ms=now_ms,
                firing_ms=firing_ms,
                key=key,
            )
        data: bytes | memoryview = blob
        if kind == _DELAY:
            data, blob_crc = with_due_time(blob, blob_crc, due_at_ms)
        queue_offset = self._catalog.queues[topic.id, queue_id].max_offset
        self._fold.append_keyed(topic.id, queue_id, queue_offset, key, data, blob_crc, now_ms)
        self._state.ready_topics.add(topic.id)
        return queue_offset, 0

    def _send_half(
        self,
        topic: Topic,
        queue_id: QueueId,
        blob: bytes,
        blob_crc: int,
        sender: HalfSender | None,
        now_ms: int,
        firing_ms: int,
        *,
        key: DedupKey | None = None,
    ) -> Sent:
        if sender is None:
            raise BadRequest("a transactional message is sent as a half message")
        if due_time(blob):
            self._timers.commands.due_of(blob, None, firing_ms)
        half_id = self._transactions.send_half(
            topic, queue_id, blob, blob_crc, sender, key=key, now_ms=now_ms
        )
        return half_id, 0

    def check_first(
        self, blob: bytes, blob_crc: int, *, firing_ms: int, delay_ms: int | None
    ) -> None:
        """Check a message before its topic is created. Raises as `send`."""
        self.check_sends()
        if len(blob) > self._blob_bytes_max:
            raise self._too_large(blob)
        if crc32(blob) != blob_crc or not _is_well_formed(blob):
            raise _damaged()
        if blob[_TYPE_AT] == _DELAY or (blob[_TYPE_AT] == _TRANSACTION and due_time(blob)):
            self._timers.commands.due_of(blob, delay_ms, firing_ms)

    def _too_large(self, blob: bytes) -> MessageBodyTooLarge:
        return MessageBodyTooLarge(
            f"the message has {len(blob)} bytes; at most {self._blob_bytes_max} fit into a "
            f"segment together with the fields of a copy; send a smaller message"
        )

    def check_sends(self) -> None:
        """Raise DiskFull or TooFewInSync if the broker accepts no messages at present."""
        if self._room.is_full:
            raise self._room.sends_rejected()
        if self.why_unconfirmed:
            raise TooFewInSync.of(self._catalog.broker_name, self.why_unconfirmed)

    def _no_such_topic(self, topic_id: TopicId) -> TopicNotFound | Forbidden:
        if topic_id in self._catalog.topics:
            return Forbidden("only the broker writes to retry and dead-letter topics")
        return TopicNotFound("the topic was deleted; query its route again")

    def _draining(self) -> GroupDraining:
        return GroupDraining(
            f"the broker group {self._catalog.broker_name} is draining and accepts no messages; "
            f"send again when it has left the cluster"
        )

    # ------------------------------------------------------------ pop

    def pop(
        self,
        group_id: GroupId,
        topic_id: TopicId,
        *,
        max_messages: int,
        invisible_duration_ms: int,
        attempt_id: str,
        now_ms: int,
        wanted: MessageFilter = EVERY_MESSAGE,
        client: ClientKey = UNKNOWN_CLIENT,
        renews: bool = False,
        level_min: int = 0,
        priority_factor: int | None = None,
        level_below: int = 0,
    ) -> list[DeliveryBatch]:
        """Deliver up to `max_messages` to a client of a group and hide them from the group.

        An empty list is a normal answer. If `renews`, the broker extends the deliveries while the
        client lives. Of a PRIORITY topic, deliver nothing if no message of `level_min` or higher is
        ready, and deliver only messages below `level_below` (0: all). A `priority_factor` replaces
        the factor and the credit of the group.

        Raises BadRequest, TopicNotFound, GroupNotFound, Overloaded, DiskFull.
        """
        if not 1 <= max_messages <= MESSAGES_MAX:
            raise BadRequest(f"a pop takes 1 to {MESSAGES_MAX} messages, not {max_messages}")
        if priority_factor is not None and priority_factor > FACTOR_MAX:
            raise BadRequest(f"a priority factor is 0 to {FACTOR_MAX}, not {priority_factor}")
        if attempt_id and len(attempt_id.encode()) > ATTEMPT_ID_BYTES_MAX:
            raise BadRequest(f"an attempt id has at most {ATTEMPT_ID_BYTES_MAX} bytes")
        if len(client.client_id) > CLIENT_ID_CHARS_SURE:
            client = pop_checkpoint.cut_client(client)
        if not self._room.may_copy:
            raise self._room.copies_rejected("stops deliveries, but not acks,")
        return self._consumption.pop(
            group_id,
            topic_id,
            max_messages=max_messages,
            invisible_duration_ms=invisible_duration_ms,
            wanted=wanted,
            attempt_id=attempt_id,
            client=client,
            renews=renews,
            now_ms=now_ms,
            level_min=level_min,
            priority_factor=priority_factor,
            level_below=level_below,
        )

    def begin_handover(self, batches: Iterable[DeliveryBatch]) -> None:
        """Extend renewing deliveries only after the client has read them."""
        handover = self._state.table.handover
        for batch in batches:
            handover[batch.slot] |= HANDOVER_PENDING

    def end_clients(self, clients: Iterable[ClientKey]) -> None:
        """Give back the renewing deliveries of clients that have ended; `due_slices` does it."""
        self._consumption.renewals.note_ended(clients, log_end=self._log.log_end)

    def revoke_deliveries(self, client: ClientKey, *, group: str, topic: str) -> None:
        """Give back the deliveries of a client that has lost a right; `due_slices` does it.

        An empty name stands for all consumer groups or all topics. Deliveries of unknown names do
        not exist.
        """
        catalog = self._catalog
        group_id = catalog.group_ids.get(group) if group else None
        topic_id = catalog.topic_ids.get(topic) if topic else None
        if (group and group_id is None) or (topic and topic_id is None):
            return
        self._consumption.revocations.note(
            client, Scope(group_id, topic_id), log_end=self._log.log_end
        )

    def disconnect_clients(self, clients: Iterable[ClientKey], *, monotonic_ms: int) -> None:
        """Stop the renewals of clients without a connection; `due_slices` does it."""
        self._consumption.renewals.note_disconnected(
            clients, monotonic_ms=monotonic_ms, log_end=self._log.log_end
        )

    # ------------------------------------------------------------ settle

    def ack(self, delivery: Delivery, now_ms: int) -> AckResult:
        """Settle one message of a delivery. All acks of a CK in a round share a record."""
        return self._settlement.ack(delivery, log_end=self._log.log_end, now_ms=now_ms)

    def change_invisible(
        self, delivery: Delivery, *, invisible_duration_ms: int, suspend: bool, now_ms: int
    ) -> Delivery:
        """Replace a delivery by one with its own deadline, as its client asks.

        Raises InvalidReceiptHandle, Overloaded.
        """
        changed = self._settlement.change_invisible(
            delivery, invisible_duration_ms=invisible_duration_ms, suspend=suspend, now_ms=now_ms
        )
        # A client that changes one message has read the whole batch.
        self._state.table.handover[delivery.slot] &= ~HANDOVER_PENDING
        return changed

    def change_invisible_again(
        self, delivery: Delivery, *, invisible_duration_ms: int, suspend: bool, now_ms: int
    ) -> Delivery:
        """Change a delivery unless an earlier request has; return the new delivery either way.

        Raises as `change_invisible`.
        """
        done = self._repeated.find_replacement(delivery)
        if done is not None:
            return done
        return self.change_invisible(
            delivery, invisible_duration_ms=invisible_duration_ms, suspend=suspend, now_ms=now_ms
        )

    def dead_letter_again(self, delivery: Delivery, now_ms: int) -> None:
        """Move a message to the dead-letter topic unless an earlier request has settled it.

        Raises as `dead_letter`.
        """
        log_end = self._log.log_end
        if not self._settlement.is_settled(delivery, log_end=log_end, now_ms=now_ms):
            self.dead_letter(delivery, now_ms)

    def give_back(self, delivery: Delivery, *, invisible_duration_ms: int, now_ms: int) -> Delivery:
        """Make a message that no client has read visible again soon. This attempt does not count.

        The client may have read the other messages of the batch. Raises InvalidReceiptHandle,
        Overloaded.
        """
        return self._settlement.change_invisible(
            delivery, invisible_duration_ms=invisible_duration_ms, suspend=True, now_ms=now_ms
        )

    def release(self, delivery: Delivery, now_ms: int) -> None:
        """Make a message visible now, as an operator asks, and invalidate its handle.

        Raises InvalidReceiptHandle, Overloaded.
        """
        self._settlement.change_invisible(
            delivery, invisible_duration_ms=0, suspend=False, now_ms=now_ms, by_operator=True
        )
        self._state.counts["given_back_released", delivery.group_id, delivery.topic_id] += 1

    def dead_letter(self, delivery: Delivery, now_ms: int) -> None:
        """Move a delivered message to the dead-letter topic.

        Raises InvalidReceiptHandle, DiskFull, Repairing.
        """
        if not self._room.may_copy:
            raise self._room.copies_rejected("writes no dead letters, but accepts acks,")
        self._settlement.dead_letter(delivery, now_ms=now_ms)


def _damaged() -> MessageCorrupted:
    return MessageCorrupted("the message was damaged on its way to the broker; send it again")
