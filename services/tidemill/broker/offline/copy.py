"""Copying a data directory while its broker runs.

The copy is a prefix of the log, with derived files that state nothing beyond it:

1. Copy the queue and index files, and the snapshots. The records by which entries are missing there
   are committed, so they will be in front of the end of the copy.
2. List the segments, then find the end E: behind the last intact record from the durable offset of
   the checkpoint file on. Everything that was acknowledged before is in front of E. Copy the log up
   to E. The last segment has zeros behind it: records that the broker writes behind E meanwhile
   would look like damage before durable records.
3. If the broker drops a segment before it is copied, begin with the next one and find E again: the
   live state of the dropped segment was stated again, behind the old E. The same holds for segments
   that were set aside (ADR 0016), which are copied too.
4. Keep the queue and index files that join up to one offset, and a snapshot that states nothing
   from behind E. Without them, only the first start of the copy is longer.
5. Sync everything, write the checkpoint file, and then give the segments their names. No broker
   starts in a folder with a segment without its name.

The files of timers are caches of the log that are written in place. A start rebuilds them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, final

from tidemill.broker.engine.layout import message, store_checkpoint
from tidemill.broker.engine.layout.message import FLAG_REMAINS
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.store_checkpoint import StoreCheckpoint
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.segment import FOLDER as LOG_FOLDER
from tidemill.broker.engine.upkeep.checkpoint import CHECKPOINT_FILE
from tidemill.broker.offline import block_files
from tidemill.broker.offline.block_files import BlockDamage, FileRange
from tidemill.broker.offline.check import NoStore
from tidemill.broker.offline.findings import WorkProgress
from tidemill.broker.offline.log_scan import (
    BrokenRange,
    LogFolder,
    LogScan,
    LogSegment,
    is_cut,
    list_held,
    list_segments,
    may_hold,
)
from tidemill.broker.offline.packed_file import read_header
from tidemill.broker.offline.replica_files import read_replica_files
from tidemill.broker.offline.source import Source, salvaging

SLICE_BYTES = 1 << 20  # copied at once
ATTEMPTS_MAX = 20  # retention drops at most a segment per minute, unless the disk is too slow
COPYING = ".copying"  # suffix of the name of a segment until the whole copy is durable
_ZEROS = bytes(SLICE_BYTES)
T = TypeVar("T")
Steps = Generator[WorkProgress, None, T]


class CopyError(Exception):
    """No copy can be made; the message says why and what to do."""


@dataclass(slots=True, kw_only=True)
class CopyReport:
    """The result of a copy."""

    log_from: int = 0
    log_end: int = 0
    record_count: int = 0
    copied_bytes: int = 0  # without zeros, which are not written
    file_count: int = 0
    derived_offset: int = 0
    # Damage in the store and in the copy; `tidemill store check` explains it.
    damaged: list[str] = field(default_factory=list)


def copy(source: Source, target: Disk, *, slice_bytes: int = SLICE_BYTES) -> Steps[CopyReport]:
    """Copy a store into `target`, which must be empty. Yields its progress.

    Raises CopyError, NoStore, UnknownRecord, OSError and DiskFailed.
    """
    return (yield from _Copy(source, target, slice_bytes).run())


class _DerivedFiles(NamedTuple):
    """The derived files in the target."""

    queues: list[FileRange]
    indexes: list[FileRange]
    snapshots: list[FileRange]


@final
class _Copy:
    """One copy."""

    def __init__(self, source: Source, target: Disk, slice_bytes: int) -> None:
        assert 0 < slice_bytes <= SLICE_BYTES, "a slice is compared with that many zeros"
        self._slice_bytes = slice_bytes
        self._source = salvaging(source)
        self._target = target
        self._report = CopyReport()
        self._epoch = 0
        self._copied: dict[str, tuple[LogSegment, int]] = {}  # segments and their copied bytes
        self._files: set[str] = set()  # in other folders
        # Log offsets of the originals of salvaged timers.
        self._originals: set[int] = set()
        # Folders with a new file, also a deleted one: the deletion must be durable, too.
        self._folders = {LOG_FOLDER}

    def run(self) -> Steps[CopyReport]:
        derived = yield from self._copy_derived()
        segments, held, end = yield from self._copy_log()
        self._report.log_from, self._report.log_end = segments[0].start, end
        yield from self._verify_log(segments, end)
        held = self._delete_unneeded(held)
        self._keep_fitting(derived)
        for folder in sorted(self._folders):
            self._target.folder(folder).sync()
        self._write_checkpoint()
        for segment in [*held, *segments]:
            self._target.rename(segment.name + COPYING, segment.name)
        self._target.folder(LOG_FOLDER).sync()
        self._report.damaged += [
            f"{name}, byte {begin}: {why}" for name, begin, _, why in self._source.unreadable
        ]
        self._report.file_count = len(segments) + len(held) + len(self._files) + 1
        return self._report

    # ------------------------------------------------------------ the log

    def _copy_log(self) -> Steps[tuple[list[LogSegment], list[LogSegment], int]]:
        """Copy the log and the held segments; return both, and the end of the copied log."""
        for _ in range(ATTEMPTS_MAX):
            # Listed before the end is found, like the segments.
            held = list_held(self._source)
            segments, end = self._find_end()
            self._delete_all_but([*held, *segments])
            self._check_room(segments, held, end)
            is_whole = True
            # A segment that is set aside meanwhile is then missing in the log.
            for segment in [*held, *segments]:
                if not (yield from self._copy_segment(segment, segments, end)):
                    is_whole = False
                    break
            if is_whole:
                return segments, held, end
        raise CopyError(
            f"the broker dropped segments during {ATTEMPTS_MAX} attempts to copy them; "
            "copy to a faster disk, or increase the retention meanwhile"
        )

    def _find_end(self) -> tuple[list[LogSegment], int]:
        """Return the segments of the log now, and its end.

        The segments are listed before the end is found: the live state of a dropped segment is then
        stated again before that end.
        """
        source = self._source
        checkpoint = store_checkpoint.find(source.read(CHECKPOINT_FILE))
        folder = list_segments(source)
        self._check_gaps(folder)
        durable_offset = checkpoint.durable_offset if checkpoint else 0
        begin = max(durable_offset, folder.segments[0].start)
        scan = LogScan(source, folder.segments, begin=begin, durable_offset=durable_offset)
        if checkpoint:
            self._epoch = max(self._epoch, checkpoint.epoch)
        cut = read_replica_files(source).cut
        for found in scan.walk():
            if cut is not None and found.log_offset >= cut:
                break  # A crash interrupted a cut there. The next start repeats it.
            # No start gets past damage here.
            if isinstance(found, BrokenRange):
                raise CopyError(
                    f"{found.segment.name} is damaged at log offset {found.log_offset} "
                    f"({found.why}); see `tidemill store check`, and mend it first"
                )
            self._epoch = max(self._epoch, found.header.epoch)
        self._check_readable(folder.segments, begin)
        end = scan.end if cut is None else min(scan.end, cut)
        if end < durable_offset:
            raise CopyError(
                f"the log ends at offset {end} and was durable up to {durable_offset}; see "
                "`tidemill store check`, and mend it first"
            )
        return [one for one in folder.segments if one.start < end or not one.start], end

    def _check_readable(self, segments: list[LogSegment], begin: int) -> None:
        """Raise CopyError if an unreadable page may hold acknowledged messages."""
        starts = {one.name: one.start for one in segments}
        for name, at, end, why in self._source.unreadable:
            if name in starts and starts[name] + end > begin:
                raise CopyError(
                    f"{name} cannot be read at byte {at} ({why}), and may hold acknowledged "
                    "messages there; restore the directory from a backup"
                )

    @staticmethod
    def _check_gaps(folder: LogFolder) -> None:
        if not folder.segments:
            raise NoStore("there is no store: the folder log holds no segment")
        if folder.strange:
            raise CopyError(f"{folder.strange[0]} is not a segment of the log; move it away")
        for segment, following in zip(folder.segments, folder.segments[1:], strict=False):
            if is_cut(segment) or segment.end != following.start:
                raise CopyError(
                    f"the log has a gap behind {segment.name}; see `tidemill store check`, and "
                    "mend it first"
                )

    def _check_room(self, segments: list[LogSegment], held: list[LogSegment], end: int) -> None:
        """Raise CopyError if the copy does not fit, before anything is written."""
        wanted = sum(one.packed_bytes or one.size for one in held)
        wanted += sum(one.packed_bytes or min(one.end, end) - one.start for one in segments)
        missing = wanted - sum(done for _, done in self._copied.values())
        free = self._target.free_bytes()
        if missing > free:
            raise CopyError(f"the copy needs {missing} bytes; the target has {free} free bytes")

    def _delete_all_but(self, segments: list[LogSegment]) -> None:
        """Delete the copies of segments that the log has dropped meanwhile."""
        for name in self._copied.keys() - {segment.name for segment in segments}:
            self._target.delete(name + COPYING)
            del self._copied[name]

    def _copy_segment(
        self, segment: LogSegment, segments: list[LogSegment], end: int
    ) -> Steps[bool]:
        """Copy a segment up to `end`; return whether it existed all the time."""
        # A pack is copied as it is. The end of the log lies behind it.
        size = segment.packed_bytes or segment.size
        name, stop = segment.name, segment.packed_bytes or min(end - segment.start, size)
        if name in self._copied and self._copied[name][1] >= stop:
            return True  # It may be dropped now: the needed part is copied.
        try:
            opened = self._source.open(name)
        except FileNotFoundError:
            return False
        header = read_header(opened)
        if header is not None and header.file_size != segment.packed_bytes:
            # Packed again meanwhile: it may rely on later records, so the end is found again.
            opened.close()
            return False
        is_new = name not in self._copied
        file = self._target.open(name + COPYING, create=is_new)
        if is_new:
            file.resize(size)
            self._copied[name] = segment, 0
        try:
            begin = self._copied[name][1]
            for at in range(begin, stop, self._slice_bytes):
                self._write(file, at, opened.read_at(at, min(self._slice_bytes, stop - at)))
                done = max(segment.start + at - segments[0].start, 0)  # Held segments are before.
                yield WorkProgress("log", done, end - segments[0].start)
            file.sync()
        finally:
            file.close()
            opened.close()
        # A segment that is dropped loses its name before it is written to again.
        if name not in self._source.names(LOG_FOLDER):
            return False
        self._copied[name] = segment, stop
        return True

    def _write(self, file: File, at: int, data: bytes) -> None:
        if data != _ZEROS[: len(data)]:
            file.write_at(at, [data])
            self._report.copied_bytes += len(data)

    def _verify_log(self, segments: list[LogSegment], end: int) -> Steps[None]:
        """Read the copy of the log, and report its damage."""
        copied = [one._replace(name=one.name + COPYING) for one in segments]
        scan = LogScan(self._target, copied, begin=0, durable_offset=end)
        for n, found in enumerate(scan.walk()):
            if n % 4096 == 0:
                yield WorkProgress(
                    "verified", found.log_offset - copied[0].start, end - copied[0].start
                )
            if isinstance(found, BrokenRange):
                name = found.segment.name.removesuffix(COPYING)
                self._report.damaged.append(
                    f"{name}, byte {found.log_offset - found.segment.start}: {found.why}"
                )
            else:
                self._report.record_count += 1
                if found.header.kind == RecordKind.MESSAGE and found.header.flags & FLAG_REMAINS:
                    self._originals.add(message.decode_remains(found.body).log_offset)

    def _delete_unneeded(self, held: list[LogSegment]) -> list[LogSegment]:
        """Delete the copies of held segments that no timer needs; return the others.

        If the copy is damaged, all stay: a damaged record may need one.
        """
        if self._report.damaged:
            return held
        kept = [one for one in held if any(may_hold(one, at) for at in self._originals)]
        for segment in held:
            if segment not in kept:
                self._target.delete(segment.name + COPYING)
        return kept

    # ------------------------------------------------------------ derived files

    def _copy_derived(self) -> Steps[_DerivedFiles]:
        """Copy the derived files; retry for files that are replaced. Raises NoStore."""
        folder = list_segments(self._source)
        self._check_gaps(folder)
        segments = folder.segments
        self._check_room(segments, list_held(self._source), segments[-1].start)
        copied = _DerivedFiles([], [], [])
        for _ in range(ATTEMPTS_MAX):
            wanted = block_files.best_chains(
                block_files.list_files(self._source, block_files.QUEUES),
                block_files.list_files(self._source, block_files.INDEX),
                min_offset=segments[0].start,
                end=segments[-1].end,
            )
            have_all = yield from self._copy_files(block_files.QUEUES, wanted[0], copied.queues)
            have_all &= yield from self._copy_files(block_files.INDEX, wanted[1], copied.indexes)
            if have_all:
                break
        snapshots = block_files.list_files(self._source, block_files.SNAPSHOTS)
        yield from self._copy_files(block_files.SNAPSHOTS, snapshots, copied.snapshots)
        return copied

    def _keep_fitting(self, copied: _DerivedFiles) -> None:
        """Delete the copied files that do not fit the copied log."""
        report = self._report
        queues, index, derived = block_files.best_chains(
            copied.queues, copied.indexes, min_offset=report.log_from, end=report.log_end
        )
        report.derived_offset = derived
        snapshots = [one for one in copied.snapshots if self._is_fitting(one, derived)]
        kept = {file.name for file in [*queues, *index, *snapshots[-1:]]}
        for name in self._files - kept:
            self._target.delete(name)
        self._files &= kept

    def _is_fitting(self, snapshot: FileRange, derived: int) -> bool:
        """Whether the slices of a copied snapshot state nothing behind the end of the copy."""
        if not self._report.log_from <= snapshot.from_offset <= derived:
            return False
        blocks = block_files.walk(self._target, block_files.SNAPSHOTS, snapshot)
        covered = [one.row.first for one in blocks if not isinstance(one, BlockDamage)]
        return max(covered, default=0) <= self._report.log_end

    def _copy_files(
        self, kind: block_files.BlockFileKind, wanted: list[FileRange], copied: list[FileRange]
    ) -> Steps[bool]:
        """Copy files that are not `copied` yet; return whether all exist.

        A damaged file is omitted: the first start of the copy rebuilds it.
        """
        have_all = True
        for file in wanted:
            if file not in copied:
                try:
                    opened = self._source.open(file.name)
                except FileNotFoundError:
                    have_all = False
                    continue
                size = opened.size()
                self._folders.add(kind.folder)
                written = self._target.open(file.name, create=True)
                for at in range(0, size, self._slice_bytes):
                    self._write(written, at, opened.read_at(at, self._slice_bytes))
                    yield WorkProgress(kind.folder, at, size)
                if written.size() < size:
                    written.resize(size)
                written.sync()
                written.close()
                opened.close()
                self._files.add(file.name)
                found = list(block_files.walk(self._target, kind, file))
                if any(isinstance(one, BlockDamage) for one in found):
                    self._target.delete(file.name)
                    self._files.discard(file.name)
                    have_all &= file.name in self._source.names(kind.folder)
                else:
                    copied.append(file)
        return have_all

    def _write_checkpoint(self) -> None:
        target, report = self._target, self._report
        checkpoint = StoreCheckpoint(
            derived_offset=report.derived_offset,
            durable_offset=report.log_end,
            min_offset=report.log_from,
            epoch=self._epoch,
        )
        temporary = f"{CHECKPOINT_FILE}.new"
        file = target.open(temporary, create=True)
        file.write_at(0, [store_checkpoint.encode(checkpoint)])
        file.sync()
        file.close()
        target.rename(temporary, CHECKPOINT_FILE)
        target.folder(".").sync()
