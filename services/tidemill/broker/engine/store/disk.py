"""The disk interface of the engine. `PosixDisk` implements it; tests use a faulty disk.

Assumptions: bytes that were written and synced survive a power cut. Bytes that were written and not
synced may survive, be torn at any byte, or vanish. A rename is atomic, and durable once its folder
is synced. Until a power cut, later processes also read bytes that may never become durable.
Therefore a start trusts the log only after `reload`.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Sequence
from typing import Protocol, final


class DiskFailed(Exception):
    """A write, sync or read failed. This is final: the process ends and recovers from the log."""


class DiskHasNoSpace(DiskFailed):
    """A write failed because the disk is full. A file that is not needed yet can be given up."""


class ReadFailed(DiskFailed):
    """A read failed. A start can do without a file that is derived from others."""


class File(Protocol):
    """One open file of fixed or growing size."""

    name: str

    def fileno(self) -> int:
        """Return the descriptor, for a sync by another process."""

    def size(self) -> int:
        """Return the size in bytes."""

    def write_at(self, offset: int, buffers: Sequence[bytes | memoryview | bytearray]) -> None:
        """Write all `buffers` consecutively from `offset`. Raises DiskFailed."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer at the end of the file. Raises ReadFailed."""

    def find_data(self, offset: int) -> int:
        """Return an offset from `offset` on before which all bytes are zero; the size at most.

        It skips ranges that were never written, without reading them.
        """

    def advise(self, offset: int, size: int) -> None:
        """Announce that `size` bytes from `offset` will be read soon; a hint."""

    def view(self) -> memoryview:
        """Return a read-only view of the whole file. Later overwrites show in it."""

    def resize(self, size: int) -> None:
        """Cut the file, or extend it by zeros. Existing views keep their size."""

    def sync(self) -> None:
        """Make everything written so far durable. Raises DiskFailed."""

    def reload(self) -> None:
        """Sync the writes of an earlier process, and read from the disk from now on.

        After a failed sync the system may keep the bytes in memory and report them as written. A
        later start would not find them. No view of the file may exist. Raises DiskFailed.
        """

    def close(self) -> None:
        """Close the descriptor."""


DROPPED = "dropped"  # name of a file during its deletion, in any folder
_DROP_SLICE_BYTES = 1 << 20  # freeing 4 MiB at once takes the file system 2 ms


class Disk(Protocol):
    """A folder of files in sub-folders ("log/0000"), which are created when needed."""

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted, each with the folder as prefix."""

    def open(self, name: str, *, create: bool = False) -> File:
        """Open a file for reading and writing. With `create` it must not exist yet."""

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist. Raises ReadFailed."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file. An existing target is replaced."""

    def delete(self, name: str) -> None:
        """Delete a file."""

    def folder(self, folder: str) -> File:
        """Return a folder as a file to sync.

        The sync makes creations, renames and deletions in it durable. It takes fsync.
        """

    def free_bytes(self) -> int:
        """Return the bytes that can still be written."""

    def total_bytes(self) -> int:
        """Return the usable bytes of the volume, used ones included."""


def reload_folder(disk: Disk, folder: str) -> None:
    """Make the files of an earlier process in `folder` durable. Raises DiskFailed."""
    names = disk.names(folder)
    for name in names:
        file = disk.open(name)
        file.reload()
        file.close()
    if names:
        disk.folder(folder).sync()


@final
class CachedFolder:
    """A folder that only its owner changes. It is listed once and cached.

    A listing takes time per file, and a folder of a large store has thousands of files.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk = disk
        self.path = path
        self._names: dict[str, None] | None = None  # in order of creation

    @property
    def names(self) -> KeysView[str]:
        """The names in the folder, oldest first, each with the folder as prefix."""
        return self._known().keys()

    def create(self, name: str) -> File:
        """Create a file. Delete an unfinished one of an earlier attempt."""
        if name in self._known():
            self.disk.delete(name)
        file = self.disk.open(name, create=True)
        self._known()[name] = None
        return file

    def rename(self, source: str, target: str) -> None:
        """Rename a file. Without an existing target it becomes the newest one."""
        known = self._known()
        self.disk.rename(source, target)
        del known[source]
        known[target] = None

    def drop(self, name: str) -> Iterator[list[File]]:
        """Delete a file in short slices."""
        yield from drop_file(self.disk, name)
        self._known().pop(name, None)  # A first listing after the deletion does not contain it.

    def _known(self) -> dict[str, None]:
        if self._names is None:
            self._names = dict.fromkeys(self.disk.names(self.path))
        return self._names


def drop_file(disk: Disk, name: str) -> Iterator[list[File]]:
    """Delete a file of any size in short slices.

    Rename it first, so that a crash in between leaves no file under the old name.
    """
    folder = name.rpartition("/")[0]
    dropped = f"{folder}/{DROPPED}"
    disk.rename(name, dropped)
    file = disk.open(dropped)
    yield [disk.folder(folder)]
    for size in range(file.size() - _DROP_SLICE_BYTES, 0, -_DROP_SLICE_BYTES):
        file.resize(size)
        yield []
    file.close()
    disk.delete(dropped)
    yield []
