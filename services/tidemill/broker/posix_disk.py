"""A `Disk` in a folder of the file system."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

from tidemill.broker.engine.store.disk import DiskFailed, DiskHasNoSpace, ReadFailed
from tidemill.common.private_files import make_private_folder

NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
IOV_MAX = 1024  # buffers of one pwritev, the limit of Linux


class PosixFile:
    """One open file."""

    def __init__(self, name: str, path: Path, flags: int) -> None:
        self.name = name
        try:
            self._fd = os.open(path, flags, 0o640)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise DiskHasNoSpace(f"creating {name}: {error}") from error
            raise

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._fd).st_size

    def write_at(self, offset: int, buffers: Sequence[bytes | memoryview | bytearray]) -> None:
        """Write all buffers with as few calls as the system allows."""
        try:
            for begin in range(0, len(buffers), IOV_MAX):
                chunk = buffers[begin : begin + IOV_MAX]
                expected = sum(map(len, chunk))
                written = os.pwritev(self._fd, chunk, offset)
                if written < expected:
                    # Rare (signal, nearly full disk): one joined copy is simpler than slices.
                    self._write_rest(offset + written, b"".join(chunk)[written:])
                offset += expected
        except OSError as error:
            failure = DiskHasNoSpace if error.errno in NO_SPACE else DiskFailed
            raise failure(f"writing {self.name}: {error}") from error

    def _write_rest(self, offset: int, rest: bytes) -> None:
        while rest:
            written = os.pwrite(self._fd, rest, offset)
            rest, offset = rest[written:], offset + written

    def read_at(self, offset: int, size: int) -> bytes:
        """Read without moving a position."""
        try:
            return os.pread(self._fd, size, offset)
        except OSError as error:
            raise ReadFailed(f"reading {self.name} at byte {offset}: {error}") from error

    def find_data(self, offset: int) -> int:
        """Return an offset from `offset` on before which all bytes are zero; the size at most."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            # ENXIO: the remaining file is a hole. A file system may not support the call.
            return self.size() if error.errno == errno.ENXIO else offset

    def advise(self, offset: int, size: int) -> None:
        """Let the kernel read ahead."""
        os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def view(self) -> memoryview:
        """Map the file, read-only."""
        size = self.size()
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(self._fd, size, mmap.MAP_SHARED, mmap.PROT_READ))

    def resize(self, size: int) -> None:
        """Cut or extend the file."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise DiskFailed(f"resizing {self.name}: {error}") from error

    def sync(self) -> None:
        """Make all written bytes durable."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DiskFailed(f"syncing {self.name}: {error}") from error

    def reload(self) -> None:
        """Sync and drop the cached pages; the next use reads them from the disk again."""
        self.sync()
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@final
class PosixFolder(PosixFile):
    """One open folder, which can only be synced."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def sync(self) -> None:
        """Sync the folder."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise DiskFailed(f"syncing folder {self.name}: {error}") from error


@final
class PosixDisk:
    """The files below one folder, which is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: dict[str, PosixFolder] = {}
        make_private_folder(folder)

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, sorted."""
        path = self._folder / folder
        if not path.is_dir():
            return []
        return sorted(f"{folder}/{entry.name}" for entry in os.scandir(path) if entry.is_file())

    def open(self, name: str, *, create: bool = False) -> PosixFile:
        """Open a file; create it and its folder with `create`."""
        path = self._folder / name
        if create:
            self._make_folder(name.rpartition("/")[0])
        extra = os.O_CREAT | os.O_EXCL if create else 0
        return PosixFile(name, path, os.O_RDWR | os.O_CLOEXEC | extra)

    def _make_folder(self, folder: str) -> None:
        if folder and not (self._folder / folder).is_dir():
            above = folder.rpartition("/")[0]
            self._make_folder(above)
            (self._folder / folder).mkdir()
            self.folder(above or ".").sync()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is missing."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ReadFailed(f"reading {name}: {error}") from error

    def rename(self, source: str, target: str) -> None:
        """Rename a file."""
        (self._folder / source).rename(self._folder / target)

    def delete(self, name: str) -> None:
        """Delete a file."""
        (self._folder / name).unlink()

    def folder(self, folder: str) -> PosixFolder:
        """Return a folder to sync, opened once."""
        if folder not in self._folders:
            self._folders[folder] = PosixFolder(folder, self._folder / folder)
        return self._folders[folder]

    def free_bytes(self) -> int:
        """Return the free bytes of the file system, without the space reserved for root."""
        stat = os.statvfs(self._folder)
        return stat.f_bavail * stat.f_frsize

    def total_bytes(self) -> int:
        """Return the used and free bytes of the file system.

        Space that is reserved for root or taken by a quota is neither used nor free.
        """
        stat = os.statvfs(self._folder)
        return (stat.f_blocks - stat.f_bfree + stat.f_bavail) * stat.f_frsize
