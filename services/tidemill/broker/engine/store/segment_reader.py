"""Reading of segments: single records, consecutive records, and records after damage.

Bytes of an earlier process are read before they are touched (`mappings.py`). An unreadable page
counts as damage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final, final

import numpy as np
import numpy.typing as npt

from tidemill.broker.engine.layout import pack as pack_layout
from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.floor import GAP_SIZE
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordHeader
from tidemill.broker.engine.store.mappings import PAGE_BYTES, READ_BYTES, Mappings, PageUnreadable
from tidemill.broker.engine.store.pack import Pack, Window
from tidemill.broker.engine.store.segment import (
    HELD,
    CorruptStore,
    Hole,
    LogDamaged,
    Record,
    RecordFreed,
    Segment,
    damaged,
    intact_at,
)

SEARCH_BYTES = 1 << 20  # bytes per search for the next record
NO_WINDOW: Final = Window(None, [0], [0])


@final
class SegmentReader:
    """Reads the segments of one log, former segments included.

    It is one class, because its readers share the window of the last look-up.
    """

    def __init__(
        self,
        views: Mappings,
        is_cold: Callable[[int], bool],
        note_directory: Callable[[Segment], None],
    ) -> None:
        """`is_cold` returns whether a read of a log offset may have to go to the disk.

        `note_directory` requests that the damaged directory of a pack is derived.
        """
        self.views = views
        self._is_cold = is_cold
        self._note_directory = note_directory
        # Derive damaged directories at once: a start has no background job that could do it.
        self.is_starting = True
        self._window = NO_WINDOW  # of the last look-up: readers move forward

    def is_warm(self, log_offset: int) -> bool:
        """Return whether this process wrote or read these bytes, and memory still has them."""
        return not self._is_cold(log_offset)

    def view(self, segment: Segment) -> memoryview:
        """Return the view of a segment. Bytes that are not warm must be read before a touch."""
        return self.views[segment.name]

    def position(self, segment: Segment, log_offset: int) -> int:
        """Return the byte in the file of a segment at which the record at `log_offset` begins.

        Raises LogDamaged while the directory of a pack is derived.
        """
        pack = segment.pack
        if pack is None:
            return log_offset - segment.start
        of_pack, begins, positions = self._window
        number = bisect_right(begins, log_offset)
        if of_pack is pack and 0 < number < len(begins):
            # As `Window.position`, without a call: every receive passes here.
            at, limit = positions[number - 1] + log_offset - begins[number - 1], positions[number]
            return min(limit, at)
        if log_offset == segment.start:
            return pack_layout.HEADER_SIZE
        return self._window_of(segment, pack, log_offset).position(log_offset)

    def _window_of(self, segment: Segment, pack: Pack, log_offset: int) -> Window:
        """Return a part of the directory of a pack with a log offset."""
        window = self._window
        if window.pack is not pack or not window.begins[0] <= log_offset < window.begins[-1]:
            self._check_directory(segment, pack, log_offset)
            window = self._window = pack.window(self.views, segment.name, log_offset)
        return window

    def _check_directory(
        self, segment: Segment, pack: Pack, log_offset: int, *, recheck: bool = False
    ) -> None:
        """Check the directory of a pack before a look-up, see `Pack.has_directory`.

        Raises LogDamaged while a background job derives the directory. Former segments have no such
        job.
        """
        if pack.has_directory(self.views, segment.name, recheck=recheck):
            return
        self._window = NO_WINDOW
        if self.is_starting or segment.name.endswith(HELD):
            for _ in pack.derive(self.views, segment.name):
                pass
            return
        self._note_directory(segment)
        raise LogDamaged(
            log_offset, f"the directory of {segment.name} is damaged, and the broker derives it"
        )

    def is_freed(self, segment: Segment, log_offset: int) -> bool:
        """Whether a gap of a pack contains a log offset. Raises LogDamaged as `position`."""
        pack = segment.pack
        if pack is None or not segment.start < log_offset < pack.header.floor:
            return False
        self._check_directory(segment, pack, log_offset)
        return pack.is_freed(self.views, segment.name, log_offset)

    def gaps(self, segment: Segment) -> npt.NDArray[np.int64]:
        """Return the begins and ends of the gaps in a segment. Raises LogDamaged as `position`."""
        pack = segment.pack
        if pack is None or pack.header.floor < pack.header.end:
            return np.zeros((0, 2), np.int64)
        # A rewrite drops the entries in gaps for ever. Bits may have flipped since the last check.
        self._check_directory(segment, pack, segment.start, recheck=True)
        return pack.gaps(self.views, segment.name)

    def end_of_records(self, segment: Segment, log_offset: int) -> bool:
        """Return whether a segment has no room for a record at `log_offset`, or no more records."""
        if segment.pack is not None:
            return log_offset >= segment.pack.header.record_end
        return segment.end - log_offset < HEADER_SIZE

    def readable(self, segment: Segment, log_offset: int) -> memoryview:
        """Return the view of a segment after reading the record at `log_offset`.

        If the record has no intact head, only its header may be touched. Raises CorruptStore if the
        disk cannot read it.
        """
        try:
            self.read_record(segment, log_offset)
        except PageUnreadable as error:
            raise damaged(segment, log_offset, str(error)) from error
        return self.views[segment.name]

    def find_in_pack(
        self, segment: Segment, log_offset: int
    ) -> tuple[memoryview, int, tuple[int, ...]]:
        """Return the view of a pack, the position of a record that was read, and its header.

        Its checksums are unchecked. Raises RecordFreed, and CorruptStore if no record begins there
        or the disk cannot read it.
        """
        views, name = self.views, segment.name
        try:
            while True:
                at = self.position(segment, log_offset)
                view = views.readable(name, at, HEADER_SIZE)
                if len(view) - at >= HEADER_SIZE:
                    header = record.HEADER.unpack_from(view, at)
                    if header[record.LOG_OFFSET] == log_offset:
                        if at % PAGE_BYTES + header[record.SIZE] > PAGE_BYTES:
                            views.readable(name, at, header[record.SIZE])
                        return view, at, header
                if not self.check_directory_again(segment, log_offset):
                    break
        except PageUnreadable as error:
            raise damaged(segment, log_offset, str(error)) from error
        raise self._missing(segment, log_offset, "no record begins here")

    def check_directory_again(self, segment: Segment, log_offset: int) -> bool:
        """Check the directory of a pack again, because a record does not begin where it says.

        Return whether a start has derived it, so that another look-up may find more. Later raises
        LogDamaged if it is damaged.
        """
        pack = segment.pack
        if pack is None or pack.is_derived:
            return False
        # Look-ups of freed messages are usual, so only some of them check it.
        if not pack.is_check_due() and self.is_freed(segment, log_offset):
            return False
        self._check_directory(segment, pack, log_offset, recheck=True)
        return pack.is_derived

    def _missing(self, segment: Segment, log_offset: int, why: str) -> Exception:
        """Return the error about a log offset without an intact record."""
        if self.is_freed(segment, log_offset):
            return RecordFreed(log_offset)
        return damaged(segment, log_offset, why)

    def rest_of_gap(self, segment: Segment, log_offset: int) -> tuple[Record, int]:
        """Return the gap of a pack that contains a log offset, and the offset behind the gap.

        Raises CorruptStore if the gap is damaged.
        """
        assert segment.pack is not None, "only packs have gaps that their directory tells"
        extent = self._window_of(segment, segment.pack, log_offset).extent(log_offset)
        begin = extent.begin + extent.end_position - GAP_SIZE - extent.position
        return self.read_verified(segment, LogOffset(begin)), extent.end

    def find_rest_of_gap(self, segment: Segment, log_offset: int) -> Record | None:
        """Return a gap for the bytes of the log from a log offset inside a gap of a pack on.

        None if no intact gap contains the log offset.
        """
        if not self.is_freed(segment, log_offset):
            return None
        try:
            gap, end = self.rest_of_gap(segment, log_offset)
        except CorruptStore:
            return None
        size, offset = end - log_offset, LogOffset(log_offset)
        return gap._replace(header=gap.header._replace(log_offset=offset, size=size))

    def gap_size(self, segment: Segment, log_offset: int) -> int:
        """Return the bytes of the log that a gap at `log_offset` covers; 0: no gap is there.

        The directory tells it, also if the gap is damaged.
        """
        pack = segment.pack
        if pack is None or log_offset >= pack.header.floor:
            return 0
        extent = self._window_of(segment, pack, log_offset).extent(log_offset)
        is_gap = extent.end_position - self.position(segment, log_offset) == GAP_SIZE
        return extent.end - log_offset if is_gap else 0

    def walk_intact(self, segment: Segment) -> Iterator[tuple[Record, memoryview]]:
        """Yield all records of a full segment with their bytes in its file.

        All checksums are checked. Raises CorruptStore.
        """
        offset, at = segment.start, self.position(segment, segment.start)
        is_pack = segment.pack is not None
        end = segment.pack.header.record_end if segment.pack else segment.end - HEADER_SIZE + 1
        read = view = memoryview(b"")  # the part of the view that was read, and all of it
        while offset < end:
            try:
                if len(read) - at < PAGE_BYTES:
                    view = self.views.readable(segment.name, at, READ_BYTES)
                    read = view[: at + READ_BYTES]
                found = intact_at(read, at, offset)
                if found is None:
                    self.read_record(segment, offset)
                    found = intact_at(view, at, offset)
            except PageUnreadable as error:
                raise damaged(segment, offset, str(error)) from error
            if found is None:
                if self.is_pad(segment, offset):
                    return
                raise damaged(segment, offset, "no intact record is here")
            stored = HEADER_SIZE + len(found.body) + len(found.tail)
            yield found, view[at : at + stored]
            offset = LogOffset(offset + found.header.size)
            at += stored if is_pack else found.header.size

    def readable_record(self, segment: Segment, log_offset: int) -> memoryview:
        """Return the view of a segment after reading the record at `log_offset`.

        Its tail is unchecked. Raises CorruptStore if the record has no intact head.
        """
        try:
            size = self.read_record(segment, log_offset)
        except PageUnreadable as error:
            raise damaged(segment, log_offset, str(error)) from error
        if not size:
            raise damaged(segment, log_offset, "no record begins here")
        return self.views[segment.name]

    def read_record(self, segment: Segment, log_offset: int) -> int:
        """Read the record at `log_offset`; return its bytes in the file, 0 if none begins there.

        The size counts only after the head is checked: garbage could name a whole segment. Raises
        PageUnreadable.
        """
        name, at = segment.name, self.position(segment, log_offset)
        view = self.views.readable(name, at, HEADER_SIZE)
        if segment.pack is not None and not _begins_at(view, at, log_offset):
            self.check_directory_again(segment, log_offset)
            at = self.position(segment, log_offset)
            view = self.views.readable(name, at, HEADER_SIZE)
        if len(view) - at < HEADER_SIZE:
            return 0
        fields = record.HEADER.unpack_from(view, at)
        if fields[0] != record.MAGIC:
            return 0
        self.views.readable(name, at, fields[record.HEAD_SIZE])
        header = self._find_head(segment, view, at, log_offset)
        if header is None:
            return 0
        size = self.size_in_file(segment, view, at, header)
        self.views.readable(name, at, size)
        return size

    def _find_head(
        self, segment: Segment, view: memoryview, at: int, log_offset: int
    ) -> RecordHeader | None:
        # In a pack, the size of a stub exceeds its bytes.
        room = None if segment.pack is None else segment.end - log_offset
        return record.find_head(view, at, log_offset=LogOffset(log_offset), room=room)

    @staticmethod
    def size_in_file(segment: Segment, view: memoryview, at: int, header: RecordHeader) -> int:
        """Return the bytes from the record at `view[at:]` to the next one in the file."""
        return header.size if segment.pack is None else record.stored_size(view, at, header)

    def read_verified(self, segment: Segment, log_offset: LogOffset) -> Record:
        """Return a record after checking all its checksums. Raises CorruptStore, RecordFreed."""
        is_cold = segment.pack is not None or self._is_cold(log_offset)
        view = self.readable(segment, log_offset) if is_cold else self.views[segment.name]
        at = self.position(segment, log_offset)
        room = None if segment.pack is None else segment.end - log_offset
        why = record.find_damage(view, at, log_offset=log_offset, room=room)
        if why:
            raise self._missing(segment, log_offset, why)
        return _record_at(view, at, RecordHeader._make(record.HEADER.unpack_from(view, at)))

    def walk(self, segment: Segment, begin: int) -> Iterator[Record]:
        """Yield the records of a full segment from log offset `begin` on, with unchecked tails.

        A caller that keeps the iterator or a record for another turn may read from a cut file.
        """
        offset = begin
        while not self.end_of_records(segment, offset):
            view = self.readable(segment, offset)
            at = self.position(segment, offset)
            if record.PAD.unpack_from(view, at)[0] == record.PAD_MAGIC:
                return
            header = self._find_head(segment, view, at, offset)
            if header is None:
                raise damaged(segment, offset, "no record begins here")
            yield _record_at(view, at, header)
            offset += header.size

    def walk_past_damage(self, segment: Segment, begin: int, stop: int) -> Iterator[Record | Hole]:
        """Yield the records between two log offsets of a segment, and a hole per damaged part.

        Heads are checked and tails are not. Unreadable parts of tails are zeros. `begin` is the
        begin of a record, or inside a gap, which has replaced the record. While the directory of a
        pack is derived, the rest of the pack is a hole.
        """
        offset = begin
        try:
            rest = self.find_rest_of_gap(segment, begin)
            if rest is not None:
                yield rest
                offset += rest.header.size
            while stop - offset >= HEADER_SIZE and not self.end_of_records(segment, offset):
                data = self._salvaged(segment, offset)
                room = segment.end - offset
                if record.PAD.unpack_from(data) == (record.PAD_MAGIC, room):
                    return
                header = record.find_head(data, 0, log_offset=LogOffset(offset), room=room)
                if header is None:
                    following = self.find_next_head(segment, offset + 1, stop)
                    yield Hole(LogOffset(offset), LogOffset(following))
                    offset = following
                    continue
                yield _record_at(data, 0, header)
                offset += header.size
        except LogDamaged:
            yield Hole(LogOffset(offset), LogOffset(stop))

    def is_pad(self, segment: Segment, log_offset: int) -> bool:
        """Return whether this segment has no record at or after `log_offset`."""
        if self.end_of_records(segment, log_offset):
            return True
        if segment.pack is not None:
            return False
        remaining = segment.end - log_offset
        data = self.views.salvage(segment.name, segment.size - remaining, record.PAD.size)
        return bool(record.PAD.unpack(data) == (record.PAD_MAGIC, remaining))

    def _salvaged(self, segment: Segment, log_offset: int) -> memoryview:
        """Return the record at `log_offset`, with zeros for lost pages.

        Of a record without an intact head, return the first bytes; at the end of a file fewer than
        a header.
        """
        at = self.position(segment, log_offset)
        if segment.pack is None and not self._is_cold(log_offset):
            return self.views[segment.name][at:]
        head = self.views.salvage(segment.name, at, HEADER_SIZE)
        if segment.pack is not None and not _begins_at(head, 0, log_offset):
            self.check_directory_again(segment, log_offset)
            at = self.position(segment, log_offset)
            head = self.views.salvage(segment.name, at, HEADER_SIZE)
        if len(head) < HEADER_SIZE:
            return memoryview(bytes(head) + bytes(HEADER_SIZE - len(head)))
        fields, room = record.HEADER.unpack_from(head), segment.end - log_offset
        if fields[0] != record.MAGIC:
            return head
        # Before its size is used.
        head_size = max(fields[record.HEAD_SIZE], HEADER_SIZE)
        head = self.views.salvage(segment.name, at, head_size)
        header = record.find_head(head, 0, log_offset=LogOffset(log_offset), room=room)
        if header is None:
            return head
        return self.views.salvage(segment.name, at, record.stored_size(head, 0, header))

    def find_next_head(self, segment: Segment, begin: int, stop: int) -> int:
        """Return the log offset of the next intact head in a segment, at most `stop`."""
        if segment.pack is not None:
            return self._find_next_in_pack(segment, begin, stop)
        for first in range(begin, stop, SEARCH_BYTES):
            size = min(SEARCH_BYTES + 3, stop - first)
            # Searching a copy is many times faster than searching the view.
            chunk = bytes(self.views.salvage(segment.name, first - segment.start, size))
            at = chunk.find(record.MAGIC_BYTES)
            while at >= 0:
                offset = LogOffset(first + at)
                data = self._salvaged(segment, offset)
                room = segment.end - offset
                if record.find_head(data, 0, log_offset=offset, room=room) is not None:
                    return first + at
                at = chunk.find(record.MAGIC_BYTES, at + 1)
        return stop

    def _find_next_in_pack(self, segment: Segment, begin: int, stop: int) -> int:
        pack = segment.pack
        assert pack is not None, "a pack"
        at = self.position(segment, begin - 1)
        while (found := pack.find_head(self.views, segment.name, at)) is not None:
            head = pack.head_at(self.views, segment.name, found)
            if head is not None and head[0] >= begin:
                return min(head[0], stop)
            at = found + 1
        return stop


def _begins_at(view: memoryview, at: int, log_offset: int) -> bool:
    """Return whether a record with a log offset seems to begin at a position of a pack."""
    if len(view) - at < HEADER_SIZE:
        return False
    header = record.HEADER.unpack_from(view, at)
    return bool(header[0] == record.MAGIC and header[record.LOG_OFFSET] == log_offset)


def _record_at(view: memoryview, at: int, header: RecordHeader) -> Record:
    """Return the record with a known, intact head."""
    end = at + record.stored_size(view, at, header)
    tail_at = at + header.head_size
    return Record(header, view[at + HEADER_SIZE : tail_at], view[tail_at:end])
