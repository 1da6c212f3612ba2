"""Delayed messages: the parts of the timer room, the turns of its stages, and its background work.

    commands     schedule, cancel, reschedule          admission      limits of new timers
    transitions  states and events of a timer          index          stage I: applies log entries
    links        wheel, timer log and hand             table          state of each timer, by id
    load         stage L: slots into the near wheel    body           stage B: reads messages ahead
    deliver      stage D: due messages to their topic  evacuation     copies out of old segments
    flush        writes the files, never ahead of the  held_segments  segments with damaged messages
                 log                                   janitor        deletes files, starts audits
    recovery     loads or rebuilds the files           audit          counts and links checked again

The engine's single owner calls all of it. Wall time (`now_ms`) stamps the records. Firing time
(`firing_ms`) decides what is due.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import final

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.layout.timer_checkpoint import FLAG_CLEAN
from tidemill.broker.engine.layout.timer_control import Frontier
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.segment import Segment
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.admission import Admission
from tidemill.broker.engine.timer.audit import TimerAudit
from tidemill.broker.engine.timer.body import TimerBodies
from tidemill.broker.engine.timer.bulk_changes import TimerChanges
from tidemill.broker.engine.timer.bulk_matches import TimerParts
from tidemill.broker.engine.timer.census import Census
from tidemill.broker.engine.timer.commands import TimerCommands
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.deliver import Deliverer
from tidemill.broker.engine.timer.evacuation import Evacuation
from tidemill.broker.engine.timer.flush import Flusher
from tidemill.broker.engine.timer.held_segments import HeldSegments
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.janitor import Janitor
from tidemill.broker.engine.timer.load import SlotLoader
from tidemill.broker.engine.timer.near_wheel import NearWheel
from tidemill.broker.engine.timer.recovery import TimerRecovery

FRONTIER_PERIOD_MS = 1_000  # at most one FRONTIER record per period
FRONTIER_IDLE_MS = 60_000  # at least one per period while timers are pending


@final
class DelayedMessages:
    """The delayed messages of a broker group."""

    def __init__(
        self,
        disk: Disk,
        config: TimerConfig,
        store: MessageStore,
        catalog: Catalog,
        index: TimerIndex,
        held_segments: HeldSegments,
        recorder: Recorder,
        tally: Tally,
        room: DiskRoom,
        *,
        ready: Callable[[TopicId], None],
        is_retirement_near: Callable[[int, int], bool],
    ) -> None:
        log = self._log = store.log
        self._recorder = recorder
        self._room = room
        self.index = index
        self.held_segments = held_segments
        self.near = NearWheel()
        self.bodies = TimerBodies(log, held_segments.originals)
        self.admission = Admission(index, config, volume_bytes=disk.total_bytes())
        self._open_delivery(config, catalog, tally, ready)
        self.evacuation = Evacuation(
            index,
            log,
            store,
            catalog,
            recorder,
            self.bodies,
            tally,
            room,
            quarantined=held_segments.quarantined,
            rate_bytes=config.evacuation_rate_bytes,
            is_due=lambda now_ms: is_retirement_near(now_ms, config.evacuation_lead_ms),
        )
        self._open_files(disk, config, catalog, tally)
        self.commands = TimerCommands(
            index,
            self.admission,
            self.bodies,
            catalog,
            store,
            recorder,
            self.recovery,
            tally,
            quarantined=held_segments.quarantined,
            lateness=self.deliverer.lateness,
        )
        self.changes = TimerChanges(
            TimerParts(index, self.bodies, store, catalog, tally),
            self.commands,
            self.admission,
            held_segments.quarantined,
        )
        # Gathered timers due within this time are linked before slots are loaded. Slots are loaded
        # up to the end of a second.
        self._gathered_ahead_ms = config.load_horizon_ms + 1000
        self._advanced_s = 0
        self._is_loaders_turn = False

    def _open_delivery(
        self, config: TimerConfig, catalog: Catalog, tally: Tally, ready: Callable[[TopicId], None]
    ) -> None:
        """Make the parts that load slots and deliver due messages."""
        self.loader = SlotLoader(
            self.index,
            self.near,
            self.bodies,
            horizon_ms=config.load_horizon_ms,
            chunk=config.load_chunk_records,
        )
        self.deliverer = Deliverer(
            self.index,
            self.near,
            self.bodies,
            catalog,
            self._recorder,
            tally,
            self._room,
            ready=ready,
            quarantined=self.held_segments.quarantined,
            rate_max=config.max_rate,
            expire_after_ms=config.expire_backlog_after_ms,
        )

    def _open_files(self, disk: Disk, config: TimerConfig, catalog: Catalog, tally: Tally) -> None:
        """Make the parts that load, write, check and delete the files."""
        index, log = self.index, self._log
        self.flusher = Flusher(disk, index, log, config)
        self.recovery = TimerRecovery(index, self.loader, self.flusher, log, catalog)
        self.janitor = Janitor(
            index,
            self.flusher,
            config,
            audit=TimerAudit(index, log, tally, quarantined=lambda: self.quarantined),
        )
        self.census = Census(index, tally)

    @property
    def quarantined(self) -> dict[int, int]:
        """Topic ids by timer id of pending timers with a damaged record, 0 if unknown."""
        return self.held_segments.quarantined

    @property
    def files_bytes(self) -> int:
        """The bytes of timer log, wheel and table together."""
        index = self.index
        return (
            index.links.timer_log.size_bytes + index.links.wheel.size_bytes + index.table.size_bytes
        )

    # ------------------------------------------------------------ time

    def due_slices(self, now_ms: int, *, firing_ms: int) -> Generator[None, None, bool]:
        """Run one slice of each stage, and yield between them. Return True if more is due."""
        index = self.index
        if not index.next_id:
            return False
        gathered_due_ms = index.gathered_due_ms
        if gathered_due_ms is not None and gathered_due_ms < firing_ms + self._gathered_ahead_ms:
            index.link_gathered()
            yield
        is_rebuilding = self.recovery.is_rebuilding
        self.deliverer.take_due(firing_ms)
        yield
        has_more = self.deliverer.step(now_ms, firing_ms=firing_ms)
        yield
        # Delivery and loading alternate, so that one call stays short.
        self._is_loaders_turn = not (has_more and self._is_loaders_turn)
        if self._is_loaders_turn and not is_rebuilding:
            has_more |= self.loader.step(firing_ms)
            yield
            has_more |= self.bodies.read_ahead()
            yield
        has_more |= self.evacuation.step(now_ms)
        yield
        is_whole = not (is_rebuilding or index.links.is_damaged)
        # After a jump of the clock by more than a revolution, the ring must move to load more.
        is_behind = not has_more and self.loader.is_behind(firing_ms)
        if is_whole and (firing_ms // 1000 > self._advanced_s or is_behind):
            self._advanced_s = firing_ms // 1000
            hand_s = index.links.hand_s
            self.loader.advance_hand(firing_ms)
            self._write_frontier(now_ms)
            has_more |= is_behind and index.links.hand_s > hand_s
        return has_more

    def _write_frontier(self, now_ms: int) -> None:
        """Record the position of the hand if it has moved and a FRONTIER record is due."""
        index = self.index
        hand_s = index.links.hand_s
        has_moved = hand_s * 1000 > index.frontier_ms and hand_s > self.recovery.rebuilt_hand_s
        if not has_moved or self._room.is_full:
            return
        was_active = index.event_count != index.frontier_events
        idle_ms = now_ms - index.frontier_at_ms
        is_due = was_active and idle_ms >= FRONTIER_PERIOD_MS
        if is_due or (index.pending_count and idle_ms >= FRONTIER_IDLE_MS):
            self._recorder.append(Frontier(hand_s * 1000), now_ms)

    def next_due_ms(self, now_ms: int, *, firing_ms: int) -> int | None:
        """Return the wall time at which `due_slices` has work next, None for never."""
        index = self.index
        if not index.next_id:
            return None
        if self.deliverer.has_work:
            return self.deliverer.next_step_ms(now_ms)
        times = [self.near.next_due_ms()]
        if index.gathered_due_ms is not None:
            times.append(index.gathered_due_ms - self._gathered_ahead_ms)
        if index.pending_count:
            times.append(self.loader.next_step_ms())
        lag_ms = now_ms - firing_ms
        wall_times = [at_ms + lag_ms for at_ms in times if at_ms is not None]
        evacuation_ms = self.evacuation.next_step_ms()
        if evacuation_ms is not None:
            wall_times.append(evacuation_ms)
        return min(wall_times, default=None)

    def next_background_ms(self) -> int | None:
        """Return when a flush is due next, None while there is nothing to write."""
        return self.flusher.next_ms() if self.index.next_id else None

    # ------------------------------------------------------------ background

    def wants_background(self, now_ms: int) -> bool:
        """Return whether files must be written or rebuilt now."""
        return (
            self.index.links.is_damaged
            or self.flusher.is_log_due(now_ms)
            or (bool(self.index.next_id) and self.flusher.is_due(now_ms))
        )

    def find_background(
        self, now_ms: int, *, firing_ms: int, quiet: Callable[[], Iterator[list[File]]]
    ) -> Iterator[list[File]] | None:
        """Return the steps of the most urgent background work, None if there is none."""
        if not self.index.next_id:
            return None
        if self.index.is_following:
            # Other work moves the hand or appends records: only the engine that delivers does it.
            is_due = not self.index.links.is_damaged and self.flusher.is_due(now_ms)
            return self.flusher.flush(now_ms, self.recovery.store_uuid, quiet) if is_due else None
        if self.index.links.is_damaged:
            return self.recovery.rebuild(now_ms, firing_ms=firing_ms)
        if self.flusher.is_due(now_ms):
            return self.flusher.flush(now_ms, self.recovery.store_uuid, quiet)
        if self.flusher.is_log_due(now_ms):
            return self.flusher.flush_log(now_ms)
        if self.census.is_due(now_ms):
            return self.census.take(now_ms)
        return self.held_segments.find_work(now_ms, quiet) or self.janitor.find_work(now_ms)

    def finish(self, now_ms: int) -> Iterator[list[File]]:
        """Write all files before a stop, so that the next start needs no replay."""
        index = self.index
        # An interrupted flush holds frozen pages. The checkpoint before it stays valid.
        is_busy = self.recovery.is_rebuilding or index.links.is_damaged or self.flusher.is_active
        index.link_gathered()
        if index.next_id and not is_busy:
            yield from self.flusher.flush(
                now_ms, self.recovery.store_uuid, lambda: iter(()), flags=FLAG_CLEAN
            )

    def may_drop(self, segment: Segment) -> bool:
        """Return whether no timer needs the oldest segment, now or after a restart."""
        if not self.index.next_id:
            return True
        self.index.link_gathered()
        return not self.index.counts.pins[segment.start] and segment.end <= self.flusher.replay_from

    def close(self) -> None:
        """Close the files without writing."""
        self.index.table.close()
        self.index.links.wheel.close()
        self.index.links.timer_log.close()
