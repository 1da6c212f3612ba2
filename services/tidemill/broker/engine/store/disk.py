"""What the engine asks of a disk. `PosixDisk` is the real one; tests hand in one that lies.

Assumed of the disk: bytes written and then synced survive a power cut; bytes written and not synced
may survive, be torn at any byte, or vanish; a rename is atomic, and durable once its folder is
synced. All that was written is read back until the power goes, by a later process too, although it
may never become durable: so what a start has found counts only after `reload`.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Sequence
from typing import Protocol, final


class DiskFailed(Exception):
    """A write, sync or read failed. Final: the process ends and recovers from the log."""


class ReadFailed(DiskFailed):
    """A read failed. Of a file that is made from others a start does without."""


class File(Protocol):
    """One open file of fixed or growing size."""

    name: str

    def fileno(self) -> int:
        """Return the descriptor, for a sync by another process."""

    def size(self) -> int:
        """Return the size in bytes."""

    def write_at(self, offset: int, buffers: Sequence[bytes | memoryview | bytearray]) -> None:
        """Write all `buffers` one after the other from `offset`. Raises DiskFailed."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer where the file ends. Raises ReadFailed."""

    def advise(self, offset: int, size: int) -> None:
        """Say that `size` bytes from `offset` will be read soon; a hint."""

    def view(self) -> memoryview:
        """Return a read-only view of the whole file as it is now and as it will be overwritten."""

    def resize(self, size: int) -> None:
        """Cut the file, or extend it by zeros. Views taken before are of the old size."""

    def sync(self) -> None:
        """Make everything written so far durable. Raises DiskFailed."""

    def reload(self) -> None:
        """Make durable what an earlier process has written, and read from the disk from now on.

        After a sync that failed the system may keep the bytes in memory and call them written: what
        is read of them is not what the next start will find. Nobody may have a view of the file.
        Raises DiskFailed.
        """

    def close(self) -> None:
        """Give the descriptor back."""


DROPPED = "dropped"  # file name, in any folder, of what is being deleted
_DROP_SLICE_BYTES = 4 << 20  # freeing more at once takes the file system over a millisecond


class Disk(Protocol):
    """A folder of files in sub-folders ("log/0000"), which are made when they are needed."""

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted, each with the folder in front."""

    def open(self, name: str, *, create: bool = False) -> File:
        """Open a file for reading and writing; with `create` it must not exist yet."""

    def read(self, name: str) -> bytes | None:
        """Return a small file's content, None where there is no such file. Raises ReadFailed."""

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, replacing what has it."""

    def delete(self, name: str) -> None:
        """Delete a file."""

    def folder(self, folder: str) -> File:
        """Return a folder as a file to sync.

        That makes what was created, renamed or deleted in it durable; it takes fsync.
        """

    def free_bytes(self) -> int:
        """Return how many bytes can still be written."""

    def total_bytes(self) -> int:
        """Return how many bytes of the volume are used, or can be by processes like this one."""


def reload_folder(disk: Disk, folder: str) -> None:
    """Make durable what an earlier process has left in `folder`. Raises DiskFailed."""
    names = disk.names(folder)
    for name in names:
        file = disk.open(name)
        file.reload()
        file.close()
    if names:
        disk.folder(folder).sync()


@final
class CachedFolder:
    """A folder that only its owner changes: listed once, and known from then on.

    A listing takes as long as there are files, and a large store has thousands a folder.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk = disk
        self.path = path
        self._names: dict[str, None] | None = None  # in the order in which they were made

    @property
    def names(self) -> KeysView[str]:
        """The names in the folder, oldest first, each with the folder in front."""
        return self._known().keys()

    def create(self, name: str) -> File:
        """Make a file, in the place of what is left of an earlier try."""
        if name in self._known():
            self.disk.delete(name)
        file = self.disk.open(name, create=True)
        self._known()[name] = None
        return file

    def rename(self, source: str, target: str) -> None:
        """Give a file another name: as the newest one, or in the place of the one that has it."""
        known = self._known()
        self.disk.rename(source, target)
        del known[source]
        known[target] = None

    def drop(self, name: str) -> Iterator[list[File]]:
        """Delete a file in short slices."""
        yield from drop_file(self.disk, name)
        self._known().pop(name, None)  # Where the first listing came behind it, it is not there.

    def _known(self) -> dict[str, None]:
        if self._names is None:
            self._names = dict.fromkeys(self.disk.names(self.path))
        return self._names


def drop_file(disk: Disk, name: str) -> Iterator[list[File]]:
    """Delete a file of any size in short slices.

    First it loses its name, so that a crash on the way leaves nothing that looks like what it was.
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
