"""Background jobs of the engine, for times without more urgent work.

Each job is a generator of slices of at most about 2 ms. The owner advances the current job between
rounds, after `note_synced`. At the end of a job, the next one is chosen.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.room import DERIVED_RESERVE_PART, DiskRoom
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.timer.delayed_messages import DelayedMessages
from tidemill.broker.engine.upkeep.checkpoint import Checkpoints
from tidemill.broker.engine.upkeep.merge import Merges
from tidemill.broker.engine.upkeep.packing import Packing
from tidemill.broker.engine.upkeep.parts import QuietMoment, Steps
from tidemill.broker.engine.upkeep.rebuild import Rebuilds
from tidemill.broker.engine.upkeep.retention import Retention

PREPARE_SLICE_BYTES = 1 << 20
LOOKS_MAX = 2  # one after the other
ROOM_PERIOD_MS = 1_000  # between two checks of the disk for jobs that wait for room


@final
class BackgroundJobs:
    """The choice of jobs, and the current job."""

    def __init__(
        self,
        store: MessageStore,
        checkpoints: Checkpoints,
        timers: DelayedMessages,
        retention: Retention,
        packing: Packing,
        rebuilds: Rebuilds,
        merges: Merges,
        quiet: QuietMoment,
        room: DiskRoom,
    ) -> None:
        self._store = store
        self._log = store.log
        self._checkpoints = checkpoints
        self._timers = timers
        self._retention = retention
        self._packing = packing
        self._rebuilds = rebuilds
        self._merges = merges
        self._quiet = quiet
        self._room = room
        self._room_check_at_ms = 0
        self._job: Steps | None = None
        self._was_checkpoint = False  # the last job
        self._was_rebuild = self._was_directory = False
        self._look_count = 0  # the last jobs that were looks

    def step(
        self, now_ms: int, *, firing_ms: int, monotonic_ms: int | None = None
    ) -> list[File] | None:
        """Do one slice; return files to sync (fsync) before the next one; None if nothing is due.

        Without `monotonic_ms`, wall time counts as a monotonic clock.
        """
        # By the clock that follows when the machine's clock is set back.
        self._retention.note(firing_ms, monotonic_ms)
        if self._log.applied_offset is not None:  # A replica has no rounds that note it.
            self._store.note_time(firing_ms if monotonic_ms is None else monotonic_ms)
        if self._quiet.is_now and self._checkpoints.may_begin:
            # Timers gathered by rounds. Linking them between busy rounds would delay answers.
            self._timers.index.link_gathered()
        if self._job is None:
            self._job = self._choose(now_ms, firing_ms=firing_ms)
        if self._job is None:
            self._look_count = 0
            self._packing.defer(now_ms)
            self._merges.defer(now_ms)
            return None
        self._timers.index.link_gathered()
        files = next(self._job, None)
        if files is None:
            self._job = None
        return files or []

    def is_due(self, now_ms: int) -> bool:
        """Whether a job is due although nothing was committed."""
        if now_ms < self._room_check_at_ms:
            return False
        if self._job is not None:
            return True
        if self._checkpoints.is_requested or any(now_ms >= due_ms for due_ms in self._after_deaths):
            return True
        return self._rebuilds.is_due or self._timers.wants_background(now_ms)

    def next_ms(self) -> int | None:
        """Return the wall time when a job is due; None: not before the next event."""
        timers_ms, due = self._timers.next_background_ms(), self._after_deaths
        due += [] if timers_ms is None else [timers_ms]
        return max(min(due), self._room_check_at_ms) if due else None

    @property
    def _after_deaths(self) -> list[int]:
        """The wall times of the next jobs that free the space of dead messages."""
        known = self._packing.next_ms(), self._merges.next_ms()
        return [due_ms for due_ms in known if due_ms is not None]

    def take_pace_s(self, now_ms: int) -> float:
        """Return the seconds that the last slices must take because of their writes.

        Nothing limits them while another job waits for the end of the current one.
        """
        pace_s = self._packing.take_pace_s()
        return 0.0 if pace_s and self._is_urgent(now_ms) else pace_s

    def _is_urgent(self, now_ms: int) -> bool:
        """Whether a job that should not wait for a pack is due."""
        is_master = self._log.applied_offset is None
        return (
            self._checkpoints.is_due
            or (self._rebuilds.is_due if is_master else self._rebuilds.has_directory)
            or (self._log.needs_preparation and self._room.may_prepare_segment)
            or self._timers.wants_background(now_ms)
        )

    @property
    def needs_quiet(self) -> bool:
        """Whether the current job waits for a moment without a pending round."""
        return self._quiet.is_awaited

    def _has_room(self) -> bool:
        # A write that fails ends the process. Without derived files everything else continues: the
        # log may be written into a segment that was filled ahead.
        return self._room.has_room(0, reserve_part=DERIVED_RESERVE_PART)

    def _choose(self, now_ms: int, *, firing_ms: int) -> Steps | None:
        # Consumers wait for a rebuild. A disk that damages everything must not stop other jobs.
        self._was_directory = self._rebuilds.has_directory and not self._was_directory
        if self._was_directory:
            return self._rebuilds.derive_directory()
        is_time = now_ms >= self._room_check_at_ms
        if not is_time or not self._has_room():
            if is_time:
                self._room_check_at_ms = now_ms + ROOM_PERIOD_MS
            return self._choose_room(now_ms)
        if self._log.needs_preparation and self._room.may_prepare_segment:
            return self._log.prepare(slice_bytes=PREPARE_SLICE_BYTES)
        if self._log.applied_offset is not None:
            return self._choose_following(now_ms, firing_ms=firing_ms)
        self._was_rebuild = self._rebuilds.is_due and not self._was_rebuild
        if self._was_rebuild:
            return self._rebuilds.rebuild()
        # If the log grows faster than checkpoints are written, one is always due. Other jobs then
        # get every second turn.
        is_checkpoints_turn = self._checkpoints.is_due and not self._was_checkpoint
        steps = None if is_checkpoints_turn else self._choose_other(now_ms, firing_ms=firing_ms)
        self._was_checkpoint = steps is None and self._checkpoints.is_due
        return self._checkpoints.write() if self._was_checkpoint else steps

    def _choose_room(self, now_ms: int) -> Steps | None:
        """Choose a job that frees space; nothing else may be written."""
        retention = self._retention
        if self._log.applied_offset is not None:
            is_due = self._checkpoints.may_begin and retention.is_due_at_replica(self._timers)
            return retention.give_up_oldest(now_ms) if is_due else None
        steps = retention.find_work(now_ms, self._timers) or retention.find_passed_hidden()
        steps = steps or retention.find_look(now_ms) or self._packing.find_work(now_ms)
        steps = steps or self._merges.find_dead_entries(now_ms)
        if steps is not None:
            return steps
        return _nothing() if retention.gate.is_searching else None

    def _choose_following(self, now_ms: int, *, firing_ms: int) -> Steps | None:
        """Choose a job without records: only the master makes records."""
        if not self._checkpoints.may_begin:
            return None
        steps = self._timers.find_background(now_ms, firing_ms=firing_ms, quiet=self._quiet)
        if steps is not None:
            return steps
        if self._checkpoints.is_due or self._retention.wants_checkpoint_at_replica():
            return self._checkpoints.write()
        steps = self._retention.find_passed_hidden() or self._find_look(now_ms, is_master=False)
        if steps is not None:
            return steps
        if self._retention.is_due_at_replica(self._timers):
            return self._retention.give_up_oldest(now_ms)
        steps = self._merges.merge() if self._merges.is_due else self._packing.find_work(now_ms)
        steps = steps or self._merges.find_dead_entries(now_ms)
        return steps or self._find_look(now_ms, is_master=False)

    def _choose_other(self, now_ms: int, *, firing_ms: int) -> Steps | None:
        steps = self._timers.find_background(now_ms, firing_ms=firing_ms, quiet=self._quiet)
        if steps is None:
            steps = self._retention.find_work(now_ms, self._timers)
        if steps is None:
            steps = self._retention.find_passed_hidden() or self._find_look(now_ms)
        if steps is None and self._retention.wants_checkpoint(now_ms, self._timers):
            return None if self._checkpoints.waits_for_room else self._checkpoints.write()
        if steps is None and self._merges.is_due:
            return self._merges.merge()
        if steps is None:
            steps = self._packing.find_work(now_ms) or self._merges.find_dead_entries(now_ms)
            steps = steps or self._find_look(now_ms)
        return _nothing() if steps is None and self._retention.gate.is_searching else steps

    def _find_look(self, now_ms: int, *, is_master: bool = True) -> Steps | None:
        """Return the steps of a look at all queues, or None after two looks: count and rules.

        While the log grows quickly, a look is always due. Then the other jobs have a turn.
        """
        if self._look_count >= LOOKS_MAX:
            self._look_count = 0
            return None
        steps = self._retention.find_look(now_ms, is_master=is_master)
        self._look_count = 0 if steps is None else self._look_count + 1
        return steps


def _nothing() -> Steps:
    """Do nothing: the gate's search was the slice, and the next slice continues it."""
    yield from ()
