"""The commit log: every record of the broker group in order of arrival, in fixed-size segments.

Owned by the engine's one owner. What must stay true:

- A record's bytes are at its log offset, in one segment; `log_end` only grows.
- `append` puts records into the pending round; `write` hands them to the disk, in one writev a
  segment where they are not many; `begin_sync` names the files that a sync must cover, and
  `synced` says that it has: then `durable_offset` moves. Between the two, later rounds may be
  appended and written.
- What is durable here is committed when `committed` says so: at once where there is no replica.
- A replica gets its records by `extend`, as they stand at its master, and by nothing else;
  `applied_offset` says how far it has applied them. Only there `cut` takes an end away.
- A failed write or sync is final (DiskFailed): the process ends and recovers from what is durable.

What an earlier process has left is opened by `log_opening.py`, and read through
`segment_reader.py`; the next segment is made ready by `next_segment.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import final
from zlib import crc32

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import (
    HEADER_SIZE,
    MAGIC,
    UNSYNCED_MAX,
    VERSION,
    RecordHeader,
    RecordKind,
)
from tidemill.broker.engine.store.cutting import drop_segments_from, erase
from tidemill.broker.engine.store.damaged_ranges import DamagedRanges
from tidemill.broker.engine.store.disk import Disk, File, drop_file
from tidemill.broker.engine.store.mappings import Mappings, PageUnreadable
from tidemill.broker.engine.store.next_segment import NextSegment
from tidemill.broker.engine.store.segment import (
    BLOCK_BYTES,
    FOLDER,
    CorruptStore,
    Hole,
    Record,
    Segment,
    damaged,
    intact_at,
    segment_name,
)
from tidemill.broker.engine.store.segment_reader import SegmentReader
from tidemill.broker.engine.tally import SLICE_BYTES
from tidemill.common.errors import MessageBodyTooLarge

# By their own names, since every record of every message passes here.
_pack_covered, _pack_prefix = record.COVERED.pack, record.PREFIX.pack
# For readers of old messages. What was written lately is still in the kernel's cache; places this
# close together it is asked for in one go, this much at once.
WARM_BYTES = 256 << 20
GAP_BYTES_MAX = 64 << 10
READ_BYTES_MAX = 1 << 20
NEVER_MS = 1 << 62
SLICE_BUFFERS = 4096  # handed to the disk at once: a quarter of a microsecond each


@final
class CommitLog:
    """The segments of one log, the pending round, and how far all of it is durable."""

    def __init__(self, disk: Disk, mappings: Mappings, *, segment_bytes: int) -> None:
        assert segment_bytes % BLOCK_BYTES == 0, "segments are made of whole blocks"
        self._disk = disk
        self._views = mappings
        self._segment_bytes = segment_bytes
        self.segments: list[Segment] = []  # all in use, oldest first
        self.held: list[Segment] = []  # files that are no part of the log any more
        self.reader = SegmentReader(mappings, self._is_cold)
        self.damage = DamagedRanges()
        self._next = NextSegment(disk, segment_bytes=segment_bytes, start=lambda: self._active_end)
        self._pending: list[tuple[Segment, int, list[bytes | memoryview]]] = []
        self._buffers: list[bytes | memoryview] = []
        # Records of the pending round by offset: a pop may want one before it is written.
        self._pending_records: dict[int, tuple[bytes, bytes | memoryview]] = {}
        self._active_end = LogOffset(0)
        self._chunk_from = 0  # where the first of `_buffers` will stand
        self._unsynced: dict[str, File] = {}
        self._full: deque[Segment] = deque()  # whose files are still open
        self._written_offset = LogOffset(0)
        self.read_from = 0  # this process has written, or read, what stands from there on
        self.epoch = 0
        self.log_end = LogOffset(0)
        self.durable_offset = LogOffset(0)  # of this disk
        self.committed_offset = LogOffset(0)  # of all that must have it; never ahead of the other
        # Then what is durable here is committed only when they have it too.
        self.has_replicas = False
        # Of a replica: up to where its memory is the fold of the log. None: up to the end.
        self.applied_offset: LogOffset | None = None
        self._cut_at: LogOffset | None = None  # while the sync under way went on
        self.record_count = 0  # appended by this process, or replayed by it
        self.written_bytes = 0  # all bytes ever passed to write, for the metrics

    @property
    def min_offset(self) -> LogOffset:
        """Where the oldest segment begins."""
        return self.segments[0].start if self.segments else LogOffset(0)

    def open_for_append(self) -> None:
        """Take what was found of an earlier process for durable, and append behind `log_end`."""
        self.committed_offset = self.durable_offset = self._written_offset = self.log_end
        self._chunk_from = self.log_end
        if self.segments:
            self._active_end = self.segments[-1].end

    # ------------------------------------------------------------ append

    def append(
        self,
        kind: RecordKind,
        body: bytes,
        stored_at_ms: int,
        flags: int = 0,
        tail: bytes | memoryview = b"",
        tail_crc: int = 0,
    ) -> LogOffset:
        """Put a record into the pending round and return its log offset.

        `tail` is not copied: it must not change until the round is written. Raises
        MessageBodyTooLarge, and changes nothing, when the record cannot fit into a segment.
        """
        head_size = HEADER_SIZE + len(body)
        size = head_size + len(tail)
        offset = self.log_end
        if offset + size > self._active_end:
            offset = self._roll(size)
        unsynced = offset - self.durable_offset
        if unsynced > UNSYNCED_MAX:
            unsynced = UNSYNCED_MAX
        covered = (
            _pack_covered(
                size,
                tail_crc,
                VERSION,
                kind,
                flags,
                self.epoch,
                stored_at_ms,
                offset,
                unsynced,
                head_size,
            )
            + body
        )
        head = _pack_prefix(MAGIC, crc32(covered)) + covered
        self._buffers.append(head)
        if tail:
            self._buffers.append(tail)
        self._pending_records[offset] = (head, tail)
        self.record_count += 1
        # Every record passes here, and a call to name the number costs as much as a field.
        self.log_end = offset + size  # type: ignore[assignment]  # A log offset plus a size.
        return offset

    def _roll(self, size: int) -> LogOffset:
        """Close the active segment with a pad and begin the next one; return its start."""
        if size > self._segment_bytes:
            raise MessageBodyTooLarge(
                f"the message needs {size} bytes in the log, more than a segment "
                f"({self._segment_bytes} bytes); send a smaller one"
            )
        start = self._active_end
        if self.segments:
            room = start - self.log_end
            if room >= record.PAD.size:
                self._buffers.append(record.PAD.pack(record.PAD_MAGIC, room))
            self.segments[-1].pad_at = self.log_end - self.segments[-1].start
            self._close_chunk(self.segments[-1])
            self._full.append(self.segments[-1])
        segment = self._next.take()
        self.segments.append(segment)
        self._active_end = segment.end
        self.log_end = self._chunk_from = start
        return start

    def _close_chunk(self, segment: Segment) -> None:
        if self._buffers:
            self._pending.append((segment, self._chunk_from, self._buffers))
            self._buffers = []

    # ------------------------------------------------------------ the round

    def write(self) -> None:
        """Hand the pending round to the disk in one go."""
        for _ in self.write_slices():
            pass

    def write_slices(self) -> Iterator[None]:
        """Hand the pending round to the disk, and yield between slices of it.

        Until it has ended nothing may be appended. What a sync that begins meanwhile covers of it
        counts for nothing: only the end moves what is written.
        """
        if self.segments:
            self._close_chunk(self.segments[-1])
        is_first = True
        for segment, begin, buffers in self._pending:
            assert segment.file is not None, "it is not synced yet"
            at = begin - segment.start
            for piece, size in _pieces(buffers):
                if not is_first:
                    yield
                is_first = False
                segment.file.write_at(at, piece)
                # Again with each piece: a sync may have begun since the last one.
                self._unsynced[segment.name] = segment.file
                self.written_bytes += size
                at += size
        self._pending.clear()
        self._pending_records.clear()
        self._written_offset = self._chunk_from = self.log_end

    def begin_sync(self) -> tuple[LogOffset, list[File]]:
        """Return the log offset up to which a sync of the files beside it makes all durable.

        What is written from here on is the business of the next one.
        """
        files = list(self._unsynced.values())
        self._unsynced.clear()
        self._cut_at = None
        return self._written_offset, files

    def note_synced(self, log_offset: LogOffset) -> None:
        """Everything before `log_offset` is durable, but for what was cut since the sync began."""
        if self._cut_at is not None:
            log_offset = min(log_offset, self._cut_at)
        assert log_offset <= self._written_offset, "only what was written is durable"
        self.durable_offset = max(self.durable_offset, log_offset)
        if not self.has_replicas:
            self.committed_offset = self.durable_offset
        while self._full and self._full[0].end < log_offset:
            self._full.popleft().close()

    def note_committed(self, log_offset: LogOffset) -> None:
        """Everything before `log_offset` stays, whatever becomes of this process or its disk."""
        assert log_offset <= self._written_offset, "only what was written is committed"
        self.committed_offset = max(self.committed_offset, log_offset)

    @property
    def written_offset(self) -> LogOffset:
        """Up to where the log was handed to the disk."""
        return self._written_offset

    @property
    def folded_offset(self) -> LogOffset:
        """Up to where memory is the fold of the log."""
        return self.log_end if self.applied_offset is None else self.applied_offset

    # ------------------------------------------------------------ a replica's log

    def begin_at(self, log_offset: LogOffset) -> None:
        """Let an empty log begin at `log_offset`."""
        assert not self.segments, "an empty log"
        self.log_end = self._active_end = self.read_from = log_offset
        self.open_for_append()

    # ------------------------------------------------------------ reading

    def read(self, log_offset: LogOffset) -> tuple[memoryview | bytes, memoryview | bytes]:
        """Return (head, tail) of the record at `log_offset`.

        The views are valid as long as the segment is. Raises LookupError when the offset lies
        before the oldest segment. No checksum is computed: `verify` does that where bytes come
        from an earlier life of the process.
        """
        if log_offset >= self._written_offset:
            return self._pending_records[log_offset]
        segment = self.segment_of(log_offset)
        at = log_offset - segment.start
        if log_offset >= self.read_from:
            view = self._views[segment.name]
        else:
            view = self.reader.readable_record(segment, at)
        header = record.HEADER.unpack_from(view, at)
        if header[0] != record.MAGIC or header[record.LOG_OFFSET] != log_offset:
            raise damaged(segment, log_offset, "no record begins here")
        head_end = at + header[record.HEAD_SIZE]
        return view[at:head_end], view[head_end : at + header[record.SIZE]]

    def verify(self, log_offset: LogOffset) -> None:
        """Check every checksum of a record. Raises CorruptStore, LookupError as `read`."""
        self.reader.read_verified(self.segment_of(log_offset), log_offset)

    def _is_cold(self, log_offset: int) -> bool:
        """Whether the kernel's cache may have let go of what stands there, or never had it."""
        return log_offset < max(self.read_from, self.log_end - WARM_BYTES)

    def record_at(self, log_offset: LogOffset) -> Record:
        """Return a record with its header decoded. Raises as `read`."""
        head, tail = self.read(log_offset)
        header = RecordHeader._make(record.HEADER.unpack_from(head))
        return Record(header, memoryview(head)[record.HEADER_SIZE :], memoryview(tail))

    def bytes_at(self, log_offset: LogOffset, size: int) -> memoryview:
        """Return the bytes from `log_offset` on, whatever they are; none where there are none.

        In place of what cannot be read are zeros.
        """
        if not self.min_offset <= log_offset < self._written_offset:
            return memoryview(b"")
        segment = self.segment_of(log_offset)
        return self._views.salvage(segment.name, log_offset - segment.start, size)

    def is_readable(self, log_offset: LogOffset) -> bool:
        """Whether the page of `log_offset` can be read."""
        segment = self.segment_of(log_offset)
        try:
            self._views.readable(segment.name, log_offset - segment.start, 1)
        except PageUnreadable:
            return False
        return True

    def remap(self, segment: Segment) -> None:
        """Map a segment anew: pages of it that could not be read have been written."""
        self._views.forget(segment.name)

    def read_held(self, log_offset: LogOffset) -> Record:
        """Return a record of a segment that was set aside. Raises as `verify`."""
        segment = next((s for s in self.held if s.start <= log_offset < s.end), None)
        if segment is None:
            raise LookupError(log_offset)
        return self.reader.read_verified(segment, log_offset)

    def stored_by_ms(self, log_offset: LogOffset) -> int:
        """Return a time by which whatever stands at `log_offset` was stored; no tight bound."""
        later = [n for n, segment in enumerate(self.segments) if segment.start > log_offset]
        is_written = bool(later) and self.segments[later[0]].start < self._written_offset
        return self.first_stored_at_ms(later[0]) if is_written else NEVER_MS

    def walk_between(self, begin: int, end: int) -> Iterator[Record | Hole]:
        """Yield the durable records between two log offsets, past those whose heads are damaged.

        In place of tails that cannot be read there are zeros. What retention took is left out;
        while it takes more nobody may go on with this.
        """
        for segment in list(self.segments):
            at, stop = max(begin - segment.start, 0), min(end - segment.start, segment.size)
            yield from self.reader.walk_past_damage(segment, at, stop)

    def segment_start(self, log_offset: LogOffset) -> int:
        """Return where the segment of `log_offset` begins; of one that is gone, the oldest does."""
        segments = self.segments
        if segments and log_offset >= segments[-1].start:
            return segments[-1].start
        return self.segment_of(max(log_offset, self.min_offset)).start if segments else 0

    def advise(self, log_offset: LogOffset, size: int) -> None:
        """Say that `size` bytes from `log_offset` will be read soon; a hint."""
        end = min(log_offset + size, self.segments[-1].end)
        while log_offset < end:
            segment = self.segment_of(log_offset)
            file = segment.file or self._disk.open(segment.name)
            file.advise(log_offset - segment.start, min(end, segment.end) - log_offset)
            if segment.file is None:
                file.close()
            log_offset = segment.end

    def segment_of(self, log_offset: LogOffset) -> Segment:
        """Return the segment in which `log_offset` lies, the last for what lies behind all.

        Raises LookupError when it lies before the oldest.
        """
        segments = self.segments
        if segments and log_offset >= segments[-1].start:
            return segments[-1]
        if not segments or log_offset < segments[0].start:
            raise LookupError(log_offset)
        # Segments are of equal size unless the setting was changed, so the guess is mostly right.
        index = min((log_offset - segments[0].start) // self._segment_bytes, len(segments) - 1)
        while log_offset < segments[index].start:
            index -= 1
        while log_offset >= segments[index].end:
            index += 1
        return segments[index]

    # ------------------------------------------------------------ replicas

    def frame_at(
        self, log_offset: LogOffset, size_max: int, *, anew: bool = False
    ) -> tuple[memoryview, Segment] | None:
        """Return whole records from `log_offset` on, at least one, and the segment they are in.

        With the last of a segment comes what is behind it: the next frame begins with the next one.
        None: nothing is written there. Nobody is to have a copy of what is damaged: each record is
        checked, but for those that were written a moment ago; with `anew` those too. Raises
        LookupError and CorruptStore as `read`, where the first one is damaged.
        """
        if log_offset >= self._written_offset:
            return None
        segment = self.segment_of(log_offset)
        begin = at = log_offset - segment.start
        end = min(self._written_offset, segment.end) - segment.start
        is_new = log_offset >= self.durable_offset and not anew
        while at < end:
            try:
                size = self._size_to_send(segment, at, is_new=is_new)
            except CorruptStore:
                if at == begin:
                    raise
                break
            if size is None:
                at = end  # The log goes on in another segment.
                break
            if at > begin and at + size - begin > size_max:
                break
            at += size
        return self._views[segment.name][begin:at], segment

    def _size_to_send(self, segment: Segment, at: int, *, is_new: bool) -> int | None:
        """Return the size of the record at a byte of a segment; None: there is none any more."""
        offset = LogOffset(segment.start + at)
        if self.reader.is_warm(offset):
            view = self._views[segment.name]
            if is_new and view[at : at + 4] == record.MAGIC_BYTES:
                size: int = record.HEADER.unpack_from(view, at)[record.SIZE]
                return size
            found = intact_at(view, at, offset)
            if found is not None:
                return found.header.size
        if self.reader.is_pad(segment, offset):
            return None
        return self.reader.read_verified(segment, offset).header.size

    def records_from(self, begin: int, end: int) -> Iterator[Record]:
        """Yield the records between two log offsets, of which each was checked when it came.

        Raises CorruptStore where none begins.
        """
        at = begin
        while at < end:
            segment = self.segment_of(LogOffset(at))
            rest = segment.end - at
            view = self._views[segment.name]
            if rest < record.HEADER_SIZE or record.PAD.unpack_from(view, at - segment.start) == (
                record.PAD_MAGIC,
                rest,
            ):
                at = segment.end
                continue
            found = self.record_at(LogOffset(at))
            yield found
            at += found.header.size

    def append_frame(
        self, data: bytes | memoryview, *, segment_start: int, segment_bytes: int
    ) -> None:
        """Write at `log_end` what another log has there, in a segment that begins where its does.

        The next sync makes it durable, as with a round. Nothing is applied by it.
        """
        assert not self._buffers, "a log that follows has no rounds"
        if not self.segments or self.segments[-1].start != segment_start:
            self._begin_segment(segment_start, segment_bytes)
        segment = self.segments[-1]
        if segment.file is None:
            segment.file = self._disk.open(segment.name)
        assert self.log_end + len(data) <= segment.end, "a frame is of one segment"
        segment.file.write_at(self.log_end - segment.start, [data])
        self._unsynced[segment.name] = segment.file
        self.written_bytes += len(data)
        self.log_end = self._written_offset = LogOffset(self.log_end + len(data))
        self._chunk_from = self.log_end

    def _begin_segment(self, start: int, size: int) -> None:
        assert start == (self._active_end if self.segments else self.log_end), "segments join"
        if self.segments:
            self._full.append(self.segments[-1])
        if self._next.is_ready and size == self._segment_bytes:
            segment = self._next.take()
        else:
            self._next.discard()
            file = self._disk.open(segment_name(start), create=True)
            file.resize(size)
            file.sync()
            self._disk.folder(FOLDER).sync()
            segment = Segment(start, size, file)
        self.segments.append(segment)
        self._active_end = segment.end

    def truncate(self, end: LogOffset) -> None:
        """Take away all from `end` on, durably; a crash on the way leaves any part of it.

        Nothing of it may have been applied.
        """
        assert self.min_offset <= end <= self.log_end, "a cut is in the log"
        assert not self._buffers, "a log that follows has no rounds"
        before = self.log_end
        self._next.discard()
        drop_segments_from(self._disk, self._views, self.segments, end)
        if self.segments:
            active = self.segments[-1]
            active.pad_at = active.first_stored_at_ms = None
            if active.file is None:
                active.file = self._disk.open(active.name)
            # Behind where the log ended nothing was ever written that could be read again.
            erase(active.file, end - active.start, min(before - active.start, active.size))
            active.file.sync()
            self._active_end = active.end
        names = {segment.name for segment in self.segments}
        self._unsynced = {name: file for name, file in self._unsynced.items() if name in names}
        self._full = deque(segment for segment in self._full if segment.name in names)
        self.log_end = self._written_offset = end
        self._chunk_from = end
        self.read_from = min(self.read_from, end)
        self.committed_offset = min(self.committed_offset, end)
        self.durable_offset = min(self.durable_offset, end)
        self._cut_at = end

    # ------------------------------------------------------------ background

    def prepare(self, *, slice_bytes: int) -> Iterator[list[File]]:
        """Make the next segment ready; yield after each slice what to sync before the next one."""
        if not self._next.is_ready and self.segments:
            yield from self._next.prepare(slice_bytes=slice_bytes)

    @property
    def needs_preparation(self) -> bool:
        """Whether the active segment is half full and nothing follows it yet."""
        return (
            not self._next.is_ready
            and bool(self.segments)
            and self._active_end - self.log_end < self._segment_bytes // 2
        )

    def drop_oldest(self) -> Iterator[list[File]]:
        """Give up the oldest segment, as the prepared one where none is ready."""
        segment = self._take_oldest()
        if self._next.may_reuse(segment):
            yield from self._next.reuse(segment)
        else:
            yield from drop_file(self._disk, segment.name)

    def set_oldest_aside(self) -> Iterator[list[File]]:
        """Give up the oldest segment, and keep its file under another name."""
        segment = self._take_oldest()
        source = segment.name
        segment.set_aside()
        self._disk.rename(source, segment.name)
        self.held.append(segment)
        yield [self._disk.folder(FOLDER)]

    def _take_oldest(self) -> Segment:
        segment = self.segments[0]
        assert len(self.segments) > 1, "the active segment is never dropped"
        assert segment.end <= self.committed_offset, "only durable segments are dropped"
        del self.segments[0]
        self._views.forget(segment.name)
        return segment

    def drop_held(self, segment: Segment) -> Iterator[list[File]]:
        """Delete a file that was set aside."""
        self.held.remove(segment)
        self._views.forget(segment.name)
        yield from drop_file(self._disk, segment.name)

    def first_stored_at_ms(self, index: int) -> int:
        """Return when the first intact record from the beginning of segment `index` on was stored.

        Retention decides by it, so it is checked once. Something must have been written there.
        """
        segment = self.segments[index]
        if segment.first_stored_at_ms is None:
            found = self.walk_between(segment.start, self.segments[-1].end)
            times = (one.header.stored_at_ms for one in found if isinstance(one, Record))
            segment.first_stored_at_ms = next(times, NEVER_MS)
        return segment.first_stored_at_ms

    def around(self, stored_at_ms: int) -> tuple[LogOffset, LogOffset]:
        """Return two log offsets between which a time falls, as the segments' first records say.

        What is before the first one was stored before, and what is at or behind the second one not.
        """
        written = bisect_left(self.segments, self._written_offset, key=lambda one: one.start)
        number = bisect_left(range(written), stored_at_ms, key=self.first_stored_at_ms)
        begin = self.segments[number - 1].start if number else self.min_offset
        return begin, self.segments[number].start if number < written else self._written_offset

    def close(self) -> None:
        """Close all files; nothing is written."""
        for segment in self.segments:
            segment.close()
        self._next.close()


def _pieces(buffers: list[bytes | memoryview]) -> Iterator[tuple[list[bytes | memoryview], int]]:
    """Yield the same bytes in lists of which each is written in one slice, and their sizes."""
    size = sum(map(len, buffers))
    if len(buffers) <= SLICE_BUFFERS and size <= SLICE_BYTES:
        yield buffers, size
        return
    piece: list[bytes | memoryview] = []
    room = SLICE_BYTES
    for buffer in buffers:
        rest = buffer
        while len(rest) > room:
            view = memoryview(rest)
            piece.append(view[:room])
            yield piece, SLICE_BYTES
            rest, piece, room = view[room:], [], SLICE_BYTES
        piece.append(rest)
        room -= len(rest)
        if len(piece) == SLICE_BUFFERS:
            yield piece, SLICE_BYTES - room
            piece, room = [], SLICE_BYTES
    if piece:
        yield piece, SLICE_BYTES - room
