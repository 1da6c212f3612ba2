"""The positions of records in a pack: its header and its directory (`layout/pack.py`)."""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeAlias, final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from tidemill.broker.engine.layout import pack, record
from tidemill.broker.engine.layout.floor import GAP_SIZE
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.pack import EXTENT, PackHeader
from tidemill.broker.engine.store.mappings import Mappings, PageUnreadable

_unpack_extent = EXTENT.unpack_from
# A slice of a derivation reads at most so many heads, 7 us each, and so many bytes.
HEADS_A_SLICE = 64
SLICE_BYTES = 256 << 10
WINDOW_EXTENTS = 128  # decoded at once: 10 KiB of memory in one window per log
# The directory is checked again once per so many extents and failed look-ups, in microseconds each.
EXTENTS_A_FAILURE = 1_000
# Returns bytes of a pack from a position on, with zeros for unreadable pages.
PackReader: TypeAlias = Callable[[int, int], memoryview]


class Extent(NamedTuple):
    """A run of records that are as far apart in the file as in the log."""

    begin: int  # log offset
    position: int  # in the file
    end: int  # log offset of the record after it
    end_position: int


@final
class Window(NamedTuple):
    """Consecutive extents of a pack: their log offsets, and their positions in its file.

    The last ones are where the next extent, or the end of the records, would be.
    """

    pack: Pack | None
    begins: list[int]
    positions: list[int]

    def position(self, log_offset: int) -> int:
        """Return the position of a log offset, at most the one of the next extent."""
        extent = self.extent(log_offset)
        at = min(extent.position + log_offset - extent.begin, extent.end_position)
        # A derived directory may lack the first records.
        return max(at, pack.HEADER_SIZE)

    def extent(self, log_offset: int) -> Extent:
        """Return the extent with a log offset; an empty one if no extent has it."""
        number = bisect_right(self.begins, log_offset)
        last = min(number, len(self.begins) - 1)
        first = number - 1 if 0 < number == last else last
        return Extent(
            self.begins[first], self.positions[first], self.begins[last], self.positions[last]
        )


@final
class Pack:
    """The header of one pack, and the way from a log offset to a position in its file.

    A damaged directory is derived from the records: each states its log offset. Before a look-up,
    the caller checks with `has_directory` that the directory can be used.
    """

    __slots__ = ("_derived", "_failed_count", "_is_checked", "_is_damaged", "header")

    def __init__(self, header: PackHeader) -> None:
        self.header = header
        self._is_checked = self._is_damaged = False
        self._failed_count = 0  # failed look-ups since the last check
        self._derived: memoryview | None = None  # the directory, if the one in the file is damaged

    def window(self, views: Mappings, name: str, log_offset: int) -> Window:
        """Return the extents from the one with a log offset on; the last one if it is behind."""
        directory, at, count = self._directory(views, name)
        header, size = self.header, EXTENT.size
        number = bisect_right(
            range(count),
            log_offset - header.start,
            key=lambda n: int(_unpack_extent(directory, at + size * n)[0]),
        )
        first = max(number - 1, 0)
        last = min(first + WINDOW_EXTENTS, count)
        fields = struct.unpack_from(f">{2 * (last - first)}I", directory, at + size * first)
        begins, positions = [header.start + one for one in fields[::2]], list(fields[1::2])
        if last < count:
            end, end_position = _unpack_extent(directory, at + size * last)
            end += header.start
        else:
            end, end_position = header.record_end, header.records_end
        return Window(self, [*begins, end], [*positions, end_position])

    def is_freed(self, views: Mappings, name: str, log_offset: int) -> bool:
        """Whether a gap of the pack contains a log offset."""
        if log_offset >= min(self.header.floor, self.header.record_end):
            return False
        extent = self.window(views, name, log_offset).extent(log_offset)
        if self._derived is not None and extent.end_position - extent.position != GAP_SIZE:
            return False  # Behind a lost head is a gap, or a live message.
        # A gap ends its extent, and no record begins in it.
        return extent.position + log_offset - extent.begin > extent.end_position - GAP_SIZE

    def gaps(self, views: Mappings, name: str) -> npt.NDArray[np.int64]:
        """Return the begins and ends of the gaps in the log, one row per gap, in their order.

        A gap at the end of the records includes the rest of the segment.
        """
        header = self.header
        directory, at, count = self._directory(views, name)
        extents = np.frombuffer(directory, ">u4", 2 * count, at).reshape(-1, 2).astype(np.int64)
        begins, positions = extents[:, 0] + header.start, extents[:, 1]
        ends = np.append(begins[1:], header.record_end)[:count]
        end_positions = np.append(positions[1:], header.records_end)[:count]
        # Only live messages and gaps are here, and only gaps cover more of the log than of the
        # file.
        is_gap = ends - begins > end_positions - positions
        if self._derived is not None:
            is_gap &= end_positions - positions == GAP_SIZE  # as `is_freed`
        gap_begins = begins + end_positions - positions - GAP_SIZE
        found = np.stack([gap_begins[is_gap], ends[is_gap]], axis=1)
        if count and is_gap[-1]:
            found[-1, 1] = header.end
        return found

    def _directory(self, views: Mappings, name: str) -> tuple[memoryview, int, int]:
        """Return the bytes with the extents, their position there, and their number."""
        if self._derived is not None:
            return self._derived, 0, len(self._derived) // EXTENT.size
        return views[name], self.header.records_end, self.header.extent_count

    def has_directory(self, views: Mappings, name: str, *, recheck: bool = False) -> bool:
        """Return whether the directory can be used; False until a damaged one is derived.

        The directory is checked when it is first needed, and with `recheck`: bits may have flipped.
        """
        if self._derived is not None:
            return True
        header = self.header
        size = EXTENT.size * header.extent_count
        self._is_checked &= not recheck
        try:
            view = views.readable(name, header.records_end, size)
        except PageUnreadable:
            self._is_damaged = True
        else:
            if not self._is_checked and not self._is_damaged:
                found = view[header.records_end : header.records_end + size]
                self._is_checked = len(found) == size and crc32(found) == header.directory_crc
                self._is_damaged = not self._is_checked
        return not self._is_damaged

    @property
    def is_derived(self) -> bool:
        """Whether the directory was damaged, and is derived."""
        return self._derived is not None

    def is_check_due(self) -> bool:
        """Count a failed look-up; return whether there were enough to check the directory again."""
        self._failed_count += 1
        if self._failed_count * EXTENTS_A_FAILURE < self.header.extent_count:
            return False
        self._failed_count = 0
        return True

    def derive(self, views: Mappings, name: str) -> Iterator[None]:
        """Derive the damaged directory; yield between slices."""
        directory = bytearray()
        for part in derive_directory(self._reader(views, name), self.header):
            directory += part
            yield
        self._derived = memoryview(bytes(directory))

    def head_at(self, views: Mappings, name: str, at: int) -> tuple[int, int] | None:
        """Return the log offset and the stored size of the record at a position.

        None if it has no intact head.
        """
        found = _head_at(self._reader(views, name), self.header, at)
        return None if found is None else found[:2]

    def find_head(self, views: Mappings, name: str, begin: int) -> int | None:
        """Return the position of the next intact head from `begin` on."""
        search = _search_head(self._reader(views, name), self.header, begin)
        while True:
            try:
                next(search)
            except StopIteration as end:
                found: int | None = end.value
                return found

    @staticmethod
    def _reader(views: Mappings, name: str) -> PackReader:
        return lambda at, size: views.salvage(name, at, size)


def derive_directory(read: PackReader, header: PackHeader) -> Iterator[bytes]:
    """Yield the parts of a directory with one extent for each intact head, one part per slice.

    Behind a stub or a gap without a following head, an extent says where the lost records begin.
    """
    extents, at = bytearray(), pack.HEADER_SIZE
    first, count = at, 0  # of this slice
    found = _head_at(read, header, at)
    while header.records_end - at >= record.HEADER_SIZE:
        if found is None:
            following = yield from _search_head(read, header, at + 1)
            if following is None:
                break
            at = first = following
            found = _head_at(read, header, at)
            continue
        log_offset, stored, size = found
        extents += EXTENT.pack(log_offset - header.start, at)
        at, count = at + stored, count + 1
        found = _head_at(read, header, at)
        if found is None and stored < size and at < header.records_end:
            extents += EXTENT.pack(log_offset + size - header.start, at)
        if count >= HEADS_A_SLICE or at - first >= SLICE_BYTES:
            yield bytes(extents)
            extents.clear()
            first, count = at, 0
    yield bytes(extents)


def _head_at(read: PackReader, header: PackHeader, at: int) -> tuple[int, int, int] | None:
    """Return the log offset, the stored size and the size in the log of a record."""
    view = read(at, record.HEADER_SIZE)
    if len(view) < record.HEADER_SIZE or view[:4] != record.MAGIC_BYTES:
        return None
    fields = record.HEADER.unpack_from(view)
    log_offset = fields[record.LOG_OFFSET]
    if not header.start <= log_offset < header.end:
        return None
    view = read(at, max(fields[record.HEAD_SIZE], record.HEADER_SIZE))
    room = header.end - log_offset
    head = record.find_head(view, 0, log_offset=LogOffset(log_offset), room=room)
    if head is None:
        return None
    return log_offset, record.stored_size(view, 0, head), head.size


def _search_head(
    read: PackReader, header: PackHeader, begin: int
) -> Generator[bytes, None, int | None]:
    """Return the position of the next intact head from `begin` on.

    Yields nothing but empty bytes, between slices.
    """
    end, count = header.records_end, 0
    for first in range(begin, end, SLICE_BYTES):
        yield b""
        chunk = bytes(read(first, min(SLICE_BYTES + 3, end - first)))
        at = chunk.find(record.MAGIC_BYTES)
        while at >= 0:
            if _head_at(read, header, first + at) is not None:
                return first + at
            count += 1
            if count % HEADS_A_SLICE == 0:
                yield b""
            at = chunk.find(record.MAGIC_BYTES, at + 1)
    return None


def apart(
    data: memoryview, begin: int, log_bytes: int, segment_end: int
) -> Iterator[tuple[int, memoryview | bytes]]:
    """Yield the parts of a frame, each with its log offset.

    A frame of a pack has `log_bytes` of the log from `begin` on, and its stubs have fewer bytes. If
    it reaches the end of its segment, a pad follows its last record.
    """
    if len(data) == log_bytes:
        yield begin, data
        return
    first, at, offset = 0, 0, begin  # the begin of the part, and the next record
    while at < len(data):
        header = record.RecordHeader._make(record.HEADER.unpack_from(data, at))
        size = record.stored_size(data, at, header)
        at, offset = at + size, offset + header.size
        if size < header.size:
            yield offset - header.size - (at - size - first), data[first:at]
            first = at
    if first < at:
        yield offset - (at - first), data[first:at]
    room = begin + log_bytes - offset
    assert room == 0 or offset + room == segment_end, "the records have the size of the frame"
    if room >= record.PAD.size:
        yield offset, record.PAD.pack(record.PAD_MAGIC, room)


@final
class Extents:
    """The records of a pack that is being written, and its directory."""

    def __init__(self) -> None:
        self._extents = array("I")  # log offset minus start, and position, alternately
        self._shift: int | None = None
        self.position = pack.HEADER_SIZE  # behind the last record

    def add(self, offset: int, stored_size: int) -> None:
        """Add the next record, at `offset` behind the begin of the segment."""
        shift = offset - self.position
        if shift != self._shift:
            self._shift = shift
            self._extents.extend((offset, self.position))
        self.position += stored_size

    @property
    def count(self) -> int:
        """The number of extents."""
        return len(self._extents) // 2

    def encode(self) -> bytes:
        """Return the directory."""
        swapped = self._extents[:]
        if sys.byteorder == "little":
            swapped.byteswap()
        return swapped.tobytes()
