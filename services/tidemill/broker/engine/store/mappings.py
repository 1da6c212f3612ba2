"""The mapped files: however many a store has, few are mapped at a time.

A touch of a mapped page that the disk cannot read ends the process, by SIGBUS and without a word,
where a read only fails. So what an earlier process has written is read once before it is touched:
the kernel has it from then on, and a page that cannot be read is damage and no more.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.store.disk import Disk, File, ReadFailed

FILES_MAX = 192  # each takes a mapping, a descriptor while it is made, and a byte a page
PAGE_BYTES = 4096  # by so much a disk gives out, or does not
READ_BYTES = 64 << 10  # read at once, 10 us where the kernel has it: what is beside is wanted next


@final
class PageUnreadable(ReadFailed):
    """The disk cannot read a page of a file: the byte at which it begins, or the file ends."""

    def __init__(self, name: str, at: int, why: str) -> None:
        """Describe it; `why` is what the system said."""
        super().__init__(f"byte {at} of {name} cannot be read: {why}")
        self.at = at


@final
class Mappings(dict[str, memoryview]):
    """Read-only views of whole files by name; what is asked for and not there is mapped.

    The file that was mapped first gives way. A view that somebody still holds stays valid: it is
    the caller who must not hold it longer than the file. Whoever renames, deletes or replaces a
    file takes its old name out.
    """

    def __init__(self, disk: Disk, *, files_max: int = FILES_MAX) -> None:
        super().__init__()
        self._disk = disk
        self._files_max = files_max
        self._read: dict[str, bytearray] = {}  # of mapped files: which pages were read
        # Of files that were mapped or forgotten. While it stays, what was readable still is.
        self.changes = 0

    def __missing__(self, name: str) -> memoryview:
        """Map a file."""
        if len(self) >= self._files_max:
            self.forget(next(iter(self)))
        self.changes += 1
        file = self._disk.open(name)
        view = self[name] = file.view()
        file.close()
        return view

    def readable(self, name: str, begin: int, size: int) -> memoryview:
        """Return a file's view, of which `size` bytes from `begin` may be touched.

        Raises PageUnreadable; the others of its pages may be touched then, and no more is known.
        """
        view = self[name]
        pages = self._read.get(name)
        if pages is None:
            pages = self._read[name] = bytearray(-(-len(view) // PAGE_BYTES))
        end = min(begin + size, len(view))
        at, stop = begin // PAGE_BYTES, -(-end // PAGE_BYTES)
        if end > begin and (at := pages.find(0, at, stop)) >= 0:
            self._read_pages(name, pages, at, stop)
        return view

    def read(self, name: str, begin: int, size: int) -> bytes:
        """Return bytes of a file without its view, and without noting it. Raises PageUnreadable."""
        file = self._disk.open(name)
        try:
            return file.read_at(begin, size)
        except ReadFailed:
            return bytes(self.readable(name, begin, size)[begin : begin + size])
        finally:
            file.close()

    def salvage(self, name: str, begin: int, size: int) -> memoryview:
        """Return `size` bytes, fewer where the file ends; zeros where a page cannot be read."""
        try:
            return self.readable(name, begin, size)[begin : begin + size]
        except PageUnreadable:
            end = min(begin + size, len(self[name]))
        found = bytearray()
        while (at := begin + len(found)) < end:
            stop = min((at // PAGE_BYTES + 1) * PAGE_BYTES, end)
            try:
                found += self.readable(name, at, stop - at)[at:stop]
            except PageUnreadable:
                found += bytes(stop - at)
        return memoryview(found).toreadonly()

    def _read_pages(self, name: str, pages: bytearray, first: int, stop: int) -> None:
        """Read pages of a file that nobody has read, in large pieces where that can be done."""
        file = self._disk.open(name)
        step = READ_BYTES // PAGE_BYTES
        try:
            while first >= 0:
                last = min((first // step + 1) * step, len(pages))
                try:
                    self._read_piece(file, name, pages, first, last)
                except ReadFailed:
                    for page in range(first, min(last, stop)):
                        self._read_piece(file, name, pages, page, page + 1)
                first = pages.find(0, last, stop)
        finally:
            file.close()

    def _read_piece(self, file: File, name: str, pages: bytearray, first: int, stop: int) -> None:
        begin = first * PAGE_BYTES
        size = min(stop * PAGE_BYTES, len(self[name])) - begin
        try:
            found = len(file.read_at(begin, size))
        except ReadFailed as error:
            raise PageUnreadable(name, begin, str(error)) from error
        if found < size:
            raise PageUnreadable(name, begin + found, "the file ends there")
        pages[first:stop] = b"\1" * (stop - first)

    def forget(self, name: str) -> None:
        """Take a name out; its file will be another one, or none."""
        self.changes += 1
        self.pop(name, None)
        self._read.pop(name, None)

    def advise(self, name: str) -> None:
        """Say that all of a file will be read soon; a hint."""
        file = self._disk.open(name)
        file.advise(0, file.size())
        file.close()
