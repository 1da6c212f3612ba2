"""Frames of the log for other replicas: whole records, checked, with a limit on old bytes."""

from __future__ import annotations

from typing import Final, final
from zlib import crc32

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.floor import GAP_SIZE, decode_gap, encode_gap
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import is_stub
from tidemill.broker.engine.replication.messages import Data, Digest
from tidemill.broker.engine.replication.replicated_log import DIGEST_BYTES
from tidemill.broker.engine.store.checked_run import find_last_run
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import CorruptStore, LogDamaged, RecordFreed
from tidemill.broker.engine.store.whole_records import WholeRecords, find_frame

# Bytes of the log behind this distance from its end are old. Less may be in flight to a replica.
RECENT_BYTES: Final = 16 << 20


@final
class LogFrames:
    """The frames that a replica sends of its log. A damaged record is reported and requested."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        # Old bytes that may be sent until the owner grants more; None: any number.
        self.old_bytes_left: int | None = None
        self.is_waiting = False  # a frame of old bytes waits for a grant
        self.damage = ""  # the damage that the last frame or digest has met; "": none

    def read(self, offset: int, size_max: int) -> Data | None:
        """Return whole records of one segment; None if they are not written or may not be sent yet.

        None also for damaged records: `damage` describes them, and the replica that needs them
        waits for another master.
        """
        is_old = offset < self._log.log_end - RECENT_BYTES
        if is_old and self.old_bytes_left is not None:
            if self.old_bytes_left <= 0:
                self.is_waiting = True
                return None
            size_max = min(size_max, self.old_bytes_left)
        try:
            frame = self._read(offset, size_max)
        except LogDamaged as error:
            self._note_damage(error)
            return None
        self.damage = ""
        if is_old and frame is not None and self.old_bytes_left is not None:
            self.old_bytes_left -= len(frame.data)
        return frame

    def _read(self, offset: int, size_max: int) -> Data | None:
        try:
            found = find_frame(self._log, LogOffset(offset), size_max)
        except RecordFreed:
            found = self._rest_of_gap(LogOffset(offset))
        if found is None:
            return None
        data, end, segment = found
        return Data(
            epoch=0,
            offset=offset,
            data=data,
            crc=crc32(data),
            confirm=0,
            segment_start=segment.start,
            segment_bytes=segment.size,
            log_bytes=0 if end - offset == len(data) else end - offset,
        )

    def _rest_of_gap(self, offset: LogOffset) -> WholeRecords | None:
        """Return a gap from `offset` on; None if no gap is small enough for the missing records."""
        segment = self._log.segment_of(offset)
        gap, end = self._log.reader.rest_of_gap(segment, offset)
        if end - offset < GAP_SIZE:
            return None
        first = gap.header._replace(log_offset=offset)
        data = encode_gap(first, end - offset, decode_gap(gap.body))
        return WholeRecords(memoryview(data), LogOffset(end), segment)

    def can_begin(self, offset: int) -> bool:
        """Whether frames may begin at a log offset: at a record, or in a gap with enough room."""
        log = self._log
        if not log.min_offset <= offset < log.state_floor:
            return offset >= log.min_offset
        try:
            if not log.reader.is_freed(log.segment_of(LogOffset(offset)), offset):
                return True
        except LogDamaged:
            return True  # The frame waits until the directory is derived.
        try:
            return self._rest_of_gap(LogOffset(offset)) is not None
        except CorruptStore:
            return False

    def read_confirmed(self, offset: int, size_max: int, *, confirm_offset: int) -> memoryview:
        """Return whole confirmed records, for a replica that mends its log (ADR 0047).

        Each record is checked now. Empty if there are none.
        """
        log = self._log
        if not log.segments or not log.min_offset <= offset < confirm_offset:
            return memoryview(b"")
        try:
            found = find_frame(log, LogOffset(offset), size_max, recheck=True)
        except LogDamaged as error:
            log.damage.request(error.log_offset, error.end)
            return memoryview(b"")
        except RecordFreed:
            return memoryview(b"")  # Inside a gap, which is larger than the record was.
        if found is None:
            return memoryview(b"")
        data, segment = found.data, found.segment
        data = data[: confirm_offset - offset]
        # The log of the replica may have whole messages, so the records end before a stub.
        at = 0
        while len(data) - at >= record.HEADER_SIZE:
            room = segment.end - offset - at
            header = record.find_head(data, at, log_offset=LogOffset(offset + at), room=room)
            if header is None:
                break  # the pad
            if is_stub(header):
                return data[:at]
            at += header.size
        return data

    def digest(self, low: int, end: int) -> Digest | None:
        """Return the checksum of the last records before `end`; None if they are damaged."""
        try:
            run = find_last_run(self._log, low, end, DIGEST_BYTES)
        except LogDamaged as error:
            self._note_damage(error)
            return None
        return Digest(run.begin, end, run.crc, run.is_behind_stub)

    def _note_damage(self, error: LogDamaged) -> None:
        self._log.damage.request(error.log_offset, error.end)
        self.damage = str(error)
