"""Walking the log of a data directory past all damage.

Beside a running broker the log grows during the walk. A range that looks broken behind the durable
offset is damage if a later record proves that it was durable; it is then read a second time.
Without such a record, or if a record is there by then, the log ended there when it was read.
Everything that was durable at the begin of the walk is before that end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeAlias, final

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.pack import PackHeader
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordHeader
from tidemill.broker.engine.store.disk import DROPPED
from tidemill.broker.engine.store.segment import (
    BLOCK_BYTES,
    FOLDER,
    HELD,
    PACK_SUFFIX,
    PACKING_SUFFIX,
    PREPARED,
    SUFFIX,
)
from tidemill.broker.offline.packed_file import find_segment, open_segment, read_header
from tidemill.broker.offline.source import FileWindow, Source, SourceFile

SEARCH_BYTES = 1 << 20  # searched at once for the next record
LISTINGS_MAX = 10  # during each but the last, a segment was entered, and a pack relies on it
REMAINS_BYTES_MAX = 4 << 20  # of a damaged range, for its properties: a message of a usual size


class LogSegment(NamedTuple):
    """One file of the log."""

    name: str
    start: int
    size: int  # bytes of the log in it
    packed_bytes: int = 0  # of its file, if it is a pack

    @property
    def end(self) -> int:
        """The log offset of its end."""
        return self.start + self.size


class IntactRecord(NamedTuple):
    """A record with matching checksums. Its bytes are valid until the next item is read."""

    segment: LogSegment
    header: RecordHeader
    data: memoryview

    @property
    def log_offset(self) -> int:
        """The log offset of its begin."""
        return self.header.log_offset

    @property
    def end(self) -> int:
        """The log offset of its end."""
        return self.header.log_offset + self.header.size

    @property
    def body(self) -> memoryview:
        """The head without the header."""
        return self.data[HEADER_SIZE : self.header.head_size]

    @property
    def tail(self) -> memoryview:
        """The bytes behind the head."""
        return self.data[self.header.head_size :]


class BrokenRange(NamedTuple):
    """A range of a segment with a damaged record, or without any record."""

    segment: LogSegment
    log_offset: int
    end: int
    why: str
    header: RecordHeader | None  # if the head of the record is intact
    remains: bytes  # the first bytes of the range


class Pad(NamedTuple):
    """The regular end of a segment."""

    segment: LogSegment
    log_offset: int


ScanItem: TypeAlias = IntactRecord | BrokenRange | Pad


class LogFolder(NamedTuple):
    """The files of the log, as a start reads them."""

    segments: list[LogSegment]  # the oldest first; there may be gaps between them
    strange: list[str]  # names of files that are not segments


def list_segments(source: Source) -> LogFolder:
    """List the files of the log, without those that a start deletes or has set aside.

    The segments contain the records that each pack relies on, also beside a running broker.
    """
    for _ in range(LISTINGS_MAX):
        folder, relied_until = _list_segments(source)
        if not folder.segments or relied_until <= folder.segments[-1].end:
            break
    return folder


def _list_segments(source: Source) -> tuple[LogFolder, int]:
    """List the files; also return the log offset before which the packs rely on records."""
    segments: list[LogSegment] = []
    strange = []
    relied_until = 0
    for listed in source.names(FOLDER):
        name = listed
        stem = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX).removesuffix(PACK_SUFFIX)
        if stem in (PREPARED, DROPPED) or name.endswith((HELD, PACKING_SUFFIX)):
            continue
        if not name.endswith((SUFFIX, PACK_SUFFIX)) or not stem.isdigit():
            strange.append(name)
            continue
        try:
            name, header, (size, packed_bytes) = _measure(source, listed)
        except FileNotFoundError:
            continue  # The broker has deleted it meanwhile.
        relied_until = max(relied_until, header.decided_at if header else 0)
        if segments and name.endswith(PACK_SUFFIX) and segments[-1].start == int(stem):
            segments.pop()  # A start deletes the segment of a complete pack.
        is_inside = bool(segments) and int(stem) < segments[-1].end
        if size and not is_inside:
            segments.append(LogSegment(name, int(stem), size, packed_bytes))
    return LogFolder(segments, strange), relied_until


def _measure(source: Source, listed: str) -> tuple[str, PackHeader | None, tuple[int, int]]:
    """Return the name of a segment or of its pack, the header of the pack, and `_sizes_of` it.

    Raises FileNotFoundError.
    """
    for _ in range(LISTINGS_MAX):
        name, file = find_segment(source, listed)
        header = read_header(file)
        sizes = _sizes_of(file, header, is_pack=name.endswith(PACK_SUFFIX))
        file.close()
        # A file loses its name before it is cut and deleted.
        with suppress(FileNotFoundError):
            source.open(name).close()
            return name, header, sizes
    raise FileNotFoundError(listed)


def _sizes_of(file: SourceFile, header: PackHeader | None, *, is_pack: bool) -> tuple[int, int]:
    """Return the bytes of the log in a file, and the size of the file if it is a pack.

    A cut pack, or one without a header, has a size that no segment has.
    """
    if header is not None:
        return header.end - header.start, header.file_size
    return (file.size() | 1 if is_pack else file.size()), 0


def list_held(source: Source) -> list[LogSegment]:
    """List the segments that were set aside. They are not part of the log."""
    held = []
    for name in source.names(FOLDER):
        stem = name.removeprefix(f"{FOLDER}/").removesuffix(HELD)
        if not name.endswith(HELD) or not stem.isdigit():
            continue
        try:
            file = source.open(name)
        except FileNotFoundError:
            continue  # The broker has deleted it meanwhile.
        held.append(LogSegment(name, int(stem), *_sizes_of(file, read_header(file), is_pack=False)))
        file.close()
    return held


def walk_held(source: Source, segment: LogSegment) -> Iterator[BrokenRange]:
    """Yield the damage of a segment that was set aside; nothing if the file does not exist.

    Raises UnknownRecord.
    """
    try:
        file = open_segment(source, segment.name)
    except FileNotFoundError:
        return
    try:
        window, at = FileWindow(file), 0
        while (found := read_one(window, segment, at)) is not None and not isinstance(found, Pad):
            if isinstance(found, BrokenRange):
                yield found
            at = found.end - segment.start
    finally:
        file.close()
    if is_cut(segment):
        yield BrokenRange(
            segment, segment.end, segment.end, f"it has {segment.size} bytes", None, b""
        )


def read_one(window: FileWindow, segment: LogSegment, at: int) -> ScanItem | None:
    """Return the item at byte `at` of a segment; None if no item fits there.

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
        return IntactRecord(segment, RecordHeader._make(record.HEADER.unpack_from(data)), data)
    header = record.find_head(data, 0, log_offset=offset)
    end = offset + header.size if header else _next_head(window, segment, at + 1)
    remains = bytes(window.view(at, min(end - offset, REMAINS_BYTES_MAX)))
    return BrokenRange(segment, offset, end, why, header, remains)


def _next_head(window: FileWindow, segment: LogSegment, begin: int) -> int:
    """Return the log offset of the next intact head in a segment, or the end of the segment."""
    for at in _magics(window, segment, begin):
        offset = LogOffset(segment.start + at)
        if record.find_head(window.record(at), 0, log_offset=offset) is not None:
            return offset
    return segment.end


def _magics(window: FileWindow, segment: LogSegment, begin: int) -> Iterator[int]:
    """Yield the positions from `begin` on with the first bytes of a record."""
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
        self.end = begin  # of the log, after the walk
        self.vanished: list[LogSegment] = []  # deleted by the broker before they were read

    def walk(self) -> Iterator[IntactRecord | BrokenRange]:
        """Yield all intact records and damaged ranges. Raises UnknownRecord."""
        for number, segment in enumerate(self._segments):
            if segment.end <= self._begin:
                continue
            try:
                file = open_segment(self._source, segment.name)
            except FileNotFoundError:
                self.vanished.append(segment)
                continue
            try:
                is_end = yield from self._walk_segment(number, FileWindow(file))
            finally:
                file.close()
            if is_end:
                return
            self.end = segment.end

    def _walk_segment(
        self, number: int, window: FileWindow
    ) -> Generator[IntactRecord | BrokenRange, None, bool]:
        """Yield the items of a segment; return whether the log ends in it."""
        segment = self._segments[number]
        at = max(self._begin - segment.start, 0)
        while True:
            found = read_one(window, segment, at)
            if isinstance(found, BrokenRange):
                found = self._judge(found, number, window)
                if found is None:
                    self.end = segment.start + at
                    return True
            if found is None or isinstance(found, Pad):
                return False
            self.end = found.end
            yield found
            at = found.end - segment.start

    def _judge(self, broken: BrokenRange, number: int, window: FileWindow) -> ScanItem | None:
        """Read a range again, and return its damage; None if the log ends there.

        The log also ends there if a record was written since the first look. Otherwise the walk
        would follow a busy broker forever.
        """
        at = broken.log_offset - broken.segment.start
        is_known = broken.log_offset < self._durable_offset
        is_proven = is_known or self._is_proven(number, broken.log_offset)
        window.forget()
        again = read_one(window, broken.segment, at)
        if is_known and not isinstance(again, BrokenRange):
            return again
        if not is_proven or not isinstance(again, BrokenRange):
            return None
        if again.end == broken.segment.end and broken.log_offset < self._durable_offset:
            # Behind the durable offset no record is known.
            again = again._replace(end=min(again.end, self._durable_offset))
        return again

    def _is_proven(self, number: int, log_offset: int) -> bool:
        """Whether a later record was written when the bytes at `log_offset` were durable."""
        for segment in self._segments[number:]:
            try:
                file = open_segment(self._source, segment.name)
            except FileNotFoundError:
                continue
            try:
                window = FileWindow(file)
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
    """Whether a segment was cut: its size is not a whole number of blocks."""
    return segment.size % BLOCK_BYTES != 0


def may_hold(segment: LogSegment, original: int) -> bool:
    """Whether a segment that was set aside may have the original of salvaged properties.

    `original` is its log offset. If negative, the original is in an unknown segment that begins
    before `-original`.
    """
    if original < 0:
        return segment.start < -original
    return segment.start <= original < segment.end
