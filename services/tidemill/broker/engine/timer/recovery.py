"""The recovery of the timer files at a start: loading, replay, and rebuild.

The table is loaded and counted completely, or all files are rebuilt from the first record of the
log. Wheel and timer log are loaded, or rebuilt from the table. `rebuild` does the latter also in
slices, when they are found to be damaged later. An unreadable file counts as missing. A failed
write ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_record
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.layout.timer_checkpoint import UUID_SIZE, TimerCheckpoint
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import File, ReadFailed
from tidemill.broker.engine.timer.flush import Flusher
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.janitor import TABLE_FILES_KEPT
from tidemill.broker.engine.timer.load import SlotLoader
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE, TimerState
from tidemill.broker.engine.timer.timer_log import TimerLogDamaged
from tidemill.broker.engine.timer.wheel import WheelDamaged
from tidemill.message.resource_names import TIMER_TOPIC


@final
class TimerRecovery:
    """The timer files of a start, and their rebuild."""

    def __init__(
        self,
        index: TimerIndex,
        loader: SlotLoader,
        flusher: Flusher,
        log: CommitLog,
        catalog: Catalog,
    ) -> None:
        self._index = index
        self._loader = loader
        self._flusher = flusher
        self._log = log
        self._catalog = catalog
        self.rebuilt_hand_s = 0  # timers due before it may be in the slot after it
        self.rebuilt_files = ""  # the files that the start has rebuilt: "", "wheel", or "all"
        self.is_rebuilding = False
        self._needs_relink = False
        self._needs_gaps_filled = False  # the table, after a replay from the begin of the log
        self._has_overdue = False  # pending timers are due before the hand: damaged, or late

    @property
    def store_uuid(self) -> bytes:
        """The id of the store, b"" before it is known."""
        secret = self._catalog.handle_secret
        return blake2b(secret, digest_size=UUID_SIZE, person=b"store").digest() if secret else b""

    def open(self) -> int:
        """Load the files. Return the log offset at which the replay must begin."""
        # An interrupted flush may have left pages that are readable but not durable. The replay
        # would not write them again.
        self._flusher.reload_files()
        checkpoint = self._flusher.find_checkpoint()
        is_usable = (
            checkpoint is not None
            and checkpoint.store_uuid == self.store_uuid
            and checkpoint.replay_from >= self._log.state_floor
        )
        if checkpoint is None or not is_usable or not self._load_table(checkpoint):
            self._reset()
            self._index.links.is_linking = False
            return self._log.state_floor
        index = self._index
        index.next_id = max(index.next_id, checkpoint.queue_offset)
        index.links.hand_s = checkpoint.hand_ms // 1000
        # No FRONTIER record before the checkpoint went further.
        index.frontier_ms = checkpoint.hand_ms
        self._flusher.adopt(checkpoint)
        try:
            self._load_wheel(checkpoint.timer_log_position, checkpoint.slots_used)
        except (TimerLogDamaged, WheelDamaged):
            self._needs_relink = True
        index.links.is_linking = not self._needs_relink
        return checkpoint.replay_from

    def _load_table(self, checkpoint: TimerCheckpoint) -> bool:
        """Count the table. Return False if a file or an entry is missing or damaged."""
        with suppress(ReadFailed):
            return self._count_table(checkpoint)
        return False

    def _count_table(self, checkpoint: TimerCheckpoint) -> bool:
        table = self._index.table
        known_ids = checkpoint.queue_offset
        is_whole = table.load(
            known_ids=known_ids, files_kept=TABLE_FILES_KEPT, live_files=checkpoint.live_files or ()
        )
        if not is_whole:
            return False
        for first_id, rows in table.file_batches():
            if table.has_gaps(rows, known_ids - first_id) or not table.is_intact(rows):
                return False
            self._index.count_rows(first_id, rows)
            due = rows["due"][rows["state"] == TimerState.PENDING]
            self._has_overdue |= bool((due <= checkpoint.hand_ms).any())
        return True

    def _load_wheel(self, position: int, slots_used: int) -> None:
        index = self._index
        newer = [(record.slot_s, record.magic) for record in index.links.timer_log.load(position)]
        index.links.wheel.load(
            position_min=index.links.timer_log.begin,
            position_max=index.links.timer_log.end,
            hand_s=index.links.hand_s,
            used_count=slots_used,
        )
        for number, (slot_s, magic) in enumerate(newer):
            if slot_s > index.links.hand_s:
                is_gone = magic & (timer_record.CANCEL | timer_record.RESCHEDULED_OUT)
                at = position + number * timer_record.SIZE
                index.links.wheel.link_if_newer(slot_s, at, change=-1 if is_gone else 1)

    def _reset(self) -> None:
        """Begin without files: the replay rebuilds everything from the first record of the log."""
        for files in self._flusher.drop_checkpoints():
            for file in files:
                file.sync()
        self._index.clear()
        self._needs_gaps_filled = True
        self._flusher.replay_from = self._log.state_floor
        self._needs_relink = True

    def open_empty(self) -> None:
        """Begin without timers. Existing files are older than the log and are deleted."""
        if self._flusher.has_files:
            self._reset()
            self._index.links.is_linking = False

    def finish_replay(self, now_ms: int) -> None:
        """Link timers again where needed, and start loading after the hand."""
        index = self._index
        index.link_gathered()
        topic_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        if topic_id is not None:
            # Retention may have removed the schedules of the last ids, which are still used.
            ids_end = self._catalog.queue(topic_id, SCHEDULE_QUEUE).max_offset
            index.next_id = max(index.next_id, ids_end)
        index.links.is_linking, index.is_following = True, False
        if self._needs_gaps_filled:
            index.table.fill_gaps(known_ids=index.next_id, files_kept=TABLE_FILES_KEPT)
        outage_s = now_ms // 1000 - index.links.hand_s
        if index.next_id and self._needs_gaps_filled:
            self.rebuilt_files = "all"
        elif index.next_id and self._needs_relink:
            self.rebuilt_files = "wheel"
        if index.next_id and (self._needs_relink or outage_s > index.links.wheel.slot_count // 2):
            hand_s = self._first_hand_s(now_ms)
            for _ in self._rebuild(index.table.file_batches(), now_ms, now_ms, hand_s):
                pass
        elif self._has_overdue:
            self._link_overdue(now_ms)
        self._needs_relink = False
        index.links.on_link = self._loader.add_linked
        index.links.on_link_rows = self._loader.add_linked_rows
        self._flusher.start_periods(now_ms)
        self.start_loading(now_ms)

    def _link_overdue(self, now_ms: int) -> None:
        """Link again the pending timers due before the hand: quarantined ones, and late ones."""
        index = self._index
        for first_id, rows in index.table.file_batches():
            is_late = (rows["state"] == TimerState.PENDING) & (
                rows["due"] <= index.links.hand_s * 1000
            )
            for at in np.flatnonzero(is_late).tolist():
                entry = index.find_pending(TimerId(first_id + at))
                if entry is not None:
                    index.links.relink(TimerId(first_id + at), entry, timer_record.SCHEDULE, now_ms)

    def start_loading(self, firing_ms: int) -> None:
        """Start loading after the hand. Without pending timers the hand moves to the present."""
        if not self._index.pending_count:
            self._index.links.hand_s = max(self._index.links.hand_s, firing_ms // 1000 - 1)
        self._loader.start(firing_ms)

    def rebuild(self, now_ms: int, *, firing_ms: int) -> Iterator[list[File]]:
        """Rebuild wheel and timer log from the table, in slices of one page."""
        # The hand does not move while they are damaged, which may take long.
        hand_s = max(self._index.links.hand_s, self._hand_min_s(firing_ms))
        return self._rebuild(self._index.table.page_batches(), now_ms, firing_ms, hand_s)

    def _rebuild(
        self, batches: Iterable[tuple[int, np.ndarray]], now_ms: int, firing_ms: int, hand_s: int
    ) -> Iterator[list[File]]:
        index = self._index
        self.is_rebuilding = True
        index.links.wheel.clear()
        index.links.timer_log.clear()
        index.links.latest_s.clear()
        index.links.hand_s = self.rebuilt_hand_s = hand_s
        for first_id, rows in batches:
            index.links.link_rows(first_id, rows, now_ms)
            yield []
        index.event_count += 1
        self.start_loading(firing_ms)
        self.is_rebuilding = index.links.is_damaged = False

    def _first_hand_s(self, now_ms: int) -> int:
        """Return a hand before all pending timers, at most half a revolution before the clock."""
        index = self._index
        now_s = now_ms // 1000
        first_s = now_s
        for _, rows in index.table.file_batches():
            waiting = rows["due"][rows["state"] == TimerState.PENDING]
            if len(waiting):
                first_s = min(first_s, int(waiting.min()) // 1000)
        return max(first_s - 1, self._hand_min_s(now_ms), index.links.hand_s)

    def _hand_min_s(self, firing_ms: int) -> int:
        """Return the earliest hand for loading: half a revolution before the clock.

        Invariant: then the parking slot is ahead of the clock, and the backlog is in the ring.
        """
        return firing_ms // 1000 - self._index.links.wheel.slot_count // 2
