"""Reading a data directory that may belong to a running broker: nothing is ever written.

No file is mapped: a broker cuts files that it drops, and a mapping of what was cut ends the process
that reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, final

from tidemill.broker.engine.layout import record

WINDOW_BYTES = 1 << 20  # read at once


class SourceFile(Protocol):
    """One open file."""

    def size(self) -> int:
        """Return the size in bytes."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer where the file ends."""

    def close(self) -> None:
        """Give the descriptor back."""


class Source(Protocol):
    """A data directory to be read. Every `Disk` is one."""

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted, each with the folder in front."""

    def open(self, name: str) -> SourceFile:
        """Open a file. Raises FileNotFoundError."""

    def read(self, name: str) -> bytes | None:
        """Return a small file's content, None where there is no such file."""


class ReadOnlyFile:
    """One open file, which nobody can write to by it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._fd).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        """Read without moving a position."""
        return os.pread(self._fd, size, offset)

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
        return ReadOnlyFile(self._folder / name)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None


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
        """Return the bytes of the record at `at`; of what cannot be one, its header at most."""
        view = self.view(at, record.HEADER_SIZE)
        if len(view) < record.HEADER_SIZE:
            return view
        header = record.HEADER.unpack_from(view)
        if header[0] != record.MAGIC or header[record.SIZE] > self._size - at:
            return view
        return self.view(at, max(header[record.SIZE], record.HEADER_SIZE))

    def forget(self) -> None:
        """Read everything again from here on."""
        self._data = memoryview(b"")
