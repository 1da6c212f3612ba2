"""The timer log: chained 64-byte records in fixed-size files, append-only.

New records are in memory until the next flush. Older ones are read through a few mapped files (ADR
0015). If it is damaged, the links are rebuilt from the state table. The replay of the commit log
links timers again whose records were not flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_record
from tidemill.broker.engine.layout.timer_record import DTYPE, SIZE, TimerRecord
from tidemill.broker.engine.store.disk import Disk, File, drop_file
from tidemill.broker.engine.store.mappings import Mappings, PageUnreadable

FOLDER = "timer/timerlog"
TAIL_PIECE_BYTES = 64 << 10  # 1,024 records: a millisecond for checksums and writing
assert TAIL_PIECE_BYTES % SIZE == 0, "no record straddles two pieces"


class TimerLogDamaged(Exception):
    """An expected record of the timer log is missing or not intact."""


@final
class TimerLog:
    """The records from `begin` to `end`, by position."""

    def __init__(self, disk: Disk, mappings: Mappings, *, file_bytes: int) -> None:
        assert file_bytes % SIZE == 0, "no record straddles two files"
        self._disk = disk
        self._views = mappings
        self._file_bytes = file_bytes
        self._names: dict[int, str] = {}  # file names by number, the oldest first
        # Records from `_tail_at` on. Those below `_written` are also in a file. In pieces, because
        # cutting the front off one buffer would move all of it.
        self._tail = [bytearray()]
        self._tail_at = 0
        self._written = 0
        self._unsynced: dict[int, File] = {}  # open until their records are synced
        self._used = 0  # the end of the log by the checkpoint, whether its files exist or not
        self.begin = 0
        self.end = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of all records."""
        return self.end - self.begin

    @property
    def has_unwritten(self) -> bool:
        """Whether a flush has records to write."""
        return self._written < self.end

    def file_number(self, position: int) -> int:
        """Return the number of the file that holds `position`."""
        return position // self._file_bytes

    def append(self, record: bytes | memoryview) -> int:
        """Append one or more records. Return the position of the first one."""
        position = self.end
        self.end = position + len(record)
        last = self._tail[-1]
        if len(last) + len(record) <= TAIL_PIECE_BYTES:
            last += record
            return position
        remaining = memoryview(record)
        while remaining:
            room = TAIL_PIECE_BYTES - len(self._tail[-1])
            self._tail[-1] += remaining[:room]
            remaining = remaining[room:]
            if remaining:
                self._tail.append(bytearray())
        return position

    def read(self, position: int) -> TimerRecord:
        """Return the record at `position`. Raises TimerLogDamaged."""
        if self._written <= position <= self.end - SIZE and position % SIZE == 0:
            piece, at = divmod(position - self._tail_at, TAIL_PIECE_BYTES)
            return timer_record.decode(self._tail[piece], at)
        number, at = divmod(position, self._file_bytes)
        name = self._names.get(number)
        found = None
        if name is not None and position < self._written and position % SIZE == 0:
            found = timer_record.find(self._view(number, at, SIZE), at)
        if found is None:
            raise TimerLogDamaged(f"no intact record at timer log position {position}")
        return found

    def batches(self, number: int, *, count: int) -> Iterator[np.ndarray]:
        """Yield copies of the written records of one file, `count` at a time, unchecked.

        Raises TimerLogDamaged if the file cannot be read.
        """
        written = min(self._written - number * self._file_bytes, self._file_bytes) // SIZE
        for begin in range(0, written, count):
            yield self._rows(number, begin, min(count, written - begin))

    def _rows(self, number: int, begin: int, count: int) -> np.ndarray:
        view = self._view(number, begin * SIZE, count * SIZE)
        return np.frombuffer(view, DTYPE, count, begin * SIZE).copy()

    def _view(self, number: int, at: int, size: int) -> memoryview:
        """Return the view of a file with a readable range of bytes. Raises TimerLogDamaged."""
        try:
            return self._views.readable(self._names[number], at, size)
        except PageUnreadable as error:
            raise TimerLogDamaged(str(error)) from error

    @property
    def numbers(self) -> list[int]:
        """The numbers of all files, the oldest first."""
        return list(self._names)

    # ------------------------------------------------------------ writing

    def write(self) -> Iterator[list[File]]:
        """Write the records that are in memory now, in slices. The last one yields the files."""
        end = self.end
        while self._written < end:
            number, at = divmod(self._written, self._file_bytes)
            file = self._unsynced.get(number) or self._open(number)
            first = self._written - self._tail_at
            size = min(TAIL_PIECE_BYTES - first, end - self._written, self._file_bytes - at)
            rows = np.frombuffer(self._tail[0][first : first + size], DTYPE)
            timer_record.seal(rows)
            file.write_at(at, [rows.tobytes()])
            self._written += size
            if first + size == TAIL_PIECE_BYTES:
                self._begin_tail(self._tail[1:])
            yield []
        files = list(self._unsynced.values())
        yield [*files, self._disk.folder(FOLDER)] if files else []
        self._close_files()

    def _begin_tail(self, pieces: list[bytearray]) -> None:
        """Begin the tail at the first unwritten record."""
        self._tail_at = self._written
        self._tail = pieces or [bytearray()]

    def _open(self, number: int) -> File:
        name = self._name(number)
        if number in self._names:
            file = self._disk.open(name)
        else:
            file = self._disk.open(name, create=name not in self._disk.names(FOLDER))
            file.resize(0)
            file.resize(self._file_bytes)
            self._names[number] = name
        self._unsynced[number] = file
        return file

    def _close_files(self) -> None:
        for file in self._unsynced.values():
            file.close()
        self._unsynced.clear()

    def _name(self, number: int) -> str:
        return f"{FOLDER}/{number * self._file_bytes:020d}"

    # ------------------------------------------------------------ opening, dropping

    def load(self, position: int) -> Iterator[TimerRecord]:
        """Find the files and yield the intact records from `position` on. Cut off all others.

        Raises TimerLogDamaged if the records before `position` are missing.
        """
        self._used = position
        for name in self._disk.names(FOLDER):
            stem = name.rpartition("/")[2]
            if not stem.isdigit():
                self._disk.delete(name)  # It was being dropped.
            elif int(stem) % self._file_bytes == 0:
                file = self._disk.open(name)
                if file.size() == self._file_bytes:
                    self._names[int(stem) // self._file_bytes] = name
                file.close()
        if not self._names:
            if position:
                raise TimerLogDamaged("the timer log's files are missing")
            return
        self._names = dict(sorted(self._names.items()))
        first, last = min(self._names), max(self._names)
        if list(self._names) != list(range(first, last + 1)):
            raise TimerLogDamaged("a file of the timer log is missing")
        self.begin = first * self._file_bytes
        file_end = (last + 1) * self._file_bytes
        if not self.begin <= position <= file_end:
            raise TimerLogDamaged("the timer log ends before its checkpoint")
        while position < file_end:
            number, at = divmod(position, self._file_bytes)
            found = timer_record.find(self._view(number, at, SIZE), at)
            if found is None or found.previous >= position:
                break
            self.end = self._written = position + SIZE
            yield found
            position += SIZE
        self.end = self._written = position
        self._begin_tail([])
        self._cut()

    def _cut(self) -> None:
        """Remove all bytes after the end, so that a later start does not read them as records."""
        for number, name in list(self._names.items()):
            start = number * self._file_bytes
            if start >= self.end:
                self._views.forget(name)
                self._disk.delete(name)
                del self._names[number]
            elif self.end < start + self._file_bytes:
                self._views.forget(name)
                file = self._open(number)
                file.resize(self.end - start)
                file.resize(self._file_bytes)

    def clear(self) -> None:
        """Delete all files. Continue at a position after all that were ever used."""
        used = max(self.end, self._used)
        for name in self._disk.names(FOLDER):
            stem = name.rpartition("/")[2]
            if stem.isdigit():
                used = max(used, int(stem) + self._file_bytes)
            self._views.forget(name)
            self._disk.delete(name)
        position = -(-used // self._file_bytes) * self._file_bytes
        self._close_files()
        self._names.clear()
        self.begin = self.end = self._written = position
        self._begin_tail([])

    def drop_oldest(self) -> Iterator[list[File]]:
        """Delete the oldest file."""
        number = next(iter(self._names))
        assert number not in self._unsynced, "a newer file was written since"
        name = self._names.pop(number)
        self.begin = (number + 1) * self._file_bytes
        self._views.forget(name)
        yield from drop_file(self._disk, name)

    def close(self) -> None:
        """Close all files without writing."""
        self._close_files()
