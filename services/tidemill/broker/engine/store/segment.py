"""One file of the commit log: its name, its records, and the errors about its damage."""

from __future__ import annotations

from typing import NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import HEADER_SIZE, MAGIC, VERSION, RecordHeader
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.mappings import PAGE_BYTES, PageUnreadable
from tidemill.broker.engine.store.pack import Pack

_unpack_header = record.HEADER.unpack_from
# Make a named tuple without a call of Python code.
_tuple = tuple.__new__
FOLDER = "log"
SUFFIX = ".log"
PACK_SUFFIX = ".pack"
PACKING_SUFFIX = ".packing"  # of a pack that is not complete
HELD = ".held"  # suffix of a former segment with messages of pending timers (ADR 0016)
PREPARED = "prepared"  # name of the next segment during its preparation
# A file of a backup ends with the backup: the store's later messages would be lost.
MEND_REMEDY = (
    "Stop the broker and run `tidemill store mend DIR --from BACKUP`; do not copy single files of "
    "a backup into the store."
)
# Only for damage that `LogDamaged` reports.
_REPLICA_REMEDY = "A replica mends this at its start if other replicas of its group run."
BLOCK_BYTES = 4096  # segments have a multiple of it, so any other size means that a file was cut


class CorruptStore(Exception):
    """Durable bytes are damaged. The message names the file, the offset and what to do."""


class LogDamaged(CorruptStore):
    """The log is damaged. Another replica may have the bytes.

    The records from `log_offset`, the begin of one, to `end` must be mended.
    """

    def __init__(self, log_offset: int, reason: str, *, end: int | None = None) -> None:
        super().__init__(reason)
        self.log_offset = LogOffset(log_offset)
        self.end = LogOffset(log_offset + 1 if end is None else end)


class Record(NamedTuple):
    """One record with a decoded header."""

    header: RecordHeader
    body: memoryview
    tail: memoryview

    @property
    def log_offset(self) -> int:
        """Position of the record in the log."""
        return self.header.log_offset


class Hole(NamedTuple):
    """A range of the log without an intact record head."""

    log_offset: LogOffset
    end: LogOffset


def segment_name(start: int) -> str:
    """Return the file name of the segment that begins at log offset `start`."""
    return f"{FOLDER}/{start:020d}{SUFFIX}"


def packing_name(start: int) -> str:
    """Return the name of the pack of a segment until it is complete."""
    return f"{FOLDER}/{start:020d}{PACKING_SUFFIX}"


def pack_name(start: int) -> str:
    """Return the file name of the pack of the segment that begins at log offset `start`."""
    return f"{FOLDER}/{start:020d}{PACK_SUFFIX}"


@final
class Segment:
    """One file of the log."""

    __slots__ = ("end", "file", "first_stored_at_ms", "name", "pack", "pad_at", "start")

    def __init__(
        self, start: int, size: int, file: File | None = None, pack: Pack | None = None
    ) -> None:
        self.name = segment_name(start) if pack is None else pack_name(start)
        self.pack = pack  # None: each record is at its log offset minus `start`
        self.start = LogOffset(start)
        self.end = LogOffset(start + size)
        # Open during writes and until their sync has ended.
        self.file = file
        # Byte of its pad, or its size without a pad; None: unknown.
        self.pad_at: int | None = None
        self.first_stored_at_ms: int | None = None  # None: unknown

    @property
    def size(self) -> int:
        """Bytes of the log in this segment, and of its file if it is no pack."""
        return self.end - self.start

    @property
    def file_size(self) -> int:
        """Bytes of the file."""
        return self.size if self.pack is None else self.pack.header.file_size

    def become_pack(self, pack: Pack) -> None:
        """Read the records from the pack from now on."""
        self.close()
        self.name, self.pack, self.pad_at = pack_name(self.start), pack, None

    def set_aside(self) -> None:
        """Take the name of a former segment."""
        self.name = segment_name(self.start).removesuffix(SUFFIX) + HELD  # A pack stays one.

    def close(self) -> None:
        """Close the file. It can still be read by name."""
        file, self.file = self.file, None
        if file is not None:
            file.close()


class RecordFreed(LookupError):
    """A record before the state floor is not in its pack any longer (ADR 0069)."""


def damaged(segment: Segment, offset: int, why: str) -> LogDamaged:
    """Return the error about damaged durable bytes."""
    return LogDamaged(
        offset,
        f"{segment.name} is damaged at byte {offset - segment.start} (log offset {offset}): "
        f"{why}. These bytes were durable, so acknowledged messages are affected and the broker "
        f"does not start. {MEND_REMEDY} {_REPLICA_REMEDY}",
    )


def unreadable(segment: Segment, begin: int, error: PageUnreadable) -> LogDamaged:
    """Return the error about a page that the replay needs and the disk cannot read.

    A record begins at byte `begin` of the segment, before or in the page.
    """
    return LogDamaged(
        segment.start + begin,
        f"{segment.name} cannot be read at byte {error.at} (log offset "
        f"{segment.start + error.at}): {error}. Acknowledged messages may be stored there, so the "
        f"broker does not start. {MEND_REMEDY} {_REPLICA_REMEDY}",
        end=segment.start + error.at + PAGE_BYTES,
    )


def intact_at(view: memoryview, at: int, log_offset: LogOffset) -> Record | None:
    """Return the record at `view[at:]` if it is intact. Raises UnknownRecord as `find_damage`.

    It makes the same checks, faster: a start reads every record with it.
    """
    if len(view) - at < HEADER_SIZE:
        return None
    fields = _unpack_header(view, at)
    magic, head_crc, size, tail_crc, version, kind, flags, _, _, own_offset, _, head_size = fields
    tail_at, end = at + head_size, at + size
    if magic != MAGIC or own_offset != log_offset or not HEADER_SIZE <= head_size <= size:
        return None
    if tail_at > len(view) or crc32(view[at + record.CRC_FROM : tail_at]) != head_crc:
        return None
    if flags & record.STUB:
        end = at + record.stored_size(view, at, _tuple(RecordHeader, fields))
    if end > len(view):
        return None
    tail = view[tail_at:end]
    if crc32(tail) != tail_crc:
        return None
    if version != VERSION or kind not in record.KINDS:
        record.find_damage(view, at, log_offset=log_offset)
    body = view[at + HEADER_SIZE : tail_at]
    return _tuple(Record, (_tuple(RecordHeader, fields), body, tail))
