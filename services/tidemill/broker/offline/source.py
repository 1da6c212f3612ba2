"""Reading a data directory that may belong to a running broker: nothing is ever written.

No file is mapped: a broker cuts files that it drops, and a mapping of what was cut ends the process
that reads it.
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
# Pages of a store that cannot be read, each asked for by itself, at seconds a page of a failing
# disk. Of more than this it is no damage to a file any more.
UNREADABLE_MAX = 4_096


class SourceFile(Protocol):
    """One open file."""

    def size(self) -> int:
        """Return the size in bytes."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer where the file ends. Raises ReadFailed."""

    def close(self) -> None:
        """Give the descriptor back."""


class Source(Protocol):
    """A data directory to be read. Every `Disk` is one."""

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted, each with the folder in front."""

    def open(self, name: str) -> SourceFile:
        """Open a file. Raises FileNotFoundError."""

    def read(self, name: str) -> bytes | None:
        """Return a small file's content, None where there is no such file. Raises ReadFailed."""


class ReadOnlyFile:
    """One open file, which nobody can write to by it."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._fd).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        """Read without moving a position."""
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
    """The files below one folder."""

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


class Unreadable(NamedTuple):
    """A stretch of a file, of whole pages, that the disk does not give out."""

    name: str
    begin: int
    end: int
    why: str


@final
class Readable:
    """A data directory as far as its disk gives it out, with zeros for what cannot be read.

    So the broker reads it, too. What was met is kept.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._bad: dict[tuple[str, int], str] = {}  # by file and first byte of the page: why

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return self._source.names(folder)

    def open(self, name: str) -> ReadableFile:
        """Open a file. Raises FileNotFoundError."""
        return ReadableFile(self, name, self._source.open(name))

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
        """Keep in mind that a page cannot be read. Raises ReadFailed where those are too many."""
        self._bad[name, page_at] = why
        if len(self._bad) > UNREADABLE_MAX:
            raise ReadFailed(
                f"over {UNREADABLE_MAX} pages cannot be read, the last one at byte {page_at} of "
                f"{name} ({why}): take the directory from the disk by other means, or from a backup"
            )

    @property
    def unreadable(self) -> list[Unreadable]:
        """What was met that cannot be read, by file and place."""
        found: list[Unreadable] = []
        for (name, at), why in sorted(self._bad.items()):
            if found and (found[-1].name, found[-1].end) == (name, at):
                found[-1] = found[-1]._replace(end=at + PAGE_BYTES)
            else:
                found.append(Unreadable(name, at, at + PAGE_BYTES, why))
        return found


@final
class ReadableFile:
    """One open file of it."""

    def __init__(self, owner: Readable, name: str, file: SourceFile) -> None:
        self._owner = owner
        self._name = name
        self._file = file

    def size(self) -> int:
        """Return the size in bytes."""
        return self._file.size()

    def read_at(self, offset: int, size: int) -> bytes:
        """Read, page by page where it cannot be done at once."""
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
        """Close it."""
        self._file.close()


def readable(source: Source) -> Readable:
    """Return a data directory as far as its disk gives it out."""
    return source if isinstance(source, Readable) else Readable(source)


@final
class Window:
    """A file's bytes, read in large pieces; what was read before stays as it was until `forget`."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._size = file.size()
        self._begin = 0
        self._data = memoryview(b"")

    def view(self, at: int, size: int) -> memoryview:
        """Return `size` bytes from `at`, fewer where the file ends."""
        end = min(at + size, self._size)
        if not self._begin <= at <= end <= self._begin + len(self._data):
            self._begin = at
            self._data = memoryview(self._file.read_at(at, max(size, WINDOW_BYTES)))
        begin = at - self._begin
        return self._data[begin : begin + size]

    def record(self, at: int) -> memoryview:
        """Return the bytes of the record at `at`; of what has no intact head, that at most.

        By the size that garbage says, a segment would be read in one go.
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
        """Read everything again from here on."""
        self._data = memoryview(b"")
