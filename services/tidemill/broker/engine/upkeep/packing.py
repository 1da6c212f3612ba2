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
from typing import Final, NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import floor, message, pack, record
from tidemill.broker.engine.layout.floor import GAP_SIZE, Gap
from tidemill.broker.engine.layout.message import FLAG_HALF, FLAG_SCHEDULE, FLAG_STUB, PLACE
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.pack import EXTENT, PackHeader
from tidemill.broker.engine.layout.record import RecordHeader, RecordKind
from tidemill.broker.engine.store.disk import DiskHasNoSpace, File, drop_file
from tidemill.broker.engine.store.pack import Extents, Pack
from tidemill.broker.engine.store.segment import FOLDER, CorruptStore, Record, Segment, packing_name
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts

PACKS_LEVEL: Final = 2  # feature level of stubs
# Sends wait for a slice and for its sync, so both are short: 0.1 to 0.5 ms, and about 0.7 ms.
RECORDS_A_SLICE: Final = 64  # 3 to 9 us each
SLICE_BYTES: Final = 128 << 10  # read or copied
SEGMENTS_A_SLICE: Final = 1_024  # of a choice: under 1 us each
LOOK_PERIOD_MS: Final = 1_000
PAUSE_MS: Final = 30_000  # after an attempt that met damage, or a disk that became full
# The active segment and the one before it stay: followers compare and copy their records.
SEGMENTS_KEPT: Final = 2
FREED_BYTES_MIN: Final = 16 << 10  # fewer are not worth a file operation
# On a full disk a pack need not free more than it keeps.
FREED_ON_FULL_DISK_MIN: Final = 1 << 20
STUBS_A_SAMPLE: Final = 17  # one of so many stubs is made to estimate the size of all
# An estimate may end after this part of a segment, if a pack seems to have 3/4 of the size allowed.
ESTIMATED_PART: Final = 8
_MESSAGE = int(RecordKind.MESSAGE)
_NEVER_DEAD = FLAG_SCHEDULE | FLAG_HALF | FLAG_STUB  # A timer or a commit may need the message.
_ALL_DEAD = 1 << 63


class _Estimate(NamedTuple):
    """The size of a pack of a segment, as of the last attempt."""

    size: int  # about, or the limit that it exceeds
    live: int  # bytes of the live messages then
    is_before_floor: bool


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
        self._pace_s = 0.0  # see `take_pace_s`
        self._not_before_ms = 0  # the rate allows no other pack earlier
        self._deaths = 0  # of messages, at the last look
        self._is_searching = False  # from such a look until no segment is due
        # By the begin of a segment, if it was not packed.
        self._estimates: dict[int, _Estimate] = {}
        # By the begin of a segment: no attempt before this time, see `PAUSE_MS`.
        self._paused: dict[int, int] = {}
        # Since the start. Bytes of incomplete packs count, and take their part of the rate.
        self.packed_count = self.copied_bytes = 0

    def find_work(self, now_ms: int) -> Steps | None:
        """Return the steps that pack the segment with the most dead bytes; None: not now."""
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
            # Not only then: the disk may become full before.
            self._look_at_ms = min(self._look_at_ms, self._not_before_ms)
            return None
        return self._pack_next(now_ms, is_full=is_full)

    def take_pace_s(self) -> float:
        """Return the seconds that the bytes copied since the last call take at the allowed rate.

        On a full disk nothing limits the rate.
        """
        pace_s, self._pace_s = self._pace_s, 0.0
        return 0.0 if self._room.is_full else pace_s

    def defer(self, now_ms: int) -> None:
        """Postpone a due look: the background has no job now, maybe because others wait.

        A later look is not postponed. Under load the background has no job many times a second.
        """
        if self._look_at_ms <= now_ms:
            self._look_at_ms = now_ms + LOOK_PERIOD_MS

    def next_ms(self) -> int | None:
        """Return the wall time of the next look; None: not before a message dies."""
        is_wanted = self._is_searching or self._catalog.deaths != self._deaths
        return self._look_at_ms if is_wanted and self._has_level else None

    def may_pack(self, segment: Segment, dead_bytes: int, now_ms: int) -> bool:
        """Whether a pack frees space on the full disk, if messages of `dead_bytes` more die."""
        least = _freed_min(segment, is_full=True)
        if dead_bytes < least // 4 or now_ms < self._paused.get(segment.start, 0):
            return False
        size = self._pack_size(segment, least) - dead_bytes
        return segment.file_size - size >= least and self._room.has_room_for_pack(size)

    @property
    def _has_level(self) -> bool:
        return self._catalog.feature_level >= PACKS_LEVEL

    def _pack_next(self, now_ms: int, *, is_full: bool) -> Steps:
        segment = yield from self._choose(now_ms, is_full=is_full)
        self._is_searching = segment is not None
        if segment is not None:
            yield from self._pack_chosen(segment, now_ms, is_full=is_full)

    def _choose(self, now_ms: int, *, is_full: bool) -> Generator[list[File], None, Segment | None]:
        """Return the segment with the most dead bytes whose pack fits; None if none is due."""
        log, best, most = self._log, None, 0
        last = min(int(log.committed_offset), self._live_bytes.counted_to)
        for n, segment in enumerate(log.segments[:-SEGMENTS_KEPT], 1):
            if segment.end > last:
                break
            if n % SEGMENTS_A_SLICE == 0:
                yield []
            size, least = segment.file_size, _freed_min(segment, is_full=is_full)
            dead = size - self._live_bytes.live_bytes_in(segment.start)
            if dead <= most or now_ms < self._paused.get(segment.start, 0):
                continue
            pack_size = self._pack_size(segment, least)
            if size - pack_size >= least and self._room.has_room_for_pack(pack_size):
                best, most = segment, dead
        return best

    def _pack_size(self, segment: Segment, least: int) -> int:
        """Return the size of a pack of a segment, as far as it is known: the live bytes at least.

        An estimate counts until a part of `least` bytes more is dead.
        """
        live = self._live_bytes.live_bytes_in(segment.start)
        known = self._estimates.get(segment.start)
        if known is None or known.live - live >= least // 4:
            return live
        return live if self._is_before_floor(segment) and not known.is_before_floor else known.size

    def _pack_chosen(self, segment: Segment, now_ms: int, *, is_full: bool) -> Steps:
        before = self.copied_bytes
        freed_min = _freed_min(segment, is_full=is_full)
        is_packed = yield from self.pack(segment, freed_min=freed_min, is_full=is_full)
        if is_packed is None:
            self._paused[segment.start] = now_ms + PAUSE_MS
        self._look_at_ms = now_ms  # Another segment may be due.
        for known in (self._estimates, self._paused):
            for start in [start for start in known if start < self._log.min_offset]:
                del known[start]
        # The pauses in a pack end when another job is due.
        copied = self.copied_bytes - before
        self._not_before_ms = now_ms + copied * 1_000 // self._rate_bytes

    # ------------------------------------------------------------ one segment

    def pack(
        self, segment: Segment, *, freed_min: int, is_full: bool = False
    ) -> Generator[list[File], None, bool | None]:
        """Pack a sealed, committed segment; return whether it was packed.

        False: a pack would free fewer bytes than `freed_min`, or than it keeps unless the disk is
        full; or it does not fit the disk. None: the segment is damaged, or the disk became full.
        """
        before = segment.file_size
        size_max = before - freed_min if is_full else min(before - freed_min, before // 2)
        live = self._live_bytes.live_bytes_in(segment.start)
        is_before_floor, header = self._is_before_floor(segment), None
        with suppress(CorruptStore, DiskHasNoSpace):  # A reader or a start reports the damage.
            size = yield from self._estimate_size(segment, size_max)
            self._estimates[segment.start] = _Estimate(size, live, is_before_floor)
            if size > size_max or not self._room.has_room_for_pack(size):
                return False
            header = yield from self._write(segment, size)
        if header is None or header.file_size > size_max:
            yield from self._discard(segment)
            if header is None:
                return None
            self._estimates[segment.start] = _Estimate(header.file_size, live, is_before_floor)
            return False
        # Before this, an election could take back a record that the pack relies on.
        yield from self._quiet()
        yield from self._log.install_pack(segment, Pack(header))
        self._estimates.pop(segment.start, None)
        self.packed_count += 1
        return True

    def _estimate_size(self, segment: Segment, size_max: int) -> Generator[list[File], None, int]:
        """Return about the size of a pack; more than `size_max` if it is too large.

        Only some stubs are made, and nothing is written. Raises CorruptStore.
        """
        content, log_bytes = self._begin_content(segment), segment.end - segment.start
        is_roomy = self._room.has_room_for_pack(size_max)
        for _ in self._fill(content, segment, stubs_a_sample=STUBS_A_SAMPLE):
            done = content.record_end - segment.start
            size = content.file_size * log_bytes // done
            is_small = done >= log_bytes // ESTIMATED_PART and size <= size_max * 3 // 4
            if is_small and is_roomy:
                return size
            if content.position > size_max:
                break
            content.gathered.clear()
            yield []
        return content.file_size

    def _write(self, segment: Segment, size: int) -> Generator[list[File], None, PackHeader]:
        """Write the pack of about `size` bytes under a temporary name, durably.

        Raises CorruptStore, and DiskHasNoSpace.
        """
        name = packing_name(segment.start)
        if name in self._disk.names(FOLDER):
            self._disk.delete(name)
        content, at = self._begin_content(segment), pack.HEADER_SIZE
        file = self._disk.open(name, create=True)
        try:
            for _ in self._fill(content, segment):
                if content.position - at < SLICE_BYTES:
                    yield []
                    continue
                self._write_part(file, at, content.gathered, size)
                at, content.gathered = content.position, []
                yield [file]
            directory = content.extents.encode()
            header = PackHeader(
                directory_crc=crc32(directory),
                start=segment.start,
                end=segment.end,
                record_end=content.record_end,
                decided_at=int(self._log.folded_offset),
                floor=content.gap.floor,
                file_size=content.file_size,
                extent_count=content.extents.count,
                stub_bytes=content.stub_bytes,
            )
            encoded = pack.encode_header(header)
            self._write_part(file, at, [*content.gathered, directory, encoded], size)
            yield []
            file.write_at(0, [encoded])
            yield [file]
        finally:
            file.close()
        return header

    def _write_part(
        self, file: File, at: int, parts: list[bytes | memoryview], pack_size: int
    ) -> None:
        """Write a part of a pack. Raises DiskHasNoSpace."""
        part_size = sum(map(len, parts))
        if not self._room.has_room_for_pack(pack_size, part=part_size):
            raise DiskHasNoSpace(f"writing {file.name}: other files have taken the space")
        self.copied_bytes += part_size
        self._pace_s += part_size / self._rate_bytes
        file.write_at(at, parts)

    def _begin_content(self, segment: Segment) -> _PackContent:
        state_floor = self._log.state_floor
        return _PackContent(segment, Gap(state_floor, int(self._log.folded_offset)))

    def _fill(
        self, content: _PackContent, segment: Segment, *, stubs_a_sample: int = 1
    ) -> Iterator[None]:
        """Add all records of a segment; yield after each slice. Raises CorruptStore.

        Of so many stubs one is made, and stands for the others.
        """
        stub: bytes | None = None
        count = dead_count = read_bytes = 0
        lows: dict[tuple[int, int], int] = {}  # by topic and queue: messages before it are dead
        for found, data in self._log.reader.walk_intact(segment):
            is_dead, header = False, found.header
            if header.kind == _MESSAGE and not header.flags & _NEVER_DEAD:
                topic_id, queue_id, _, queue_offset = PLACE.unpack_from(found.body)
                low = lows.get((topic_id, queue_id))
                if low is None:
                    low = lows[topic_id, queue_id] = self._find_low(topic_id, queue_id)
                is_dead = queue_offset < low
            kept: bytes | memoryview = data
            if is_dead and not content.is_before_floor:
                if dead_count % stubs_a_sample == 0:
                    stub = _stub_of(data)
                dead_count += 1
                kept = data if stub is None else stub[: len(data)]
            content.add(found, data, kept, is_dead=is_dead)
            count, read_bytes = count + 1, read_bytes + len(data)
            if count % RECORDS_A_SLICE == 0 or read_bytes >= SLICE_BYTES:
                read_bytes = 0
                yield
        content.end()

    def _discard(self, segment: Segment) -> Steps:
        """Delete an incomplete pack."""
        name = packing_name(segment.start)
        if name in self._disk.names(FOLDER):
            yield from drop_file(self._disk, name)

    def _is_before_floor(self, segment: Segment) -> bool:
        return segment.end <= self._log.state_floor

    def _find_low(self, topic_id: int, queue_id: int) -> int:
        """Return the queue offset before which the messages of a queue are dead."""
        if not self._catalog.is_alive(TopicId(topic_id)):
            return _ALL_DEAD
        queue = self._catalog.queues.get((TopicId(topic_id), QueueId(queue_id)))
        return 0 if queue is None else queue.low


def _stub_of(data: memoryview) -> bytes | None:
    """Return the stub of a dead message; None if it has none that is smaller."""
    try:
        stub = message.encode_stub(data)
    except ValueError:
        return None  # It is no stored message, or smaller than its stub.
    return stub if len(stub) < len(data) else None


@final
class _PackContent:
    """The content of a pack: all records and stubs of a segment, or live messages and gaps."""

    def __init__(self, segment: Segment, gap: Gap) -> None:
        self.gap = gap  # the body of gaps, with the state floor
        self.gathered: list[bytes | memoryview] = []  # the owner writes and removes them
        self.extents = Extents()
        self.stub_bytes = 0
        self.record_end = int(segment.start)
        self._start = segment.start
        # Whether only live messages are needed.
        self.is_before_floor = segment.end <= gap.floor
        # The records since the last live message: the first one, its bytes, and the size of all.
        self._first: tuple[RecordHeader, memoryview] | None = None
        self._size = 0

    @property
    def position(self) -> int:
        """The end of the last part in the file."""
        return self.extents.position

    @property
    def file_size(self) -> int:
        """The size of the file, if no part follows."""
        return self.position + EXTENT.size * self.extents.count + pack.TRAILER_SIZE

    def add(
        self, found: Record, data: memoryview, kept: bytes | memoryview, *, is_dead: bool
    ) -> None:
        """Add the next record: its bytes, and those that the pack keeps of it."""
        header = found.header
        self.record_end = header.log_offset + header.size
        is_message = header.kind == _MESSAGE and not header.flags & _NEVER_DEAD
        if not self.is_before_floor or (is_message and not is_dead):
            if self._first is not None:
                self.end()
            is_copied = kept is data and not record.is_stub(header)
            self._put(header.log_offset, kept, is_copied=is_copied)
            return
        if self._first is None:
            self._first, self._size = (header, data), 0
        self._size += header.size

    def end(self) -> None:
        """Add the gap of the records since the last live message."""
        if self._first is None:
            return
        header, data = self._first
        is_gap = self._size > GAP_SIZE
        part = floor.encode_gap(header, self._size, self.gap) if is_gap else data
        self._put(header.log_offset, part, is_copied=False)
        self._first = None

    def _put(self, log_offset: int, part: bytes | memoryview, *, is_copied: bool) -> None:
        self.extents.add(log_offset - self._start, len(part))
        self.gathered.append(part)
        self.stub_bytes += 0 if is_copied else len(part)


def _freed_min(segment: Segment, *, is_full: bool) -> int:
    """Return the bytes that a pack of the segment must free, stubs aside."""
    size = segment.file_size
    return min(FREED_ON_FULL_DISK_MIN, size // 4) if is_full else max(size // 2, FREED_BYTES_MIN)
