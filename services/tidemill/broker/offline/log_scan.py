"""Walking the log of a data directory, past everything that is damaged in it.

Beside a live broker the log grows while it is read: what seems broken behind the durable offset is
read a second time once something behind it proves that it was durable. Where nothing does, or where
a record stands there by then, the log ended there when it was read; all that was durable when the
walk began lies in front.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeAlias, final

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordHeader
from tidemill.broker.engine.store.disk import DROPPED
from tidemill.broker.engine.store.segment import BLOCK_BYTES, FOLDER, HELD, PREPARED, SUFFIX
from tidemill.broker.offline.source import Source, Window

SEARCH_BYTES = 1 << 20  # looked through at once for the next record
REMAINS_BYTES_MAX = 4 << 20  # kept of what is damaged: any message of a usual size


class LogSegment(NamedTuple):
    """One file of the log."""

    name: str
    start: int
    size: int

    @property
    def end(self) -> int:
        """The log offset behind its last byte."""
        return self.start + self.size


class Intact(NamedTuple):
    """A record whose checksums are all right. Its bytes are valid until the next one is taken."""

    segment: LogSegment
    header: RecordHeader
    data: memoryview

    @property
    def log_offset(self) -> int:
        """Where it begins."""
        return self.header.log_offset

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.header.log_offset + self.header.size

    @property
    def body(self) -> memoryview:
        """What follows the header in the head."""
        return self.data[HEADER_SIZE : self.header.head_size]

    @property
    def tail(self) -> memoryview:
        """What follows the head."""
        return self.data[self.header.head_size :]


class Broken(NamedTuple):
    """A stretch of a segment in which a record is damaged, or in which there are none."""

    segment: LogSegment
    log_offset: int
    end: int
    why: str
    header: RecordHeader | None  # of a record whose head is intact
    remains: bytes  # its first bytes


class Pad(NamedTuple):
    """The regular end of a segment."""

    segment: LogSegment
    log_offset: int


Found: TypeAlias = Intact | Broken | Pad


class LogFolder(NamedTuple):
    """The files of the log, as a start would take them."""

    segments: list[LogSegment]  # the oldest first; there may be gaps between them
    strange: list[str]  # names of files that are none


def list_segments(source: Source) -> LogFolder:
    """List the files of the log; what a start deletes, or has set aside, is left out."""
    segments: list[LogSegment] = []
    strange = []
    for name in source.names(FOLDER):
        stem = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)
        if stem in (PREPARED, DROPPED) or name.endswith(HELD):
            continue
        if not name.endswith(SUFFIX) or not stem.isdigit():
            strange.append(name)
            continue
        try:
            file = source.open(name)
        except FileNotFoundError:
            continue  # The broker has dropped it meanwhile.
        size = file.size()
        file.close()
        is_inside = bool(segments) and int(stem) < segments[-1].end
        if size and not is_inside:
            segments.append(LogSegment(name, int(stem), size))
    return LogFolder(segments, strange)


def list_held(source: Source) -> list[LogSegment]:
    """List the segments that were set aside: no part of the log, and each by itself."""
    held = []
    for name in source.names(FOLDER):
        stem = name.removeprefix(f"{FOLDER}/").removesuffix(HELD)
        if not name.endswith(HELD) or not stem.isdigit():
            continue
        try:
            file = source.open(name)
        except FileNotFoundError:
            continue  # The broker has dropped it meanwhile.
        held.append(LogSegment(name, int(stem), file.size()))
        file.close()
    return held


def walk_held(source: Source, segment: LogSegment) -> Iterator[Broken]:
    """Yield what is damaged in a segment that was set aside: nothing, where it is gone.

    Raises UnknownRecord.
    """
    try:
        file = source.open(segment.name)
    except FileNotFoundError:
        return
    try:
        window, at = Window(file), 0
        while (found := read_one(window, segment, at)) is not None and not isinstance(found, Pad):
            if isinstance(found, Broken):
                yield found
            at = found.end - segment.start
    finally:
        file.close()
    if is_cut(segment):
        yield Broken(segment, segment.end, segment.end, f"it has {segment.size} bytes", None, b"")


def read_one(window: Window, segment: LogSegment, at: int) -> Found | None:
    """Return what stands at byte `at` of a segment; None where nothing more fits.

    Raises UnknownRecord.
    """
    room = segment.size - at
    if room < record.PAD.size:
        return None
    offset = LogOffset(segment.start + at)
    data = window.record(at)
    if len(data) >= record.PAD.size and record.PAD.unpack_from(data) == (record.PAD_MAGIC, room):
        return Pad(segment, offset)
    why = record.find_damage(data, 0, log_offset=offset, room=room)
    if not why:
        return Intact(segment, RecordHeader._make(record.HEADER.unpack_from(data)), data)
    header = record.find_head(data, 0, log_offset=offset)
    end = offset + header.size if header else _next_head(window, segment, at + 1)
    remains = bytes(window.view(at, min(end - offset, REMAINS_BYTES_MAX)))
    return Broken(segment, offset, end, why, header, remains)


def _next_head(window: Window, segment: LogSegment, begin: int) -> int:
    """Return the log offset of the next intact head in a segment, its end where there is none."""
    for at in _magics(window, segment, begin):
        offset = LogOffset(segment.start + at)
        if record.find_head(window.record(at), 0, log_offset=offset) is not None:
            return offset
    return segment.end


def _magics(window: Window, segment: LogSegment, begin: int) -> Iterator[int]:
    """Yield the bytes from `begin` on at which something begins like a record."""
    for first in range(begin, segment.size, SEARCH_BYTES):
        chunk = bytes(window.view(first, min(SEARCH_BYTES + 3, segment.size - first)))
        at = chunk.find(record.MAGIC_BYTES)
        while at >= 0:
            yield first + at
            at = chunk.find(record.MAGIC_BYTES, at + 1)


@final
class LogScan:
    """One walk over the segments from a log offset on."""

    def __init__(
        self, source: Source, segments: list[LogSegment], *, begin: int, durable_offset: int
    ) -> None:
        self._source = source
        self._segments = segments
        self._begin = begin
        self._durable_offset = durable_offset
        self.end = begin  # of the log: right when the walk is over
        self.vanished: list[LogSegment] = []  # dropped by the broker before they were read

    def walk(self) -> Iterator[Intact | Broken]:
        """Yield all records, and what is damaged. Raises UnknownRecord."""
        for number, segment in enumerate(self._segments):
            if segment.end <= self._begin:
                continue
            try:
                file = self._source.open(segment.name)
            except FileNotFoundError:
                self.vanished.append(segment)
                continue
            try:
                is_end = yield from self._walk_segment(number, Window(file))
            finally:
                file.close()
            if is_end:
                return
            self.end = segment.end

    def _walk_segment(self, number: int, window: Window) -> Generator[Intact | Broken, None, bool]:
        """Yield what a segment holds; return whether the log ends in it."""
        segment = self._segments[number]
        at = max(self._begin - segment.start, 0)
        while True:
            found = read_one(window, segment, at)
            if isinstance(found, Broken):
                found = self._judge(found, number, window)
                if found is None:
                    self.end = segment.start + at
                    return True
            if found is None or isinstance(found, Pad):
                return False
            self.end = found.end
            yield found
            at = found.end - segment.start

    def _judge(self, broken: Broken, number: int, window: Window) -> Found | None:
        """Return what is damaged, by a second look; None where the log ends.

        It ends too where a record has come since the first look: whoever followed a busy broker
        would never arrive.
        """
        at = broken.log_offset - broken.segment.start
        is_known = broken.log_offset < self._durable_offset
        is_proven = is_known or self._is_proven(number, broken.log_offset)
        window.forget()
        again = read_one(window, broken.segment, at)
        if is_known and not isinstance(again, Broken):
            return again
        if not is_proven or not isinstance(again, Broken):
            return None
        if again.end == broken.segment.end and broken.log_offset < self._durable_offset:
            # Behind the durable offset nobody knows of a record there.
            again = again._replace(end=min(again.end, self._durable_offset))
        return again

    def _is_proven(self, number: int, log_offset: int) -> bool:
        """Whether a record behind `log_offset` was written when what stands there was durable."""
        for segment in self._segments[number:]:
            try:
                file = self._source.open(segment.name)
            except FileNotFoundError:
                continue
            try:
                window = Window(file)
                for at in _magics(window, segment, max(log_offset + 1 - segment.start, 0)):
                    offset = LogOffset(segment.start + at)
                    data = window.record(at)
                    if record.find_damage(data, 0, log_offset=offset):
                        continue
                    if offset - record.HEADER.unpack_from(data)[record.UNSYNCED] > log_offset:
                        return True
            finally:
                file.close()
        return False


def is_cut(segment: LogSegment) -> bool:
    """Whether a segment has a size that none has: it was cut."""
    return segment.size % BLOCK_BYTES != 0


def may_hold(segment: LogSegment, original: int) -> bool:
    """Whether a message may stand in a segment that was set aside, by what its remains say.

    They say where it stands, or, below 0, in front of what nobody knows where.
    """
    if original < 0:
        return segment.start < -original
    return segment.start <= original < segment.end
