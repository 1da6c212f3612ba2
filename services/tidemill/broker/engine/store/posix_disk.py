"""A `Disk` on a folder of the file system."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

from tidemill.broker.engine.store.disk import DiskFailed

IOV_MAX = 1024  # buffers of one pwritev, the limit of Linux


class PosixFile:
    """One open file."""

    def __init__(self, name: str, path: Path, flags: int) -> None:
        self.name = name
        self._fd = os.open(path, flags, 0o640)

    def fileno(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def write_at(self, offset: int, buffers: Sequence[bytes | memoryview | bytearray]) -> None:
        try:
            for begin in range(0, len(buffers), IOV_MAX):
                chunk = buffers[begin : begin + IOV_MAX]
                expected = sum(map(len, chunk))
                written = os.pwritev(self._fd, chunk, offset)
                if written < expected:
                    # Rare (a signal, a nearly full disk): one joined copy is simpler than slicing.
                    self._write_rest(offset + written, b"".join(chunk)[written:])
                offset += expected
        except OSError as error:
            raise DiskFailed(f"writing {self.name}: {error}") from error

    def _write_rest(self, offset: int, rest: bytes) -> None:
        while rest:
            written = os.pwrite(self._fd, rest, offset)
            rest, offset = rest[written:], offset + written

    def view(self) -> memoryview:
        size = self.size()
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(self._fd, size, mmap.MAP_SHARED, mmap.PROT_READ))

    def resize(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise DiskFailed(f"resizing {self.name}: {error}") from error

    def sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DiskFailed(f"syncing {self.name}: {error}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@final
class PosixFolder(PosixFile):
    """One open folder: it can only be synced."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise DiskFailed(f"syncing folder {self.name}: {error}") from error


@final
class PosixDisk:
    """The files below one folder, which is made when it does not exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: dict[str, PosixFolder] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        path = self._folder / folder
        if not path.is_dir():
            return []
        return sorted(f"{folder}/{entry.name}" for entry in os.scandir(path) if entry.is_file())

    def open(self, name: str, *, create: bool = False) -> PosixFile:
        path = self._folder / name
        if create and not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.folder(".").sync()
        extra = os.O_CREAT | os.O_EXCL if create else 0
        return PosixFile(name, path, os.O_RDWR | os.O_CLOEXEC | extra)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def rename(self, source: str, target: str) -> None:
        os.rename(self._folder / source, self._folder / target)

    def delete(self, name: str) -> None:
        os.unlink(self._folder / name)

    def folder(self, folder: str) -> PosixFolder:
        if folder not in self._folders:
            self._folders[folder] = PosixFolder(folder, self._folder / folder)
        return self._folders[folder]

    def free_bytes(self) -> int:
        stat = os.statvfs(self._folder)
        return stat.f_bavail * stat.f_frsize
