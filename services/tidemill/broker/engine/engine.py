"""The broker's state machine: the commands of clients, and the round.

Everything here is a plain call of one owner, the round loop, and is told what time it is. A command
decides, and records entries, which the fold applies to the state and puts into the pending round;
nothing that follows from it may leave the process before `committed_offset` has reached the
`log_end` of the moment after the round.

A round of the owner:

    1. the commands of everything that queued up, and `due_slices`; polls that `take_ready` names
       are popped again
    2. `write_slices`: one writev, or several where a round is large
    3. fdatasync of the files that `begin_sync` names, elsewhere; rounds go on meanwhile
    4. `synced`
    5. the answers of all rounds up to there
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import repeat
from typing import TypeAlias, final
from zlib import crc32

# The first `np.unique` would import it, and keep everybody waiting for 50 ms.
import numpy.ma  # noqa: F401  # nobody names it here

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.configuration.administration import Administration
from tidemill.broker.engine.configuration.broker_groups import BrokerGroups
from tidemill.broker.engine.configuration.following import Following
from tidemill.broker.engine.events.event import EventQuery
from tidemill.broker.engine.events.lookup import EventLookup
from tidemill.broker.engine.events.reader import EventRead
from tidemill.broker.engine.events.record_starts import RecordStarts, RecordStartSearch
from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.entry import EpochStart
from tidemill.broker.engine.layout.message import HEAD_BYTES_MAX, MessageEntry
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, QueueOffset, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import ATTEMPT_ID_BYTES_MAX, MESSAGES_MAX
from tidemill.broker.engine.layout.record import HEADER_SIZE
from tidemill.broker.engine.message_store import MessageRecord, MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, ConfigChanges
from tidemill.broker.engine.metadata.quota import Quota
from tidemill.broker.engine.pop.consumption import AckResult, Consumption, Delivery, DeliveryBatch
from tidemill.broker.engine.pop.delivery_table import HANDOVER_PENDING
from tidemill.broker.engine.pop.readiness import ReadyMessages
from tidemill.broker.engine.pop.settlement import RELEASES_RESERVE_PART
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.pop.stated_rows import restarted_deliveries
from tidemill.broker.engine.queries.inspection import Inspection
from tidemill.broker.engine.queries.pull import QueuePull
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.store.message_index import MessageIndex
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.held_segments import HeldSegments
from tidemill.broker.engine.timer.index import open_index
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.broker.engine.timer.timers import Timers
from tidemill.broker.engine.upkeep.archive_gate import ArchiveGate
from tidemill.broker.engine.upkeep.background import Background, Quiet
from tidemill.broker.engine.upkeep.checkpoint import Checkpoints
from tidemill.broker.engine.upkeep.merge import Merges
from tidemill.broker.engine.upkeep.rebuild import Repairs
from tidemill.broker.engine.upkeep.retention import Retention
from tidemill.common.errors import (
    BadRequest,
    DiskFull,
    Forbidden,
    GroupDraining,
    MessageBodyTooLarge,
    MessageCorrupted,
    TooFewInSync,
    TopicNotFound,
)
from tidemill.message import stored_message

__all__ = ["AckResult", "Delivery", "DeliveryBatch", "Engine", "EngineConfig"]

# Below this part of the reserve nothing is popped or copied: acks, and what frees space, go on.
COPY_RESERVE_PART = 4
# Below this one nothing derived is written: a write that fails would end the process.
DERIVED_RESERVE_PART = 32
GATE_ROOM_SEGMENTS = 4  # with room for fewer, retention waits for no archive
MERGED_BYTES_MAX = 128 << 20  # of a derived file, on a disk without a reserve
CLIENT_ID_CHARS_SURE = pop_checkpoint.HOLDER_BYTES_MAX // 4  # a character has up to 4 bytes
REVIVES_A_TURN = 2  # slices: what a busy broker does of it in a round
STATED_A_COMMIT = 16  # records of up to 450 KiB that a start writes together
FALLS_MAX = 16  # starts with a clock that was set back, the newest: others are years ago
ROOM_PERIOD_MS = 1_000  # until it is looked again whether there is room for what waits for it
# What became of a message that was sent: its queue offset and 0; or, when it waits for its time,
# its timer id and when it is due. A plain tuple, since every send makes one.
Sent: TypeAlias = tuple[int, int]
_TYPE_AT, _DELAY = stored_message.MESSAGE_TYPE_AT, stored_message.TYPE_DELAY
_is_well_formed = stored_message.is_well_formed
# Makes a named tuple of a tuple without a call of Python code, for what every message makes.
_tuple = tuple.__new__


@final
class Engine:
    """One broker group's store and consumption. `recovery.open_engine` makes one."""

    def __init__(self, disk: Disk, config: EngineConfig) -> None:
        self.disk = disk
        self.config = config
        self.tally = Tally()
        self.catalog = Catalog()
        self.mappings = Mappings(disk)
        # Whether messages are refused since too few replicas could confirm them.
        self.is_short = False
        self.log = CommitLog(disk, self.mappings, segment_bytes=config.segment_bytes)
        self.store = MessageStore(self.log, self.catalog, MessageIndex(self.tally))
        self.state = PopState(self.catalog, self.tally)
        timer_index = open_index(disk, self.mappings, config.timer, self.log)
        held_segments = HeldSegments(timer_index, self.log, self.catalog)
        self.fold = Fold(self.log, self.catalog, self.store, self.state, timer_index)
        self.consumption = Consumption(
            self.state,
            self.store,
            self.catalog,
            self.fold,
            self.tally,
            deliveries_max=config.deliveries_max,
            may_copy=lambda: self.may_copy,
        )
        self._acks = self.consumption.acks
        self._quiet = Quiet(self.log, self._acks)
        self.checkpoints = Checkpoints(
            disk,
            self.mappings,
            self.store,
            self.catalog,
            self.state,
            self._quiet,
            self.tally,
            log_bytes=config.checkpoint_log_bytes,
            records=config.checkpoint_records,
            deliveries_max=config.deliveries_max,
            segment_bytes=config.segment_bytes,
            has_room=lambda size: self._has_room(size, part=DERIVED_RESERVE_PART),
        )
        self.retention = Retention(
            self.store,
            self.catalog,
            self.state,
            self._acks,
            timer_index,
            held_segments,
            self.fold,
            self.checkpoints,
            self._quiet,
            self._archive_gate(),
            retention_ms=config.retention_ms,
            retention_bytes=config.retention_bytes,
        )
        self.timers = Timers(
            disk,
            config.timer,
            self.log,
            self.store,
            self.catalog,
            timer_index,
            held_segments,
            self.fold,
            self.tally,
            ready=self._make_ready,
            may_append=lambda: not self.is_disk_full,
            may_copy=lambda: self.may_copy,
            is_retirement_near=self.retention.is_near,
        )
        self.repairs = Repairs(
            self.checkpoints,
            self.mappings,
            self.store,
            self.catalog,
            self.state,
            self.tally,
            repaired=self.consumption.resume,
            has_room=lambda size: self._has_room(size, part=COPY_RESERVE_PART),
        )
        self.background = Background(
            self.log,
            self.checkpoints,
            self.timers,
            self.retention,
            self.repairs,
            Merges(
                self.checkpoints,
                self.mappings,
                self.store,
                self.catalog,
                self.tally,
                log_bytes=config.checkpoint_log_bytes,
                files_merged=config.files_merged,
                bytes_max=config.disk_reserve_bytes // 4 or MERGED_BYTES_MAX,
                has_room=lambda size: self._has_room(size, part=1),
            ),
            self._quiet,
            may_prepare=lambda: self.free_bytes >= config.disk_reserve_bytes + config.segment_bytes,
            has_room=lambda: self._has_room(0, part=DERIVED_RESERVE_PART),
        )
        self.inspection = Inspection(
            self.catalog,
            self.store,
            self.state,
            self.tally,
            timer_count_of=lambda topic_id: self.timers.index.counts.pending[topic_id],
        )
        self._event_lookup = EventLookup(self.catalog, self.store, timer_index, self.tally)
        self._event_places = RecordStarts(self.log, self.tally)
        self.administration = Administration(
            self.catalog,
            self.store,
            self.fold,
            self.consumption,
            auto_create=config.auto_create,
            default_queues=config.default_queues,
            check_room=self._check_room,
            inspection=self.inspection,
            quota=Quota(
                topics_max=config.topics_max,
                groups_max=config.groups_max,
                auto_create_per_s=config.auto_create_per_s,
            ),
        )
        self.broker_groups = BrokerGroups(self.catalog, self.administration)
        self.following = Following(
            self.catalog,
            self.administration,
            self.inspection,
            delayed_count=lambda: self.timers.index.pending_count,
            archive_group=config.archive_gate_group,
        )
        self._copy_reserve_bytes = config.disk_reserve_bytes // COPY_RESERVE_PART
        self._free_at_look = 0  # bytes, when it was looked last; and where the log ended then
        self._log_end_at_look = LogOffset(0)
        # Its copy for a retry must fit too, or nobody could ever revive it.
        self._blob_bytes_max = config.segment_bytes - HEADER_SIZE - HEAD_BYTES_MAX
        self._full_from = 0  # log offset from which messages are refused
        # What the recovery took and cut from the end of the log; the shell tells.
        self.opened_in_ms = 0
        self.cut_bytes = 0
        self.last_stored_at_ms = 0  # of what the recovery has read; 0: nothing

    def _archive_gate(self) -> ArchiveGate:
        config = self.config
        # Room for sends while what has been let go is retired, a segment at a time.
        room_bytes_min = max(config.disk_reserve_bytes, GATE_ROOM_SEGMENTS * config.segment_bytes)
        return ArchiveGate(
            self.catalog,
            config.archive_gate_group,
            room_bytes=lambda: self._full_from - self.log.log_end,
            room_bytes_min=room_bytes_min,
        )

    # ------------------------------------------------------------ commands

    def find_sent(self, topic_id: TopicId, queue_id: QueueId, blob: bytes) -> QueueOffset | None:
        """Return where a message stands that may have been sent a moment ago; None: it was not.

        For sends whose first answer was lost. Raises BrokerTimeout where it cannot be told.
        """
        return self.store.find_sent(topic_id, queue_id, blob)

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
    ) -> Sent:
        """Store a message; or, of type DELAY, keep it until it is due.

        That is when it says itself, or `delay_ms` from now; one that is due already is stored.
        Raises TopicNotFound, Forbidden, BadRequest, MessageCorrupted, MessageBodyTooLarge,
        DiskFull, TooFewInSync, GroupDraining; of a message that is to wait IllegalDeliveryTime and
        Overloaded.
        """
        queues = self.catalog.open_queues.get(topic_id)
        if queues is None:
            raise self._no_such_topic(topic_id)
        if self.catalog.is_draining:
            raise self._draining()
        if queue_id >= len(queues):
            raise BadRequest(f"the topic has {len(queues)} queues, and no queue {queue_id}")
        if self.log.log_end > self._full_from:
            raise self._disk_full("messages are refused")
        if self.is_short:
            raise self._too_few()
        if len(blob) > self._blob_bytes_max:
            raise MessageBodyTooLarge(
                f"the message takes {len(blob)} bytes, and with what a copy of it needs at most "
                f"{self._blob_bytes_max} fit into a segment; send a smaller one"
            )
        if crc32(blob) != blob_crc or not _is_well_formed(blob):
            raise MessageCorrupted(
                "the message was damaged on its way to the broker; send it again"
            )
        if blob[_TYPE_AT] == _DELAY:
            timers = self.timers
            due_at_ms = timers.due_of(blob, delay_ms, firing_ms)
            if due_at_ms > firing_ms:
                return timers.schedule(
                    self.catalog.topics[topic_id],
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
        self.fold.append_message(entry, now_ms)
        self.state.ready_topics.add(topic_id)
        return queue_offset, 0

    def _make_ready(self, topic_id: TopicId) -> None:
        # The set is another one after each `take_ready`.
        self.state.ready_topics.add(topic_id)

    @property
    def is_disk_full(self) -> bool:
        """Whether messages are refused for want of space."""
        return self.log.log_end > self._full_from

    @property
    def free_bytes(self) -> int:
        """Room on the disk: what there was when it was looked last, less what was logged since."""
        return self._free_at_look - (self.log.log_end - self._log_end_at_look)

    @property
    def may_copy(self) -> bool:
        """Whether there is room for what the broker writes by itself, and for pops."""
        # As `free_bytes`, without a call: every pop asks.
        free_bytes = self._free_at_look - (self.log.log_end - self._log_end_at_look)
        return free_bytes >= self._copy_reserve_bytes

    def _has_room(self, size: int, *, part: int) -> bool:
        """Whether so much can be written now, and a part of the reserve is left."""
        self.refresh()
        return self.free_bytes - size >= self.config.disk_reserve_bytes // part

    def _check_room(self) -> None:
        """Raise DiskFull when messages are refused."""
        if self.is_disk_full:
            raise self._disk_full("messages are refused")
        if self.is_short:
            raise self._too_few()

    def _too_few(self) -> TooFewInSync:
        return TooFewInSync(
            f"broker group {self.catalog.broker_name} has too few replicas in sync to confirm "
            f"anything; nothing was stored, so repeat when one is back"
        )

    def _no_such_topic(self, topic_id: TopicId) -> TopicNotFound | Forbidden:
        if topic_id in self.catalog.topics:
            return Forbidden("retry and dead-letter topics are written by the broker alone")
        return TopicNotFound("the topic was deleted; query its route again")

    def _draining(self) -> GroupDraining:
        return GroupDraining(
            f"the broker group {self.catalog.broker_name} is draining and takes no new messages; "
            f"send again when it has left"
        )

    def _disk_full(self, consequence: str) -> DiskFull:
        return DiskFull(
            f"{max(self.free_bytes, 0) >> 20} MiB are left on the broker's disk: {consequence} "
            f"until there is room; delete topics, shorten the retention, or enlarge the volume"
        )

    def pop(
        self,
        group_id: GroupId,
        topic_id: TopicId,
        *,
        max_messages: int,
        invisible_duration_ms: int,
        tags: frozenset[str],
        attempt_id: str,
        now_ms: int,
        client_id: str = "",
        renews: bool = False,
    ) -> list[DeliveryBatch]:
        """Take up to `max_messages` for a group and hide them from it; none is an answer.

        `client_id` is who gets them; what `renews` is extended while that client lives.

        Raises BadRequest, TopicNotFound, GroupNotFound, Overloaded, DiskFull.
        """
        if not 1 <= max_messages <= MESSAGES_MAX:
            raise BadRequest(f"a pop takes 1 to {MESSAGES_MAX} messages, not {max_messages}")
        if attempt_id and len(attempt_id.encode()) > ATTEMPT_ID_BYTES_MAX:
            raise BadRequest(f"an attempt id has at most {ATTEMPT_ID_BYTES_MAX} bytes")
        if len(client_id) > CLIENT_ID_CHARS_SURE:
            client_id = pop_checkpoint.cut_client_id(client_id)
        if not self.may_copy:
            raise self._disk_full("even deliveries stop, acks go on,")
        return self.consumption.pop(
            group_id,
            topic_id,
            max_messages=max_messages,
            invisible_duration_ms=invisible_duration_ms,
            tags=tags,
            attempt_id=attempt_id,
            client_id=client_id,
            renews=renews,
            now_ms=now_ms,
        )

    def prepare_pop(self, group_id: GroupId, topic_id: TopicId) -> bool:
        """Do a part of what a first pop would do in one slice; True: call again before it."""
        return self.consumption.prepare_pop(group_id, topic_id)

    def ready_count(
        self, group_id: GroupId, topic_id: TopicId, *, tags: frozenset[str], now_ms: int
    ) -> ReadyMessages:
        """Say how much a pop would find, and take nothing: a hint, right for this moment.

        Raises TopicNotFound, GroupNotFound.
        """
        return self.consumption.ready_count(group_id, topic_id, tags=tags, now_ms=now_ms)

    def read_batch(self, batch: DeliveryBatch) -> list[MessageRecord]:
        """Return the messages of a batch. Raises MessageDamaged, and LookupError, for any of them.

        Then `left_of` says what of it can be read.
        """
        return list(
            map(
                self.store.message,
                batch.log_offsets,
                repeat(batch.topic_id),
                repeat(batch.queue_id),
                batch.queue_offsets,
            )
        )

    def pull(
        self,
        queue: ConsumeQueue,
        from_offset: int,
        *,
        tags: frozenset[str],
        max_messages: int,
        max_bytes: int,
        until_offset: int,
        with_bodies: bool,
    ) -> QueuePull:
        """Begin to read what is committed of a queue; between rounds, as `read_batch`."""
        return QueuePull(
            self.store,
            self.tally,
            queue,
            from_offset,
            tags=tags,
            max_messages=max_messages,
            max_bytes=max_bytes,
            until_offset=until_offset,
            with_bodies=with_bodies,
        )

    def left_of(self, batch: DeliveryBatch) -> DeliveryBatch:
        """Return a batch without what cannot be read; `run_due` dead-letters what is damaged."""
        return self.consumption.damaged.left_of(batch)

    def ack(self, delivery: Delivery, now_ms: int) -> AckResult:
        """Settle one message of a delivery; acks of a round share a record."""
        return self.consumption.settlement.ack(delivery, log_end=self.log.log_end, now_ms=now_ms)

    def change_invisible(
        self, delivery: Delivery, *, invisible_duration_ms: int, suspend: bool, now_ms: int
    ) -> Delivery:
        """Replace a delivery by one with a deadline of its own, as its client asks.

        Raises InvalidReceiptHandle, Overloaded.
        """
        changed = self.consumption.settlement.change_invisible(
            delivery, invisible_duration_ms=invisible_duration_ms, suspend=suspend, now_ms=now_ms
        )
        # Who says something of one message has read the batch.
        self.state.table.handover[delivery.slot] &= ~HANDOVER_PENDING
        return changed

    def give_back(self, delivery: Delivery, *, invisible_duration_ms: int, now_ms: int) -> Delivery:
        """Make a message visible again soon that nobody has got: it was no attempt.

        Whether its client has the rest of the batch stays open. Raises InvalidReceiptHandle,
        Overloaded.
        """
        return self.consumption.settlement.change_invisible(
            delivery, invisible_duration_ms=invisible_duration_ms, suspend=True, now_ms=now_ms
        )

    def release(self, delivery: Delivery, now_ms: int) -> None:
        """Make a message visible now, as an operator asks; its handle is refused from here on.

        Raises InvalidReceiptHandle, Overloaded.
        """
        self.consumption.settlement.change_invisible(
            delivery,
            invisible_duration_ms=0,
            suspend=False,
            now_ms=now_ms,
            reserve_part=RELEASES_RESERVE_PART,
        )
        self.state.counts["given_back_released", delivery.group_id, delivery.topic_id] += 1

    def read_events(
        self,
        query: EventQuery,
        *,
        from_position: int,
        from_index: int = 0,
        until_position: int = 0,
        log_bytes_max: int,
        events_max: int,
    ) -> EventRead:
        """Begin to read what happened, of what is committed by now."""
        return EventRead(
            self.log,
            self.catalog,
            self._event_lookup,
            self.tally,
            query,
            from_position=from_position,
            from_index=from_index,
            until_position=until_position,
            log_bytes_max=log_bytes_max,
            events_max=events_max,
        )

    def find_place(self, position: int) -> RecordStartSearch:
        """Begin to look for the first record that does not begin before a position."""
        return self._event_places.look(position)

    def note_place(self, position: int) -> None:
        """Keep that a record begins at a position which a client is told."""
        self._event_places.note(position)

    def find_records(self, message_id: str) -> Iterator[list[LogOffset]]:
        """Yield where records of a message may stand, in bounded slices."""
        return self.store.index.find(stored_message.key_hash("id", message_id))

    def clients_alive(self, client_ids: Iterable[str], *, monotonic_ms: int) -> None:
        """Note signs of life: what such a client holds and renews is extended."""
        self.consumption.renewals.alive(client_ids, monotonic_ms=monotonic_ms)

    def clients_ended(self, client_ids: Iterable[str]) -> None:
        """Give back what clients hold and renew that have ended; `due_slices` does it."""
        self.consumption.renewals.ended(client_ids, log_end=self.log.log_end)

    def on_their_way(self, batches: Iterable[DeliveryBatch]) -> None:
        """Extend what was popped only when it is `handed_over`: until then nobody may have it."""
        handover = self.state.table.handover
        for batch in batches:
            handover[batch.slot] |= HANDOVER_PENDING

    def handed_over(self, deliveries: Iterable[tuple[int, int]], *, now_ms: int) -> None:
        """Know of deliveries that renew, by slot and identity, that their clients have them."""
        self.consumption.renewals.handed_over(deliveries, now_ms)

    def dead_letter(self, delivery: Delivery, now_ms: int) -> None:
        """Move a delivered message to the dead-letter topic.

        Raises InvalidReceiptHandle, DiskFull, Repairing.
        """
        if not self.may_copy:
            raise self._disk_full("not even dead letters are written, acks go on,")
        self.consumption.settlement.dead_letter(delivery, now_ms=now_ms)

    # ------------------------------------------------------------ the round

    @property
    def log_end(self) -> LogOffset:
        """Where the next record will begin."""
        return self.log.log_end

    @property
    def state_mark(self) -> tuple[int, int]:
        """What differs once anything has changed: what is recorded, and acks that will be."""
        return self.log.log_end, self._acks.gathered_count

    @property
    def committed_offset(self) -> LogOffset:
        """Everything below is durable, at the replicas too: what depends on it may go out."""
        return self.log.committed_offset

    def write_slices(self, now_ms: int) -> Iterator[None]:
        """Hand the pending round to the disk, and yield between slices of it.

        No command may come before its end. Raises DiskFailed, which is final.
        """
        self._acks.record(now_ms)
        return self.log.write_slices()

    def write(self, now_ms: int) -> None:
        """Hand the pending round to the disk in one go. Raises DiskFailed, which is final."""
        for _ in self.write_slices(now_ms):
            pass

    def begin_sync(self) -> tuple[LogOffset, list[File]]:
        """Return up to which log offset a sync of the files beside it makes all durable."""
        return self.log.begin_sync()

    def synced(self, log_offset: LogOffset) -> None:
        """Everything before `log_offset` is durable here.

        Where there are no replicas it is committed by that: what depends on it may go out.
        """
        self.log.note_synced(log_offset)

    def committed(self, log_offset: LogOffset) -> None:
        """Everything before `log_offset` is confirmed by the replicas."""
        self.log.note_committed(log_offset)

    def commit(self, now_ms: int) -> None:
        """Write and sync in one go, for those who have no sync process."""
        self.write(now_ms)
        log_offset, files = self.begin_sync()
        for file in files:
            file.sync()
        self.synced(log_offset)

    def finish(self, now_ms: int) -> None:
        """Write the timers' files after the last round: a stop that spares the next start time."""
        for files in self.timers.finish(now_ms):
            for file in files:
                file.sync()

    def close(self) -> None:
        """Close the files. Nothing is written: a stop and a crash recover alike."""
        self.timers.close()
        self.log.close()

    # ------------------------------------------------------------ time and wake-ups

    def run_due(
        self,
        now_ms: int,
        *,
        firing_ms: int,
        expiry_ms: int | None = None,
        monotonic_ms: int | None = None,
    ) -> bool:
        """Do what `due_slices` does in one go; True: call again soon."""
        slices = self.due_slices(
            now_ms, firing_ms=firing_ms, expiry_ms=expiry_ms, monotonic_ms=monotonic_ms
        )
        while True:
            try:
                next(slices)
            except StopIteration as ended:
                return bool(ended.value)

    def due_slices(
        self,
        now_ms: int,
        *,
        firing_ms: int,
        expiry_ms: int | None = None,
        monotonic_ms: int | None = None,
    ) -> Generator[None, None, bool]:
        """Revive, and deliver, a bounded part of what is due; returns whether more is.

        Yields between slices, and no command may come between them. Deliveries of popped messages
        run out by `expiry_ms` (`now_ms` where that is not given), delayed messages are due by
        `firing_ms`: clocks that wait out a jump of wall time. Clients fall silent by
        `monotonic_ms`.
        """
        self._acks.record(now_ms)
        expiry_ms = now_ms if expiry_ms is None else expiry_ms
        monotonic_ms = now_ms if monotonic_ms is None else monotonic_ms
        has_more = False
        if self.log.damage.take_ended():
            self.consumption.resume()
            self.timers.deliverer.resume(now_ms)
        # Copies wait for room: they would take what acks and retention need to make some.
        if self.may_copy:
            self.consumption.damaged.settle(now_ms)
            for _ in range(REVIVES_A_TURN):
                has_more = self.consumption.revive.run_due(
                    now_ms, expiry_ms=expiry_ms, monotonic_ms=monotonic_ms, log_end=self.log.log_end
                )
                yield
                if not has_more:
                    break
        has_timers = yield from self.timers.due_slices(now_ms, firing_ms=firing_ms)
        return has_timers or has_more

    def next_due_ms(
        self, now_ms: int, *, firing_ms: int, expiry_ms: int | None = None
    ) -> int | None:
        """Return when, by wall time, `run_due` or `take_ready` has something to do; None: never."""
        has_damaged = self.consumption.damaged.is_due and self.may_copy
        if self.state.ready or self.state.ready_topics or has_damaged:
            # Made by a pop for those who wait: it left the rest of a long scan for the next turn.
            return now_ms
        expiry_ms = now_ms if expiry_ms is None else expiry_ms
        revive_ms = self.consumption.revive.next_due_ms()
        if revive_ms is not None:
            revive_ms += now_ms - expiry_ms
            if not self.may_copy:
                revive_ms = max(revive_ms, now_ms + ROOM_PERIOD_MS)
        dues = (revive_ms, self.timers.next_due_ms(now_ms, firing_ms=firing_ms))
        return min((due for due in dues if due is not None), default=None)

    def take_ready(self) -> tuple[set[TopicId], set[tuple[GroupId, TopicId]]]:
        """Return and clear what became available: topic ids, and (group id, topic id) pairs."""
        ready = self.state.ready_topics, self.state.ready
        self.state.ready_topics, self.state.ready = set(), set()
        return ready

    def take_config_changes(self) -> ConfigChanges:
        """Return and clear the topics and groups that were put or deleted."""
        changes, self.catalog.changes = self.catalog.changes, ConfigChanges()
        return changes

    def note_time(self, monotonic_ms: int) -> None:
        """Hear of the time, every few seconds, from a clock that nobody moves."""
        self.store.note_time(monotonic_ms)

    def refresh(self) -> None:
        """Look again how much room the disk has."""
        self._free_at_look, self._log_end_at_look = self.disk.free_bytes(), self.log.log_end
        reserve_bytes = self.config.disk_reserve_bytes
        if reserve_bytes:
            # Where what is in flight grows the snapshot of it does, and has to fit in the end.
            reserve_bytes = max(reserve_bytes, self.checkpoints.snapshot_bytes)
        room = self._free_at_look - reserve_bytes
        self._full_from = self._log_end_at_look + room

    # ------------------------------------------------------------ the beginning

    def take_over(self, secret: bytes, now_ms: int, *, epoch: int | None = None) -> None:
        """Begin to decide: all that is in the log is applied, and nobody else appends to it.

        Makes the first record of this epoch durable, and of a new store its name and `secret`. A
        broker without replicas begins the next epoch by itself; of others the group record says
        which.
        """
        self.refresh()
        self.timers.opening.end_replay(now_ms)
        self.log.epoch = self.log.epoch + 1 if epoch is None else epoch
        fall = self.log.log_end
        self.fold.append(EpochStart(), now_ms)
        if now_ms < self.last_stored_at_ms:
            # Whoever looks for a time has to look on both sides.
            known = [one for one in self.catalog.clock_falls if one > self.log.min_offset]
            item = {"op": "clockBack", "at": [*known, fall][-FALLS_MAX:]}
            self.fold.append(ConfigItem(item), now_ms)
        self._bring_back(now_ms)
        for _ in self.consumption.renewals.begin(now_ms):
            self.commit(now_ms)
        self.consumption.revive.take_over()
        if not self.catalog.handle_secret:
            item = {"op": "broker", "name": self.config.broker_name, "handleSecret": secret.hex()}
            self.fold.append(ConfigItem(item), now_ms)
        self.commit(now_ms)

    def go_on_in(self, epoch: int, now_ms: int) -> None:
        """Go on in a later epoch, whose first record this makes durable; between two rounds."""
        assert self.log.log_end == self.log.written_offset, "no round is pending"
        self.log.epoch = epoch
        self.fold.append(EpochStart(), now_ms)
        self.commit(now_ms)

    def _bring_back(self, now_ms: int) -> None:
        """Record of deliveries that were popped in the future that they begin now."""
        for n, entry in enumerate(restarted_deliveries(self.state, now_ms)):
            if n == 0:
                # First: a start that is cut short between these records leaves the rest to the
                # next one, and nobody may say ALREADY of those that it has brought back.
                item = {"op": "broughtBack", "before": self.log.log_end}
                self.fold.append(ConfigItem(item), now_ms)
            self.fold.append(entry, now_ms)
            if n % STATED_A_COMMIT == STATED_A_COMMIT - 1:
                self.commit(now_ms)
