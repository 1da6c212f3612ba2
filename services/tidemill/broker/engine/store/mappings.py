"""Memory-mapped files: only a limited number is mapped at a time.

If the disk cannot read a page, an access to the mapped page kills the process by SIGBUS. A read
only fails. Therefore bytes of an earlier process are read once before they are accessed. The kernel
then has them in its cache, and an unreadable page is reported as damage.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.store.disk import Disk, File, ReadFailed

FILES_MAX = 192  # each takes a mapping, a descriptor during the mapping, and a byte per page
PAGE_BYTES = 4096  # unit in which a disk reads or fails
# Bytes per read, 10 us from the cache: the neighbouring bytes are needed next.
READ_BYTES = 64 << 10


@final
class PageUnreadable(ReadFailed):
    """The disk cannot read a page of a file. `at` is its first byte, or the end of the file."""

    def __init__(self, name: str, at: int, why: str) -> None:
        """Describe the page; `why` is the system's error."""
        super().__init__(f"byte {at} of {name} cannot be read: {why}")
        self.at = at


@final
class Mappings(dict[str, memoryview]):
    """Read-only views of whole files by name. A missing view is mapped on access.

    The oldest mapping is dropped first. A view that a caller still holds stays valid. The caller
    must release it before the file is deleted, and must call `forget` before it renames, deletes or
    replaces a file.
    """

    def __init__(self, disk: Disk, *, files_max: int = FILES_MAX) -> None:
        super().__init__()
        self._disk = disk
        self._files_max = files_max
        # Per mapped file: which pages were read; empty if all were.
        self._read: dict[str, bytearray] = {}
        # Number of mappings and forgotten names. While it is unchanged, readable bytes stay
        # readable.
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
        """Return the view of a file after reading `size` bytes from `begin`.

        Raises PageUnreadable. Then the other pages of the range may be accessed.
        """
        view = self[name]
        pages = self._read.get(name)
        if pages is None:
            pages = self._read[name] = bytearray(-(-len(view) // PAGE_BYTES))
        if not pages:
            return view
        end = min(begin + size, len(view))
        at, stop = begin // PAGE_BYTES, -(-end // PAGE_BYTES)
        if end > begin and (at := pages.find(0, at, stop)) >= 0:
            self._read_pages(name, pages, at, stop)
        return view

    def read(self, name: str, begin: int, size: int) -> bytes:
        """Return bytes of a file without its view. Raises PageUnreadable."""
        file = self._disk.open(name)
        try:
            return file.read_at(begin, size)
        except ReadFailed:
            return bytes(self.readable(name, begin, size)[begin : begin + size])
        finally:
            file.close()

    def salvage(self, name: str, begin: int, size: int) -> memoryview:
        """Return up to `size` bytes of a file, with zeros for unreadable pages."""
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
        """Read pages that were not read yet, in large pieces if possible."""
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
            if pages.find(0) < 0:
                self._read[name] = bytearray()
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
        """Forget the name of a file that will change or be deleted."""
        self.changes += 1
        self.pop(name, None)
        self._read.pop(name, None)

    def advise(self, name: str) -> None:
        """Announce that all of a file will be read soon; a hint."""
        file = self._disk.open(name)
        file.advise(0, file.size())
        file.close()
