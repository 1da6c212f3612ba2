"""Packing: sealed segments lose the content of their dead messages (ADR 0067).

A message is dead if its topic is deleted, or if it is before the low of its queue. A pack has all
other records unchanged, at their log offsets, and a stub of each dead message. Before the state
floor it has live messages only, and gaps for the records between them (ADR 0069). Each replica
packs at its own time. The decision uses committed records only: no later election takes a message
back.

The steps: write `S.packing` and sync it; rename it to `S.pack` and sync the folder; read from the
pack; delete the file of the segment. A crash in between leaves the segment, or both files. A start
then deletes the incomplete file, or the segment of the complete pack.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Final, final
from zlib import crc32

from tidemill.broker.engine.layout import floor, message, pack, record
from tidemill.broker.engine.layout.floor import GAP_SIZE, Gap
from tidemill.broker.engine.layout.message import FLAG_SCHEDULE, FLAG_STUB, PLACE
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.pack import PackHeader
from tidemill.broker.engine.layout.record import RecordHeader, RecordKind
from tidemill.broker.engine.room import COPY_RESERVE_PART
from tidemill.broker.engine.store.disk import File, drop_file
from tidemill.broker.engine.store.pack import Extents, Pack
from tidemill.broker.engine.store.segment import FOLDER, CorruptStore, Record, Segment, packing_name
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts

PACKS_LEVEL: Final = 2  # feature level of stubs
RECORDS_A_SLICE: Final = 128  # 3 to 9 us each
SLICE_BYTES: Final = 1 << 20  # copied
LOOK_PERIOD_MS: Final = 1_000
PAUSE_MS: Final = 30_000  # after an attempt that met damage, or a disk without room
# The active segment and the one before it stay: followers compare and copy their records.
SEGMENTS_KEPT: Final = 2
FREED_BYTES_MIN: Final = 16 << 10  # fewer are not worth a file operation
# On a full disk a pack need not free more than it keeps.
FREED_ON_FULL_DISK_MIN: Final = 1 << 20
_MESSAGE = int(RecordKind.MESSAGE)


@final
class Packing:
    """The choice of a segment, and the steps that pack it."""

    def __init__(self, parts: UpkeepParts, live_bytes: LiveBytes) -> None:
        self._log = parts.store.log
        self._disk = parts.disk
        self._catalog = parts.catalog
        self._quiet = parts.quiet
        self._room = parts.room
        self._live_bytes = live_bytes
        self._rate_bytes = parts.config.pack_rate_bytes
        self._look_at_ms = 0
        self._not_before_ms = 0  # the rate allows no copy earlier
        self._deaths = 0  # of messages, at the last look
        self._is_searching = False  # from such a look until no segment is due
        # By the begin of a segment: its live bytes when a pack would have freed too little, whether
        # the disk was full, and whether the segment was before the state floor.
        self._tried: dict[int, tuple[int, bool, bool]] = {}
        # By the begin of a segment: no attempt before this time, after damage or a full disk.
        self._paused: dict[int, int] = {}
        self.packed_count = self.copied_bytes = 0  # since the start

    def find_work(self, now_ms: int) -> Steps | None:
        """Return the steps that pack the segment with the most dead bytes; None if none is due."""
        if now_ms < self._look_at_ms or not self._has_level:
            return None
        self._look_at_ms = now_ms + LOOK_PERIOD_MS
        if self._catalog.deaths != self._deaths:
            # The space of a purge or a deletion is wanted soon: count first, then choose.
            self._deaths, self._look_at_ms = self._catalog.deaths, now_ms
            self._live_bytes.request_look()
            self._is_searching = True
            return iter(())
        is_full = self._room.is_full
        if now_ms < self._not_before_ms and not is_full:
            self._look_at_ms = self._not_before_ms
            return None
        segment = self._choose(now_ms, is_full=is_full)
        self._is_searching = segment is not None
        return None if segment is None else self._pack_at_rate(segment, now_ms, is_full=is_full)

    def defer(self, now_ms: int) -> None:
        """Look again later: the background has no job now, maybe because others wait."""
        self._look_at_ms = max(self._look_at_ms, now_ms + LOOK_PERIOD_MS)

    def next_ms(self) -> int | None:
        """Return the wall time of the next look; None: not before a message dies."""
        is_wanted = self._is_searching or self._catalog.deaths != self._deaths
        return self._look_at_ms if is_wanted and self._has_level else None

    @property
    def _has_level(self) -> bool:
        return self._catalog.feature_level >= PACKS_LEVEL

    def _choose(self, now_ms: int, *, is_full: bool) -> Segment | None:
        """Return the segment with the most dead bytes; None if none is due."""
        log, best, most = self._log, None, 0
        last = min(int(log.committed_offset), self._live_bytes.counted_to)
        for segment in log.segments[:-SEGMENTS_KEPT]:
            if segment.end > last:
                break
            live, size = self._live_bytes.live_bytes_in(segment.start), segment.file_size
            if now_ms < self._paused.get(segment.start, 0):
                continue
            tried = self._tried.get(segment.start)
            if (
                tried is not None
                and tried[0] - live < size // 4
                and tried[1] >= is_full
                and tried[2] >= self._is_before_floor(segment)
            ):
                continue
            least = _freed_on_full_disk(segment) if is_full else max(size // 2, FREED_BYTES_MIN)
            if size - live >= max(most + 1, least):
                best, most = segment, size - live
        return best

    def _pack_at_rate(self, segment: Segment, now_ms: int, *, is_full: bool) -> Steps:
        """Pack a segment. The next one may begin when the rate of copied bytes allows it."""
        before, live = self.copied_bytes, self._live_bytes.live_bytes_in(segment.start)
        freed_min = _freed_on_full_disk(segment) if is_full else FREED_BYTES_MIN
        is_packed = yield from self.pack(segment, freed_min=freed_min, is_full=is_full)
        self._tried.pop(segment.start, None)
        if is_packed is None:
            self._paused[segment.start] = now_ms + PAUSE_MS
        elif not is_packed:
            self._tried[segment.start] = live, is_full, self._is_before_floor(segment)
        self._look_at_ms = now_ms  # Another segment may be due.
        for known in (self._tried, self._paused):
            for start in [start for start in known if start < self._log.min_offset]:
                del known[start]
        copied = self.copied_bytes - before
        self._not_before_ms = now_ms + copied * 1_000 // self._rate_bytes

    # ------------------------------------------------------------ one segment

    def pack(
        self, segment: Segment, *, freed_min: int, is_full: bool = False
    ) -> Generator[list[File], None, bool | None]:
        """Pack a sealed, committed segment; return whether it was packed.

        False: a pack would free fewer bytes than `freed_min`, or than it keeps unless the disk is
        full. None: the segment is damaged, or the disk has no room.
        """
        before = segment.file_size
        size_max = before - freed_min if is_full else min(before - freed_min, before // 2)
        header: PackHeader | bool = False
        with suppress(CorruptStore):  # A reader or a start reports the damage.
            header = yield from self._write(segment, size_max)
        if isinstance(header, bool):
            yield from self._discard(segment)
            return False if header else None
        # Before this, an election could take back a record that the pack relies on.
        yield from self._quiet()
        yield from self._log.install_pack(segment, Pack(header))
        self.packed_count += 1
        self.copied_bytes += header.file_size
        return True

    def _write(
        self, segment: Segment, size_max: int
    ) -> Generator[list[File], None, PackHeader | bool]:
        """Write the pack under a temporary name, durably.

        True: it would be larger than `size_max`. False: the disk has no room. Raises CorruptStore.
        """
        name = packing_name(segment.start)
        if name in self._disk.names(FOLDER):
            self._disk.delete(name)
        state_floor = self._log.state_floor
        gap = Gap(state_floor, int(self._log.folded_offset))
        parts = _PackParts(gap if segment.end <= state_floor else None)
        extents, offset, stub_bytes, count = Extents(), int(segment.start), 0, 0
        file = self._disk.open(name, create=True)
        at, gathered, read_bytes = pack.HEADER_SIZE, list[bytes | memoryview](), 0
        try:
            for found, data in self._log.reader.walk_intact(segment):
                is_dead = self._is_dead(found)
                stub = _stub_of(data) if is_dead and not parts.is_before_floor else None
                for first, part in parts.add(found.header, stub or data, is_dead=is_dead):
                    extents.add(first - segment.start, len(part))
                    gathered.append(part)
                    is_copied = part is data and not record.is_stub(found.header)
                    stub_bytes += 0 if is_copied else len(part)
                offset = found.log_offset + found.header.size
                read_bytes, count = read_bytes + len(data), count + 1
                if extents.position - at >= SLICE_BYTES:
                    if extents.position > size_max:
                        return True
                    if not self._has_room(2 * SLICE_BYTES):
                        return False
                    file.write_at(at, gathered)
                    at, gathered = extents.position, []
                    yield [file]
                elif count % RECORDS_A_SLICE == 0 or read_bytes >= SLICE_BYTES:
                    read_bytes = 0
                    yield []
            for first, part in parts.end():
                extents.add(first - segment.start, len(part))
                gathered.append(part)
                stub_bytes += len(part)
            directory = extents.encode()
            header = PackHeader(
                directory_crc=crc32(directory),
                start=segment.start,
                end=segment.end,
                record_end=offset,
                decided_at=int(self._log.folded_offset),
                floor=state_floor,
                file_size=extents.position + len(directory) + pack.TRAILER_SIZE,
                extent_count=extents.count,
                stub_bytes=stub_bytes,
            )
            if header.file_size > size_max:
                return True
            if not self._has_room(2 * SLICE_BYTES):
                return False
            encoded = pack.encode_header(header)
            file.write_at(at, [*gathered, directory, encoded])
            yield []
            file.write_at(0, [encoded])
            yield [file]
        finally:
            file.close()
        return header

    def _discard(self, segment: Segment) -> Steps:
        """Delete an incomplete pack."""
        name = packing_name(segment.start)
        if name in self._disk.names(FOLDER):
            yield from drop_file(self._disk, name)

    def _has_room(self, size: int) -> bool:
        return self._room.has_room(size, reserve_part=COPY_RESERVE_PART)

    def _is_before_floor(self, segment: Segment) -> bool:
        return segment.end <= self._log.state_floor

    def _is_dead(self, found: Record) -> bool:
        header = found.header
        if header.kind != _MESSAGE or header.flags & FLAG_SCHEDULE or record.is_stub(header):
            return False  # A timer may need its message.
        topic_id, queue_id, _, queue_offset = PLACE.unpack_from(found.body)
        if not self._catalog.is_alive(TopicId(topic_id)):
            return True
        queue = self._catalog.queues.get((TopicId(topic_id), QueueId(queue_id)))
        return queue is not None and queue_offset < queue.low


def _stub_of(data: memoryview) -> bytes | None:
    """Return the stub of a dead message; None if it has none that is smaller."""
    try:
        stub = message.encode_stub(data)
    except ValueError:
        return None  # It is no stored message, or smaller than its stub.
    return stub if len(stub) < len(data) else None


@final
class _PackParts:
    """The records of a pack: all of them, or live messages and gaps."""

    def __init__(self, gap: Gap | None) -> None:
        """`gap` is the body of gaps, for a segment before the state floor; None for others."""
        self._gap = gap
        # The records since the last live message: the first one, its bytes, and the size of all.
        self._first: tuple[RecordHeader, bytes | memoryview] | None = None
        self._size = 0

    @property
    def is_before_floor(self) -> bool:
        """Whether only live messages are needed."""
        return self._gap is not None

    def add(
        self, header: RecordHeader, data: bytes | memoryview, *, is_dead: bool
    ) -> Iterator[tuple[int, bytes | memoryview]]:
        """Add the next record; yield the parts of the pack that are complete, with log offsets."""
        is_message = header.kind == _MESSAGE and not header.flags & (FLAG_SCHEDULE | FLAG_STUB)
        if self._gap is None or (is_message and not is_dead):
            yield from self.end()
            yield header.log_offset, data
            return
        if self._first is None:
            self._first, self._size = (header, data), 0
        self._size += header.size

    def end(self) -> Iterator[tuple[int, bytes | memoryview]]:
        """Yield the gap of the records since the last live message."""
        if self._first is None:
            return
        assert self._gap is not None, "only records before the state floor are left out"
        header, data = self._first
        if self._size > GAP_SIZE:
            data = floor.encode_gap(header, self._size, self._gap)
        yield header.log_offset, data
        self._first = None


def _freed_on_full_disk(segment: Segment) -> int:
    """Return the bytes that a pack of the segment must free on a full disk."""
    return min(FREED_ON_FULL_DISK_MIN, segment.file_size // 4)
