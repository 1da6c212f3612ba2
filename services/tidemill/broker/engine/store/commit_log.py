"""The commit log: every record of the broker group in order of arrival, in fixed-size segments.

The engine's owner is the only one that uses it. Invariants:

- A record's bytes are at its log offset, in one segment. `log_end` only grows.
- `append` puts records into the pending round. `write` passes them to the disk, in few writes per
  segment. `begin_sync` names the files to sync, and `note_synced` then moves `durable_offset`.
  Later rounds may be appended and written between the two.
- Durable records are committed when `note_committed` says so; without replicas, at once.
- A replica gets its records only by `append_frame`, unchanged. `applied_offset` says how far it has
  applied them. Only a replica may `truncate` its log.
- A failed write or sync is final (DiskFailed): the next process recovers from the durable bytes.

It is one file, because append, write, sync, commit and truncate move the same few offsets.
`log_opening.py` opens the log of an earlier process, `segment_reader.py` reads it, and
`next_segment.py` prepares the next segment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
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
from tidemill.broker.engine.store.pack import Pack, apart
from tidemill.broker.engine.store.round_slices import in_slices
from tidemill.broker.engine.store.segment import (
    BLOCK_BYTES,
    FOLDER,
    Hole,
    LogDamaged,
    Record,
    Segment,
    damaged,
    pack_name,
    packing_name,
    segment_name,
)
from tidemill.broker.engine.store.segment_reader import SegmentReader
from tidemill.common.errors import MessageBodyTooLarge

# As names of this module, for speed: every record passes here.
_pack_covered, _pack_prefix = record.COVERED.pack, record.PREFIX.pack
# For readers of old messages. The kernel still has recent bytes in its cache. A reader announces
# older positions that are this close together in one call, at most this many bytes.
WARM_BYTES = 256 << 20
GAP_BYTES_MAX = 64 << 10
READ_BYTES_MAX = 1 << 20


@final
class CommitLog:
    """The segments of one log, the pending round, and the durable and committed offsets.

    It is one class, because append, write, sync, commit and truncate move the same few offsets.
    """

    def __init__(self, disk: Disk, mappings: Mappings, *, segment_bytes: int) -> None:
        assert segment_bytes % BLOCK_BYTES == 0, "segments have whole blocks"
        self._disk = disk
        self._views = mappings
        self._segment_bytes = segment_bytes
        self.segments: list[Segment] = []  # segments of the log, oldest first
        self.held: list[Segment] = []  # former segments with messages of pending timers
        self.damage = DamagedRanges()
        self.reader = SegmentReader(
            mappings, self._is_cold, lambda one: self.damage.note_directory(one.start, one.end)
        )
        self._next = NextSegment(disk, segment_bytes=segment_bytes, start=lambda: self._active_end)
        self._pending: list[tuple[Segment, int, list[bytes | memoryview]]] = []
        self._buffers: list[bytes | memoryview] = []
        # Records of the pending round by offset. A pop may read one before it is written.
        self._pending_records: dict[int, tuple[bytes, bytes | memoryview]] = {}
        self._active_end = LogOffset(0)
        self._chunk_from = 0  # log offset of the first buffer
        self._unsynced: dict[str, File] = {}
        self._full: deque[Segment] = deque()  # full segments with an open file
        self._written_offset = LogOffset(0)
        self.read_from = 0  # this process has written or read everything from there on
        self.epoch = 0
        self.log_end = LogOffset(0)
        self.durable_offset = LogOffset(0)  # on this disk
        # On all disks of the sync state set; at most durable_offset.
        self.committed_offset = LogOffset(0)
        # With replicas, a durable record is not committed before they have it.
        self.has_replicas = False
        # Of a replica: memory is the fold of the log before this offset. None: of the whole log.
        self.applied_offset: LogOffset | None = None
        self._cut_at: LogOffset | None = None  # log offset of a cut during the running sync
        self.record_count = 0  # appended or replayed by this process
        self._state_floor = 0  # committed
        # The newest state floor, and the log offset of its record; -1: it is surely committed.
        self._next_floor: tuple[int, int] = 0, -1
        # Derived files need the log before this offset: a record there may have made entries dead.
        self.checkpoint_end = LogOffset(0)
        self.pack_count = 0  # packs that this process has installed
        self.written_bytes = 0  # all bytes written by this process, for the metrics

    @property
    def min_offset(self) -> LogOffset:
        """Begin of the oldest segment."""
        return self.segments[0].start if self.segments else LogOffset(0)

    @property
    def state_floor(self) -> int:
        """The log offset before which no state is stated only; committed, and never lower."""
        floor, stated_at = self._next_floor
        if floor > self._state_floor and stated_at < self.committed_offset:
            self._state_floor = floor
        return max(self._state_floor, self.min_offset)

    def note_floor(self, floor: int, stated_at: int = -1) -> None:
        """Note a state floor and the log offset of its record; -1: it is committed."""
        if floor > self.state_floor:
            self._next_floor = floor, stated_at

    @property
    def floor_number(self) -> int:
        """The number of the first segment at or after the state floor."""
        return bisect_left(self.segments, self.state_floor, key=lambda one: one.start)

    @property
    def packed_floor(self) -> int:
        """The log offset before which packs may lack records."""
        headers = [one.pack.header for one in self.segments if one.pack is not None]
        return max((one.floor for one in headers), default=0)

    @property
    def packed_until(self) -> int:
        """The log offset before which packs need the log; 0: there is no pack."""
        headers = [one.pack.header for one in self.segments if one.pack is not None]
        return max((max(one.end, one.decided_at) for one in headers), default=0)

    def open_for_append(self) -> None:
        """Treat the log of an earlier process as durable, and append at `log_end`."""
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
        MessageBodyTooLarge, and changes nothing, if the record does not fit into a segment.
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
        # Every record passes here, and a call of `LogOffset` costs as much as a field.
        self.log_end = offset + size  # type: ignore[assignment]  # A log offset plus a size.
        return offset

    def _roll(self, size: int) -> LogOffset:
        """Close the active segment with a pad and begin the next one; return its begin."""
        if size > self._segment_bytes:
            raise MessageBodyTooLarge(
                f"the message takes {size} bytes in the log, and a segment has only"
                f" {self._segment_bytes} bytes; send a smaller message"
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
        """Write the pending round."""
        for _ in self.write_slices():
            pass

    def write_slices(self) -> Iterator[None]:
        """Write the pending round, and yield between slices.

        Until the end nothing may be appended. Only the end moves `written_offset`, so a sync that
        begins in between does not cover the round.
        """
        if self.segments:
            self._close_chunk(self.segments[-1])
        is_first = True
        for segment, begin, buffers in self._pending:
            assert segment.file is not None, "a pending segment is open"
            at = begin - segment.start
            for piece, size in in_slices(buffers):
                if not is_first:
                    yield
                is_first = False
                segment.file.write_at(at, piece)
                # With each piece again: a sync may have begun since the last one.
                self._unsynced[segment.name] = segment.file
                self.written_bytes += size
                at += size
        self._pending.clear()
        self._pending_records.clear()
        self._written_offset = self._chunk_from = self.log_end

    def begin_sync(self) -> tuple[LogOffset, list[File]]:
        """Return the written offset, and the files to sync to make the log durable up to it.

        Later writes belong to the next sync.
        """
        files = list(self._unsynced.values())
        self._unsynced.clear()
        self._cut_at = None
        return self._written_offset, files

    def note_synced(self, log_offset: LogOffset) -> None:
        """Record that everything before `log_offset` is durable, except for later cuts."""
        if self._cut_at is not None:
            log_offset = min(log_offset, self._cut_at)
        assert log_offset <= self._written_offset, "only written bytes are durable"
        self.durable_offset = max(self.durable_offset, log_offset)
        if not self.has_replicas:
            self.committed_offset = self.durable_offset
        while self._full and self._full[0].end < log_offset:
            self._full.popleft().close()

    def note_committed(self, log_offset: LogOffset) -> None:
        """Record that everything before `log_offset` survives any failure of this broker."""
        assert log_offset <= self._written_offset, "only written bytes are committed"
        self.committed_offset = max(self.committed_offset, log_offset)

    @property
    def written_offset(self) -> LogOffset:
        """End of the bytes that were passed to the disk."""
        return self._written_offset

    @property
    def folded_offset(self) -> LogOffset:
        """Offset before which memory is the fold of the log."""
        return self.log_end if self.applied_offset is None else self.applied_offset

    # ------------------------------------------------------------ a replica's log

    def begin_at(self, log_offset: LogOffset) -> None:
        """Begin an empty log at `log_offset`."""
        assert not self.segments, "an empty log"
        self.log_end = self._active_end = self.read_from = log_offset
        self.open_for_append()

    # ------------------------------------------------------------ reading

    def read(self, log_offset: LogOffset) -> tuple[memoryview | bytes, memoryview | bytes]:
        """Return (head, tail) of the record at `log_offset`.

        The views are valid as long as the segment. Raises LookupError before the oldest segment,
        and CorruptStore if no record begins there. Computes no checksum; call `verify` for bytes of
        an earlier process.
        """
        if log_offset >= self._written_offset:
            return self._pending_records[log_offset]
        segment = self.segment_of(log_offset)
        if segment.pack is not None:
            view, at, header = self.reader.find_in_pack(segment, log_offset)
        else:
            view, at = self._bytes_of(segment, log_offset)
            header = record.HEADER.unpack_from(view, at)
        if header[0] != record.MAGIC or header[record.LOG_OFFSET] != log_offset:
            raise damaged(segment, log_offset, "no record begins here")
        head_end, size = at + header[record.HEAD_SIZE], header[record.SIZE]
        if header[record.FLAGS] & record.STUB:
            size = record.stored_size(view, at, RecordHeader._make(header))
        return view[at:head_end], view[head_end : at + size]

    def find_written(self, log_offset: LogOffset) -> tuple[memoryview, int] | None:
        """Return the bytes of a segment and the position in them that a log offset has.

        None if the record is not written yet, or is in a pack. Raises as `read`, but does not
        check that a record begins there.
        """
        if log_offset >= self._written_offset:
            return None
        segment = self.segment_of(log_offset)
        return None if segment.pack is not None else self._bytes_of(segment, log_offset)

    def _bytes_of(self, segment: Segment, log_offset: LogOffset) -> tuple[memoryview, int]:
        at = log_offset - segment.start
        if log_offset >= self.read_from:
            return self._views[segment.name], at
        return self.reader.readable_record(segment, log_offset), at

    def verify(self, log_offset: LogOffset) -> Record:
        """Return a record after checking all its checksums. Raises CorruptStore and LookupError."""
        return self.reader.read_verified(self.segment_of(log_offset), log_offset)

    def _is_cold(self, log_offset: int) -> bool:
        """Return whether the kernel's cache may not have the bytes."""
        return log_offset < max(self.read_from, self.log_end - WARM_BYTES)

    def record_at(self, log_offset: LogOffset) -> Record:
        """Return a record with its header decoded. Raises as `read`."""
        head, tail = self.read(log_offset)
        header = RecordHeader._make(record.HEADER.unpack_from(head))
        return Record(header, memoryview(head)[record.HEADER_SIZE :], memoryview(tail))

    def bytes_at(self, log_offset: LogOffset, size: int) -> memoryview:
        """Return up to `size` bytes of the record at `log_offset`, with zeros for unreadable pages.

        The result is empty outside of the log, and while the directory of a pack is derived.
        """
        if not self.min_offset <= log_offset < self._written_offset:
            return memoryview(b"")
        segment = self.segment_of(log_offset)
        try:
            at = self.reader.position(segment, log_offset)
        except LogDamaged:
            return memoryview(b"")
        return self._views.salvage(segment.name, at, size)

    def is_readable(self, log_offset: LogOffset) -> bool:
        """Return whether the disk can read the page of `log_offset`."""
        segment = self.segment_of(log_offset)
        try:
            self._views.readable(segment.name, self.reader.position(segment, log_offset), 1)
        except PageUnreadable:
            return False
        return True

    def remap(self, segment: Segment) -> None:
        """Map a segment again after its unreadable pages were written."""
        self._views.forget(segment.name)

    def read_held(self, log_offset: LogOffset) -> Record:
        """Return a record of a former segment. Raises as `verify`."""
        segment = next((s for s in self.held if s.start <= log_offset < s.end), None)
        if segment is None:
            raise LookupError(log_offset)
        return self.reader.read_verified(segment, log_offset)

    def walk_between(self, begin: int, end: int) -> Iterator[Record | Hole]:
        """Yield the durable records between two log offsets, and a hole for each damaged part.

        Unreadable parts of tails are zeros. Segments that retention has removed are left out. Do
        not keep the iterator while retention removes another one.
        """
        for segment in list(self.segments):
            if segment.start < end and begin < segment.end:
                at, stop = max(begin, segment.start), min(end, segment.end)
                yield from self.reader.walk_past_damage(segment, at, stop)

    def segment_start(self, log_offset: LogOffset) -> int:
        """Return the begin of the segment of `log_offset`, or of the oldest segment."""
        segments = self.segments
        if segments and log_offset >= segments[-1].start:
            return segments[-1].start
        return self.segment_of(max(log_offset, self.min_offset)).start if segments else 0

    def advise(self, log_offset: LogOffset, size: int) -> None:
        """Announce that these bytes of the log will be read soon; a hint. Ignore all others."""
        end = min(log_offset + size, self.segments[-1].end)
        log_offset = max(log_offset, self.min_offset)
        while log_offset < end:
            segment, size = self.segment_of(log_offset), 0
            # A pack has fewer bytes than its part of the log.
            with suppress(LogDamaged):
                at = self.reader.position(segment, log_offset)
                size = self.reader.position(segment, min(end, segment.end)) - at
            if size > 0:
                file = segment.file or self._disk.open(segment.name)
                file.advise(at, size)
                if segment.file is None:
                    file.close()
            log_offset = segment.end

    def segment_of(self, log_offset: LogOffset) -> Segment:
        """Return the segment of `log_offset`, the last one at or after the log end.

        Raises LookupError before the oldest segment.
        """
        segments = self.segments
        if segments and log_offset >= segments[-1].start:
            return segments[-1]
        if not segments or log_offset < segments[0].start:
            raise LookupError(log_offset)
        # Segments have equal sizes unless the setting was changed, so this guess is mostly right.
        index = min((log_offset - segments[0].start) // self._segment_bytes, len(segments) - 1)
        while log_offset < segments[index].start:
            index -= 1
        while log_offset >= segments[index].end:
            index += 1
        return segments[index]

    def append_frame(
        self,
        data: bytes | memoryview,
        *,
        segment_start: int,
        segment_bytes: int,
        log_bytes: int | None = None,
    ) -> None:
        """Write records of the master at `log_end`, in a segment with the same begin.

        With stubs they take `log_bytes` of the log and have fewer bytes. The next sync makes them
        durable. This does not apply them.
        """
        assert not self._buffers, "a replica has no rounds"
        if not self.segments or self.segments[-1].start != segment_start:
            self._begin_segment(segment_start, segment_bytes)
        segment = self.segments[-1]
        if segment.file is None:
            segment.file = self._disk.open(segment.name)
        log_bytes = len(data) if log_bytes is None else log_bytes
        assert self.log_end + log_bytes <= segment.end, "a frame is of one segment"
        for log_offset, part in apart(memoryview(data), self.log_end, log_bytes, segment.end):
            segment.file.write_at(log_offset - segment.start, [part])
        self._unsynced[segment.name] = segment.file
        self.written_bytes += len(data)
        self.log_end = self._written_offset = LogOffset(self.log_end + log_bytes)
        self._chunk_from = self.log_end

    def _begin_segment(self, start: int, size: int) -> None:
        assert start == (self._active_end if self.segments else self.log_end), (
            "segments are contiguous"
        )
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
        """Cut the log at `end`, durably. A crash in between may leave any part of the tail.

        Nothing of the tail may have been applied.
        """
        assert self.min_offset <= end <= self.log_end, "a cut is in the log"
        assert not self._buffers, "a replica has no rounds"
        assert end >= self.packed_until, "no pack is cut, and none loses its reasons"
        before = self.log_end
        self._next.discard()
        drop_segments_from(self._disk, self._views, self.segments, end)
        if self.segments:
            active = self.segments[-1]
            active.pad_at = active.first_stored_at_ms = None
            if active.file is None:
                active.file = self._disk.open(active.name)
            # After the end of the log there were never any readable bytes.
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
        """Prepare the next segment.

        Yield after each slice the files to sync before the next one.
        """
        if not self._next.is_ready and self.segments:
            yield from self._next.prepare(slice_bytes=slice_bytes)

    @property
    def needs_preparation(self) -> bool:
        """Whether the active segment is half full and no next segment is ready."""
        return (
            not self._next.is_ready
            and bool(self.segments)
            and self._active_end - self.log_end < self._segment_bytes // 2
        )

    def drop_oldest(self) -> Iterator[list[File]]:
        """Drop the oldest segment, and delete its file.

        The file never becomes the next segment. Its old records would look like a lost tail behind
        the log end.
        """
        yield from drop_file(self._disk, self._take_oldest().name)

    def set_oldest_aside(self) -> Iterator[list[File]]:
        """Drop the oldest segment from the log, and keep its file as a former segment."""
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

    def install_pack(self, segment: Segment, pack: Pack) -> Iterator[list[File]]:
        """Replace the file of a segment by its pack, which is complete and durable."""
        before = segment.name
        self._views.forget(before)
        self._disk.rename(packing_name(segment.start), pack_name(segment.start))
        # Readers of this process use the pack from here on. A crash may leave both files.
        segment.become_pack(pack)
        self.pack_count += 1
        yield [self._disk.folder(FOLDER)]
        if before != segment.name:
            yield from drop_file(self._disk, before)

    def drop_held(self, segment: Segment) -> Iterator[list[File]]:
        """Delete a former segment."""
        self.held.remove(segment)
        self._views.forget(segment.name)
        yield from drop_file(self._disk, segment.name)

    def close(self) -> None:
        """Close all files without writing, and delete the prepared segment."""
        for segment in self.segments:
            segment.close()
        self._next.close()
