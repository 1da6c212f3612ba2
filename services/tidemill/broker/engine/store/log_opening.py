"""Opening of a log that an earlier process wrote: its files, its records, and its end.

    opening = LogOpening(log, disk, mappings)
    opening.find_segments(durable_offset=...)
    for found in opening.scan(from_offset): ...  # apply it
    opening.finish(DurabilityProofs(durable_offset=...))  # cuts a torn tail

Invariant: damaged durable bytes are never taken for a torn tail. Then the log does not open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from tidemill.broker.engine.layout import pack, record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.pack import PackHeader
from tidemill.broker.engine.layout.record import RecordHeader
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.cutting import drop_segments_from, erase
from tidemill.broker.engine.store.disk import DROPPED, Disk, File, ReadFailed
from tidemill.broker.engine.store.mappings import Mappings, PageUnreadable
from tidemill.broker.engine.store.pack import Pack
from tidemill.broker.engine.store.segment import (
    BLOCK_BYTES,
    FOLDER,
    HELD,
    MEND_REMEDY,
    PACK_SUFFIX,
    PACKING_SUFFIX,
    PREPARED,
    SUFFIX,
    CorruptStore,
    Record,
    Segment,
    damaged,
    intact_at,
    pack_name,
    unreadable,
)

SEARCH_BYTES = 1 << 20  # bytes per read, and per search for records after the log end
TORN_BYTES_MAX = 8 << 20  # a torn tail is measured up to here; all of it is cut


class DurabilityProofs(NamedTuple):
    """Proofs that broken bytes were durable. Such bytes are damaged and not torn."""

    # Everything before it was durable, according to a file beside the log.
    durable_offset: int = 0
    # Records of this epoch state the durable offset of this disk. None: records of every epoch do.
    # 0: records of no epoch do. Another broker's records state the durable offset of another disk.
    led_epoch: int | None = None
    # Since then there was no power cut: everything before an intact record was written before it.
    is_same_boot: bool = False
    # Called before written bytes are cut although there was no power cut.
    doubt: Callable[[], None] = lambda: None

    def prove(self, end: int, found: TailRemnant) -> bool:
        """Return whether a remnant after `end` proves that the log continued at `end`."""
        if found.header is None:
            return False
        is_written_here = self.led_epoch is None or 0 < self.led_epoch == found.header.epoch
        return self.is_same_boot or (
            is_written_here and found.log_offset - found.header.unsynced > end
        )


class TailRemnant(NamedTuple):
    """Bytes after the end of the log that begin like a record."""

    log_offset: int
    header: RecordHeader | None  # None: the record is broken


@final
class LogOpening:
    """Opens a log: fills its segments and its end."""

    def __init__(self, log: CommitLog, disk: Disk, mappings: Mappings) -> None:
        self._log = log
        self._disk = disk
        self._views = mappings
        self._unused: list[str] = []  # files that were never written to

    def find_segments(self, *, durable_offset: int) -> None:
        """Add the segment files to the log. Raises CorruptStore if one is missing.

        Everything that an earlier process wrote from `durable_offset` on becomes durable, in all
        files. The replay relies on it, and later records state that it is durable.
        """
        names = self._disk.names(FOLDER)
        if names:
            self._disk.folder(FOLDER).sync()
        self._find_held([name for name in names if name.endswith(HELD)])
        for name in names:
            stem = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)
            if name.endswith(HELD):
                continue
            if stem in (PREPARED, DROPPED) or name.endswith(PACKING_SUFFIX):
                # The process ended while it prepared or deleted this segment, or wrote this pack.
                self._disk.delete(name)
            elif name.endswith(PACK_SUFFIX):
                self._add_pack(name)
            elif (start := _start_of(name)) is not None and pack_name(start) in names:
                # The process ended before it deleted the segment of a complete pack.
                open_pack(self._disk, pack_name(start))
                self._disk.delete(name)
            elif not name.endswith(SUFFIX) or not stem.isdigit():
                raise CorruptStore(
                    f"{name} is not a segment of the log. If it was one, restore its name (the "
                    f"log offset of its begin, in 20 digits). Otherwise move it to another folder."
                )
            elif not self._log.segments or int(stem) >= self._log.segments[-1].end:
                self._add_segment(name, int(stem), durable_offset)
        self._check_end(durable_offset)
        for name in self._unused if self._log.segments or not durable_offset else ():
            self._views.forget(name)
            self._disk.delete(name)

    def _check_end(self, durable_offset: int) -> None:
        """Raise CorruptStore if the files end before the durable offset.

        A file that seems unused may be the remainder of the missing one, so it stays.
        """
        segments = self._log.segments
        if segments and segments[-1].end < durable_offset:
            end = segments[-1].end
            raise CorruptStore(
                f"{FOLDER}/{end:020d}{SUFFIX} is missing or empty: the log was durable up to log "
                f"offset {durable_offset}, and its files end at {end}. {MEND_REMEDY}"
            )

    def repeat_cut(self, log_offset: int) -> None:
        """Cut the log at `log_offset`, durably, to complete the cut of an earlier process.

        Call this before reading the log: whatever that process left after the cut is invalid.
        """
        names = [name for name in self._disk.names(FOLDER) if _start_of(name) is not None]
        # Delete the last one first: a power cut in between must not leave a hole.
        for number, name in reversed(list(enumerate(names))):
            start = _start_of(name)
            assert start is not None, "a segment"
            if number and start >= log_offset:
                self._disk.delete(name)
                continue
            file = self._disk.open(name)
            erase(file, max(log_offset - start, 0), file.size())
            file.sync()
            file.close()
            if start <= log_offset:
                break
        if names:
            self._disk.folder(FOLDER).sync()

    def _find_held(self, names: list[str]) -> None:
        self._log.held = []
        for name in names:
            stem = name.removeprefix(f"{FOLDER}/").removesuffix(HELD)
            if stem.isdigit():
                segment = open_held(self._disk, name, int(stem))
                segment.set_aside()
                self._log.held.append(segment)

    def _add_pack(self, name: str) -> None:
        """Add a pack as the next segment of the log. Raises CorruptStore."""
        segment = open_pack(self._disk, name)
        segments = self._log.segments
        if segments and segments[-1].end != segment.start:
            raise CorruptStore(
                f"the log has a hole: {segments[-1].name} ends at log offset {segments[-1].end}, "
                f"and the next file is {name}. {MEND_REMEDY}"
            )
        segments.append(segment)

    def _add_segment(self, name: str, start: int, durable_offset: int) -> None:
        """Add a file as the next segment of the log, unless it was never written to."""
        size = self._reload(name, start, durable_offset)
        if not size:
            # The process ended while it created the file, so it was never written to.
            self._unused.append(name)
            return
        if size % BLOCK_BYTES:
            raise CorruptStore(
                f"{name} was cut: it has {size} bytes, not a multiple of {BLOCK_BYTES}. "
                f"{MEND_REMEDY}"
            )
        segments, segment = self._log.segments, Segment(start, size)
        if segments and segments[-1].end != segment.start:
            if self._is_unused(segment):
                self._unused.append(name)
                return
            raise CorruptStore(
                f"the log has a hole: {segments[-1].name} ends at log offset {segments[-1].end}, "
                f"and the next file is {name}. {MEND_REMEDY}"
            )
        segments.append(segment)

    def _reload(self, name: str, start: int, durable_offset: int) -> int:
        """Make a segment durable from `durable_offset` on; return its size."""
        file = self._disk.open(name)
        if start + file.size() > durable_offset:
            file.reload()
        size = file.size()  # size on the disk, not only in memory
        file.close()
        return size

    def _is_unused(self, segment: Segment) -> bool:
        try:
            view = self._log.reader.readable(segment, segment.start)
        except CorruptStore:
            return False  # Unknown: it may be in use.
        return bool(record.find_damage(view, 0, log_offset=segment.start))

    def scan(self, log_offset: LogOffset) -> Iterator[Record]:
        """Yield the intact records from `log_offset` on, and move `log_end` behind each.

        Raises CorruptStore if the disk cannot read the next record.
        """
        log = self._log
        log.log_end = log.read_from = log_offset
        for segment in log.segments:
            if segment.end <= log_offset:
                continue
            if segment.pack is not None:
                yield from self._scan_pack(segment, max(log_offset, segment.start))
                log.log_end = segment.end
                continue
            at = max(log_offset, segment.start) - segment.start
            start, size = segment.start, segment.size
            view = memoryview(b"")  # up to the read position
            while size - at >= record.PAD.size:
                offset = LogOffset(start + at)
                found = intact_at(view, at, offset)
                if found is None:
                    if len(view) < size and (more := self._read_on(segment, at)) != len(view):
                        view = self._views[segment.name][:more]
                        continue
                    if record.PAD.unpack_from(view, at) == (record.PAD_MAGIC, size - at):
                        segment.pad_at = at
                        break
                    log.log_end = offset
                    return
                header = found.header
                if header.epoch > log.epoch:
                    log.epoch = header.epoch
                yield found
                at += header.size
                log.log_end = LogOffset(start + at)
            log.log_end = segment.end

    def _scan_pack(self, segment: Segment, log_offset: int) -> Iterator[Record]:
        """Yield the records of a pack. All of them were durable, so a broken one is damage."""
        log, reader = self._log, self._log.reader
        offset = LogOffset(log_offset)
        while not reader.end_of_records(segment, offset):
            found = reader.read_verified(segment, offset)
            log.epoch = max(log.epoch, found.header.epoch)
            yield found
            offset = log.log_end = LogOffset(offset + found.header.size)

    def _read_on(self, segment: Segment, at: int) -> int:
        """Read a large piece from `at` on, at least the record there; return its end."""
        end = min(at + SEARCH_BYTES, segment.size)
        try:
            self._views.readable(segment.name, at, end - at)
            end = max(end, at + self._log.reader.read_record(segment, segment.start + at))
        except PageUnreadable as error:
            raise unreadable(segment, at, error) from error
        return end

    def finish(self, proofs: DurabilityProofs) -> int:
        """Cut the torn tail after `log_end`, and return its size in bytes.

        Raises CorruptStore if broken bytes were durable.
        """
        end = self._log.log_end
        remnants = list(self._find_remnants(end))
        # A pack relies on committed records, so these were durable.
        is_proven = any(proofs.prove(end, found) for found in remnants)
        is_proven = is_proven or self._log.packed_until > end
        if end < proofs.durable_offset or is_proven:
            segment = self._log.segment_of(end)
            view = self._log.reader.readable(segment, end)
            why = record.find_damage(view, end - segment.start, log_offset=end)
            raise damaged(segment, end, why or "the record is missing")
        cut_bytes = self._cut(end, has_remnants=bool(remnants), proofs=proofs)
        self._log.open_for_append()
        return cut_bytes

    def _find_remnants(self, end: int) -> Iterator[TailRemnant]:
        """Yield everything that begins like a record after `end`."""
        for segment in self._log.segments:
            if segment.end <= end or segment.pack is not None:
                continue
            size = segment.size
            for begin in self._written_pieces(segment, max(end - segment.start, 0)):
                stop = min(begin + SEARCH_BYTES + 3, size)
                chunk = self._read_chunk(segment, begin, stop)
                if is_zero(chunk):
                    continue
                at = chunk.find(record.MAGIC_BYTES)
                while at >= 0:
                    position = begin + at
                    offset = LogOffset(segment.start + position)
                    self._read_on(segment, position)
                    view = self._views[segment.name]
                    is_intact = not record.find_damage(view, position, log_offset=offset)
                    header = (
                        RecordHeader._make(record.HEADER.unpack_from(view, position))
                        if is_intact
                        else None
                    )
                    yield TailRemnant(offset, header)
                    at = chunk.find(record.MAGIC_BYTES, at + 1)

    def _written_pieces(self, segment: Segment, begin: int) -> Iterator[int]:
        """Yield the begins of pieces to search; between the pieces, the segment is a hole."""
        file = self._disk.open(segment.name)
        try:
            while (begin := file.find_data(begin)) < segment.size:
                yield begin
                begin += SEARCH_BYTES
        finally:
            file.close()

    def _read_chunk(self, segment: Segment, begin: int, stop: int) -> bytes:
        try:
            return self._views.read(segment.name, begin, stop - begin)
        except PageUnreadable as error:
            raise unreadable(segment, begin, error) from error

    def _cut(self, end: int, *, has_remnants: bool, proofs: DurabilityProofs) -> int:
        """Erase everything from `end` on, so that no torn record ever comes back."""
        segments = self._log.segments
        if has_remnants and proofs.is_same_boot:
            proofs.doubt()
        drop_segments_from(self._disk, self._views, segments, end)
        if not segments:
            return 0
        active = segments[-1]
        file = active.file = self._disk.open(active.name)
        at = end - active.start
        cut_bytes = 0
        if file.find_data(at) < active.size:
            # Read without a mapping: on a full tmpfs an unwritten page has no memory.
            remnants = self._read_chunk(active, at, min(at + TORN_BYTES_MAX, active.size))
            cut_bytes = 0 if is_zero(remnants) else len(remnants.rstrip(b"\0"))
        if cut_bytes and proofs.is_same_boot:
            proofs.doubt()
        if cut_bytes or has_remnants:
            erase(file, at, active.size)
        file.sync()
        return cut_bytes


def is_zero(data: bytes) -> bool:
    """Return whether all bytes are zero.

    A start checks the unused part of the last segment, most of 128 MiB. The comparison takes 0.1 ms
    per MiB. A search for a record takes 0.5 ms per MiB, and `strip` takes 1.4 ms.
    """
    return data == bytes(len(data))


def open_pack(disk: Disk, name: str) -> Segment:
    """Return a pack as a segment. Raises CorruptStore if both copies of its header are damaged."""
    file = disk.open(name)
    try:
        header = _read_header(file)
        size = file.size()
    finally:
        file.close()
    if header is None:
        raise CorruptStore(f"{name} is no pack, or its header is damaged. {MEND_REMEDY}")
    if size != header.file_size:
        raise CorruptStore(
            f"{name} was cut: it has {size} bytes, and its header says {header.file_size}. "
            f"{MEND_REMEDY}"
        )
    return Segment(header.start, header.end - header.start, pack=Pack(header))


def open_held(disk: Disk, name: str, start: int) -> Segment:
    """Return a former segment, which may be a pack."""
    file = disk.open(name)
    try:
        header = _read_header(file)
        return Segment(start, file.size()) if header is None else open_pack(disk, name)
    finally:
        file.close()


def _read_header(file: File) -> PackHeader | None:
    """Return the first intact copy of the header of a pack; None if there is none.

    The end of a segment may be a message with the bytes of a pack.
    """
    with contextlib.suppress(ReadFailed):
        if file.read_at(0, len(record.MAGIC_BYTES)) == record.MAGIC_BYTES:
            return None
    for at in (0, file.size() - pack.TRAILER_SIZE):
        try:
            header = pack.find_header(file.read_at(max(at, 0), pack.TRAILER_SIZE))
        except ReadFailed:
            continue
        if header is not None:
            return header
    return None


def _start_of(name: str) -> int | None:
    """Return the log offset at which the segment of that name begins; None for other files."""
    stem = name.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)
    return int(stem) if name.endswith(SUFFIX) and stem.isdigit() else None
