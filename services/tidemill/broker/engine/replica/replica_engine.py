"""The engine of a replica: its log, and the application of records.

    append(frame)    a frame of the master: written at once, synced in the background
    confirm(offset)  the group has the log up to `offset`: a replica applies it in slices; a master
                     releases the effects that wait for it
    begin_epoch      this replica becomes the master: it applies the whole log, and decides

A replica applies confirmed records only. A tail that its master does not have was therefore never
in memory, in a derived file or in a snapshot. Cutting the log is enough to remove it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Final, final

from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.fold import StateBehindGap
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.truncate_intent import LogCut
from tidemill.broker.engine.pop.catch_up import CatchUp
from tidemill.broker.engine.replica.log_frames import LogFrames
from tidemill.broker.engine.replica.replica_files import ReplicaFiles, end_cut, find_cut
from tidemill.broker.engine.replication.epoch_journal import Journal
from tidemill.broker.engine.replication.messages import Data, Digest
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.segment import CorruptStore, LogDamaged
from tidemill.broker.engine.store.whole_records import records_between

# The report of a cut counts at most this many records. A master writes fewer without confirmation.
COUNTED_RECORDS_MAX: Final = 100_000
# A replica accepts frames down to this part of the reserve: less than its master may need for acks
# and deliveries when it rejects sends, and more than derived files leave free.
FRAMES_RESERVE_PART: Final = 16
# And in any case down to this many bytes: a checkpoint, a snapshot, and the segment that they free.
FRAMES_LEFT_BYTES: Final = 8 << 20
RECORDS_A_SLICE: Final = 200  # applied; 7 us each


class MustBeEmptied(Exception):
    """The log differs from the master's, or ends before it begins, or before its state floor.

    The replica copies it again.
    """

    def __init__(self, log_min: int) -> None:
        super().__init__(f"the log is copied again from {log_min} on")
        self.log_min = log_min


@final
class ReplicaEngine:
    """The log and the engine of one replica; a `ReplicatedLog`.

    It is one class, because its methods read and move the same offsets of the log.
    """

    def __init__(self, engine: Engine, files: ReplicaFiles, secret: bytes, now_ms: int) -> None:
        self.engine = engine
        self.files = files
        self.frames = LogFrames(engine.log)
        self.now_ms = now_ms  # wall time, set by the owner
        self.is_master = False
        # Called when the confirm offset has moved: effects may be released, or records applied.
        self.on_confirmed: Callable[[], None] = lambda: None
        self._log = engine.log
        self._secret = secret
        self.confirm_offset = min(files.confirm_offset, engine.log.log_end)
        if not engine.log.segments:
            # The log is new, so the saved offset belongs to an earlier log.
            files.save_confirm(self._durable_confirm)
        files.requested_confirm = self.confirm_offset
        # Invariant: applied records were confirmed, even if the saved offset is lower.
        self.confirm_offset = max(self.confirm_offset, int(engine.log.folded_offset))
        # The last cut, also of an earlier process: the controllers may not know it.
        self.cut: LogCut | None = find_cut(engine.disk)
        self._is_full = False  # the last check has found no room for frames
        # The begin of the master's log, and the offset before which dropped state is restated.
        self._floor: tuple[int, int] | None = None
        engine.room.measure()
        # A replica without a snapshot has caught up when it has applied the log before this offset;
        # None: its master has not sent it yet.
        self.catch_up_to: int | None = None

    # ------------------------------------------------------------ facts

    @property
    def log_min(self) -> int:
        """The begin of the log."""
        return self._log.min_offset if self._log.segments else self._log.log_end

    @property
    def log_end(self) -> int:
        """The end of the log."""
        return self._log.log_end

    @property
    def state_floor(self) -> int:
        """The state floor."""
        return self._log.state_floor

    @property
    def durable_offset(self) -> int:
        """The end of the log that is durable here."""
        return self._log.durable_offset

    @property
    def applied_offset(self) -> int:
        """The end of the applied log: memory contains the fold up to there."""
        return self._log.folded_offset

    @property
    def _durable_confirm(self) -> int:
        # Other replicas may have records that are not durable here. Without this bound, losing
        # them in a power cut would look like damage.
        return min(self.confirm_offset, self.durable_offset)

    @property
    def epoch_seen(self) -> int:
        """The highest epoch of its broker group that this store knows.

        The epochs of a broker without replicas say nothing about a group, also if its store was
        started as a replica and met the group's master. Such a log has no journal. A broker that
        begins a group does so with the next epoch.
        """
        seen = self.files.epoch_seen
        is_of_group = seen and self.files.journal and self._log.segments
        return max(seen, self._log.epoch) if is_of_group else seen

    @property
    def epoch_alone(self) -> int:
        """The last epoch of a broker that had no replicas until now; its group begins above it."""
        return self._log.epoch if self._log.segments and not self.files.epoch_seen else 0

    @property
    def journal(self) -> Journal:
        """The journal that was saved last."""
        return self.files.journal

    def save_epoch_seen(self, epoch: int) -> None:
        """Make durable that an epoch exists."""
        self.files.save_epoch_seen(epoch, confirm_offset=self._durable_confirm)

    def save_journal(self, journal: Journal) -> None:
        """Make a journal durable."""
        self.files.save_journal(journal, confirm_offset=self._durable_confirm)

    def begin_sync(self) -> list[File]:
        """Return the files to sync together with the log. The files of the last call are synced."""
        return self.files.begin_sync(
            confirm_offset=self._durable_confirm, durable_offset=self.durable_offset
        )

    # ------------------------------------------------------------ the log of a master

    def begin_epoch(self, epoch: int) -> int:
        """Apply the whole log, decide from now on, and return where EPOCH_START ends."""
        engine, log = self.engine, self._log
        self.files.known_end.note_led_epoch(epoch)
        if self.is_master:
            begin = log.log_end
            engine.begin_epoch(epoch, self.now_ms)
        else:
            try:
                for _ in self._apply(log.log_end):
                    pass
            except MustBeEmptied as error:
                # The group needs this log: nothing else may have it.
                raise CorruptStore(f"the log cannot be applied: {error.__cause__}") from error
            self._end_catch_up()
            log.applied_offset = None
            self.is_master = True
            begin = log.log_end
            engine.take_over(self._secret, self.now_ms, epoch=epoch)
        found = log.record_at(LogOffset(self._start_of_record(begin)))
        return found.log_offset + found.header.size

    def _start_of_record(self, offset: int) -> int:
        """Return where the record begins that was appended at `offset`, perhaps behind a pad."""
        segment = self._log.segment_of(LogOffset(offset))
        pad_at = segment.pad_at
        return segment.end if pad_at is not None and segment.start + pad_at == offset else offset

    @property
    def is_between_rounds(self) -> bool:
        """Whether a master has written everything that it has recorded."""
        return self._log.log_end == self._log.written_offset

    def frame_at(self, offset: int, size_max: int) -> Data | None:
        """Return whole records of one segment; see `LogFrames.read`."""
        return self.frames.read(offset, size_max)

    def can_begin(self, offset: int) -> bool:
        """Return whether a frame may begin at `offset`; see `LogFrames.can_begin`."""
        return self.frames.can_begin(offset)

    def digest(self, low: int, end: int) -> Digest | None:
        """Return the checksum of the last records before `end`; None if they are damaged.

        Another log may have gaps in other places, so the records begin at the state floor.
        """
        floor = min(max(self._log.state_floor, self.engine.fold.state_from), end)
        found = self.frames.digest(max(low, floor), end)
        is_at_floor = found is not None and low < floor == found.begin
        return found._replace(is_behind_stub=True) if found and is_at_floor else found

    # ------------------------------------------------------------ the log of a replica

    def has_room_for(self, size: int) -> bool:
        """Whether `size` bytes may be appended; after a full disk this needs twice the room.

        A failed write ends the process, and the next process has no more room. A replica therefore
        stops earlier. It still applies records, and drops segments as its master does.
        """
        engine = self.engine
        least = max(engine.config.disk_reserve_bytes // FRAMES_RESERVE_PART, FRAMES_LEFT_BYTES)
        least = size + (2 * least if self._is_full else least)
        if engine.room.free_bytes < least:
            engine.room.measure()
        self._is_full = engine.room.free_bytes < least
        return not self._is_full

    def append(self, frame: Data) -> None:
        """Write a frame of the master."""
        self._log.append_frame(
            frame.data,
            segment_start=frame.segment_start,
            segment_bytes=frame.segment_bytes,
            log_bytes=frame.end - frame.offset,
        )

    def truncate(self, cut_offset: int) -> None:
        """Cut the log at `cut_offset`, durably and atomically.

        Raises MustBeEmptied if an unclean election removes records that were applied, or that a
        pack or a derived file relies on.
        """
        cut, log = self._describe_cut(cut_offset), self._log
        # Stubs and lost entries are final, also if the records that made messages dead are cut.
        if cut_offset < max(log.folded_offset, log.packed_until, log.checkpoint_end):
            # For the next process of the store, which reports what its master does not have.
            self.files.note_cut(cut)
            raise MustBeEmptied(0)
        self.cut = cut
        self.files.known_end.note_cut(cut_offset)
        if cut_offset < self.confirm_offset:
            # An unclean election has made these records unconfirmed.
            self.confirm_offset = cut_offset
            self.files.save_confirm(self._durable_confirm)
        self.files.begin_cut(cut)
        self._log.truncate(LogOffset(cut_offset))
        end_cut(self.engine.disk)

    def _describe_cut(self, offset: int) -> LogCut:
        """Describe the records that a cut removes, for operators; damaged ones are not counted."""
        end, records = self._log.log_end, 0
        with contextlib.suppress(CorruptStore):
            for _ in itertools.islice(records_between(self._log, offset, end), COUNTED_RECORDS_MAX):
                records += 1
        confirmed_bytes = max(min(self.confirm_offset, end) - offset, 0)
        return LogCut(
            offset=offset,
            epoch=self.epoch_seen,
            size_bytes=end - offset,
            records=records,
            confirmed_bytes=confirmed_bytes,
        )

    def start_at(self, log_min: int) -> None:
        """Begin an empty log; raise MustBeEmptied if the store has a log."""
        if self._log.segments:
            raise MustBeEmptied(log_min)
        self.files.known_end.note_emptied()
        self._log.begin_at(LogOffset(log_min))
        self._log.applied_offset = LogOffset(log_min)
        self.confirm_offset = log_min
        self.files.save_confirm(self._durable_confirm)
        if log_min:
            self.engine.state.catch_up = CatchUp(self.engine.state)

    def confirm(self, offset: int) -> None:
        """Note that the group has the log before `offset`."""
        self.confirm_offset = offset
        if self.is_master:
            self._log.note_committed(LogOffset(offset))
        self.on_confirmed()

    def follow_floor(self, log_min: int, confirm: int, state_floor: int = 0) -> None:
        """Note begin and state floor of the master's log; it has restated state before `confirm`.

        `confirm` may be a little ahead of the applied offset.
        """
        if self.is_master:
            return
        self._raise_state_floor(state_floor, confirm)
        if self._floor is None:
            self._floor = log_min, confirm
        droppable_before, stated_before = self._floor
        if self._log.folded_offset >= stated_before:
            self.engine.retention.may_go_before = droppable_before
            self._floor = None

    def follow_state_floor(self, state_floor: int, stated_before: int) -> None:
        """Take no state from records before the master's state floor.

        It and all state from it on are stated before `stated_before`. Raises MustBeEmptied if state
        from such records was applied, and the log ends before the floor: the records that settle
        that state may be missing.
        """
        # After a short break, the own marks of ages stay: they do not rely on clocks.
        missing_bytes = stated_before - self._log.log_end
        if self._log.log_end == self.log_min or missing_bytes >= self.engine.config.segment_bytes:
            self.engine.retention.note_copy(stated_before)
        if self._raise_state_floor(state_floor, stated_before):
            return
        if self._log.log_end < state_floor:
            raise MustBeEmptied(self.log_min)

    def _raise_state_floor(self, state_floor: int, stated_before: int) -> bool:
        """Begin the state at a floor if none was applied yet; return False if some was."""
        engine, log = self.engine, self._log
        if self.is_master or log.folded_offset > max(engine.fold.state_from, self.log_min):
            return False
        if state_floor > max(engine.fold.state_from, log.folded_offset):
            engine.fold.state_from = state_floor
            engine.state.catch_up = engine.state.catch_up or CatchUp(engine.state)
            self.catch_up_to = max(self.catch_up_to or 0, stated_before)
        return True

    # ------------------------------------------------------------ applying

    @property
    def is_behind(self) -> bool:
        """Whether a replica has confirmed records to apply."""
        log = self._log
        if self.is_master or log.folded_offset >= self._durable_confirm:
            return False
        return not log.damage.is_requested(log.folded_offset)

    def apply_slices(self) -> Iterator[None]:
        """Apply confirmed, durable records; yield between slices. Ends on a master.

        A power cut may remove records that are not durable, and derived files must not be ahead of
        the log.
        """
        while self.is_behind:
            try:
                yield from self._apply(self._durable_confirm)
            except LogDamaged as error:
                if not self._log.damage.request(error.log_offset, error.end):
                    raise
                self._pass_pad(error.log_offset)
        if not self.is_master:
            if self.catch_up_to is not None and self._log.folded_offset >= self.catch_up_to:
                self._end_catch_up()
            self._follow_time()

    def _pass_pad(self, log_offset: LogOffset) -> None:
        """Move behind the pad before `log_offset`, if the next record begins a segment."""
        log = self._log
        applied = log.applied_offset
        if applied is not None and applied < log_offset == log.segment_start(log_offset):
            log.applied_offset = log_offset

    def _apply(self, end: int) -> Iterator[None]:
        """Apply all records before `end`. Raises LogDamaged."""
        engine, log = self.engine, self._log
        begin = log.folded_offset
        for count, found in enumerate(records_between(log, begin, end), 1):
            # Since the last yield this replica may have become the master and applied everything.
            if log.applied_offset is None:
                return
            try:
                engine.fold.apply(found)
            except StateBehindGap as behind:
                # The master's state floor has moved since its last message about it.
                if not self._raise_state_floor(*behind.gap):
                    raise MustBeEmptied(self.log_min) from behind
            log.epoch = max(log.epoch, found.header.epoch)
            log.record_count += 1
            # If this replica becomes the master, it compares its clock with this time.
            engine.note_time(found.header)
            log.applied_offset = LogOffset(found.log_offset + found.header.size)
            if self.catch_up_to is not None and log.applied_offset >= self.catch_up_to:
                self._end_catch_up()
            if count % RECORDS_A_SLICE == 0:
                log.note_committed(log.applied_offset)
                yield
        if log.applied_offset is not None:
            log.applied_offset = LogOffset(end)  # Behind a pad, if the last one is a pad.
            log.note_committed(log.applied_offset)
            if self.catch_up_to is not None and end >= self.catch_up_to:
                self._end_catch_up()

    def catch_up_at_latest(self, log_end: int) -> None:
        """Note the end of the master's log: all live state is stated before it."""
        if not self.is_master:
            self.catch_up_to = log_end

    def _end_catch_up(self) -> None:
        self.catch_up_to = None
        if self.engine.state.catch_up is not None:
            self.engine.state.catch_up.finish(now_ms=self.now_ms)
            self.engine.catalog.forget_unknown_queues()

    def _follow_time(self) -> None:
        engine = self.engine
        if engine.state.catch_up is None:
            engine.timers.index.link_gathered()
            engine.consumption.reviver.remove_due(self.now_ms)
        engine.take_ready()
        engine.take_config_changes()
