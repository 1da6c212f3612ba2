"""The flush of the timer files. Each step relies on the steps before it.

New records of the timer log are written every second. Every `flush_period_ms`, or after
`flush_log_bytes` of commit log, at a moment without pending records:

    1. take the hand and the offset to replay from; freeze the pages of wheel and table
    2. write and sync the timer log
    3. write and sync the wheel's pages: no slot on disk points beyond the durable timer log
    4. write and sync the table's pages
    5. write and sync the older of the two checkpoint files

After a crash between two steps, the previous checkpoint is valid. The replay from its offset
applies entries that some pages contain already, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

from tidemill.broker.engine.layout import timer_checkpoint
from tidemill.broker.engine.layout.numbers import QueueOffset
from tidemill.broker.engine.layout.timer_checkpoint import TimerCheckpoint
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk, File, ReadFailed, reload_folder
from tidemill.broker.engine.timer import table, timer_log
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.index import TimerIndex

FILES = ("timer/checkpoint.a", "timer/checkpoint.b")
FOLDER = "timer"
FOLDERS = (FOLDER, timer_log.FOLDER, table.FOLDER)
LOG_PERIOD_MS = 1_000
DIRTY_PAGES_MAX = 2_048  # of the table, 32 MiB: with more, a flush is due at once


@final
class Flusher:
    """The writer of the timer files, and the times of its flushes."""

    def __init__(self, disk: Disk, index: TimerIndex, log: CommitLog, config: TimerConfig) -> None:
        self._disk = disk
        self._index = index
        self._log = log
        self._config = config
        self.generation = 0  # of the newest checkpoint that was found or written
        self._counter = 0
        self._flushed_at_ms = 0
        self._log_flushed_at_ms = 0
        self._flushed_events = 0
        self.is_active = False  # whether a flush is in progress
        self.replay_from = 0  # of the newest durable checkpoint
        self.durable_hand_s = 0
        self.checkpoint_at_ms = 0  # when that checkpoint was written; 0: never

    def find_checkpoint(self) -> TimerCheckpoint | None:
        """Return the newest intact checkpoint, and continue its generations.

        A checkpoint file that cannot be read is deleted, so that the next write uses intact
        sectors.
        """
        found: list[TimerCheckpoint | None] = []
        for name in FILES:
            try:
                found.append(timer_checkpoint.find(self._disk.read(name)))
            except ReadFailed:
                self._disk.delete(name)
        newest = max(filter(None, found), key=lambda c: c.generation, default=None)
        if newest is not None:
            self.generation = newest.generation
        return newest

    @property
    def has_files(self) -> bool:
        """Whether the disk has any file of timers."""
        return any(self._disk.names(folder) for folder in FOLDERS)

    def reload_files(self) -> None:
        """Make the files of an earlier process durable."""
        for folder in FOLDERS:
            reload_folder(self._disk, folder)

    def start_periods(self, now_ms: int) -> None:
        """Start the periods of flushes now."""
        self._flushed_at_ms = self._log_flushed_at_ms = now_ms

    def adopt(self, checkpoint: TimerCheckpoint) -> None:
        """Continue from a checkpoint that was loaded or written."""
        self.replay_from = checkpoint.replay_from
        self.durable_hand_s = checkpoint.hand_ms // 1000
        self.checkpoint_at_ms = checkpoint.written_at_ms

    def drop_checkpoints(self) -> Iterator[list[File]]:
        """Delete both checkpoints. The next start then rebuilds everything from the commit log."""
        names = self._disk.names(FOLDER)
        for name in FILES:
            if name in names:
                self._disk.delete(name)
        if names:
            yield [self._disk.folder(FOLDER)]

    # ------------------------------------------------------------ when

    def is_log_due(self, now_ms: int) -> bool:
        """Return whether new records of the timer log must be written now."""
        is_time = now_ms - self._log_flushed_at_ms >= LOG_PERIOD_MS
        return is_time and self._index.links.timer_log.has_unwritten

    def is_due(self, now_ms: int) -> bool:
        """Return whether all files must be written now."""
        if self._log.committed_offset - self.replay_from >= self._config.flush_log_bytes:
            return True
        index = self._index
        if index.event_count == self._flushed_events:
            return False
        is_time = now_ms - self._flushed_at_ms >= self._config.flush_period_ms
        return is_time or index.table.dirty_count >= DIRTY_PAGES_MAX

    def next_ms(self) -> int | None:
        """Return when a flush is due, None while there is nothing to write."""
        if self._index.links.timer_log.has_unwritten:
            return self._log_flushed_at_ms + LOG_PERIOD_MS
        if self._index.event_count != self._flushed_events:
            return self._flushed_at_ms + self._config.flush_period_ms
        return None

    # ------------------------------------------------------------ how

    def flush_log(self, now_ms: int) -> Iterator[list[File]]:
        """Write the timer log's new records."""
        self._log_flushed_at_ms = now_ms
        yield from self._index.links.timer_log.write()

    def flush(
        self,
        now_ms: int,
        store_uuid: bytes,
        quiet: Callable[[], Iterator[list[File]]],
        *,
        flags: int = 0,
    ) -> Iterator[list[File]]:
        """Write all files, as of the first moment without pending records."""
        yield from quiet()
        index = self._index
        self._flushed_at_ms = self._log_flushed_at_ms = now_ms
        self._flushed_events = index.event_count
        self._counter += 1
        checkpoint = TimerCheckpoint(
            generation=self.generation + 1,
            hand_ms=index.links.hand_s * 1000,
            timer_log_position=index.links.timer_log.end,
            queue_offset=QueueOffset(index.next_id),
            master_queue_offset=QueueOffset(index.next_id),
            replay_from=self._log.committed_offset,
            epoch=self._log.epoch,
            written_at_ms=now_ms,
            counter=self._counter,
            pending_count=index.pending_count,
            oldest_pinned_offset=min((s for s, n in index.counts.pins.items() if n), default=-1),
            flags=flags,
            store_uuid=store_uuid,
            slots_used=index.links.wheel.used_count,
            live_files=_live_files(index),
        )
        self.is_active = True
        index.links.wheel.freeze()
        index.table.freeze()
        yield from index.links.timer_log.write()
        yield from index.links.wheel.write_frozen()
        yield from index.table.write_frozen()
        yield from self._write(checkpoint)
        self.generation = checkpoint.generation
        self.is_active = False
        self.adopt(checkpoint)

    def _write(self, checkpoint: TimerCheckpoint) -> Iterator[list[File]]:
        name = FILES[checkpoint.generation % 2]
        file = self._disk.open(name, create=name not in self._disk.names(FOLDER))
        file.write_at(0, [timer_checkpoint.encode(checkpoint)])
        yield [file, self._disk.folder(FOLDER)]
        file.close()


def _live_files(index: TimerIndex) -> tuple[int, ...] | None:
    numbers = sorted(number for number, count in index.counts.file_live.items() if count)
    return tuple(numbers) if len(numbers) <= timer_checkpoint.LIVE_FILES_MAX else None
