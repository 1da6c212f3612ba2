"""The flush service: table, wheel, timer log and checkpoint, durable in this order of trust.

Every second the timer log's new records. Every `flush_period_ms`, or `flush_log_bytes` of commit
log, with nothing pending:

    1. take the hand and the offset to replay from; freeze the pages of wheel and table
    2. the timer log, synced
    3. the wheel's pages, synced: no slot on disk points beyond the durable timer log
    4. the table's pages, synced
    5. the older of the two checkpoint files, synced

A crash between any two steps leaves the checkpoint before: the replay from its offset folds in
again what pages on disk may know already, and that changes nothing.
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
DIRTY_PAGES_MAX = 2_048  # of the table, 32 MiB: beyond it a flush does not wait for its time


@final
class Flusher:
    """When the files were written, and writing them."""

    def __init__(self, disk: Disk, index: TimerIndex, log: CommitLog, config: TimerConfig) -> None:
        self._disk = disk
        self._index = index
        self._log = log
        self._config = config
        self.generation = 0  # of the newest checkpoint, durable or not found to be
        self._counter = 0
        self._flushed_at_ms = 0
        self._log_flushed_at_ms = 0
        self._flushed_events = 0
        self.is_active = False  # a flush is under way
        self.replay_from = 0  # of the newest durable checkpoint
        self.durable_hand_s = 0
        self.checkpoint_at_ms = 0  # when that was written; 0: never

    def find_checkpoint(self) -> TimerCheckpoint | None:
        """Return the newest intact checkpoint, and go on after it.

        One that cannot be read is none, and deleted: what is written next has a sound place.
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
        """Make durable what an earlier process has written."""
        for folder in FOLDERS:
            reload_folder(self._disk, folder)

    def begin(self, now_ms: int) -> None:
        """Count the periods from here."""
        self._flushed_at_ms = self._log_flushed_at_ms = now_ms

    def use(self, checkpoint: TimerCheckpoint) -> None:
        """Go on from a checkpoint that was loaded."""
        self.replay_from = checkpoint.replay_from
        self.durable_hand_s = checkpoint.hand_ms // 1000
        self.checkpoint_at_ms = checkpoint.written_at_ms

    def drop_checkpoints(self) -> Iterator[list[File]]:
        """Delete both checkpoints: the next start makes everything again from the commit log."""
        names = self._disk.names(FOLDER)
        for name in FILES:
            if name in names:
                self._disk.delete(name)
        if names:
            yield [self._disk.folder(FOLDER)]

    # ------------------------------------------------------------ when

    def is_log_due(self, now_ms: int) -> bool:
        """Whether the timer log has records to be written now."""
        is_time = now_ms - self._log_flushed_at_ms >= LOG_PERIOD_MS
        return is_time and self._index.links.timer_log.has_unwritten

    def is_due(self, now_ms: int) -> bool:
        """Whether all files are to be written now."""
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
        """Write everything, as of the first moment at which nothing is pending."""
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
        self.use(checkpoint)

    def _write(self, checkpoint: TimerCheckpoint) -> Iterator[list[File]]:
        name = FILES[checkpoint.generation % 2]
        file = self._disk.open(name, create=name not in self._disk.names(FOLDER))
        file.write_at(0, [timer_checkpoint.encode(checkpoint)])
        yield [file, self._disk.folder(FOLDER)]
        file.close()


def _live_files(index: TimerIndex) -> tuple[int, ...] | None:
    numbers = sorted(number for number, count in index.counts.file_live.items() if count)
    return tuple(numbers) if len(numbers) <= timer_checkpoint.LIVE_FILES_MAX else None
