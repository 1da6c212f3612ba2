"""The commit log: every record of the broker group in order of arrival, in fixed-size segments.

Owned by the engine's one owner. What must stay true:

- A record's bytes are at its log offset, in one segment; `log_end` only grows.
- `append` puts records into the pending round; `write` hands them to the disk, in one writev a
  segment where they are not many; `begin_sync` names the files that a sync must cover, and
  `synced` says that it has: then `committed_offset` moves. Between the two, later rounds may be
  appended and written.
- A failed write or sync is final (DiskFailed): the process ends and recovers from what is durable.

After a crash `recover` walks the log from the checkpoint file's offset, cuts a torn tail, and
refuses to go on when durable bytes are damaged.

What an earlier process has written is read before it is touched (`mappings.py`): a page that cannot
be read is damage to what stands there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import (
    HEADER_SIZE,
    MAGIC,
    UNSYNCED_MAX,
    VERSION,
    Header,
    Kind,
)
from tidemill.broker.engine.store.disk import DROPPED, Disk, File, drop_file
from tidemill.broker.engine.store.mappings import Mappings, PageUnreadable
from tidemill.broker.engine.tally import SLICE_BYTES
from tidemill.common.errors import MessageBodyTooLarge

# By their own names, since every record of every message passes here.
_pack_covered, _pack_prefix = record.COVERED.pack, record.PREFIX.pack
_unpack_header = record.HEADER.unpack_from
# Makes a named tuple of a tuple without a call of Python code.
_tuple = tuple.__new__
FOLDER = "log"
SUFFIX = ".log"
HELD = ".held"  # suffix of what was set aside when retention came to it (ADR 0016)
PREPARED = "prepared"  # name of the next segment while it is filled
BLOCK_BYTES = 4096  # segments are made in multiples of it, so one that is not was cut
SEARCH_BYTES = 1 << 20  # looked through at once for remains behind the end of the log
# For readers of old messages. What was written lately is still in the kernel's cache; places this
# close together it is asked for in one go, this much at once.
WARM_BYTES = 256 << 20
GAP_BYTES_MAX = 64 << 10
READ_BYTES_MAX = 1 << 20
NEVER_MS = 1 << 62
SLICE_BUFFERS = 4096  # handed to the disk at once: a quarter of a microsecond each
TORN_BYTES_MAX = 8 << 20  # a torn tail is measured up to here; what lies behind is cut all the same


class CorruptStore(Exception):
    """Durable bytes are damaged. The message names the file, the offset and what to do."""


class Record(NamedTuple):
    """One record, decoded as far as its header."""

    header: Header
    body: memoryview
    tail: memoryview

    @property
    def log_offset(self) -> int:
        """Position of the record in the log."""
        return self.header.log_offset


class Hole(NamedTuple):
    """A stretch of the log in which no record has an intact head."""

    log_offset: LogOffset
    end: LogOffset


def segment_name(start: int) -> str:
    """Return the file name of the segment that begins at log offset `start`."""
    return f"{FOLDER}/{start:020d}{SUFFIX}"


@final
class Segment:
    """One file of the log."""

    __slots__ = ("end", "file", "first_stored_at_ms", "name", "pad_at", "start")

    def __init__(self, start: int, size: int, file: File | None = None) -> None:
        self.name = segment_name(start)
        self.start = LogOffset(start)
        self.end = LogOffset(start + size)
        # Open as long as it is written to, or a sync of it is under way.
        self.file = file
        # Byte at which its pad stands, the end where it has none; None: nobody has looked.
        self.pad_at: int | None = None
        self.first_stored_at_ms: int | None = None  # None: nobody has looked


def damaged(segment: Segment, offset: int, why: str) -> CorruptStore:
    """Describe damage to durable bytes."""
    return CorruptStore(
        f"{segment.name} is damaged at byte {offset - segment.start} (log offset {offset}): "
        f"{why}. These bytes were durable, so acknowledged messages are affected and the broker "
        f"does not start over them. Stop the broker, restore this file from a backup, and start "
        f"again."
    )


def unreadable(segment: Segment, error: PageUnreadable) -> CorruptStore:
    """Describe a page that the replay needs and the disk cannot read."""
    return CorruptStore(
        f"{segment.name} cannot be read at byte {error.at} (log offset "
        f"{segment.start + error.at}): {error}. Whether acknowledged messages stand there nobody "
        f"can say, so the broker does not start over it. Restore this file from a backup, on a "
        f"disk that is sound, and start again."
    )


@final
class CommitLog:
    """The segments of one log, the pending round, and how far all of it is durable."""

    def __init__(self, disk: Disk, mappings: Mappings, *, segment_bytes: int) -> None:
        assert segment_bytes % BLOCK_BYTES == 0, "segments are made of whole blocks"
        self._disk = disk
        self._views = mappings
        self._segment_bytes = segment_bytes
        self._segments: list[Segment] = []
        self.held: list[Segment] = []  # files that are no part of the log any more
        self._prepared: Segment | None = None
        self._is_prepared_durable = False
        self._pending: list[tuple[Segment, int, list[bytes | memoryview]]] = []
        self._buffers: list[bytes | memoryview] = []
        # Records of the pending round by offset: a pop may want one before it is written.
        self._pending_records: dict[int, tuple[bytes, bytes | memoryview]] = {}
        self._active_end = LogOffset(0)
        self._chunk_from = 0  # where the first of `_buffers` will stand
        self._unsynced: dict[str, File] = {}
        self._full: deque[Segment] = deque()  # whose files are still open
        self._written_offset = LogOffset(0)
        self._read_from = 0  # this process has written, or read, what stands from there on
        self.epoch = 0
        self.log_end = LogOffset(0)
        self.committed_offset = LogOffset(0)
        self.record_count = 0  # appended by this process, or replayed by it
        self.written_bytes = 0  # all bytes ever passed to write, for the metrics

    @property
    def min_offset(self) -> LogOffset:
        """Where the oldest segment begins."""
        return self._segments[0].start if self._segments else LogOffset(0)

    @property
    def segments(self) -> list[Segment]:
        """All segments in use, oldest first."""
        return self._segments

    # ------------------------------------------------------------ append

    def append(
        self,
        kind: Kind,
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
        unsynced = offset - self.committed_offset
        if unsynced > UNSYNCED_MAX:
            unsynced = UNSYNCED_MAX
        covered = (
            _pack_covered(
                size, tail_crc, VERSION, kind, flags, self.epoch, stored_at_ms, offset, unsynced,
                head_size,
            )
            + body
        )  # fmt: skip
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
        if self._segments:
            room = start - self.log_end
            if room >= record.PAD.size:
                self._buffers.append(record.PAD.pack(record.PAD_MAGIC, room))
            self._segments[-1].pad_at = self.log_end - self._segments[-1].start
            self._close_chunk(self._segments[-1])
            self._full.append(self._segments[-1])
        segment, self._prepared = self._prepared, None
        if segment is None:
            # Nobody prepared it in time: an unfilled file is slower to sync, and right.
            segment = self._create(start)
        elif not self._is_prepared_durable:
            # Else what is synced into it could be lost with its name.
            self._disk.folder(FOLDER).sync()
        assert segment.start == start, "segments are contiguous"
        self._segments.append(segment)
        self._active_end = segment.end
        self.log_end = self._chunk_from = start
        return start

    def _close_chunk(self, segment: Segment) -> None:
        if self._buffers:
            self._pending.append((segment, self._chunk_from, self._buffers))
            self._buffers = []

    def _create(self, start: int) -> Segment:
        file = self._disk.open(segment_name(start), create=True)
        file.resize(self._segment_bytes)
        file.sync()
        self._disk.folder(FOLDER).sync()
        return Segment(start, self._segment_bytes, file)

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
        if self._segments:
            self._close_chunk(self._segments[-1])
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
        return self._written_offset, files

    def synced(self, log_offset: LogOffset) -> None:
        """Everything before `log_offset` is durable."""
        assert log_offset <= self._written_offset, "only what was written is durable"
        self.committed_offset = max(self.committed_offset, log_offset)
        while self._full and self._full[0].end < log_offset:
            _close(self._full.popleft())

    # ------------------------------------------------------------ reading

    def read(self, log_offset: LogOffset) -> tuple[memoryview | bytes, memoryview | bytes]:
        """Return (head, tail) of the record at `log_offset`.

        The views are valid as long as the segment is. Raises LookupError when the offset lies
        before the oldest segment. No checksum is computed: `verify` does that where bytes come
        from an earlier life of the process.
        """
        if log_offset >= self._written_offset:
            return self._pending_records[log_offset]
        segment = self._segment_of(log_offset)
        at = log_offset - segment.start
        if log_offset >= self._read_from:
            view = self._views[segment.name]
        else:
            view = self._readable(segment, at)
        header = record.HEADER.unpack_from(view, at)
        if header[0] != record.MAGIC or header[record.LOG_OFFSET] != log_offset:
            raise damaged(segment, log_offset, "no record begins here")
        head_end = at + header[record.HEAD_SIZE]
        return view[at:head_end], view[head_end : at + header[record.SIZE]]

    def verify(self, log_offset: LogOffset) -> None:
        """Check every checksum of a record. Raises CorruptStore, LookupError as `read`."""
        segment = self._segment_of(log_offset)
        at = log_offset - segment.start
        view = (
            self._readable(segment, at) if self._is_cold(log_offset) else self._views[segment.name]
        )
        why = record.find_damage(view, at, log_offset=log_offset)
        if why:
            raise damaged(segment, log_offset, why)

    def _is_cold(self, log_offset: int) -> bool:
        """Whether the kernel's cache may have let go of what stands there, or never had it."""
        return log_offset < max(self._read_from, self.log_end - WARM_BYTES)

    def _readable(self, segment: Segment, at: int) -> memoryview:
        """Return a segment's view, of which the record at `at` may be touched.

        Raises CorruptStore where it cannot be read.
        """
        try:
            view = self._views.readable(segment.name, at, HEADER_SIZE)
            size = _size_of(view[at : at + HEADER_SIZE], len(view) - at)
            self._views.readable(segment.name, at, size)
        except PageUnreadable as error:
            raise damaged(segment, segment.start + at, str(error)) from error
        return view

    def _salvaged(self, segment: Segment, at: int) -> memoryview:
        """Return the record at `at`, and of what is none its first bytes; zeros for lost pages."""
        if not self._is_cold(segment.start + at):
            return self._views[segment.name][at:]
        head = self._views.salvaged(segment.name, at, HEADER_SIZE)
        size = _size_of(head, segment.end - segment.start - at)
        return self._views.salvaged(segment.name, at, max(size, HEADER_SIZE))

    def record_at(self, log_offset: LogOffset) -> Record:
        """Return a record with its header decoded. Raises as `read`."""
        head, tail = self.read(log_offset)
        header = Header._make(record.HEADER.unpack_from(head))
        return Record(header, memoryview(head)[record.HEADER_SIZE :], memoryview(tail))

    def bytes_at(self, log_offset: LogOffset, size: int) -> memoryview:
        """Return the bytes from `log_offset` on, whatever they are; none where there are none.

        In place of what cannot be read are zeros.
        """
        if not self.min_offset <= log_offset < self._written_offset:
            return memoryview(b"")
        segment = self._segment_of(log_offset)
        return self._views.salvaged(segment.name, log_offset - segment.start, size)

    def read_held(self, log_offset: LogOffset) -> Record:
        """Return a record of a segment that was set aside. Raises as `verify`."""
        segment = next((s for s in self.held if s.start <= log_offset < s.end), None)
        if segment is None:
            raise LookupError(log_offset)
        at = log_offset - segment.start
        view = self._readable(segment, at)
        why = record.find_damage(view, at, log_offset=log_offset)
        if why:
            raise damaged(segment, log_offset, why)
        header = Header._make(record.HEADER.unpack_from(view, at))
        tail_at = at + header.head_size
        return Record(header, view[at + HEADER_SIZE : tail_at], view[tail_at : at + header.size])

    def stored_by_ms(self, log_offset: LogOffset) -> int:
        """Return a time by which whatever stands at `log_offset` was stored; no tight bound."""
        later = [n for n, segment in enumerate(self._segments) if segment.start > log_offset]
        is_written = bool(later) and self._segments[later[0]].start < self._written_offset
        return self.first_stored_at_ms(later[0]) if is_written else NEVER_MS

    def walk(self, segment: Segment, begin: int) -> Iterator[Record]:
        """Yield the records of a full segment from log offset `begin` on, checksums unchecked.

        Whoever keeps this, or a record, over a turn of the owner reads from a file that may be cut.
        """
        size, at = segment.end - segment.start, begin - segment.start
        while size - at >= record.HEADER_SIZE:
            view = self._readable(segment, at)
            header = Header._make(record.HEADER.unpack_from(view, at))
            if header.magic == record.PAD_MAGIC:
                return
            if header.magic != record.MAGIC or header.log_offset != segment.start + at:
                raise damaged(segment, segment.start + at, "no record begins here")
            body = view[at + record.HEADER_SIZE : at + header.head_size]
            yield Record(header, body, view[at + header.head_size : at + header.size])
            at += header.size

    def walk_between(self, begin: int, end: int) -> Iterator[Record | Hole]:
        """Yield the durable records between two log offsets, past those whose heads are damaged.

        Heads are checked, tails are not: where one cannot be read there are zeros. What retention
        took is left out; while it takes more nobody may go on with this.
        """
        for segment in list(self._segments):
            size = segment.end - segment.start
            at, stop = max(begin - segment.start, 0), min(end - segment.start, size)
            yield from self._walk_past_damage(segment, at, stop)

    def walk_held(self, segment: Segment) -> Iterator[Record | Hole]:
        """Yield what stands in a segment that was set aside, as `walk_between` does."""
        return self._walk_past_damage(segment, 0, segment.end - segment.start)

    def _walk_past_damage(self, segment: Segment, at: int, stop: int) -> Iterator[Record | Hole]:
        size = segment.end - segment.start
        while stop - at >= record.HEADER_SIZE:
            data = self._salvaged(segment, at)
            if record.PAD.unpack_from(data) == (record.PAD_MAGIC, size - at):
                return
            offset = LogOffset(segment.start + at)
            header = record.find_head(data, 0, log_offset=offset)
            if header is None:
                at = self._find_next_head(segment, at + 1, stop)
                yield Hole(offset, LogOffset(segment.start + at))
                continue
            body = data[record.HEADER_SIZE : header.head_size]
            yield Record(header, body, data[header.head_size : header.size])
            at += header.size

    def _find_next_head(self, segment: Segment, begin: int, stop: int) -> int:
        """Return where in a segment the next intact head begins; `stop` where there is none."""
        for first in range(begin, stop, SEARCH_BYTES):
            size = min(SEARCH_BYTES + 3, stop - first)
            # The copy is many times faster to search than the view.
            chunk = bytes(self._views.salvaged(segment.name, first, size))
            at = chunk.find(record.MAGIC_BYTES)
            while at >= 0:
                offset = LogOffset(segment.start + first + at)
                data = self._salvaged(segment, first + at)
                if record.find_head(data, 0, log_offset=offset) is not None:
                    return first + at
                at = chunk.find(record.MAGIC_BYTES, at + 1)
        return stop

    def segment_start(self, log_offset: LogOffset) -> int:
        """Return where the segment of `log_offset` begins; of one that is gone, the oldest does."""
        segments = self._segments
        if segments and log_offset >= segments[-1].start:
            return segments[-1].start
        return self._segment_of(max(log_offset, self.min_offset)).start if segments else 0

    def advise(self, log_offset: LogOffset, size: int) -> None:
        """Say that `size` bytes from `log_offset` will be read soon; a hint."""
        end = min(log_offset + size, self._segments[-1].end)
        while log_offset < end:
            segment = self._segment_of(log_offset)
            file = segment.file or self._disk.open(segment.name)
            file.advise(log_offset - segment.start, min(end, segment.end) - log_offset)
            if segment.file is None:
                file.close()
            log_offset = segment.end

    def _segment_of(self, log_offset: LogOffset) -> Segment:
        segments = self._segments
        if segments and log_offset >= segments[-1].start:
            return segments[-1]
        if not segments or log_offset < segments[0].start:
            raise LookupError(log_offset)
        # Segments are of equal size unless the setting was changed, so the guess is mostly right.
        index = min(
            (log_offset - segments[0].start) // self._segment_bytes,
            len(segments) - 1,
        )
        while log_offset < segments[index].start:
            index -= 1
        while log_offset >= segments[index].end:
            index += 1
        return segments[index]

    # ------------------------------------------------------------ recovery

    def open_segments(self, *, durable_offset: int) -> None:
        """Open the files of the log that are not open. Raises CorruptStore when one is missing.

        What an earlier process has written from `durable_offset` on is made durable, in all files:
        the replay builds on it, and what is logged from now on says that it is.
        """
        names = self._disk.names(FOLDER)
        if names:
            self._disk.folder(FOLDER).sync()
        self._open_held([name for name in names if name.endswith(HELD)])
        for name in names:
            if name.endswith(HELD):
                continue
            stem = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)
            if stem in (PREPARED, DROPPED):
                # A segment that was being prepared or deleted when the process ended.
                self._disk.delete(name)
                continue
            if not name.endswith(SUFFIX) or not stem.isdigit():
                raise CorruptStore(
                    f"{name} is no segment of the log. If it was one, give it its name back (the "
                    f"log offset at which it begins, in 20 digits); if not, move it away."
                )
            if self._segments and int(stem) < self._segments[-1].end:
                continue
            size = self._reload(name, int(stem), durable_offset)
            if not size:
                # The process ended while it made the file: nothing was ever in it.
                self._disk.delete(name)
                continue
            if size % BLOCK_BYTES:
                raise CorruptStore(
                    f"{name} has been cut: it has {size} bytes, and a segment has a "
                    f"multiple of {BLOCK_BYTES}. Restore it from a backup, and start again."
                )
            segment = Segment(int(stem), size)
            if self._segments and self._segments[-1].end != segment.start:
                if self._is_unused(segment):
                    self._views.forget(name)
                    self._disk.delete(name)
                    continue
                raise CorruptStore(
                    f"the log has a hole: {self._segments[-1].name} ends at log offset "
                    f"{self._segments[-1].end}, and the next file is {name}. Restore the missing "
                    f"file from a backup, and start again."
                )
            self._segments.append(segment)

    def _open_held(self, names: list[str]) -> None:
        self.held = []
        for name in names:
            stem = name.removeprefix(f"{FOLDER}/").removesuffix(HELD)
            if stem.isdigit():
                file = self._disk.open(name)
                self.held.append(_held(Segment(int(stem), file.size())))
                file.close()

    def _reload(self, name: str, start: int, durable_offset: int) -> int:
        """Make a segment durable from `durable_offset` on; return its size."""
        file = self._disk.open(name)
        if start + file.size() > durable_offset:
            file.reload()
        size = file.size()  # of what is on the disk, and not in memory alone
        file.close()
        return size

    def _is_unused(self, segment: Segment) -> bool:
        try:
            view = self._readable(segment, 0)
        except CorruptStore:
            return False  # Nobody can say.
        return bool(record.find_damage(view, 0, log_offset=segment.start))

    def scan(self, log_offset: LogOffset) -> Iterator[Record]:
        """Yield the intact records from `log_offset` on, and set `log_end` behind the last one.

        Raises CorruptStore where it cannot be read how the log goes on.
        """
        self.log_end = log_offset
        self._read_from = log_offset
        for segment in self._segments:
            if segment.end <= log_offset:
                continue
            at = max(log_offset, segment.start) - segment.start
            start, size = segment.start, segment.end - segment.start
            view = memoryview(b"")  # up to where it was read
            while size - at >= record.PAD.size:
                offset = LogOffset(start + at)
                found = _intact_at(view, at, offset)
                if found is None:
                    if len(view) < size and (more := self._read_on(segment, at)) != len(view):
                        view = self._views[segment.name][:more]
                        continue
                    if record.PAD.unpack_from(view, at) == (record.PAD_MAGIC, size - at):
                        segment.pad_at = at
                        break
                    self.log_end = offset
                    return
                header = found.header
                if header.epoch > self.epoch:
                    self.epoch = header.epoch
                yield found
                at += header.size
                self.log_end = LogOffset(start + at)
            self.log_end = segment.end

    def _read_on(self, segment: Segment, at: int) -> int:
        """Read a large piece from `at` on, and at least the record there; return up to where."""
        size, view = segment.end - segment.start, self._views[segment.name]
        end = min(at + SEARCH_BYTES, size)
        try:
            self._views.readable(segment.name, at, end - at)
            end = max(end, at + _size_of(view[at : at + HEADER_SIZE], size - at))
            self._views.readable(segment.name, at, end - at)
        except PageUnreadable as error:
            raise unreadable(segment, error) from error
        return end

    def finish_recovery(self, *, durable_offset: int) -> int:
        """Cut what is torn behind `log_end`, and return how many bytes that were.

        `durable_offset` is known from the checkpoint file to have been durable. Raises
        CorruptStore when what is broken had been durable.
        """
        end = self.log_end
        remains = list(self._find_remains(end))
        if end < durable_offset or any(offset - unsynced > end for offset, unsynced in remains):
            segment = self._segment_of(end)
            view = self._readable(segment, end - segment.start)
            why = record.find_damage(view, end - segment.start, log_offset=end)
            raise damaged(segment, end, why or "the record is missing")
        cut_bytes = self._cut(end, has_remains=bool(remains))
        self.committed_offset = self._written_offset = self._chunk_from = self.log_end
        return cut_bytes

    def _find_remains(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield (log offset, unsynced) of whatever begins like a record behind `end`.

        An intact one says by `unsynced` what was durable when it was written; of a broken one
        nothing is known, and its `unsynced` is given as so large that it proves nothing.
        """
        for segment in self._segments:
            if segment.end <= end:
                continue
            size = segment.end - segment.start
            for begin in range(max(end - segment.start, 0), size, SEARCH_BYTES):
                stop = min(begin + SEARCH_BYTES + 3, size)
                chunk = self._read_chunk(segment, begin, stop)
                at = chunk.find(record.MAGIC_BYTES)
                while at >= 0:
                    position = begin + at
                    offset = segment.start + position
                    unsynced = record.UNSYNCED_MAX
                    self._read_on(segment, position)
                    view = self._views[segment.name]
                    if not record.find_damage(view, position, log_offset=LogOffset(offset)):
                        unsynced = record.HEADER.unpack_from(view, position)[record.UNSYNCED]
                    yield offset, unsynced
                    at = chunk.find(record.MAGIC_BYTES, at + 1)

    def _read_chunk(self, segment: Segment, begin: int, stop: int) -> bytes:
        try:
            return self._views.read(segment.name, begin, stop - begin)
        except PageUnreadable as error:
            raise unreadable(segment, error) from error

    def _cut(self, end: int, *, has_remains: bool) -> int:
        """Make everything from `end` on unreadable, so that no torn record ever comes back."""
        kept = [segment for segment in self._segments if segment.start < end or not segment.start]
        for segment in self._segments[len(kept) :]:
            self._views.forget(segment.name)
            self._disk.delete(segment.name)
        if len(kept) < len(self._segments):
            self._disk.folder(FOLDER).sync()
        self._segments = kept
        if not kept:
            return 0
        active = kept[-1]
        file = active.file = self._disk.open(active.name)
        at = end - active.start
        remains = bytes(self._views[active.name][at : at + TORN_BYTES_MAX])
        cut_bytes = len(remains.rstrip(b"\0"))
        if cut_bytes or has_remains:
            # By zeros and not by a shorter file: a power cut on the way must not leave a segment
            # that looks as if somebody had cut it.
            size = active.end - active.start
            for begin in range(at, size, SEARCH_BYTES):
                file.write_at(begin, [bytes(min(SEARCH_BYTES, size - begin))])
        file.sync()
        self._active_end = active.end
        return cut_bytes

    # ------------------------------------------------------------ background

    def prepare(self, *, slice_bytes: int) -> Iterator[list[File]]:
        """Make the next segment ready: created, filled, durable, and under its own name.

        Yields after each slice the files to sync before the next one. A filled file makes each
        later sync two to three times cheaper than a growing one.
        """
        if self._prepared is not None or not self._segments:
            return
        start = self._active_end
        temporary = f"{FOLDER}/{PREPARED}"
        file = self._disk.open(temporary, create=True)
        zeros = bytes(slice_bytes)
        for at in range(0, self._segment_bytes, slice_bytes):
            size = min(slice_bytes, self._segment_bytes - at)
            file.write_at(at, [zeros[:size]])
            yield [file]
            if self._active_end != start:
                break
        if self._active_end != start:  # The log was faster.
            file.close()
            self._disk.delete(temporary)
            return
        yield from self._install(file, start)

    def _install(self, file: File, start: int) -> Iterator[list[File]]:
        """Give `file` the name of the segment that begins at `start`, durably; keep it ready."""
        source, file.name = file.name, segment_name(start)
        self._disk.rename(source, file.name)
        # The log may roll before the name is durable, and must then find the file and not make it.
        self._prepared = Segment(start, self._segment_bytes, file)
        self._is_prepared_durable = False
        yield [self._disk.folder(FOLDER)]
        self._is_prepared_durable = True

    @property
    def wants_preparation(self) -> bool:
        """Whether the active segment is half full and nothing follows it yet."""
        return (
            self._prepared is None
            and bool(self._segments)
            and self._active_end - self.log_end < self._segment_bytes // 2
        )

    def drop_oldest(self) -> Iterator[list[File]]:
        """Give up the oldest segment, as the prepared one where none is ready."""
        segment = self._take_oldest()
        is_of_size = segment.end - segment.start == self._segment_bytes
        if self._prepared is None and is_of_size and segment.pad_at is not None:
            # What it holds stays readable by nobody: every record in it names another position. A
            # pad does not: behind a lost record it would pass for the end of the next use. Until
            # the name is gone, durably, it is the end of this one.
            self._disk.rename(segment.name, f"{FOLDER}/{PREPARED}")
            file = self._disk.open(f"{FOLDER}/{PREPARED}")
            yield [self._disk.folder(FOLDER)]
            erased = bytes(min(record.PAD.size, self._segment_bytes - segment.pad_at))
            file.write_at(segment.pad_at, [erased])
            yield [file]
            yield from self._install(file, self._active_end)
        else:
            yield from drop_file(self._disk, segment.name)

    def set_oldest_aside(self) -> Iterator[list[File]]:
        """Give up the oldest segment, and keep its file under another name."""
        segment = self._take_oldest()
        source = segment.name
        held = _held(segment)
        self._disk.rename(source, held.name)
        self.held.append(held)
        yield [self._disk.folder(FOLDER)]

    def _take_oldest(self) -> Segment:
        segment = self._segments[0]
        assert len(self._segments) > 1, "the active segment is never dropped"
        assert segment.end <= self.committed_offset, "only durable segments are dropped"
        del self._segments[0]
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
        segment = self._segments[index]
        if segment.first_stored_at_ms is None:
            found = self.walk_between(segment.start, self._segments[-1].end)
            times = (one.header.stored_at_ms for one in found if isinstance(one, Record))
            segment.first_stored_at_ms = next(times, NEVER_MS)
        return segment.first_stored_at_ms

    def around(self, stored_at_ms: int) -> tuple[LogOffset, LogOffset]:
        """Return two log offsets between which a time falls, as the segments' first records say.

        What is before the first one was stored before, and what is at or behind the second one not.
        """
        written = bisect_left(self._segments, self._written_offset, key=lambda one: one.start)
        number = bisect_left(range(written), stored_at_ms, key=self.first_stored_at_ms)
        begin = self._segments[number - 1].start if number else self.min_offset
        return begin, self._segments[number].start if number < written else self._written_offset

    def close(self) -> None:
        """Close all files; nothing is written."""
        for segment in [*self._segments, *([self._prepared] if self._prepared else [])]:
            _close(segment)


def _intact_at(view: memoryview, at: int, log_offset: LogOffset) -> Record | None:
    """Return the record at `view[at:]` if it is intact. Raises UnknownRecord as `find_damage`.

    Checks the same, at once: a start passes here with every record.
    """
    if len(view) - at < HEADER_SIZE:
        return None
    fields = _unpack_header(view, at)
    magic, head_crc, size, tail_crc, version, kind, _, _, _, own_offset, _, head_size = fields
    tail_at, end = at + head_size, at + size
    if magic != MAGIC or own_offset != log_offset or not HEADER_SIZE <= head_size <= size:
        return None
    if end > len(view) or crc32(view[at + record.CRC_FROM : tail_at]) != head_crc:
        return None
    tail = view[tail_at:end]
    if crc32(tail) != tail_crc:
        return None
    if version != VERSION or kind not in record.KINDS:
        record.find_damage(view, at, log_offset=log_offset)
    body = view[at + HEADER_SIZE : tail_at]
    return _tuple(Record, (_tuple(Header, fields), body, tail))


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


def _close(segment: Segment) -> None:
    file, segment.file = segment.file, None
    if file is not None:
        file.close()


def _held(segment: Segment) -> Segment:
    segment.name = segment_name(segment.start).removesuffix(SUFFIX) + HELD
    return segment


def _size_of(head: memoryview, room: int) -> int:
    """Return the size of the record that begins with `head`, 0 where none begins or fits."""
    if len(head) < HEADER_SIZE:
        return 0
    fields = _unpack_header(head)
    return int(fields[record.SIZE]) if fields[0] == MAGIC and fields[record.SIZE] <= room else 0
