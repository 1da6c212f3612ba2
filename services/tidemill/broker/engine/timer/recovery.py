"""The timers' files at a start: loading them, what the log says beyond them, making them again.

The table is loaded and counted whole, or everything is made again from the log's first record.
Wheel and timer log are loaded, or made again from the table (`rebuild`, which the owner also calls
in slices when it finds them damaged later). What cannot be read is as good as missing; what cannot
be written ends the process.
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
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE, TIMER_TOPIC, TimerState
from tidemill.broker.engine.timer.timer_log import TimerLogDamaged
from tidemill.broker.engine.timer.wheel import WheelDamaged


@final
class TimerRecovery:
    """What a start finds of timers, and what it makes again."""

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
        self.rebuilt_hand_s = 0  # timers due before it may wait in the slot after it
        self.rebuilt_files = ""  # which files the start has made again: "", "wheel", or "all"
        self.is_rebuilding = False
        self._needs_relink = False
        self._needs_complete = False  # the table, after a replay from the log's beginning
        self._has_overdue = False  # timers wait that the hand had passed: damaged, or late

    @property
    def store_uuid(self) -> bytes:
        """Which store the files belong to, b"" before that is known."""
        secret = self._catalog.handle_secret
        return blake2b(secret, digest_size=UUID_SIZE, person=b"store").digest() if secret else b""

    def open(self) -> int:
        """Load the files; return the log offset from which the log must be folded in."""
        # A flush that a kill has ended left pages that are read and not durable; what they say
        # already no replay would write again.
        self._flusher.reload_files()
        checkpoint = self._flusher.find_checkpoint()
        is_usable = (
            checkpoint is not None
            and checkpoint.store_uuid == self.store_uuid
            and checkpoint.replay_from >= self._log.min_offset
        )
        if checkpoint is None or not is_usable or not self._load_table(checkpoint):
            self._reset()
            self._index.links.is_linking = False
            return self._log.min_offset
        index = self._index
        index.next_id = max(index.next_id, checkpoint.queue_offset)
        index.links.hand_s = checkpoint.hand_ms // 1000
        # No FRONTIER record before the checkpoint went further.
        index.frontier_ms = checkpoint.hand_ms
        self._flusher.use(checkpoint)
        try:
            self._load_wheel(checkpoint.timer_log_position, checkpoint.slots_used)
        except (TimerLogDamaged, WheelDamaged):
            self._needs_relink = True
        index.links.is_linking = not self._needs_relink
        return checkpoint.replay_from

    def _load_table(self, checkpoint: TimerCheckpoint) -> bool:
        """Count what the table has; False when a file or an entry is not there or damaged."""
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
                index.links.wheel.revise(slot_s, at, change=-1 if is_gone else 1)

    def _reset(self) -> None:
        """Begin with no files: everything is folded in again from the log's first record."""
        for files in self._flusher.drop_checkpoints():
            for file in files:
                file.sync()
        self._index.clear()
        self._needs_complete = True
        self._flusher.replay_from = self._log.min_offset
        self._needs_relink = True

    def open_empty(self) -> None:
        """Begin without timers: files, if any, know less than the log."""
        if self._flusher.has_files:
            self._reset()
            self._index.links.is_linking = False

    def finish_replay(self, now_ms: int) -> None:
        """Link what must be linked again, and start behind the hand."""
        index = self._index
        index.link_gathered()
        topic_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        if topic_id is not None:
            # The schedules of the last ones may be gone with their segments; their ids were given.
            ids_end = self._catalog.queue(topic_id, SCHEDULE_QUEUE).max_offset
            index.next_id = max(index.next_id, ids_end)
        index.links.is_linking, index.is_following = True, False
        if self._needs_complete:
            index.table.complete(known_ids=index.next_id, files_kept=TABLE_FILES_KEPT)
        outage_s = now_ms // 1000 - index.links.hand_s
        if index.next_id and self._needs_complete:
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
        self._flusher.begin(now_ms)
        self.start_loading(now_ms)

    def _link_overdue(self, now_ms: int) -> None:
        """Link again what was due before the hand and still waits: quarantined, or late then."""
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
        """Start loading behind the hand; where nothing waits the hand is at the present."""
        if not self._index.pending_count:
            self._index.links.hand_s = max(self._index.links.hand_s, firing_ms // 1000 - 1)
        self._loader.begin(firing_ms)

    def rebuild(self, now_ms: int, *, firing_ms: int) -> Iterator[list[File]]:
        """Make wheel and timer log again from the table, in slices of a page."""
        # The hand stands still while they are damaged, for however long that is.
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
        """Return a hand before all that waits, and at most half a revolution behind the clock."""
        index = self._index
        now_s = now_ms // 1000
        first_s = now_s
        for _, rows in index.table.file_batches():
            waiting = rows["due"][rows["state"] == TimerState.PENDING]
            if len(waiting):
                first_s = min(first_s, int(waiting.min()) // 1000)
        return max(first_s - 1, self._hand_min_s(now_ms), index.links.hand_s)

    def _hand_min_s(self, firing_ms: int) -> int:
        """Return where the hand is at least before slots are loaded: half a revolution behind.

        Invariant: the parking slot is ahead of the clock then, and the backlog within the ring.
        """
        return firing_ms // 1000 - self._index.links.wheel.slot_count // 2
