"""The broker's state machine: every command, every deadline, and all background work.

Everything here is a plain call of one owner, the round loop. A command changes memory at once and
puts records into the pending round; nothing that follows from it may leave the process before
`committed_offset` has reached the `log_end` of the moment after the command.

A round of the owner:

    1. the commands of everything that queued up, and `run_due(now_ms)`; polls that `take_ready`
       names are popped again
    2. `write()`: one writev
    3. fdatasync of `unsynced_files()`, elsewhere
    4. `synced()`
    5. the answers
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.background import run_background
from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.message import Reason, TimerReason
from tidemill.broker.engine.layout.pop_checkpoint import ATTEMPT_ID_BYTES_MAX, MESSAGES_MAX
from tidemill.broker.engine.layout.record import Kind
from tidemill.broker.engine.message_store import MessageRecord, MessageStore, cause_of
from tidemill.broker.engine.metadata.catalog import (
    QUEUES_MAX,
    Catalog,
    ConfigChanges,
    ExponentialRetry,
    Group,
    Topic,
    TopicType,
    topic_item,
)
from tidemill.broker.engine.pop.consumption import AckResult, Batch, Consumption, Delivery
from tidemill.broker.engine.pop.delivery_table import NIL
from tidemill.broker.engine.pop.progress import Progress
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.store.commit_log import CommitLog, Record
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.message_index import MessageIndex
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.broker.engine.timer.status import TIMER_TOPIC, Scheduled
from tidemill.broker.engine.timer.timers import Timers
from tidemill.common.errors import (
    BadRequest,
    Conflict,
    DiskFull,
    Forbidden,
    GroupNotFound,
    IllegalOffset,
    MessageCorrupted,
    TopicNotFound,
)
from tidemill.message import stored_message
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, TIMER_DEAD_LETTER_TOPIC

__all__ = ["AckResult", "Batch", "Delivery", "Engine", "EngineConfig"]

# Below this part of the reserve even pops are refused; acks and revive go on to the end.
POP_RESERVE_PART = 4
TYPES_WITH_ORDER = {TopicType.FIFO, TopicType.MIXED}
MAX_ATTEMPTS_MAX = 1000
RETRY_STEPS_MAX = 100
SPREAD_MS_MAX = 3_600_000  # around this time, not around this day


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What can be chosen about the engine."""

    segment_bytes: int = 128 << 20
    checkpoint_log_bytes: int = 64 << 20  # log between two checkpoints: bounds the replay
    checkpoint_records: int = 250_000  # records between two checkpoints, for small ones
    retention_ms: int = 72 * 3600 * 1000
    retention_bytes: int = 0  # 0: no limit by size
    disk_reserve_bytes: int = 512 << 20  # with less free space sends are refused
    deliveries_max: int = 4_000_000  # live pop checkpoints: 280 MB of memory
    auto_create: bool = False
    default_queues: int = 8
    broker_name: str = "broker-0"  # only used when the store is new
    timer: TimerConfig = field(default_factory=TimerConfig)


class QueueStatus(NamedTuple):
    """Where a queue begins and ends."""

    queue_id: int
    min_offset: int
    max_offset: int


class QueueProgress(NamedTuple):
    """How far a group is in a queue."""

    topic: str
    queue_id: int
    is_retry: bool
    min_offset: int
    max_offset: int
    pop_offset: int
    consumer_offset: int
    ready_count: int
    in_flight_count: int
    oldest_unacked_at_ms: int  # 0: nothing is unacked
    oldest_ready_at_ms: int  # 0: nothing is ready


class FoundMessage(NamedTuple):
    """A message found by id or key, or a copy of it."""

    queue_id: int
    queue_offset: int
    stored_at_ms: int
    log_offset: int
    delivery_attempt: int
    blob: bytes
    stored_topic: str
    group: str
    origin_topic: str
    reason: str


class ResetTarget(NamedTuple):
    """Where a reset goes: exactly one of the four is set."""

    timestamp_ms: int | None = None
    offset: int | None = None
    earliest: bool = False
    latest: bool = False


@final
class Engine:
    """One broker group's store and consumption. `recovery.open_engine` makes one."""

    def __init__(self, disk: Disk, config: EngineConfig) -> None:
        self.disk = disk
        self.config = config
        self.catalog = Catalog()
        self.log = CommitLog(disk, segment_bytes=config.segment_bytes)
        self.index = MessageIndex()
        self.store = MessageStore(self.log, self.catalog, self.index)
        self.state = PopState(self.log, self.catalog)
        self.consumption = Consumption(
            self.state, self.store, self.catalog, deliveries_max=config.deliveries_max
        )
        self.timers = Timers(
            disk,
            config.timer,
            self.log,
            self.store,
            self.catalog,
            ready=self._make_ready,
            may_append=lambda: not self.is_disk_full,
            is_retirement_near=self.is_retirement_near,
        )
        self.free_bytes = disk.free_bytes()
        self.derived_offset = 0  # queue and index files state everything before
        self.records_at_checkpoint = 0
        self.expired_count = 0  # messages that retention took since the start
        self.opened_in_ms = 0  # how long the recovery took; the shell measures it
        self.now_ms = 0

    # ------------------------------------------------------------ commands

    def append(self, topic_id: int, queue_id: int, blob: bytes, blob_crc: int, now_ms: int) -> int:
        """Store a message and return its queue offset.

        Raises TopicNotFound, BadRequest, MessageCorrupted, MessageBodyTooLarge, DiskFull.
        """
        self._check_append(topic_id, queue_id, blob, blob_crc)
        self.now_ms = now_ms
        queue_offset = self.store.append_message(topic_id, queue_id, blob, blob_crc, now_ms)
        self.state.ready_topics.add(topic_id)
        return queue_offset

    def schedule(
        self,
        topic_id: int,
        queue_id: int,
        blob: bytes,
        blob_crc: int,
        now_ms: int,
        *,
        delay_ms: int | None = None,
    ) -> Scheduled:
        """Keep a message until it is due: when it says itself, or `delay_ms` from now.

        One that is due already is stored at once. Raises as `append`, and IllegalDeliveryTime,
        Overloaded.
        """
        self._check_append(topic_id, queue_id, blob, blob_crc)
        self.now_ms = now_ms
        firing_ms = self.timers.firing_time(now_ms)
        due_at_ms = self.timers.due_of(blob, delay_ms, firing_ms)
        if due_at_ms <= firing_ms:
            data, crc = with_due_time(blob, blob_crc, due_at_ms)
            queue_offset = self.store.append_message(topic_id, queue_id, data, crc, now_ms)
            self.state.ready_topics.add(topic_id)
            return Scheduled(queue_offset, 0)
        topic = self.catalog.topics[topic_id]
        return self.timers.schedule(topic, queue_id, blob, blob_crc, now_ms, due_at_ms=due_at_ms)

    def _check_append(self, topic_id: int, queue_id: int, blob: bytes, blob_crc: int) -> None:
        queues = self.catalog.open_queues.get(topic_id)
        if queues is None:
            raise self._no_such_topic(topic_id)
        if queue_id >= len(queues):
            raise BadRequest(f"the topic has {len(queues)} queues, and no queue {queue_id}")
        if self.is_disk_full:
            raise self._disk_full("messages are refused")
        if crc32(blob) != blob_crc or not stored_message.is_well_formed(blob):
            raise MessageCorrupted(
                "the message was damaged on its way to the broker; send it again"
            )

    def _make_ready(self, topic_id: int) -> None:
        # The set is another one after each `take_ready`.
        self.state.ready_topics.add(topic_id)

    @property
    def is_disk_full(self) -> bool:
        """Whether messages are refused for want of space."""
        return self.free_bytes < self.config.disk_reserve_bytes

    def _no_such_topic(self, topic_id: int) -> TopicNotFound | Forbidden:
        if topic_id in self.catalog.topics:
            return Forbidden("retry and dead-letter topics are written by the broker alone")
        return TopicNotFound("the topic was deleted; query its route again")

    def _disk_full(self, consequence: str) -> DiskFull:
        return DiskFull(
            f"{self.free_bytes >> 20} MiB are left on the broker's disk: {consequence} until there "
            f"is room; delete topics, shorten the retention, or enlarge the volume"
        )

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
        """Take up to `max_messages` for a group and hide them from it; none is an answer.

        Raises BadRequest, TopicNotFound, GroupNotFound, Overloaded, DiskFull.
        """
        if not 1 <= max_messages <= MESSAGES_MAX:
            raise BadRequest(f"a pop takes 1 to {MESSAGES_MAX} messages, not {max_messages}")
        if len(attempt_id.encode()) > ATTEMPT_ID_BYTES_MAX:
            raise BadRequest(f"an attempt id has at most {ATTEMPT_ID_BYTES_MAX} bytes")
        if self.free_bytes < self.config.disk_reserve_bytes // POP_RESERVE_PART:
            raise self._disk_full("even deliveries stop, acks go on,")
        self.now_ms = now_ms
        return self.consumption.pop(
            group_id,
            topic_id,
            max_messages=max_messages,
            invisible_duration_ms=invisible_duration_ms,
            tags=tags,
            attempt_id=attempt_id,
            now_ms=now_ms,
        )

    def read_batch(self, batch: Batch) -> list[MessageRecord]:
        """Return the messages of a batch. Raises CorruptStore when one is damaged."""
        return [self.store.message(log_offset) for log_offset in batch.log_offsets]

    def ack(self, delivery: Delivery, now_ms: int) -> AckResult:
        """Settle one message of a delivery; acks of a round share one record."""
        self.now_ms = now_ms
        return self.consumption.settlement.ack(delivery, now_ms)

    def change_invisible(
        self, delivery: Delivery, *, invisible_duration_ms: int, suspend: bool, now_ms: int
    ) -> Delivery:
        """Replace a delivery by one with a deadline of its own. Raises InvalidReceiptHandle."""
        self.now_ms = now_ms
        return self.consumption.settlement.change_invisible(
            delivery, invisible_duration_ms=invisible_duration_ms, suspend=suspend, now_ms=now_ms
        )

    def dead_letter(self, delivery: Delivery, now_ms: int) -> None:
        """Move a delivered message to the dead-letter topic. Raises InvalidReceiptHandle."""
        self.now_ms = now_ms
        self.consumption.settlement.dead_letter(delivery, now_ms=now_ms)

    # ------------------------------------------------------------ configuration

    def ensure(self, topic: str, group: str, now_ms: int) -> None:
        """Create what is missing of a topic and a group, each possibly "", by their first use.

        Raises TopicNotFound, GroupNotFound where that is not allowed.
        """
        if topic.startswith(DEAD_LETTER_TOPIC_PREFIX):
            # A group's dead-letter topic may be watched before the first message gets there.
            group_name = topic.removeprefix(DEAD_LETTER_TOPIC_PREFIX)
            is_known = self.catalog.find_group(group_name) is not None
            if not is_known and topic != TIMER_DEAD_LETTER_TOPIC:
                raise TopicNotFound(f"there is no consumer group to the topic {topic!r}")
            self.now_ms = now_ms
            self.store.ensure_system_topic(topic, None, now_ms)
        is_missing = bool(topic) and self.catalog.find_topic(topic) is None
        if is_missing and not self.config.auto_create:
            raise TopicNotFound(f"there is no topic {topic!r}; create it first")
        if is_missing:
            self.put_topic(topic, type_=None, queues=0, now_ms=now_ms)
        is_missing = bool(group) and self.catalog.find_group(group) is None
        if is_missing and not self.config.auto_create:
            raise GroupNotFound(f"there is no consumer group {group!r}; create it first")
        if is_missing:
            self.put_group(group, now_ms=now_ms)

    def put_topic(
        self,
        name: str,
        *,
        type_: TopicType | None,
        queues: int,
        delivery_spread_ms: int | None = None,
        now_ms: int,
    ) -> Topic:
        """Create or change a topic; None and 0 queues keep what is, or take the defaults.

        Raises Conflict, BadRequest.
        """
        if not 0 <= (delivery_spread_ms or 0) <= SPREAD_MS_MAX:
            raise BadRequest(
                f"deliveries are spread over 0 to {SPREAD_MS_MAX} ms, not {delivery_spread_ms}"
            )
        if not 0 <= queues <= QUEUES_MAX:
            raise BadRequest(f"a topic has 1 to {QUEUES_MAX} queues, not {queues}")
        old = self.catalog.find_topic(name)
        if old is None:
            topic = Topic(
                id=self.catalog.next_id,
                version=1,
                name=name,
                type=type_ or TopicType.MIXED,
                queues=queues or self.config.default_queues,
                delivery_spread_ms=delivery_spread_ms or 0,
            )
        else:
            if old.is_system:
                raise Conflict("retry and dead-letter topics are managed by the broker")
            topic = replace(
                old,
                version=old.version + 1,
                type=type_ or old.type,
                queues=queues or old.queues,
            )
            if delivery_spread_ms is not None:
                topic = replace(topic, delivery_spread_ms=delivery_spread_ms)
            if topic.queues < old.queues:
                raise Conflict(
                    f"topic {name!r} has {old.queues} queues, and messages in them; the number can "
                    f"only grow"
                )
            if topic.queues > old.queues and {old.type, topic.type} & TYPES_WITH_ORDER:
                raise Conflict(
                    "the queues of a topic that takes FIFO messages are fixed at its creation: "
                    "message groups are spread over them by hash, and their order would break"
                )
            if replace(topic, version=old.version) == old:
                return old
        self._put(topic_item(topic), now_ms)
        return topic

    def _put(self, config: dict[str, Any], now_ms: int) -> int:
        self.now_ms = now_ms
        return self.store.append_config(config, now_ms)

    def delete_topic(self, name: str, now_ms: int) -> None:
        """Delete a topic, its messages, and all groups' progress in it. Raises TopicNotFound."""
        topic = self.catalog.find_topic(name)
        if topic is None:
            raise TopicNotFound(f"there is no topic {name!r}")
        if topic.retry_of is not None:
            raise Conflict("a retry topic lives as long as its group and topic")
        if topic.name == TIMER_TOPIC:
            raise Conflict("delayed messages wait on this topic; cancel them one by one")
        self._keep_next_id(now_ms)
        self._put({"op": "deleteTopic", "id": topic.id}, now_ms)
        self.state.forget(topic_id=topic.id)

    def _keep_next_id(self, now_ms: int) -> None:
        # The record that states the highest id may be the one that is deleted.
        self._put({"op": "nextId", "nextId": self.catalog.next_id}, now_ms)

    def put_group(
        self,
        name: str,
        *,
        is_ordered: bool | None = None,
        max_attempts: int = 0,
        exponential: ExponentialRetry | None = None,
        customized_ms: Sequence[int] = (),
        start_from_latest: bool = False,
        now_ms: int,
    ) -> Group:
        """Create or change a consumer group; None, 0 and empty keep what is, or the defaults.

        Raises Conflict, BadRequest.
        """
        _check_retry(max_attempts, exponential, customized_ms)
        old = self.catalog.find_group(name)
        if old is not None and is_ordered is not None and is_ordered != old.is_ordered:
            raise Conflict(
                f"group {name!r} has its delivery order for life; delete it and create it again"
            )
        group = old or Group(
            id=self.catalog.next_id,
            version=0,
            name=name,
            is_ordered=bool(is_ordered),
            start_from_latest=start_from_latest,
        )
        group = replace(group, max_attempts=max_attempts or group.max_attempts)
        if exponential is not None:
            group = replace(group, exponential=exponential)
        elif customized_ms:
            group = replace(group, exponential=None, customized_ms=tuple(customized_ms))
        if old == group:
            return group
        group = replace(group, version=group.version + 1)
        self._put({"op": "group", "group": asdict(group)}, now_ms)
        return group

    def delete_group(self, name: str, now_ms: int) -> None:
        """Delete a group and its progress; its dead letters stay. Raises GroupNotFound."""
        group = self.catalog.find_group(name)
        if group is None:
            raise GroupNotFound(f"there is no consumer group {name!r}")
        self._keep_next_id(now_ms)
        self._put({"op": "deleteGroup", "id": group.id}, now_ms)
        self.state.forget(group_id=group.id)

    def reset_offset(
        self, group_name: str, topic_name: str, target: ResetTarget, now_ms: int
    ) -> list[QueueStatus]:
        """Set where a group goes on in a topic; deliveries and retries before it are void.

        Raises TopicNotFound, GroupNotFound, IllegalOffset. Returns the new offsets as max_offset.
        """
        group = self.catalog.find_group(group_name)
        topic = self.catalog.find_topic(topic_name)
        if group is None:
            raise GroupNotFound(f"there is no consumer group {group_name!r}")
        if topic is None:
            raise TopicNotFound(f"there is no topic {topic_name!r}")
        queues = self.catalog.queues_of(topic)
        offsets = [[topic.id, queue.queue_id, self._resolve(queue, target)] for queue in queues]
        answer = [
            QueueStatus(queue.queue_id, queue.min_offset, offset)
            for queue, (_, _, offset) in zip(queues, offsets, strict=True)
        ]
        retry_id = self.catalog.retry_topic_ids.get((group.id, topic.id))
        if retry_id is not None:
            offsets.append([retry_id, 0, self.catalog.queue(retry_id, 0).max_offset])
        config = {"op": "reset", "group_id": group.id, "offsets": offsets}
        self.now_ms = now_ms
        if self.state.has_unflushed_acks:
            self.state.flush_acks(now_ms)
        log_offset = self.store.append_reset(config, now_ms)
        self.state.apply_reset(config, log_offset)
        return answer

    def _resolve(self, queue: ConsumeQueue, target: ResetTarget) -> int:
        if target.earliest:
            return queue.min_offset
        if target.latest:
            return queue.max_offset
        if target.timestamp_ms is not None:
            return queue.offset_at(target.timestamp_ms, self.store.stored_at_ms)
        assert target.offset is not None, "a reset has a target"
        if target.offset < 0:
            raise IllegalOffset(f"an offset is 0 or more, not {target.offset}")
        return min(max(target.offset, queue.min_offset), queue.max_offset)

    # ------------------------------------------------------------ reading

    @property
    def broker_name(self) -> str:
        """The name under which this broker group is known."""
        return self.catalog.broker_name

    @property
    def handle_secret(self) -> bytes:
        """The key of receipt handles, 32 bytes."""
        return self.catalog.handle_secret

    def queue_status(self, topic: Topic) -> list[QueueStatus]:
        """Return where each queue of a topic begins and ends."""
        return [
            QueueStatus(queue.queue_id, queue.min_offset, queue.max_offset)
            for queue in self.catalog.queues_of(topic)
        ]

    def group_progress(self, group: Group) -> list[QueueProgress]:
        """Return how far a group is in each queue of the topics it reads, retries included."""
        topic_ids = {key[1] for key in self.state.progress if key[0] == group.id}
        return [
            self.queue_progress(self.state.progress_of(group.id, topic_id, queue_id))
            for topic_id in sorted(topic_ids)
            for queue_id in range(self.catalog.topics[topic_id].queues)
        ]

    def queue_progress(self, progress: Progress) -> QueueProgress:
        """Return how far a group is in one queue."""
        queue = progress.queue
        name = self.catalog.topics[progress.named_topic_id].name
        # What an ordered group did not ack in time waits in its place for the next pop.
        expired = self.state.expired_ordered_count(progress)
        is_retry = progress.named_topic_id != progress.topic_id
        ready_at = 0
        if progress.ready_count > 0:
            ready_at = self._entry_stored_at(queue, max(progress.pop_offset, queue.min_offset))
        unacked_at = ready_at
        if progress.head != NIL:
            oldest = self.state.table.starts[progress.head]
            unacked_at = self._entry_stored_at(queue, oldest) or ready_at
        return QueueProgress(
            name,
            queue.queue_id,
            is_retry,
            queue.min_offset,
            queue.max_offset,
            progress.pop_offset,
            self.state.consumer_offset(progress),
            max(progress.ready_count, 0) + expired,
            progress.in_flight - expired,
            unacked_at,
            ready_at,
        )

    def _entry_stored_at(self, queue: ConsumeQueue, offset: int) -> int:
        if offset < queue.min_offset:
            return 0
        return self.store.stored_at_ms(queue.entry(offset)[0])

    def find(
        self, topic: Topic, *, message_id: str = "", key: str = "", max_messages: int = 32
    ) -> list[FoundMessage]:
        """Find messages of a topic, and their copies, by id or by key, newest first."""
        kind, text = ("id", message_id) if message_id else ("key", key)
        found: list[FoundMessage] = []
        for log_offset in self.index.find(stored_message.key_hash(kind, text)):
            if len(found) == max_messages:
                break
            if log_offset < self.log.min_offset:
                continue
            candidate = self._describe(log_offset)
            is_it = candidate is not None and topic.name in (
                candidate.stored_topic,
                candidate.origin_topic,
            )
            if candidate is not None and is_it and _has_key(candidate.blob, message_id, key):
                found.append(candidate)
        return found

    def _describe(self, log_offset: int) -> FoundMessage | None:
        found = self.store.record(log_offset)
        place = message.Place._make(message.PLACE.unpack_from(found.body))
        stored_topic = self.catalog.topics.get(place.topic_id)
        if stored_topic is None:
            return None
        origin, reason = _origin_of(found)
        cause = cause_of(found)
        group = self.catalog.groups.get(cause.group_id) if cause else None
        return FoundMessage(
            place.queue_id,
            place.queue_offset,
            found.header.stored_at_ms,
            log_offset,
            place.attempts + 1,
            bytes(found.tail),
            stored_topic.name,
            group.name if group else "",
            origin,
            reason,
        )

    # ------------------------------------------------------------ the round

    @property
    def log_end(self) -> int:
        """Where the next record will begin."""
        return self.log.log_end

    @property
    def committed_offset(self) -> int:
        """Everything below is durable."""
        return self.log.committed_offset

    @property
    def has_pending(self) -> bool:
        """Whether `write` has anything to do."""
        return self.log.log_end > self.log.committed_offset or self.state.has_unflushed

    def write(self) -> None:
        """Hand the pending round to the disk. Raises DiskFailed, which is final."""
        self.state.flush_acks(self.now_ms)
        self.log.write()

    def unsynced_files(self) -> list[File]:
        """Return the files to sync before `synced` may be called."""
        return self.log.unsynced_files()

    def synced(self) -> None:
        """All that was written is durable: answers may go out."""
        self.log.synced()

    def commit(self) -> None:
        """Write and sync in one go, for those who have no sync process."""
        self.write()
        for file in self.unsynced_files():
            file.sync()
        self.synced()

    def finish(self) -> None:
        """Write the timers' files after the last round: a stop that spares the next start time."""
        for files in self.timers.finish(self.now_ms):
            for file in files:
                file.sync()

    def close(self) -> None:
        """Close the files. Nothing is written: a stop and a crash recover alike."""
        self.timers.close()
        self.log.close()

    # ------------------------------------------------------------ time and wake-ups

    def next_due_ms(self) -> int | None:
        """Return when `run_due` or `take_ready` has something to do next, None: never."""
        if self.state.ready or self.state.ready_topics:
            # Made by a pop for those who wait: it left the rest of a long scan for the next turn.
            return self.now_ms
        return _earlier(self.consumption.revive.next_due_ms(), self.timers.next_due_ms())

    def run_due(self, now_ms: int, firing_ms: int | None = None) -> bool:
        """Revive, and deliver, one bounded slice of what is due; True: call again soon.

        `firing_ms` is by which time delayed messages are due; without it `now_ms`.
        """
        self.now_ms = now_ms
        has_more = self.consumption.revive.run_due(now_ms)
        return self.timers.run_due(now_ms, now_ms if firing_ms is None else firing_ms) or has_more

    def next_background_ms(self) -> int | None:
        """Return when background work is due by the clock, None: not before something happens."""
        return self.timers.next_background_ms()

    def take_ready(self) -> tuple[set[int], set[tuple[int, int]]]:
        """Return and clear what became available: topic ids, and (group id, topic id) pairs."""
        ready = self.state.ready_topics, self.state.ready
        self.state.ready_topics, self.state.ready = set(), set()
        return ready

    def take_config_changes(self) -> ConfigChanges:
        """Return and clear the topics and groups that were put or deleted."""
        changes, self.catalog.changes = self.catalog.changes, ConfigChanges()
        return changes

    def background(self) -> Iterator[list[File] | None]:
        """Prepare segments, write checkpoints, retire old segments; endless.

        To be advanced between rounds, after `synced`. Yields after each short slice: files to sync
        (fsync) before the next step, an empty list to give way, or None when nothing is to be done.
        """
        return run_background(self)

    @property
    def wants_background(self) -> bool:
        """Whether background work is due by the clock alone."""
        return self.timers.wants_background(self.now_ms)

    def is_retirement_near(self, now_ms: int, lead_ms: int) -> bool:
        """Whether the oldest segment will have to go within `lead_ms`, timers aside."""
        log, config = self.log, self.config
        if len(log.segments) < 2 or log.committed_offset <= log.segments[1].start:
            return False
        # What follows it was stored at that time, so everything in it is at least as old.
        if log.first_stored_at_ms(1) + config.retention_ms - lead_ms <= now_ms:
            return True
        # Messages that wait for their time are not what a limit by size is there to bound.
        size = log.log_end - log.min_offset - self.timers.index.counts.pinned_bytes
        return 0 < config.retention_bytes < size

    def refresh(self, now_ms: int) -> None:
        """Look again how much room the disk has, and what time it is for retention."""
        self.now_ms = max(self.now_ms, now_ms)
        self.free_bytes = self.disk.free_bytes()

    # ------------------------------------------------------------ recovery

    def begin_epoch(self, secret: bytes, now_ms: int) -> None:
        """Append the first record of this life of the broker, and in its first life its name."""
        self.now_ms = now_ms
        self.log.append(Kind.EPOCH_START, b"", now_ms)
        if not self.catalog.handle_secret:
            name = self.config.broker_name
            self._put({"op": "broker", "name": name, "handleSecret": secret.hex()}, now_ms)

    def drop_unknown_queues(self) -> None:
        """Forget queues of topics that a replay has met and that do not exist."""
        for key in [key for key in self.catalog.queues if key[0] not in self.catalog.topics]:
            del self.catalog.queues[key]


def _origin_of(found: Record) -> tuple[str, str]:
    """Return the topic that a copy came from or waits for, and why it is one; "" for neither."""
    flags = found.header.flags
    if flags & message.FLAG_SCHEDULE:
        return message.decode_target(found.body).origin, "scheduled"
    if flags & message.FLAG_TIMER:
        timer_cause = message.decode_timer_cause(found.body)
        return timer_cause.origin, TimerReason(timer_cause.reason).name.lower()
    cause = cause_of(found)
    return (cause.origin, Reason(cause.reason).name.lower()) if cause else ("", "")


def _earlier(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def _has_key(blob: bytes, message_id: str, key: str) -> bool:
    if message_id:
        return stored_message.message_id_of(blob) == message_id
    return stored_message.has_key(blob, key)


def _check_retry(
    max_attempts: int, exponential: ExponentialRetry | None, customized_ms: Sequence[int]
) -> None:
    if not 0 <= max_attempts <= MAX_ATTEMPTS_MAX:
        raise BadRequest(f"a group has 1 to {MAX_ATTEMPTS_MAX} attempts, not {max_attempts}")
    if exponential is not None and not (
        0 < exponential.initial_ms <= exponential.max_ms and exponential.multiplier >= 1
    ):
        raise BadRequest(
            "exponential retry needs 0 < initialMs <= maxMs and a multiplier of at least 1"
        )
    if len(customized_ms) > RETRY_STEPS_MAX or any(step <= 0 for step in customized_ms):
        raise BadRequest(f"customized retry has 1 to {RETRY_STEPS_MAX} steps, each over 0 ms")
