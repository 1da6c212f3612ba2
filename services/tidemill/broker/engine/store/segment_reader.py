"""Reading of segments: single records, consecutive records, and records after damage.

Bytes of an earlier process are read before they are touched (`mappings.py`). An unreadable page
counts as damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordHeader
from tidemill.broker.engine.store.mappings import Mappings, PageUnreadable
from tidemill.broker.engine.store.segment import Hole, Record, Segment, damaged

SEARCH_BYTES = 1 << 20  # bytes per search for the next record


@final
class SegmentReader:
    """Reads the segments of one log, former segments included."""

    def __init__(self, views: Mappings, is_cold: Callable[[int], bool]) -> None:
        """`is_cold` returns whether a read of a log offset may have to go to the disk."""
        self._views = views
        self._is_cold = is_cold

    def is_warm(self, log_offset: int) -> bool:
        """Return whether this process wrote or read these bytes, and memory still has them."""
        return not self._is_cold(log_offset)

    def view(self, segment: Segment) -> memoryview:
        """Return the view of a segment. Bytes that are not warm must be read before a touch."""
        return self._views[segment.name]

    def readable(self, segment: Segment, at: int) -> memoryview:
        """Return the view of a segment after reading the record at `at`.

        If the record has no intact head, only its header may be touched. Raises CorruptStore if the
        disk cannot read it.
        """
        try:
            self.read_record(segment, at)
        except PageUnreadable as error:
            raise damaged(segment, segment.start + at, str(error)) from error
        return self._views[segment.name]

    def readable_record(self, segment: Segment, at: int) -> memoryview:
        """Return the view of a segment after reading the record at `at`; its tail is unchecked.

        Raises CorruptStore if the record has no intact head.
        """
        try:
            end = self.read_record(segment, at)
        except PageUnreadable as error:
            raise damaged(segment, segment.start + at, str(error)) from error
        if end == at:
            raise damaged(segment, segment.start + at, "no record begins here")
        return self._views[segment.name]

    def read_record(self, segment: Segment, at: int) -> int:
        """Read the record at `at`; return its end, or `at` if no record begins there.

        The size counts only after the head is checked: garbage could name a whole segment. Raises
        PageUnreadable.
        """
        name = segment.name
        view = self._views.readable(name, at, HEADER_SIZE)
        if len(view) - at < HEADER_SIZE:
            return at
        fields = record.HEADER.unpack_from(view, at)
        if fields[0] != record.MAGIC:
            return at
        self._views.readable(name, at, fields[record.HEAD_SIZE])
        header = record.find_head(view, at, log_offset=LogOffset(segment.start + at))
        if header is None:
            return at
        self._views.readable(name, at, header.size)
        return at + header.size

    def read_verified(self, segment: Segment, log_offset: LogOffset) -> Record:
        """Return a record after checking all its checksums. Raises CorruptStore."""
        at = log_offset - segment.start
        view = (
            self.readable(segment, at) if self._is_cold(log_offset) else self._views[segment.name]
        )
        why = record.find_damage(view, at, log_offset=log_offset)
        if why:
            raise damaged(segment, log_offset, why)
        header = RecordHeader._make(record.HEADER.unpack_from(view, at))
        tail_at = at + header.head_size
        return Record(header, view[at + HEADER_SIZE : tail_at], view[tail_at : at + header.size])

    def walk(self, segment: Segment, begin: int) -> Iterator[Record]:
        """Yield the records of a full segment from log offset `begin` on, with unchecked tails.

        A caller that keeps the iterator or a record for another turn may read from a cut file.
        """
        size, at = segment.size, begin - segment.start
        while size - at >= HEADER_SIZE:
            view = self.readable(segment, at)
            if record.PAD.unpack_from(view, at)[0] == record.PAD_MAGIC:
                return
            header = record.find_head(view, at, log_offset=LogOffset(segment.start + at))
            if header is None:
                raise damaged(segment, segment.start + at, "no record begins here")
            body = view[at + HEADER_SIZE : at + header.head_size]
            yield Record(header, body, view[at + header.head_size : at + header.size])
            at += header.size

    def walk_past_damage(self, segment: Segment, at: int, stop: int) -> Iterator[Record | Hole]:
        """Yield the records between two bytes of a segment, and a hole for each damaged part.

        Heads are checked and tails are not. Unreadable parts of tails are zeros.
        """
        size = segment.size
        while stop - at >= HEADER_SIZE:
            data = self._salvaged(segment, at)
            if record.PAD.unpack_from(data) == (record.PAD_MAGIC, size - at):
                return
            offset = LogOffset(segment.start + at)
            header = record.find_head(data, 0, log_offset=offset)
            if header is None:
                at = self.find_next_head(segment, at + 1, stop)
                yield Hole(offset, LogOffset(segment.start + at))
                continue
            body = data[HEADER_SIZE : header.head_size]
            yield Record(header, body, data[header.head_size : header.size])
            at += header.size

    def is_pad(self, segment: Segment, log_offset: int) -> bool:
        """Return whether this segment has no record at or after `log_offset`."""
        remaining = segment.end - log_offset
        if remaining < HEADER_SIZE:
            return True
        data = self._views.salvage(segment.name, segment.size - remaining, record.PAD.size)
        return bool(record.PAD.unpack(data) == (record.PAD_MAGIC, remaining))

    def _salvaged(self, segment: Segment, at: int) -> memoryview:
        """Return the record at `at`, or its first bytes if damaged, with zeros for lost pages."""
        if not self._is_cold(segment.start + at):
            return self._views[segment.name][at:]
        head = self._views.salvage(segment.name, at, HEADER_SIZE)
        if len(head) < HEADER_SIZE:
            return head
        fields, room = record.HEADER.unpack_from(head), segment.size - at
        if fields[0] != record.MAGIC:
            return head
        # Before its size is used.
        head_size = max(fields[record.HEAD_SIZE], HEADER_SIZE)
        head = self._views.salvage(segment.name, at, head_size)
        offset = LogOffset(segment.start + at)
        header = record.find_head(head, 0, log_offset=offset, room=room)
        return head if header is None else self._views.salvage(segment.name, at, header.size)

    def find_next_head(self, segment: Segment, begin: int, stop: int) -> int:
        """Return the byte of the next intact head in a segment, or `stop`."""
        for first in range(begin, stop, SEARCH_BYTES):
            size = min(SEARCH_BYTES + 3, stop - first)
            # Searching a copy is many times faster than searching the view.
            chunk = bytes(self._views.salvage(segment.name, first, size))
            at = chunk.find(record.MAGIC_BYTES)
            while at >= 0:
                offset = LogOffset(segment.start + first + at)
                data = self._salvaged(segment, first + at)
                if record.find_head(data, 0, log_offset=offset) is not None:
                    return first + at
                at = chunk.find(record.MAGIC_BYTES, at + 1)
        return stop
