"""The timer state table: the current state of each timer, by id.

While the process runs, it is the authority on timers. Entries are read and written in pages,
through a cache of `pages_max` pages. A changed page stays in the cache until a flush has written
it. If a file is missing or damaged, a replay from the minimum offset of the log rebuilds all files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_entry
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.layout.timer_entry import DTYPE, SIZE, TimerEntry, TimerEntryDamaged
from tidemill.broker.engine.store.disk import Disk, File, drop_file
from tidemill.broker.engine.timer.pages import DirtyPages
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.engine.timer.transitions import ON_FORGET

FOLDER = "timer/state"
PAGE_ENTRIES = 512  # 16 KiB: a cold cancel reads one page
PAGE_BYTES = PAGE_ENTRIES * SIZE
PAGES_A_SLICE = 8  # 4,096 entries: a millisecond for checksums and writing
OPEN_FILES_MAX = 64
_NO_PAGE = bytes(PAGE_BYTES)


@final
class TimerTable:
    """The entries of all timers, except in deleted files."""

    def __init__(self, disk: Disk, *, file_entries: int, pages_max: int) -> None:
        assert file_entries % PAGE_ENTRIES == 0, "a file is made of whole pages"
        self._disk = disk
        self._file_entries = file_entries
        self._file_bytes = file_entries * SIZE
        self._pages_a_file = file_entries // PAGE_ENTRIES
        self._pages_max = pages_max
        self._pages: dict[int, bytearray] = {}  # cached pages, in the order in which they came
        self._changes = DirtyPages(lambda number: bytes(self._pages[number]))
        self._open: dict[int, File] = {}
        self._file_numbers: set[int] = set()  # numbers of the files that exist
        self._damaged: set[int] = set()  # timers with a wrong checksum when their page was read

    # ------------------------------------------------------------ entries

    def get(self, timer_id: TimerId) -> TimerEntry:
        """Return an entry. An unused one has state 0. Raises TimerEntryDamaged."""
        number, index = divmod(timer_id, PAGE_ENTRIES)
        page = self._pages.get(number) or self._page(number)
        if self._damaged and timer_id in self._damaged:
            raise TimerEntryDamaged
        return timer_entry.read(page, index * SIZE)

    def put(self, timer_id: TimerId, entry: TimerEntry) -> None:
        """Write an entry."""
        number, index = divmod(timer_id, PAGE_ENTRIES)
        page = self._pages.get(number) or self._page(number)
        self._changes.touch(number)
        self._damaged.discard(timer_id)
        timer_entry.write(page, index * SIZE, entry)

    def put_rows(self, first_id: int, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Write entries of consecutive timers. Yield (first id, entries) of each file's part."""
        done = 0
        while done < len(rows):
            begin = first_id + done
            count = min(self._file_entries - begin % self._file_entries, len(rows) - done)
            part = rows[done : done + count]
            for at in range(0, count, PAGE_ENTRIES):
                self._put_in_pages(begin + at, part[at : at + PAGE_ENTRIES])
            yield begin, part
            done += count

    def _put_in_pages(self, first_id: int, rows: np.ndarray) -> None:
        """Write at most PAGE_ENTRIES entries, which are on one page or two."""
        while len(rows):
            number, index = divmod(first_id, PAGE_ENTRIES)
            page = self._pages.get(number) or self._page(number)
            part = rows[: PAGE_ENTRIES - index]
            self._changes.touch(number)
            page[index * SIZE : (index + len(part)) * SIZE] = part.tobytes()
            first_id, rows = first_id + len(part), rows[len(part) :]

    def _page(self, number: int) -> bytearray:
        page = bytearray(self._read(number))
        self._pages[number] = page
        broken = np.flatnonzero(~timer_entry.is_intact(np.frombuffer(page, DTYPE)))
        self._damaged.update((broken + number * PAGE_ENTRIES).tolist())
        if len(self._pages) > self._pages_max:
            self._evict()
        return page

    def _evict(self) -> None:
        """Drop clean pages from the cache, the oldest first, until it is seven eighths full."""
        surplus = len(self._pages) - self._pages_max * 7 // 8
        clean = [number for number in self._pages if not self._changes.is_unwritten(number)]
        for number in clean[: min(surplus, len(clean) - 1)]:
            del self._pages[number]

    def _read(self, number: int) -> bytes:
        file_number, index = divmod(number, self._pages_a_file)
        if file_number not in self._file_numbers:
            return _NO_PAGE
        data = self._file(file_number).read_at(index * PAGE_BYTES, PAGE_BYTES)
        return data.ljust(PAGE_BYTES, b"\0")

    def _file(self, number: int) -> File:
        file = self._open.get(number)
        if file is None:
            name = self._name(number)
            file = self._disk.open(name, create=number not in self._file_numbers)
            if file.size() < self._file_bytes:
                file.resize(self._file_bytes)
            self._file_numbers.add(number)
            self._open[number] = file
            if len(self._open) > OPEN_FILES_MAX:
                self._open.pop(next(iter(self._open))).close()
        return file

    def _name(self, number: int) -> str:
        return f"{FOLDER}/{number * self._file_entries:020d}"

    # ------------------------------------------------------------ walking

    def page_numbers(self) -> list[int]:
        """Return the numbers of all pages that can hold an entry, in order."""
        held = set(self._pages)
        for stem in self._file_numbers:
            held.update(range(stem * self._pages_a_file, (stem + 1) * self._pages_a_file))
        return sorted(held)

    def live_page_numbers(self, live: Mapping[int, int], *, begin: int = 0) -> Iterator[int]:
        """Yield the page numbers from `begin` on of files with pending timers, in order.

        `live` has the counts of pending timers by file.
        """
        first_file = begin // self._pages_a_file
        files = (number for number, count in live.items() if count and number >= first_file)
        for file_number in sorted(files):
            first = file_number * self._pages_a_file
            for number in range(max(first, begin), first + self._pages_a_file):
                if file_number in self._file_numbers or number in self._pages:
                    yield number

    def rows(self, number: int) -> np.ndarray:
        """Return a page's entries as an array, without caching the page."""
        page = self._pages.get(number)
        return np.frombuffer(bytes(page) if page is not None else self._read(number), DTYPE)

    def page_batches(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first id, entries) of all pages, small enough for the owner's slices."""
        for number in self.page_numbers():
            yield number * PAGE_ENTRIES, self.rows(number)

    def file_batches(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first id, entries) of all files with their cached pages. For a start."""
        files: dict[int, list[int]] = {stem: [] for stem in self._file_numbers}
        for number in self._pages:
            files.setdefault(number // self._pages_a_file, []).append(number)
        for stem, numbers in sorted(files.items()):
            size = self._file_entries * SIZE
            data = bytearray(size)
            if stem in self._file_numbers:
                found = self._file(stem).read_at(0, size)
                data[: len(found)] = found
            for number in numbers:
                at = number % self._pages_a_file * PAGE_BYTES
                data[at : at + PAGE_BYTES] = self._pages[number]
            yield stem * self._file_entries, np.frombuffer(data, DTYPE)

    @staticmethod
    def is_intact(rows: np.ndarray) -> bool:
        """Return whether all checksums of a page are right."""
        return bool(timer_entry.is_intact(rows).all())

    # ------------------------------------------------------------ files

    def file_number(self, timer_id: TimerId) -> int:
        """Return the number of the file that holds a timer."""
        return timer_id // self._file_entries

    def file_end(self, number: int) -> int:
        """Return the first id after a file."""
        return (number + 1) * self._file_entries

    @property
    def file_numbers(self) -> list[int]:
        """The numbers of the files that exist, the oldest first."""
        return sorted(self._file_numbers)

    def load(self, *, known_ids: int, files_kept: int, live_files: Iterable[int]) -> bool:
        """Find the files. Return False if a file with ids below `known_ids` is cut or missing.

        A missing old file counts as dropped, unless it is among `live_files`. The newest
        `files_kept` files are never dropped.
        """
        for name in self._disk.names(FOLDER):
            stem = name.rpartition("/")[2]
            if not stem.isdigit():
                self._disk.delete(name)  # It was being dropped.
                continue
            number = int(stem) // self._file_entries
            self._file_numbers.add(number)
            file = self._disk.open(name)
            size = file.size()
            file.close()
            if size < self._file_bytes and number * self._file_entries < known_ids:
                return False
        required = {*self._newest(known_ids, files_kept), *live_files}
        return self._file_numbers.issuperset(required)

    def _newest(self, known_ids: int, files_kept: int) -> range:
        end = -(-known_ids // self._file_entries)
        return range(max(end - files_kept, 0), end)

    def fill_gaps(self, *, known_ids: int, files_kept: int) -> None:
        """Mark unused ids below `known_ids` as forgotten, in all files that are kept.

        The log no longer has their records, so they are final. Afterwards an entry of zeros is
        always damage.
        """
        files = {number // self._pages_a_file for number in self._pages}
        for file_number in sorted({*files, *self._newest(known_ids, files_kept)}):
            first = file_number * self._pages_a_file
            for number in range(first, first + self._pages_a_file):
                count = min(known_ids - number * PAGE_ENTRIES, PAGE_ENTRIES)
                if count > 0:
                    self._fill_gaps(number, count)

    def _fill_gaps(self, number: int, count: int) -> None:
        page = self._pages.get(number)
        rows = np.frombuffer(self._page(number) if page is None else page, DTYPE)
        gaps = np.flatnonzero(rows["state"][:count] == TimerState.UNUSED)
        if len(gaps):
            self._changes.touch(number)
            rows["state"][gaps] = ON_FORGET[TimerState.UNUSED]

    @staticmethod
    def has_gaps(rows: np.ndarray, count: int) -> bool:
        """Return whether one of the first `count` entries was never written."""
        return bool((rows["state"][: max(count, 0)] == TimerState.UNUSED).any())

    def clear(self) -> None:
        """Delete all entries and files."""
        for file in self._open.values():
            file.close()
        for name in self._disk.names(FOLDER):
            self._disk.delete(name)
        self._open.clear()
        self._file_numbers.clear()
        self._pages.clear()
        self._damaged.clear()
        self._changes = DirtyPages(lambda number: bytes(self._pages[number]))

    def is_flushed(self, number: int) -> bool:
        """Return whether all entries of a file are on the disk."""
        first = number * self._pages_a_file
        return not any(map(self._changes.is_unwritten, range(first, first + self._pages_a_file)))

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return len(self._file_numbers) * self._file_entries * SIZE

    @property
    def dirty_count(self) -> int:
        """Pages that changed since the last flush began."""
        return len(self._changes.dirty)

    def freeze(self) -> None:
        """Begin a flush of the current entries."""
        self._changes.freeze()

    def write_frozen(self) -> Iterator[list[File]]:
        """Write the pages of the flush in slices. Each slice yields files to sync."""
        written: dict[int, File] = {}
        for n, (number, data) in enumerate(self._changes.frozen(), 1):
            file_number, index = divmod(number, self._pages_a_file)
            file = self._file(file_number)
            file.write_at(index * PAGE_BYTES, [self._sealed(number, data)])
            written[file_number] = file
            if len(written) == OPEN_FILES_MAX // 2:
                yield list(written.values())
                written.clear()
            elif n % PAGES_A_SLICE == 0:
                yield []
        yield [*written.values(), self._disk.folder(FOLDER)] if self._file_numbers else []

    def _sealed(self, number: int, data: bytes) -> bytes:
        rows = np.frombuffer(bytearray(data), DTYPE)
        timer_entry.seal(rows)
        for timer_id in self._damaged:
            if timer_id // PAGE_ENTRIES == number:
                # Keep the checksum wrong, so that the next start finds the damage and rebuilds.
                rows["crc"][timer_id % PAGE_ENTRIES] ^= np.uint32(1)
        return rows.tobytes()

    def drop_file(self, number: int) -> Iterator[list[File]]:
        """Delete one file. All its timers are final."""
        if number in self._open:
            self._open.pop(number).close()
        self._file_numbers.discard(number)
        for page in range(number * self._pages_a_file, (number + 1) * self._pages_a_file):
            if not self._changes.is_unwritten(page):
                self._pages.pop(page, None)
        yield from drop_file(self._disk, self._name(number))

    def close(self) -> None:
        """Close the files without writing."""
        for file in self._open.values():
            file.close()
