"""Reading a data directory on which a broker may run. Nothing is written.

No file is mapped: a broker cuts files before it deletes them, and reading a mapping of a cut part
ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, final

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.store.disk import ReadFailed
from tidemill.broker.engine.store.mappings import PAGE_BYTES

WINDOW_BYTES = 1 << 20  # read at once
# Unreadable pages of a store. Each is read by itself, which takes seconds on a failing disk. More
# than this is the failure of a disk and not damage to a file.
UNREADABLE_MAX = 4_096


class SourceFile(Protocol):
    """One open file."""

    def size(self) -> int:
        """Return the size in bytes."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer at the end of the file. Raises ReadFailed."""

    def close(self) -> None:
        """Close the file."""


class Source(Protocol):
    """A data directory to read. Every `Disk` is a source."""

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted, each with the folder as prefix."""

    def open(self, name: str) -> SourceFile:
        """Open a file. Raises FileNotFoundError."""

    def read(self, name: str) -> bytes | None:
        """Return a small file's content, None if it does not exist. Raises ReadFailed."""


class ReadOnlyFile:
    """One file, open for reading only."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._fd).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        """Read at an offset."""
        try:
            return os.pread(self._fd, size, offset)
        except OSError as error:
            raise ReadFailed(f"reading {self._name} at byte {offset}: {error.strerror}") from error

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@final
class ReadOnlyDisk:
    """The files below one folder, for reading only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        path = self._folder / folder
        if not path.is_dir():
            return []
        return sorted(f"{folder}/{entry.name}" for entry in os.scandir(path) if entry.is_file())

    def open(self, name: str) -> ReadOnlyFile:
        """Open a file."""
        return ReadOnlyFile(name, self._folder / name)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ReadFailed(f"reading {name}: {error.strerror}") from error


class UnreadableRange(NamedTuple):
    """A range of whole pages of a file that the disk cannot read."""

    name: str
    begin: int
    end: int
    why: str


@final
class SalvageSource:
    """A data directory with zeros in place of unreadable pages, as the broker reads it.

    It remembers the unreadable pages.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._bad: dict[tuple[str, int], str] = {}  # by file and first byte of the page: why

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return self._source.names(folder)

    def open(self, name: str) -> SalvageFile:
        """Open a file. Raises FileNotFoundError."""
        return SalvageFile(self, name, self._source.open(name))

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file."""
        try:
            return self._source.read(name)
        except ReadFailed:
            file = self.open(name)
        try:
            return file.read_at(0, file.size())
        finally:
            file.close()

    def note(self, name: str, page_at: int, why: str) -> None:
        """Remember an unreadable page. Raises ReadFailed if there are too many."""
        self._bad[name, page_at] = why
        if len(self._bad) > UNREADABLE_MAX:
            raise ReadFailed(
                f"more than {UNREADABLE_MAX} pages are unreadable, the last one at byte {page_at} "
                f"of {name} ({why}): copy the directory with a recovery tool, or restore a backup"
            )

    @property
    def unreadable(self) -> list[UnreadableRange]:
        """The unreadable ranges so far, by file and position."""
        found: list[UnreadableRange] = []
        for (name, at), why in sorted(self._bad.items()):
            if found and (found[-1].name, found[-1].end) == (name, at):
                found[-1] = found[-1]._replace(end=at + PAGE_BYTES)
            else:
                found.append(UnreadableRange(name, at, at + PAGE_BYTES, why))
        return found


@final
class SalvageFile:
    """One open file with zeros in place of unreadable pages."""

    def __init__(self, owner: SalvageSource, name: str, file: SourceFile) -> None:
        self._owner = owner
        self._name = name
        self._file = file

    def size(self) -> int:
        """Return the size in bytes."""
        return self._file.size()

    def read_at(self, offset: int, size: int) -> bytes:
        """Read at once, or page by page if that fails."""
        try:
            return self._file.read_at(offset, size)
        except ReadFailed:
            return b"".join(self._pages(offset, min(offset + size, self._file.size())))

    def _pages(self, at: int, end: int) -> Iterator[bytes]:
        while at < end:
            page_at = at - at % PAGE_BYTES
            stop = min(page_at + PAGE_BYTES, end)
            try:
                yield self._file.read_at(at, stop - at)
            except ReadFailed as error:
                self._owner.note(self._name, page_at, str(error))
                yield bytes(stop - at)
            at = stop

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def salvaging(source: Source) -> SalvageSource:
    """Return a source that reads zeros in place of unreadable pages."""
    return source if isinstance(source, SalvageSource) else SalvageSource(source)


@final
class FileWindow:
    """The bytes of a file, read in large pieces. A piece does not change until `forget`."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._size = file.size()
        self._begin = 0
        self._data = memoryview(b"")

    def view(self, at: int, size: int) -> memoryview:
        """Return `size` bytes from `at`, fewer at the end of the file."""
        end = min(at + size, self._size)
        if not self._begin <= at <= end <= self._begin + len(self._data):
            self._begin = at
            self._data = memoryview(self._file.read_at(at, max(size, WINDOW_BYTES)))
        begin = at - self._begin
        return self._data[begin : begin + size]

    def record(self, at: int) -> memoryview:
        """Return the bytes of the record at `at`; at most its head if the head is damaged.

        The size in a damaged head could be that of a whole segment.
        """
        view = self.view(at, record.HEADER_SIZE)
        if len(view) < record.HEADER_SIZE:
            return view
        header = record.HEADER.unpack_from(view)
        if header[0] != record.MAGIC:
            return view
        view = self.view(at, max(header[record.HEAD_SIZE], record.HEADER_SIZE))
        own_offset, room = header[record.LOG_OFFSET], self._size - at
        if record.find_head(view, 0, log_offset=own_offset, room=room) is None:
            return view
        return self.view(at, header[record.SIZE])

    def forget(self) -> None:
        """Read the file again from now on."""
        self._data = memoryview(b"")
