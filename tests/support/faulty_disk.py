"""A disk in memory that keeps only what it must, and can lose power at any operation.

What it may do is what a real disk may do (see `tidemill.broker.engine.store.disk`): at a power cut
each write that was not synced is kept, torn at a random byte, or lost, each on its own; folder
changes that were not synced survive up to a random one of them. What was synced is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tidemill.broker.engine.store.disk import DiskFailed

SECTOR = 512


class PowerCut(Exception):
    """The machine stopped at this operation."""


@dataclass
class Content:
    """The bytes of one file, as read now, and what of them is durable."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes] | int] = field(default_factory=list)  # writes, and resizes
    viewed: list[bytearray] = field(default_factory=list)  # of former sizes, with views on them

    def write(self, offset: int, data: bytes) -> None:
        if len(self.now) < offset + len(data):
            self.resize(offset + len(data))
        for seen in (self.now, *self.viewed):
            end = min(offset + len(data), len(seen))
            if offset < end:
                seen[offset:end] = data[: end - offset]

    def resize(self, size: int) -> None:
        """Cut or extend in place, unless there are views: these stay of the size they have."""
        self.viewed = [seen for seen in self.viewed if not _resized(seen, len(seen))]
        if not _resized(self.now, size):
            self.viewed.append(self.now)
            self.now = self.now[:size] + bytes(max(size - len(self.now), 0))

    def make_durable(self) -> None:
        """Carry over what was written since the last sync: files may be large, and writes few."""
        for change in self.unsynced:
            if isinstance(change, int):
                self.durable = self.durable[:change] + bytes(max(change - len(self.durable), 0))
                continue
            offset, written = change
            if len(self.durable) < offset:
                self.durable += bytes(offset - len(self.durable))
            self.durable[offset : offset + len(written)] = written
        self.unsynced.clear()

    def after_power_cut(self, random: Random) -> Content:
        data = bytearray(self.durable)
        for change in self.unsynced:
            fate = random.choice(["kept", "torn", "lost"])
            if isinstance(change, int):
                if fate == "kept":
                    data = data[:change] + bytes(max(change - len(data), 0))
                continue
            offset, written = change
            if fate == "lost":
                continue
            for begin in range(0, len(written), SECTOR):
                part = written[begin : begin + SECTOR]
                if fate == "torn":
                    part = part[: random.randint(0, len(part))] if random.random() < 0.7 else b""
                at = offset + begin
                if len(data) < at + len(part):
                    data += bytes(at + len(part) - len(data))
                data[at : at + len(part)] = part
        return Content(now=bytearray(data), durable=data)


def _resized(data: bytearray, size: int) -> bool:
    """Give `data` another size, if nobody has a view of it."""
    try:
        data.append(0)
    except BufferError:
        return False
    data.pop()
    data.extend(bytes(max(size - len(data), 0)))
    del data[size:]
    return True


class FaultyFile:
    """One open file."""

    def __init__(self, disk: FaultyDisk, name: str, content: Content) -> None:
        self.name = name
        self._disk = disk
        self._content = content

    def fileno(self) -> int:
        raise AssertionError("nobody syncs this disk from another process")

    def size(self) -> int:
        return len(self._content.now)

    def write_at(self, offset: int, buffers: Sequence[bytes | memoryview | bytearray]) -> None:
        data = b"".join(buffers)
        if not data:
            return
        self._disk.step(f"write {self.name} {offset}+{len(data)}", self._content, (offset, data))
        self._content.write(offset, data)
        self._disk.written_bytes += len(data)

    def read_at(self, offset: int, size: int) -> bytes:
        return bytes(self._content.now[offset : offset + size])

    def advise(self, offset: int, size: int) -> None:
        assert 0 <= offset < offset + size <= self.size(), "advice about what is in the file"
        self._disk.advised.append((self.name, offset, size))

    def view(self) -> memoryview:
        return memoryview(self._content.now).toreadonly()

    def resize(self, size: int) -> None:
        self._disk.step(f"resize {self.name} {size}", self._content, size)
        self._content.resize(size)

    def sync(self) -> None:
        self._disk.step(f"sync {self.name}")
        self._content.make_durable()

    def close(self) -> None:
        pass


class FaultyFolder(FaultyFile):
    """One folder, to be synced."""

    def __init__(self, disk: FaultyDisk, name: str) -> None:
        super().__init__(disk, name, Content())

    def sync(self) -> None:
        self._disk.sync_folder(self.name)


class FaultyDisk:
    """A `Disk` whose next life begins with `after_power_cut`."""

    def __init__(self, random: Random, *, capacity_bytes: int = 1 << 40) -> None:
        self.random = random
        self.capacity_bytes = capacity_bytes
        self.written_bytes = 0
        self.operations: list[str] = []
        self.cut_at: int | None = None  # index of the operation at which the power goes
        self.fails_writes = False
        self.advised: list[tuple[str, int, int]] = []
        self._folders = {"."}  # durable as soon as they are made
        self._files: dict[str, Content] = {}
        self._durable: dict[str, Content] = {}
        self._folder_changes: list[dict[str, Content]] = []

    def step(
        self,
        what: str,
        content: Content | None = None,
        change: tuple[int, bytes] | int | None = None,
    ) -> None:
        """Count an operation; at `cut_at` leave it half done and stop."""
        if self.cut_at is not None and len(self.operations) > self.cut_at:
            raise PowerCut("there is no power any more")
        self.operations.append(what)
        if self.fails_writes and change is not None:
            raise DiskFailed(what)
        if content is not None and change is not None:
            content.unsynced.append(change)
        if self.cut_at is not None and len(self.operations) > self.cut_at:
            raise PowerCut(what)

    def after_power_cut(self) -> FaultyDisk:
        """Return the disk as the next start finds it."""
        names = self._durable
        if self._folder_changes:
            survivors = self.random.randint(0, len(self._folder_changes))
            if survivors:
                names = self._folder_changes[survivors - 1]
        return self._with({n: c.after_power_cut(self.random) for n, c in sorted(names.items())})

    def after_kill(self) -> FaultyDisk:
        """Return the disk as it is after the process died: the kernel has every write."""
        return self._with(
            {n: Content(bytearray(c.now), bytearray(c.now)) for n, c in self._files.items()}
        )

    def _with(self, files: dict[str, Content]) -> FaultyDisk:
        disk = FaultyDisk(self.random, capacity_bytes=self.capacity_bytes)
        disk._files = dict(files)
        disk._durable = dict(files)
        disk._folders = set(self._folders)
        return disk

    # ------------------------------------------------------------ the protocol

    def names(self, folder: str) -> list[str]:
        return sorted(name for name in self._files if _folder_of(name) == folder)

    def open(self, name: str, *, create: bool = False) -> FaultyFile:
        if create:
            if name in self._files:
                raise FileExistsError(name)
            self._make_folder(_folder_of(name))
            self._change(f"create {name}", {**self._files, name: Content()})
        self._find(name)
        return FaultyFile(self, name, self._files[name])

    def read(self, name: str) -> bytes | None:
        content = self._files.get(name)
        return None if content is None else bytes(content.now)

    def rename(self, source: str, target: str) -> None:
        self._find(source)
        self._find_folder(_folder_of(target))
        files = dict(self._files)
        files[target] = files.pop(source)
        self._change(f"rename {source} {target}", files)

    def delete(self, name: str) -> None:
        self._find(name)
        self._change(f"delete {name}", {n: c for n, c in self._files.items() if n != name})

    def folder(self, folder: str) -> FaultyFolder:
        self._find_folder(folder)
        return FaultyFolder(self, folder)

    def sync_folder(self, folder: str) -> None:
        # All folders at once: what the engine orders between two folders, it orders by syncs.
        self.step(f"sync folder {folder}")
        self._durable = dict(self._files)
        self._folder_changes.clear()

    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(len(content.now) for content in self._files.values())

    def total_bytes(self) -> int:
        return self.capacity_bytes

    def damage(self, name: str, position: int, *, bits: int = 1) -> None:
        """Flip bits of a byte, durably."""
        content = self._files[name]
        content.now[position] ^= bits
        content.durable = bytearray(content.now)

    def remove(self, name: str) -> None:
        """Take a file away behind the engine's back."""
        del self._files[name]
        self._durable = dict(self._files)

    def _find(self, name: str) -> None:
        if name not in self._files:
            raise FileNotFoundError(name)

    def _find_folder(self, folder: str) -> None:
        if folder not in self._folders:
            raise FileNotFoundError(folder)

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            self._make_folder(_folder_of(folder))
            self._folders.add(folder)

    def _change(self, what: str, files: dict[str, Content]) -> None:
        self.step(what)
        self._files = files
        self._folder_changes.append(dict(files))


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0] or "."
