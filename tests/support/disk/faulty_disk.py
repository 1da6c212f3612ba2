"""A disk in memory that guarantees only synced bytes and can lose power at any operation.

It fails as a real disk may fail (see `tidemill.broker.engine.store.disk`):

    power cut    each unsynced write is kept, torn at a random byte, or lost, independently of the
                 others; of a folder's unsynced changes the first few survive
    kill         all written bytes stay readable; unsynced bytes stay unsynced
    failed sync  the bytes are on the disk, torn or lost, as after a power cut; they stay readable,
                 and no later sync writes them again, only a write does
    bad page     a read fails; an access through a view ends the process, as SIGBUS does
                 (`tests.support.processes.own_process` lets a test observe that)
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from tidemill.broker.engine.store.disk import DROPPED, DiskFailed, DiskHasNoSpace, ReadFailed
from tidemill.broker.engine.store.segment import PREPARED

SECTOR = 512
BLOCK = 4096
UNBOUNDED = 1 << 40  # bytes: more than any test writes
Change: TypeAlias = tuple[int, bytes] | int  # a write: offset and bytes; a resize: the new size
Names: TypeAlias = dict[str, "Content"]  # of one folder


class PowerCut(Exception):
    """The machine stopped at this operation."""


@dataclass
class Content:
    """The readable and the durable bytes of one file."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[Change] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)  # written blocks; holes take no space
    viewed: list[bytearray] = field(default_factory=list)  # of former sizes, with views on them
    bad: set[int] = field(default_factory=set)  # unreadable pages
    # Views of a file with bad pages, each with the pages that were bad when it was created.
    mapped: list[tuple[mmap.mmap, frozenset[int]]] = field(default_factory=list)

    def view(self) -> memoryview:
        """Return a live view of the bytes. An access to a bad page ends the process."""
        if not self.bad:
            return memoryview(self.now).toreadonly()
        size = len(self.now)
        found = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
        for page in range(-(-size // BLOCK)):
            if page not in self.bad:
                at = slice(page * BLOCK, min((page + 1) * BLOCK, size))
                found[at] = bytes(self.now[at])
        address = ctypes.addressof(ctypes.c_char.from_buffer(found))
        for page in self.bad:
            if page * BLOCK < size:
                _forbid(address + page * BLOCK)
        self.mapped.append((found, frozenset(self.bad)))
        return memoryview(found).toreadonly()

    def is_readable(self, offset: int, size: int) -> bool:
        """Return whether a range has no bad page."""
        end = min(offset + size, len(self.now))
        return not any(page * BLOCK < end and offset < (page + 1) * BLOCK for page in self.bad)

    def find_data(self, offset: int) -> int:
        """Return the first byte from `offset` on in a block that is bad or not all zeros."""
        size = len(self.now)
        if offset >= size:
            return size
        zeros = size - offset - len(self.now[offset:].lstrip(b"\0"))
        pages = [page * BLOCK for page in self.bad if (page + 1) * BLOCK > offset]
        at = min([offset + zeros, *pages])
        return at if at == size else max(at // BLOCK * BLOCK, offset)

    def new_blocks(self, offset: int, size: int) -> set[int]:
        """Return the blocks that a write of `size` bytes would allocate."""
        return set(range(offset // BLOCK, -(-(offset + size) // BLOCK))) - self.blocks

    def check_that_nobody_reads(self, name: str) -> None:
        """Fail if a view exists of a file that the engine is about to cut or overwrite.

        On a real disk a mapped file would then cause SIGBUS or show other bytes.
        """
        try:
            self.now.append(0)
            self.now.pop()
        except BufferError as error:
            raise AssertionError(f"{name} still has a view") from error

    def write(self, offset: int, data: bytes) -> None:
        self.blocks |= self.new_blocks(offset, len(data))
        if len(self.now) < offset + len(data):
            self.resize(offset + len(data))
        for seen in (self.now, *self.viewed):
            end = min(offset + len(data), len(seen))
            if offset < end:
                seen[offset:end] = data[: end - offset]
        for view, bad in self.mapped:
            for at in range(offset, min(offset + len(data), len(view))):
                if at // BLOCK not in bad:
                    view[at] = data[at - offset]
        # A disk moves rewritten pages to another place.
        self.bad -= set(range(-(-offset // BLOCK), (offset + len(data)) // BLOCK))

    def resize(self, size: int) -> None:
        """Cut or extend in place if there are no views. Existing views keep their size."""
        self.blocks = {block for block in self.blocks if block * BLOCK < size}
        self.viewed = [seen for seen in self.viewed if not _resized(seen, len(seen))]
        if not _resized(self.now, size):
            self.viewed.append(self.now)
            self.now = self.now[:size] + bytes(max(size - len(self.now), 0))

    def copy(self) -> Content:
        """Return the content as another process finds it, without views."""
        unsynced = list(self.unsynced)
        now, durable = bytearray(self.now), bytearray(self.durable)
        return Content(now, durable, unsynced, set(self.blocks), bad=set(self.bad))

    def lose_pages(self, random: Random) -> None:
        """Fail a sync: the disk's bytes are unknown, and the cache counts them as written."""
        self.durable = self.after_power_cut(random).durable
        self.unsynced.clear()

    def reload(self) -> None:
        """Replace the cached bytes with the bytes on the disk."""
        assert not self.unsynced, "it is synced first"
        assert not self.viewed, "no view of it exists yet"
        self.now = bytearray(self.durable)

    def make_durable(self) -> None:
        """Copy only the unsynced writes: files may be large, and writes few."""
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
        now = bytearray(data)
        return Content(now=now, durable=data, blocks=set(self.blocks), bad=set(self.bad))


def _forbid(address: int) -> None:
    """Make an access to a page end the process. Python has no call for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(BLOCK), 0)
    assert not failed, f"mprotect: {ctypes.get_errno()}"


def _resized(data: bytearray, size: int) -> bool:
    """Resize `data` if it has no views; return whether it is resized."""
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
        self._is_open = True
        disk.open_files += 1

    def fileno(self) -> int:
        raise AssertionError("no other process syncs this disk")

    def size(self) -> int:
        return len(self._content.now)

    def write_at(self, offset: int, buffers: Sequence[bytes | memoryview | bytearray]) -> None:
        data = b"".join(buffers)
        if not data:
            return
        self._disk.step(f"write {self.name} {offset}+{len(data)}", self._content, (offset, data))
        self._content.write(offset, data)
        self._disk.written_bytes += len(data)

    def find_data(self, offset: int) -> int:
        if self.name in self._disk.unreadable:
            return offset
        return self._content.find_data(offset)

    def read_at(self, offset: int, size: int) -> bytes:
        self._disk.read_bytes += size
        self._disk.need_readable(self.name)
        if not self._content.is_readable(offset, size):
            raise ReadFailed(f"reading {self.name}: EIO")
        return bytes(self._content.now[offset : offset + size])

    def advise(self, offset: int, size: int) -> None:
        assert 0 <= offset < offset + size <= self.size(), "the range is in the file"
        self._disk.advised.append((self.name, offset, size))

    def view(self) -> memoryview:
        return self._content.view()

    def resize(self, size: int) -> None:
        self._disk.step(f"resize {self.name} {size}", self._content, size)
        self._content.resize(size)

    def sync(self) -> None:
        self._disk.step_sync(f"sync {self.name}", self._content)
        self._content.make_durable()

    def reload(self) -> None:
        self.sync()
        self._content.reload()

    def close(self) -> None:
        self._disk.open_files -= self._is_open
        self._is_open = False


class FaultyFolder(FaultyFile):
    """One folder, to be synced."""

    def __init__(self, disk: FaultyDisk, name: str) -> None:
        super().__init__(disk, name, Content())
        self.close()  # A real disk has one descriptor per folder, and few folders.

    def sync(self) -> None:
        self._disk.sync_folder(self.name)


class FaultyDisk:
    """A `Disk` in memory. `after_power_cut` and `after_kill` return its next state."""

    def __init__(self, random: Random, *, capacity_bytes: int = UNBOUNDED) -> None:
        self.random = random
        self.capacity_bytes = capacity_bytes
        self.written_bytes = 0
        self.read_bytes = 0  # requested from open files
        self.operations: list[str] = []
        self.cut_at: int | None = None  # index of the operation that ends the process
        self.sync_fails_at: int | None = None  # from this operation on, the next sync fails
        self.fails_writes = False
        self.unreadable: set[str] = set()  # names; a view of such a file would end the process
        self.open_files = 0  # a view needs no open file
        self.advised: list[tuple[str, int, int]] = []
        self._interrupted: tuple[Content, Change] | None = None
        self._folders: dict[str, Names] = {".": {}}  # durable from their creation on
        self._durable: dict[str, Names] = {".": {}}
        self._changes: dict[str, list[Names]] = {}  # unsynced changes by folder

    def step(self, what: str, content: Content | None = None, change: Change | None = None) -> None:
        """Count an operation. At `cut_at`, stop in the middle of it."""
        if self.cut_at is not None and len(self.operations) > self.cut_at:
            raise PowerCut("the power is cut")
        self.operations.append(what)
        if change is not None and self.fails_writes:
            raise DiskFailed(what)
        if change is not None and not self._has_room(content, change):
            raise DiskHasNoSpace(what)
        is_last = self.cut_at is not None and len(self.operations) > self.cut_at
        if content is not None and change is not None:
            content.unsynced.append(change)
            if is_last:
                self._interrupted = content, change
        if is_last:
            raise PowerCut(what)

    def _has_room(self, content: Content | None, change: Change) -> bool:
        """Return whether a change fits. A longer file gets a hole, which takes no space."""
        if content is None or isinstance(change, int) or self.capacity_bytes >= UNBOUNDED:
            return True
        wanted = len(content.new_blocks(change[0], len(change[1]))) * BLOCK
        return not wanted or wanted <= self.free_bytes()

    def step_sync(self, what: str, content: Content | None = None) -> None:
        """Count a sync. From `sync_fails_at` on, the next sync fails."""
        fails_at = self.sync_fails_at
        if fails_at is not None and len(self.operations) >= fails_at:
            self.sync_fails_at = None
            if content is not None:
                content.lose_pages(self.random)
            raise DiskFailed(what)
        self.step(what)

    def after_power_cut(self) -> FaultyDisk:
        """Return the disk as the next start finds it."""
        names = {
            folder: self._surviving(folder, durable) for folder, durable in self._durable.items()
        }
        contents = {id(c): c for of_folder in names.values() for c in of_folder.values()}
        found = {key: c.after_power_cut(self.random) for key, c in contents.items()}
        disk = self._empty()
        for folder, of_folder in names.items():
            disk._folders[folder] = {name: found[id(c)] for name, c in of_folder.items()}
            disk._durable[folder] = dict(disk._folders[folder])
        return disk

    def _surviving(self, folder: str, durable: Names) -> Names:
        changes = self._changes.get(folder, [])
        survivors = self.random.randint(0, len(changes))
        return changes[survivors - 1] if survivors else durable

    def after_kill(self) -> FaultyDisk:
        """Return the disk after a kill of the process: the kernel has every write.

        Unsynced writes stay unsynced: a power cut can still lose them.
        """
        self._end_interrupted()
        copies: dict[int, Content] = {}

        def copied(names: Names) -> Names:
            for content in names.values():
                if id(content) not in copies:
                    copies[id(content)] = content.copy()
            return {name: copies[id(content)] for name, content in names.items()}

        disk = self._empty()
        disk._folders = {folder: copied(names) for folder, names in self._folders.items()}
        disk._durable = {folder: copied(names) for folder, names in self._durable.items()}
        disk._changes = {
            folder: [copied(names) for names in changes]
            for folder, changes in self._changes.items()
        }
        return disk

    def _end_interrupted(self) -> None:
        """Choose how many bytes the kernel has of the write that the kill interrupted."""
        if self._interrupted is None:
            return
        content, change = self._interrupted
        self._interrupted = None
        content.unsynced.pop()
        if isinstance(change, int):
            return
        offset, data = change
        part = data[: self.random.choice((0, self.random.randint(0, len(data)), len(data)))]
        if part:
            content.unsynced.append((offset, part))
            content.write(offset, part)

    def _empty(self) -> FaultyDisk:
        return FaultyDisk(self.random, capacity_bytes=self.capacity_bytes)

    # ------------------------------------------------------------ the protocol

    def names(self, folder: str) -> list[str]:
        return sorted(self._folders.get(folder, {}))

    def open(self, name: str, *, create: bool = False) -> FaultyFile:
        folder = _folder_of(name)
        if create:
            if name in self._folders.get(folder, {}):
                raise FileExistsError(name)
            self._make_folder(folder)
            self._change(f"create {name}", folder, {**self._folders[folder], name: Content()})
        return FaultyFile(self, name, self._find(name))

    def read(self, name: str) -> bytes | None:
        content = self._folders.get(_folder_of(name), {}).get(name)
        self.need_readable(name)
        if content is not None and content.bad:
            raise ReadFailed(f"reading {name}: EIO")
        return None if content is None else bytes(content.now)

    def need_readable(self, name: str) -> None:
        """Raise ReadFailed if reads of this file fail."""
        if name in self.unreadable:
            raise ReadFailed(f"reading {name}")

    def rename(self, source: str, target: str) -> None:
        content, folder = self._find(source), _folder_of(source)
        if _folder_of(target) not in self._folders:
            raise FileNotFoundError(target)
        assert _folder_of(target) == folder, "a rename is atomic where there is one folder to sync"
        if target.endswith((f"/{DROPPED}", f"/{PREPARED}")):
            content.check_that_nobody_reads(source)
        names = {name: c for name, c in self._folders[folder].items() if name != source}
        self._change(f"rename {source} {target}", folder, {**names, target: content})

    def delete(self, name: str) -> None:
        self._find(name)
        folder = _folder_of(name)
        names = {n: c for n, c in self._folders[folder].items() if n != name}
        self._change(f"delete {name}", folder, names)
        self.unreadable.discard(name)

    def folder(self, folder: str) -> FaultyFolder:
        if folder not in self._folders:
            raise FileNotFoundError(folder)
        return FaultyFolder(self, folder)

    def sync_folder(self, folder: str) -> None:
        self.step_sync(f"sync folder {folder}")
        self._durable[folder] = dict(self._folders[folder])
        self._changes.pop(folder, None)

    def free_bytes(self) -> int:
        used = sum(len(c.blocks) for names in self._folders.values() for c in names.values())
        return self.capacity_bytes - used * BLOCK

    def total_bytes(self) -> int:
        return self.capacity_bytes

    def all_names(self) -> list[str]:
        """Return the names of all files."""
        return sorted(name for names in self._folders.values() for name in names)

    def damage(self, name: str, position: int, *, bits: int = 1) -> None:
        """Flip bits of a byte, durably."""
        content = self._find(name)
        content.now[position] ^= bits
        content.durable = bytearray(content.now)
        content.unsynced.clear()

    def spoil(self, name: str, *pages: int) -> None:
        """Make pages of a file unreadable. Existing views are not affected."""
        self._find(name).bad.update(pages)

    def zero(self, name: str, begin: int, size: int) -> None:
        """Replace a range of a file with zeros, durably, as after a lost write."""
        content = self._find(name)
        end = min(begin + size, len(content.now))
        content.now[begin:end] = bytes(max(end - begin, 0))
        content.durable = bytearray(content.now)
        content.unsynced.clear()

    def cut(self, name: str, size: int) -> None:
        """Cut a file to its first `size` bytes, durably."""
        content = self._find(name)
        content.now = bytearray(content.now[:size])
        content.durable = bytearray(content.now)
        content.unsynced.clear()

    def remove(self, name: str) -> None:
        """Remove a file without the engine, durably."""
        folder = _folder_of(name)
        del self._folders[folder][name]
        self._durable[folder] = dict(self._folders[folder])
        self._changes.pop(folder, None)

    def _find(self, name: str) -> Content:
        content = self._folders.get(_folder_of(name), {}).get(name)
        if content is None:
            raise FileNotFoundError(name)
        return content

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            self._make_folder(_folder_of(folder))
            self._folders[folder] = {}
            self._durable[folder] = {}

    def _change(self, what: str, folder: str, names: Names) -> None:
        self.step(what)
        self._folders[folder] = names
        self._changes.setdefault(folder, []).append(names)


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0] or "."
