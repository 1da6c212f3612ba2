"""The log of an engine as the replicas of its group see it, and what a replica does with it.

    append(frame)    from the master: written at once, synced beside
    confirm(offset)  the group has it: a replica applies it, slice by slice; a master lets go what
                     waits for it
    begin_epoch      this replica is the master now: what is left is applied, and it decides

A replica applies what is confirmed and no more, so that a tail which its master does not have was
never in memory, in a derived file or in a snapshot: cutting the log is all there is to do.

Small writes happen in place (ADR 0040). After a crash what `StoreLog` has saved is read back; how
far the log is confirmed may be known too low, and never too high.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, final

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout import store_identity
from tidemill.broker.engine.layout.durable_mark import NO_BOOT_ID
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.truncate_intent import LogCut
from tidemill.broker.engine.pop.catch_up import CatchUp
from tidemill.broker.engine.recovery import RecoveryReport, open_damaged, open_replica
from tidemill.broker.engine.replication.epoch_journal import Journal
from tidemill.broker.engine.replication.known_end import KnownEnd
from tidemill.broker.engine.replication.messages import Data, Digest
from tidemill.broker.engine.replication.store_log import (
    FOLDER,
    StoreLog,
    end_intent,
    find_confirm,
    find_cut,
    find_intent,
    make_state,
    refuse_forgotten,
)
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.log_opening import LogOpening
from tidemill.broker.engine.store.segment import CorruptStore, LogDamaged

IDENTITY: Final = f"{FOLDER}/store"
# A sync of a small file in place takes as long as one of so much of the log.
SAVED_BYTES: Final = 1 << 20
# What is this near to the end of the log is new: as much as may be under way to a replica.
LATELY_BYTES: Final = 16 << 20
# Of a log that is cut, for people: more than a master takes while nothing is confirmed. Where there
# are more so many are told.
COUNTED_RECORDS_MAX: Final = 100_000
# A replica takes frames down to this part of the reserve: less than its master may need for acks
# and deliveries when it refuses messages, and more than derived files leave alone.
FRAMES_RESERVE_PART: Final = 16
# And down to so much in any case: a checkpoint, a snapshot, and the segment that they make room in.
FRAMES_LEFT_BYTES: Final = 8 << 20
# Applied in one slice: 7 us each.
RECORDS_A_SLICE: Final = 200


class MustBeEmptied(Exception):
    """The replica has what its master has not, or too little: all goes, and it begins again."""

    def __init__(self, log_min: int) -> None:
        super().__init__(f"the log is copied again from {log_min} on")
        self.log_min = log_min


class Identity(NamedTuple):
    """What opening a replica needs to know of chance, once in a store's life."""

    store_uuid: bytes
    secret: bytes  # of receipt handles, used when the group is founded by this replica


def open_group_log(
    disk: Disk,
    config: EngineConfig,
    *,
    now_ms: int,
    fresh: Identity,
    boot_id: bytes = NO_BOOT_ID,
    cuts_damage: bool = False,
) -> tuple[GroupLog, RecoveryReport]:
    """Open the store of a replica, or make one. Raises CorruptStore.

    `boot_id` names this run of the machine: what was written in it no power cut has taken.
    `cuts_damage`: nobody has what is damaged, so the log is cut there, and is doubtful.
    """
    store_uuid = _identify(disk, fresh.store_uuid)
    known_end = KnownEnd(disk, boot_id)

    def finish_cut(opening: LogOpening) -> None:
        cut = find_intent(disk)
        if cut is not None:
            opening.repeat_cut(cut.offset)
            end_intent(disk)

    if cuts_damage:
        known_end.accept_loss()
    proofs = known_end.proofs(confirmed=0 if cuts_damage else find_confirm(disk))
    engine, report = open_replica(disk, config, now_ms=now_ms, proofs=proofs, before=finish_cut)
    known_end.note_opened(engine.log.log_end)
    return GroupLog(engine, store_uuid, fresh.secret, now_ms, known_end), report


def doubt(disk: Disk) -> None:
    """Note, durably, that this log may lack what was acked: before it does."""
    KnownEnd(disk, NO_BOOT_ID).mark_doubtful()


def open_damaged_log(disk: Disk, config: EngineConfig) -> tuple[CommitLog, int]:
    """Open the log of a replica that does not start, to be mended; and how far it is confirmed."""
    return open_damaged(disk, config, confirmed=find_confirm(disk))


def _identify(disk: Disk, fresh_uuid: bytes) -> bytes:
    data = disk.read(IDENTITY)
    known = store_identity.find(data)
    if known is None and data is not None:
        raise CorruptStore(
            f"{IDENTITY} is damaged, so it is unknown whether this store is the one that the"
            f" broker group knows. It does not start. Empty its data directory; it is then copied"
            f" again."
        )
    if known is not None:
        refuse_forgotten(disk)
    else:
        make_state(disk)
        # Beside it, and renamed: what was torn is no damage.
        temporary = f"{IDENTITY}.new"
        file = disk.open(temporary, create=disk.read(temporary) is None)
        file.write_at(0, [store_identity.encode(fresh_uuid)])
        file.sync()
        file.close()
        disk.rename(temporary, IDENTITY)
    # An earlier process may have made names here, and not have come to this.
    disk.folder(FOLDER).sync()
    return known or fresh_uuid


@final
class GroupLog:
    """A `ReplicatedLog` on an engine."""

    def __init__(
        self, engine: Engine, store_uuid: bytes, secret: bytes, now_ms: int, known_end: KnownEnd
    ) -> None:
        self.engine = engine
        self.known_end = known_end
        self._is_mark_due = self._is_confirm_due = False
        self.store_uuid = store_uuid
        self.now_ms = now_ms  # of the wall, as its owner has said last
        self.is_master = False
        # Told that more is confirmed: what waits for it may go, or a replica is to apply it.
        self.on_confirmed: Callable[[], None] = lambda: None
        self._log = engine.log
        self._secret = secret
        self._stored = StoreLog(
            engine.disk, engine.log, begin=self._begin_epoch, confirmed=self._confirmed
        )
        if not engine.log.segments:
            self._stored.save_confirm()  # Of what was here before it says nothing any more.
        self._saved_confirm = self._stored.confirm_offset
        # What was applied was confirmed, whatever was saved since.
        applied = int(engine.log.folded_offset)
        self._stored.confirm_offset = max(self._stored.confirm_offset, applied)
        # The last, also of an earlier life: controllers may not have heard of it before its end.
        self.cut: LogCut | None = find_cut(engine.disk)
        # Met in what a replica was to be sent, or to be compared with.
        self.damage = ""
        self._is_full = False  # too full for more of the log, when somebody has looked last
        self._floor: tuple[int, int] | None = None  # until what is stated again is applied
        engine.room.measure()
        # How much of what is not new may be sent before somebody says more; None: any.
        self.old_bytes_left: int | None = None
        self.is_old_held = False  # some of it waits for that
        # A replica without a snapshot has caught up when it has applied all before this offset;
        # None: its master has not said yet.
        self.catch_up_to: int | None = None

    # ------------------------------------------------------------ facts

    @property
    def log_min(self) -> int:
        """Where the log begins."""
        return self._log.min_offset if self._log.segments else self._log.log_end

    @property
    def log_end(self) -> int:
        """Where the log ends."""
        return self._log.log_end

    @property
    def durable_offset(self) -> int:
        """Up to where it is durable here."""
        return self._log.durable_offset

    @property
    def confirm_offset(self) -> int:
        """Up to where it is known here to be confirmed."""
        return self._stored.confirm_offset

    @property
    def applied_offset(self) -> int:
        """Up to where memory is the fold of the log."""
        return self._log.folded_offset

    @property
    def epoch_seen(self) -> int:
        """The highest epoch of its group that this store has heard of.

        A broker that was alone had epochs of its own, which say nothing of a group: it begins one
        with the next epoch, and is not taken for a replica of a group whose record was lost.
        """
        seen = self._stored.epoch_seen
        return max(seen, self._log.epoch) if seen and self._log.segments else seen

    @property
    def epoch_alone(self) -> int:
        """The last epoch of a broker that was alone until now, above which its group begins."""
        return self._log.epoch if self._log.segments and not self._stored.epoch_seen else 0

    @property
    def journal(self) -> Journal:
        """The journal that was saved last."""
        return self._stored.journal

    def save_epoch_seen(self, epoch: int) -> None:
        """Make durable that an epoch exists."""
        self._stored.save_epoch_seen(epoch)

    def save_journal(self, journal: Journal) -> None:
        """Make a journal durable."""
        self._stored.save_journal(journal)

    def note_confirm(self) -> bool:
        """Let the next sync note how far the log is confirmed, where that has moved a good deal.

        A start tells by it damage from a tail that was torn.
        """
        if self.confirm_offset - self._saved_confirm >= SAVED_BYTES:
            self._saved_confirm = self.confirm_offset
            self._is_confirm_due = True
        return self._is_confirm_due

    def note_durable(self) -> bool:
        """Let the next sync note how far the log is durable; whether there is anything to note."""
        self._is_mark_due = self.known_end.is_behind(self.durable_offset)
        return self._is_mark_due

    def files_beside(self) -> list[File]:
        """Return what is to be synced together with the log; the call before has been synced."""
        self.known_end.note_synced()
        self._stored.note_synced()
        files = []
        if self._is_mark_due:
            files.append(self.known_end.write(self.durable_offset))
        if self._is_confirm_due:
            files.append(self._stored.write_confirm())
        self._is_mark_due = self._is_confirm_due = False
        return files

    def close(self) -> None:
        """Note how far the log is durable, when nothing is synced any more."""
        self.known_end.note_synced()
        self._stored.note_synced()
        if self.known_end.is_behind(self.durable_offset):
            self.known_end.write(self.durable_offset).sync()
            self.known_end.note_synced()

    @property
    def is_clean(self) -> bool:
        """Whether this log has all that any earlier run of this replica has acked."""
        return not self.known_end.is_doubtful

    # ------------------------------------------------------------ a master's log

    def begin_epoch(self, epoch: int) -> int:
        """Apply what is left, decide from now on, and return where EPOCH_START ends."""
        return self._stored.begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> int:
        engine, log = self.engine, self._log
        self.known_end.note_led_epoch(epoch)
        if self.is_master:
            begin = log.log_end
            engine.begin_epoch(epoch, self.now_ms)
        else:
            for _ in self._apply(log.log_end):
                pass
            self._end_catch_up()
            log.applied_offset = None
            self.is_master = True
            begin = log.log_end
            engine.take_over(self._secret, self.now_ms, epoch=epoch)
        found = log.record_at(LogOffset(self._start_of_record(begin)))
        return found.log_offset + found.header.size

    def _start_of_record(self, offset: int) -> int:
        """Return where the record stands that was appended at `offset`: a pad may be before it."""
        segment = self._log.segment_of(LogOffset(offset))
        pad_at = segment.pad_at
        return segment.end if pad_at is not None and segment.start + pad_at == offset else offset

    @property
    def is_between_rounds(self) -> bool:
        """Whether a master has written all that it has recorded."""
        return self._log.log_end == self._log.written_offset

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        """Return whole records of one segment; None: not written yet, or not to be sent yet.

        None too where they are damaged: whoever needs them from here waits for another master, and
        `damage` says so.
        """
        is_old = offset < self._log.log_end - LATELY_BYTES
        if is_old and self.old_bytes_left is not None:
            if self.old_bytes_left <= 0:
                self.is_old_held = True
                return None
            size_max = min(size_max, self.old_bytes_left)
        try:
            frame = self._stored.frame_at(offset, size_max)
        except LogDamaged as error:
            self._log.damage.request(error.log_offset, error.end)
            self.damage = str(error)
            return None
        self.damage = ""
        if is_old and frame is not None and self.old_bytes_left is not None:
            self.old_bytes_left -= len(frame.data)
        return frame

    def confirmed_frame_at(self, offset: int, size_max: int) -> memoryview:
        """Return whole records that are confirmed, for a replica whose own are damaged (ADR 0047).

        Each was checked just now. Empty where there are none.
        """
        log, end = self._log, self.confirm_offset
        if not self.log_min <= offset < end:
            return memoryview(b"")
        try:
            found = log.frame_at(LogOffset(offset), size_max, anew=True)
        except LogDamaged as error:
            log.damage.request(error.log_offset, error.end)
            return memoryview(b"")
        return memoryview(b"") if found is None else found[0][: end - offset]

    def digest(self, low: int, end: int) -> Digest | None:
        """Return the checksum of the last records before `end`; None, and `damage`: it has none."""
        try:
            return self._stored.digest(low, end)
        except LogDamaged as error:
            self._log.damage.request(error.log_offset, error.end)
            self.damage = str(error)
            return None

    # ------------------------------------------------------------ a replica's log

    def has_room_for(self, size: int) -> bool:
        """Whether so much may be appended; who was full begins again with twice the room.

        A write that fails ends the process, and the next one has no more room: so a replica stops
        before, and still applies, and gives up what its master has given up.
        """
        engine = self.engine
        least = max(engine.config.disk_reserve_bytes // FRAMES_RESERVE_PART, FRAMES_LEFT_BYTES)
        least = size + (2 * least if self._is_full else least)
        if engine.room.free_bytes < least:
            engine.room.measure()
        self._is_full = engine.room.free_bytes < least
        return not self._is_full

    def append(self, frame: Data) -> None:
        """Write what a master has sent."""
        self._stored.append(frame)

    def truncate(self, cut: int) -> None:
        """Take away all from `cut` on, durably, whole or not at all.

        Raises MustBeEmptied where an unclean election takes away what was applied.
        """
        found = self._what_is_cut(cut)
        if cut < self._log.folded_offset:
            # What its master has not: the next life of the store tells of it.
            self._stored.note_cut(found)
            raise MustBeEmptied(0)
        self.cut = found
        self.known_end.note_cut(cut)
        self._stored.truncate(found)

    def _what_is_cut(self, cut: int) -> LogCut:
        """Return what goes, for people to read: what is damaged of it is not counted."""
        end, records = self._log.log_end, 0
        with contextlib.suppress(CorruptStore):
            for _ in itertools.islice(self._log.records_from(cut, end), COUNTED_RECORDS_MAX):
                records += 1
        confirmed_bytes = max(min(self.confirm_offset, end) - cut, 0)
        return LogCut(
            offset=cut,
            epoch=self.epoch_seen,
            size_bytes=end - cut,
            records=records,
            confirmed_bytes=confirmed_bytes,
        )

    def start_at(self, log_min: int) -> None:
        """Begin an empty log; raise MustBeEmptied where there is one already."""
        if self._log.segments:
            raise MustBeEmptied(log_min)
        self.known_end.note_emptied()
        self._log.begin_at(LogOffset(log_min))
        self._log.applied_offset = LogOffset(log_min)
        self._stored.confirm_offset = log_min
        self._stored.save_confirm()
        if log_min:
            self.engine.state.catch_up = CatchUp(self.engine.state)

    def confirm(self, offset: int) -> None:
        """Hear that all before `offset` is confirmed."""
        self._stored.confirm(offset)

    def _confirmed(self, offset: int) -> None:
        if self.is_master:
            self.engine.log.note_committed(LogOffset(offset))
        self.on_confirmed()

    def follow_floor(self, log_min: int, confirm: int) -> None:
        """Hear where the master's log begins; what it has stated again stands before `confirm`.

        That may be a little ahead of what is applied here, and of a busy master always is.
        """
        if self.is_master:
            return
        if self._floor is None:
            self._floor = log_min, confirm
        may_go_before, stated_before = self._floor
        if self._log.folded_offset >= stated_before:
            self.engine.retention.may_go_before = may_go_before
            self._floor = None

    # ------------------------------------------------------------ applying

    @property
    def is_behind(self) -> bool:
        """Whether something is confirmed that a replica has not applied."""
        is_damaged = self._log.damage.is_requested(self._log.folded_offset)
        return (
            not self.is_master and self._log.folded_offset < self._may_apply_to and not is_damaged
        )

    @property
    def _may_apply_to(self) -> int:
        # What is not durable here may be gone after a power cut, and derived files must not know
        # more than the log.
        return min(self._stored.confirm_offset, self._log.durable_offset)

    def apply_slices(self) -> Iterator[None]:
        """Apply what is confirmed, and yield between slices; ends when this is the master."""
        while self.is_behind:
            try:
                yield from self._apply(self._may_apply_to)
            except LogDamaged as error:
                if not self._log.damage.request(error.log_offset, error.end):
                    raise
        if not self.is_master:
            if self.catch_up_to is not None and self._log.folded_offset >= self.catch_up_to:
                self._end_catch_up()
            self._follow_time()

    def _apply(self, end: int) -> Iterator[None]:
        """Apply the records before `end`: every one, or the log is damaged."""
        engine, log = self.engine, self._log
        begin = log.folded_offset
        for count, found in enumerate(log.records_from(begin, end), 1):
            # It was yielded: this replica may have become the master, and have applied it all.
            if log.applied_offset is None:
                return
            engine.fold.apply(found)
            log.epoch = max(log.epoch, found.header.epoch)
            log.record_count += 1
            # Whoever takes over with a clock that is behind it notes so.
            engine.last_stored_at_ms = found.header.stored_at_ms
            log.applied_offset = LogOffset(found.log_offset + found.header.size)
            if self.catch_up_to is not None and log.applied_offset >= self.catch_up_to:
                self._end_catch_up()
            if count % RECORDS_A_SLICE == 0:
                log.note_committed(log.applied_offset)
                yield
        if log.applied_offset is not None:
            log.applied_offset = LogOffset(end)  # Behind a pad, where one is the last.
            log.note_committed(log.applied_offset)
            if self.catch_up_to is not None and end >= self.catch_up_to:
                self._end_catch_up()

    def catch_up_at_latest(self, log_end: int) -> None:
        """Hear where the master's log ends: what is stated in it is known by then."""
        if not self.is_master:
            self.catch_up_to = log_end

    def _end_catch_up(self) -> None:
        self.catch_up_to = None
        if self.engine.state.catch_up is not None:
            self.engine.state.catch_up.finish(now_ms=self.now_ms)

    def _follow_time(self) -> None:
        engine = self.engine
        if engine.state.catch_up is None:
            engine.timers.index.link_gathered()
            engine.consumption.reviver.remove_due(self.now_ms)
        engine.take_ready()
        engine.take_config_changes()
