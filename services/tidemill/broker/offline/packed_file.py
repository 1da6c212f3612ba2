"""A pack, read as the segment that it was: each record at its log offset minus the begin.

The content of dead messages is zeros. So a walk over a log needs no other code for packs.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from typing import final
from zlib import crc32

from tidemill.broker.engine.layout import pack
from tidemill.broker.engine.layout.pack import EXTENT, PackHeader
from tidemill.broker.engine.layout.record import MAGIC_BYTES, PAD, PAD_MAGIC
from tidemill.broker.engine.store.disk import ReadFailed
from tidemill.broker.engine.store.pack import derive_directory
from tidemill.broker.engine.store.segment import PACK_SUFFIX, SUFFIX
from tidemill.broker.offline.source import Source, SourceFile


def read_header(file: SourceFile) -> PackHeader | None:
    """Return the header of a whole pack; None if the file is cut, or both copies are damaged."""
    with suppress(ReadFailed):
        # The end of a segment may be a message with the bytes of a pack.
        if file.read_at(0, len(MAGIC_BYTES)) == MAGIC_BYTES:
            return None
    size = file.size()
    for at in (0, max(size - pack.TRAILER_SIZE, 0)):
        try:
            header = pack.find_header(file.read_at(at, pack.TRAILER_SIZE))
        except ReadFailed:
            continue
        if header is not None:
            return header if header.file_size == size else None
    return None


@final
class PackedFile:
    """One open pack."""

    def __init__(self, file: SourceFile, header: PackHeader) -> None:
        self._file = file
        self._header = header
        size = EXTENT.size * header.extent_count
        directory = file.read_at(header.records_end, size)
        self.is_directory_damaged = crc32(directory) != header.directory_crc
        if self.is_directory_damaged:
            parts = derive_directory(lambda at, n: memoryview(file.read_at(at, n)), header)
            directory = b"".join(parts)
        extents = list(EXTENT.iter_unpack(directory))
        self._firsts = [first for first, _ in extents]
        self._positions = [position for _, position in extents] + [header.records_end]

    def size(self) -> int:
        """Return the bytes of the log in this segment."""
        return self._header.end - self._header.start

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes of the segment."""
        end = min(offset + size, self.size())
        found = bytearray(max(end - offset, 0))
        number = max(bisect_right(self._firsts, offset) - 1, 0)
        while number < len(self._firsts) and self._firsts[number] < end:
            first, position = self._firsts[number], self._positions[number]
            length = self._positions[number + 1] - position
            low, high = max(first, offset), min(first + length, end)
            if low < high:
                part = self._file.read_at(position + low - first, high - low)
                found[low - offset : low - offset + len(part)] = part
            number += 1
        self._add_pad(found, offset)
        return bytes(found)

    def _add_pad(self, found: bytearray, offset: int) -> None:
        """Add the pad behind the last record, as a segment has it."""
        record_end = self._header.record_end - self._header.start
        room = self.size() - record_end
        pad = PAD.pack(PAD_MAGIC, room) if room >= PAD.size else b""
        low, high = max(record_end, offset), min(record_end + len(pad), offset + len(found))
        if low < high:
            found[low - offset : high - offset] = pad[low - record_end : high - record_end]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def find_segment(source: Source, name: str) -> tuple[str, SourceFile]:
    """Open a segment, or the pack that has replaced it; return its name and the file.

    Raises FileNotFoundError.
    """
    try:
        return name, source.open(name)
    except FileNotFoundError:
        packed = name.removesuffix(SUFFIX) + PACK_SUFFIX
        return packed, source.open(packed)


def open_segment(source: Source, name: str) -> SourceFile:
    """Open a file of the log, a pack as the segment that it was. Raises FileNotFoundError.

    If a pack has replaced the file meanwhile, open the pack.
    """
    _, file = find_segment(source, name)
    header = read_header(file)
    return file if header is None else PackedFile(file, header)
