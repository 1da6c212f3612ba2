"""The timer log: chained 64-byte records in fixed-size files, append-only.

Owned by the engine's one owner. New records are in memory until the next flush; older ones are
read through a mapping of their file. A cache: when its end or middle is damaged the records are
made again from the state table, and what was not flushed is linked again by the replay of the
commit log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_record
from tidemill.broker.engine.layout.timer_record import DTYPE, SIZE, TimerRecord
from tidemill.broker.engine.store.disk import Disk, File, drop_file

FOLDER = "timer/timerlog"
TAIL_PIECE_BYTES = 64 << 10  # 1,024 records, summed and written in about a millisecond
assert TAIL_PIECE_BYTES % SIZE == 0, "no record straddles two pieces"


class TimerLogDamaged(Exception):
    """A record that should be there is not intact."""


class _LogFile:
    """One file and its mapping."""

    __slots__ = ("file", "view")

    def __init__(self, file: File) -> None:
        self.file = file
        self.view = file.view()


@final
class TimerLog:
    """The records from `begin` to `end`, by position."""

    def __init__(self, disk: Disk, *, file_bytes: int) -> None:
        assert file_bytes % SIZE == 0, "no record straddles two files"
        self._disk = disk
        self._file_bytes = file_bytes
        self._files: dict[int, _LogFile] = {}  # by number, the oldest first
        # Records from `_tail_at` on, of which those below `_written` are in a file too. In pieces:
        # to take from the front of one buffer would move all that is behind it.
        self._tail = [bytearray()]
        self._tail_at = 0
        self._written = 0
        self._unsynced: dict[str, File] = {}
        self._used = 0  # by what a checkpoint says, whether or not its files are there
        self.begin = 0
        self.end = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all records that are kept."""
        return self.end - self.begin

    @property
    def has_unwritten(self) -> bool:
        """Whether a flush has something to write."""
        return self._written < self.end

    def file_number(self, position: int) -> int:
        """Return the number of the file that holds `position`."""
        return position // self._file_bytes

    def append(self, record: bytes | memoryview) -> int:
        """Add a record, or several; return the position of the first."""
        position = self.end
        self.end = position + len(record)
        last = self._tail[-1]
        if len(last) + len(record) <= TAIL_PIECE_BYTES:
            last += record
            return position
        rest = memoryview(record)
        while rest:
            room = TAIL_PIECE_BYTES - len(self._tail[-1])
            self._tail[-1] += rest[:room]
            rest = rest[room:]
            if rest:
                self._tail.append(bytearray())
        return position

    def read(self, position: int) -> TimerRecord:
        """Return the record at `position`. Raises TimerLogDamaged."""
        if self._written <= position <= self.end - SIZE and position % SIZE == 0:
            piece, at = divmod(position - self._tail_at, TAIL_PIECE_BYTES)
            return timer_record.decode(self._tail[piece], at)
        number, at = divmod(position, self._file_bytes)
        file = self._files.get(number)
        found = None
        if file is not None and position < self._written and position % SIZE == 0:
            found = timer_record.find(file.view, at)
        if found is None:
            raise TimerLogDamaged(f"no intact record at timer log position {position}")
        return found

    def rows(self, number: int) -> np.ndarray:
        """Return the written records of one file as an array, unchecked."""
        file = self._files[number]
        count = min(self._written - number * self._file_bytes, self._file_bytes) // SIZE
        return np.frombuffer(file.view, DTYPE, max(count, 0))

    @property
    def numbers(self) -> list[int]:
        """The numbers of all files, the oldest first."""
        return list(self._files)

    # ------------------------------------------------------------ writing

    def write(self) -> Iterator[list[File]]:
        """Write what is in memory now, in slices; the last names the files to sync."""
        end = self.end
        while self._written < end:
            number, at = divmod(self._written, self._file_bytes)
            file = self._files.get(number) or self._create(number)
            first = self._written - self._tail_at
            size = min(TAIL_PIECE_BYTES - first, end - self._written, self._file_bytes - at)
            rows = np.frombuffer(self._tail[0][first : first + size], DTYPE)
            timer_record.seal(rows)
            file.file.write_at(at, [rows.tobytes()])
            self._written += size
            if first + size == TAIL_PIECE_BYTES:
                self._begin_tail(self._tail[1:])
            self._unsynced[file.file.name] = file.file
            yield []
        files = [*self._unsynced.values()]
        self._unsynced.clear()
        yield [*files, self._disk.folder(FOLDER)] if files else []

    def _begin_tail(self, pieces: list[bytearray]) -> None:
        """Let the tail begin at what is not written."""
        self._tail_at = self._written
        self._tail = pieces or [bytearray()]

    def _create(self, number: int) -> _LogFile:
        name = self._name(number)
        file = self._disk.open(name, create=name not in self._disk.names(FOLDER))
        file.resize(0)
        file.resize(self._file_bytes)
        self._files[number] = _LogFile(file)
        return self._files[number]

    def _name(self, number: int) -> str:
        return f"{FOLDER}/{number * self._file_bytes:020d}"

    # ------------------------------------------------------------ opening, dropping

    def load(self, position: int) -> Iterator[TimerRecord]:
        """Open the files and yield the intact records from `position` on; the rest is cut off.

        Raises TimerLogDamaged when there is nothing up to `position`.
        """
        self._used = position
        for name in self._disk.names(FOLDER):
            stem = name.rpartition("/")[2]
            if not stem.isdigit():
                self._disk.delete(name)  # It was being dropped.
            elif int(stem) % self._file_bytes == 0:
                file = self._disk.open(name)
                if file.size() == self._file_bytes:
                    self._files[int(stem) // self._file_bytes] = _LogFile(file)
        if not self._files:
            if position:
                raise TimerLogDamaged("the timer log's files are missing")
            return
        first, last = min(self._files), max(self._files)
        if sorted(self._files) != list(range(first, last + 1)):
            raise TimerLogDamaged("a file of the timer log is missing")
        self._files = {number: self._files[number] for number in sorted(self._files)}
        self.begin = first * self._file_bytes
        file_end = (last + 1) * self._file_bytes
        if not self.begin <= position <= file_end:
            raise TimerLogDamaged("the timer log ends before its checkpoint")
        while position < file_end:
            number, at = divmod(position, self._file_bytes)
            found = timer_record.find(self._files[number].view, at)
            if found is None or found.previous >= position:
                break
            self.end = self._written = position + SIZE
            yield found
            position += SIZE
        self.end = self._written = position
        self._begin_tail([])
        self._cut()

    def _cut(self) -> None:
        """Leave nothing behind the end that a later start could take for a record."""
        for number in list(self._files):
            file, start = self._files[number].file, number * self._file_bytes
            if start >= self.end:
                file.close()
                self._disk.delete(file.name)
                del self._files[number]
            elif self.end < start + self._file_bytes:
                file.resize(self.end - start)
                file.resize(self._file_bytes)
                self._files[number] = _LogFile(file)
                self._unsynced[file.name] = file

    def clear(self) -> None:
        """Begin anew behind all positions that were ever used, without any file."""
        used = max(self.end, self._used)
        for name in self._disk.names(FOLDER):
            stem = name.rpartition("/")[2]
            if stem.isdigit():
                used = max(used, int(stem) + self._file_bytes)
            self._disk.delete(name)
        position = -(-used // self._file_bytes) * self._file_bytes
        for file in self._files.values():
            file.file.close()
        self._files.clear()
        self._unsynced.clear()
        self.begin = self.end = self._written = position
        self._begin_tail([])

    def drop_oldest(self) -> Iterator[list[File]]:
        """Delete the oldest file."""
        number = next(iter(self._files))
        file = self._files.pop(number).file
        self.begin = (number + 1) * self._file_bytes
        file.close()
        yield from drop_file(self._disk, file.name)

    def close(self) -> None:
        """Close all files; nothing is written."""
        for file in self._files.values():
            file.file.close()
