"""Mending a data directory that no broker holds.

Of the log only what a backup has intact at the same log offsets is written, and only where both
agree on the records around it: a store that was restored and lived on has other records at the same
offsets. What cannot be verified stays as it is.

Segments that were set aside are mended as those of the log are: a delayed message that was damaged
in one is delivered again. Nothing else depends on them.

Derived files and the files of timers that are damaged are deleted where the whole log is sound, and
the next start makes them from it. Elsewhere they stay: they may know what the log does not say.
They go before the log is mended: cut short behind that, a repair would leave files that were
derived over a hole, and a log in which the next one finds nothing to do.

A page that cannot be read is written only where each byte of it is known: from the backup, before
what is known to be durable, where zeros are found as damage again, or behind the end of a segment.
What may have been answered is never made to look as if nothing had been written there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, final

from tidemill.broker.engine.layout import message, store_checkpoint
from tidemill.broker.engine.layout.message import FLAG_REMAINS, FLAG_SCHEDULE
from tidemill.broker.engine.layout.record import PAD, PAD_MAGIC, RecordKind
from tidemill.broker.engine.store.disk import Disk
from tidemill.broker.engine.store.mappings import PAGE_BYTES
from tidemill.broker.engine.store.segment import FOLDER as LOG_FOLDER
from tidemill.broker.engine.store.segment import HELD, PREPARED, SUFFIX
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.upkeep.checkpoint import CHECKPOINT_FILE
from tidemill.broker.offline import block_files
from tidemill.broker.offline.check import NoStore, Report, check
from tidemill.broker.offline.findings import OF_THE_LOG, Concern, Damage, Finding, Progress
from tidemill.broker.offline.log_scan import (
    Broken,
    Intact,
    LogScan,
    LogSegment,
    Pad,
    is_cut,
    list_held,
    list_segments,
    read_one,
)
from tidemill.broker.offline.names import Names
from tidemill.broker.offline.replica_files import read_replica_files
from tidemill.broker.offline.source import Source, Window, readable
from tidemill.message import salvage

SLICE_BYTES = 1 << 20  # written at once
NO_BACKUP = "name a backup with --from"
UNSURE = (
    "it is not known to be confirmed in its broker group: start the replica, which asks the others;"
    " or empty its folder, and it is copied again"
)
T = TypeVar("T")
Steps = Generator[Progress, None, T]
# What a start makes again by itself even where a file is merely gone.
_DERIVED = {
    Damage.QUEUES,
    Damage.INDEX,
    Damage.SNAPSHOT,
    Damage.TIMER_CHECKPOINT,
    Damage.TIMER_TABLE,
    Damage.TIMER_WHEEL,
    Damage.TIMER_LOG,
}


@dataclass(slots=True, kw_only=True)
class RepairReport:
    """What was mended, and what was not: sentences."""

    mended: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    is_whole: bool = True  # nothing damaged is left, or would be


class NotMended(Exception):
    """A stretch of the log cannot be taken from the backup; the message says why."""


class _Neighbour(NamedTuple):
    """An intact record beside a damaged stretch."""

    log_offset: int
    data: bytes


def repair(
    disk: Disk, backup: Source | None, timer: TimerConfig | None = None, *, is_dry: bool
) -> Steps[RepairReport]:
    """Mend what can be mended. Yields how far it has come.

    The caller owns the directory. Raises as `check`, and NoStore where the backup is none, or is of
    another store.
    """
    return (yield from _Repair(disk, backup, timer, is_dry=is_dry).run())


@final
class _Repair:
    """One repair."""

    def __init__(
        self, disk: Disk, backup: Source | None, timer: TimerConfig | None, *, is_dry: bool
    ) -> None:
        self._disk = disk
        self._source = readable(disk)
        self._backup = backup
        self._timer = timer
        self._is_dry = is_dry
        self._is_planning = True  # what is decided is told, and not done yet
        self._report = RepairReport()
        # Of a replica: what its master may have had in another form than any backup.
        self._unsure: list[Finding] = []
        self._known_to = 0  # zeros in front of this log offset are found as damage again
        self._written: set[tuple[str, int]] = set()  # pages that could not be read, and now can

    def run(self) -> Steps[RepairReport]:
        before = yield from check(self._source, self._timer)
        damages = [one for one in before.findings if one.damage in OF_THE_LOG]
        replica = read_replica_files(self._source)
        if replica.is_replica:
            self._unsure = [one for one in damages if _range(one)[1] > replica.confirmed]
            damages = [one for one in damages if one not in self._unsure]
        held = [one for one in before.findings if one.damage in _SET_ASIDE]
        derived = [one for one in before.findings if one.damage in _DERIVED]
        checkpoint = store_checkpoint.find(self._source.read(CHECKPOINT_FILE))
        self._known_to = max(
            checkpoint.durable_offset if checkpoint else 0,
            before.log_from,
            *[_range(one)[1] for one in damages if one.damage in _IN_PLACE],
        )
        backup = None
        if (damages or held) and self._backup is not None:
            backup = yield from self._look_at_backup(before, self._backup)
        self._mend(damages, backup)
        is_mendable = not self._report.left
        is_dropping = bool(derived or damages) and is_mendable
        self._is_planning = self._is_dry
        dropped: list[str] = []
        if is_dropping:
            dropped = self._drop({one.file for one in derived} | self._derived_from(damages))
        if not self._is_dry:
            yield Progress("mending", 0, 0)
            self._report = RepairReport()
            self._mend(damages, backup)
        report = self._report
        report.mended += dropped
        if derived and not is_mendable:
            why = "the log is damaged too, and the file may know what it does not say any more"
            report.left += [_told(one, why) for one in derived]
        if any(one.damage is Damage.CHECKPOINT for one in before.findings) and not report.left:
            report.mended.append(f"{CHECKPOINT_FILE}: the next start writes it again")
        # Last, since no other file depends on them.
        self._mend_held(held, backup)
        if report.mended and not self._is_dry and not report.left:
            yield from self._look_again()
        report.is_whole = not report.left
        return report

    def _look_again(self) -> Steps[None]:
        """Check what was mended: that, and no plan, says whether nothing damaged is left."""
        after = yield from check(readable(self._disk), self._timer)
        self._report.left += [
            _told(one, f"{one.detail}; it is there still, behind all that was mended")
            for one in after.findings
            if one.damage in OF_THE_LOG | _SET_ASIDE or one.stops_start
        ]

    # ------------------------------------------------------------ the log

    @staticmethod
    def _look_at_backup(before: Report, source: Source) -> Steps[_Backup]:
        backup = _Backup(source)
        yield from backup.look()
        ours, theirs = before.names.handle_secret, backup.names.handle_secret
        if ours and theirs and ours != theirs:
            raise NoStore("the backup is of another store; nothing was changed")
        backup.is_of_this_life = bool(ours) and ours == theirs and backup.epoch == before.epoch
        return backup

    def _mend(self, damages: list[Finding], backup: _Backup | None) -> None:
        """Mend the log, and what cannot be read behind the ends of its files."""
        self._written.clear()
        replaced: set[str] = set()
        self._report.left += [_told(one, UNSURE) for one in self._unsure]
        if backup is not None:
            replaced = self._mend_log(damages, backup)
        else:
            self._report.left += [_told(one, NO_BACKUP) for one in damages]
        self._clear_behind_pads(replaced)
        self._tell_unreadable(replaced)

    def _clear_behind_pads(self, replaced: set[str]) -> None:
        """Write zeros to pages that cannot be read where a segment's end says that nothing stands.

        No start needs them as long as there are derived files; one without reads them all.
        """
        for segment in list_segments(self._disk).segments:
            pages = [] if segment.name in replaced else self._unreadable_pages(segment)
            end = self._find_pad(segment) if pages else None
            behind = [at for at in pages if end is not None and at >= end]
            if not behind:
                continue
            told = f"{len(behind)} pages behind its end written with zeros"
            self._report.mended.append(f"{segment.name}, {Damage.UNREADABLE.value}: {told}")
            zeros = [(at, [bytes(min(PAGE_BYTES, segment.size - at))]) for at in behind]
            self._write(segment, zeros)

    def _find_pad(self, segment: LogSegment) -> int | None:
        """Return the byte behind the pad that ends a segment, None where none is met."""
        file = self._source.open(segment.name)
        try:
            window, at = Window(file), 0
            while (found := read_one(window, segment, at)) is not None:
                at = (found.log_offset if isinstance(found, Pad) else found.end) - segment.start
                if isinstance(found, Pad):
                    return at + PAD.size
        finally:
            file.close()
        return None

    def _unreadable_pages(self, segment: LogSegment) -> list[int]:
        """Return where the pages begin that were met, cannot be read, and were not written."""
        return [
            at
            for name, begin, end, _ in self._source.unreadable
            if name == segment.name
            for at in range(begin, end, PAGE_BYTES)
            if (name, at) not in self._written
        ]

    def _tell_unreadable(self, replaced: set[str]) -> None:
        """Tell of pages of the log that stay as they are: nobody knows what stands there."""
        why = "what stands there may have been answered: restore the directory on a sound disk"
        for segment in list_segments(self._disk).segments:
            pages = [] if segment.name in replaced else self._unreadable_pages(segment)
            if pages:
                where = f"{segment.name} at log offset {segment.start + pages[0]}"
                told = f"{where}, {Damage.UNREADABLE.value}: {len(pages)} pages; {why}"
                self._report.left.append(told)

    def _write(self, segment: LogSegment, stretches: list[tuple[int, list[bytes]]]) -> None:
        """Write stretches of a file durably; of pages that could not be read they take all."""
        for at, pieces in stretches:
            end = at + sum(map(len, pieces))
            pages = range(at - at % PAGE_BYTES, end, PAGE_BYTES)
            self._written |= {(segment.name, one) for one in pages}
        if self._is_planning:
            return
        file = self._disk.open(segment.name)
        for at, pieces in stretches:
            file.write_at(at, pieces)
        file.sync()
        file.close()

    def _mend_log(self, damages: list[Finding], taken: _Backup) -> set[str]:
        """Mend what the backup has; return the names of files that were taken whole."""
        replaced: set[str] = set()
        # Whole files first: they may hold other damaged stretches.
        for start, findings in self._by_segment(damages, taken).items():
            try:
                replaced |= self._mend_files(start, findings, taken)
            except NotMended as error:
                self._report.left += [_told(one, str(error)) for one in findings]
        for finding in damages:
            if finding.damage in _WHOLE or finding.file in replaced:
                continue
            try:
                if finding.damage is Damage.STRANGE_FILE:
                    raise NotMended("give it the name that it had, or move it away")
                self._mend_stretch(finding, taken, list_segments(self._disk).segments)
            except NotMended as error:
                self._report.left.append(_told(finding, str(error)))
        return replaced

    def _mend_held(self, damages: list[Finding], backup: _Backup | None) -> None:
        """Mend segments that were set aside, of which a backup may have the former ones."""
        put = self._put_missing(damages, backup)
        held = {one.name: one for one in list_held(self._disk)}
        for finding in damages:
            if finding.damage is Damage.HELD_MISSING or finding.file in put:
                continue
            try:
                if backup is None:
                    raise NotMended(NO_BACKUP)
                if not finding.size:
                    raise NotMended("its file is cut; put a whole one in its place")
                self._mend_stretch(finding, backup, [held[finding.file]])
            except NotMended as error:
                self._report.left.append(_told(finding, str(error)))

    def _put_missing(self, damages: list[Finding], backup: _Backup | None) -> set[str]:
        """Put the backup's segments where those set aside are missing; return their names."""
        names: set[str] = set()
        for finding in damages:
            if finding.damage is not Damage.HELD_MISSING:
                continue
            try:
                if backup is None:
                    raise NotMended(NO_BACKUP)
                segment = backup.segment_with(finding)
                name = _name(segment.start).removesuffix(SUFFIX) + HELD
                if name not in names and not self._is_planning:
                    self._put(name, segment.size, backup.pieces(segment))
                names.add(name)
                self._report.mended.append(_told(finding, f"{name} taken from the backup"))
            except NotMended as error:
                self._report.left.append(_told(finding, str(error)))
        return names

    @staticmethod
    def _by_segment(damages: list[Finding], backup: _Backup) -> dict[int, list[Finding]]:
        """Return what takes whole segments to mend, by where the first of them begins.

        Whether a file is missing, or the one before it lost its end, the backup's files say.
        """
        found: dict[int, list[Finding]] = {}
        for finding in damages:
            if finding.damage in _WHOLE:
                begin, _ = _range(finding)
                starts = [one.start for one in backup.segments if one.start <= begin < one.end]
                found.setdefault(starts[0] if starts else begin, []).append(finding)
        return found

    def _mend_stretch(self, finding: Finding, backup: _Backup, segments: list[LogSegment]) -> None:
        """Write a damaged stretch of a segment from the backup; `segments` are those around it."""
        begin, end = _range(finding)
        segment = _segment_of(segments, begin)
        data = backup.take(begin, end, ends_segment=end == segment.end)
        if len(data) > end - begin:
            raise NotMended("its file is cut, and the backup has no whole one")
        self._compare(begin, end, data, backup, segments)
        stretches = self._with_pages(segment, begin - segment.start, data, to=end - segment.start)
        self._report.mended.append(_told(finding, f"{len(data)} bytes taken from the backup"))
        self._write(segment, stretches)

    def _with_pages(
        self, segment: LogSegment, at: int, data: bytes, *, to: int
    ) -> list[tuple[int, list[bytes]]]:
        """Return where to write, and what: of pages that cannot be read all, so that they can be.

        A part of one cannot be written: what is beside it would have to be read before. Raises
        NotMended where that may have been answered, and nobody knows what it says.
        """
        begin, end = at, at + len(data)
        if self._source.is_unreadable(segment.name, begin):
            begin -= begin % PAGE_BYTES
        if self._source.is_unreadable(segment.name, end - 1):
            end = min(end - end % -PAGE_BYTES, segment.size)
        is_ending = to == segment.size  # behind the data nothing stands
        if end > at + len(data) and not is_ending and segment.start + end > self._known_to:
            raise NotMended(
                "what follows it in a page that cannot be read may have been answered: restore the"
                " directory on a sound disk"
            )
        file = self._source.open(segment.name)
        before = file.read_at(begin, at - begin)
        behind = file.read_at(at + len(data), end - at - len(data))
        file.close()
        stretches = [(begin, [before, data, behind])]
        if is_ending:
            pages = [one for one in self._unreadable_pages(segment) if one >= end]
            stretches += [(one, [bytes(min(PAGE_BYTES, segment.size - one))]) for one in pages]
        return stretches

    def _mend_files(self, start: int, findings: list[Finding], backup: _Backup) -> set[str]:
        """Put segments from the backup where some are missing or cut; return their names."""
        end = max(_range(finding)[1] for finding in findings)
        ours = list_segments(self._disk).segments
        if not ours and not backup.is_of_this_life:
            raise NotMended("nothing of the log is left that could be compared: restore the backup")
        limit = min((one.start for one in ours if one.start > start), default=None)
        segments = [one for one in backup.segments if start <= one.start < end]
        if not segments or segments[0].start != start:
            raise NotMended(f"the backup has no segment that begins at log offset {start}")
        if limit is not None and segments[-1].end != limit:
            raise NotMended(f"the backup's segments there end at log offset {segments[-1].end}")
        contents = []
        for segment in segments:
            if is_cut(segment):
                raise NotMended(f"{segment.name} of the backup is cut too")
            is_open = limit is None and segment is segments[-1]
            contents.append(backup.take_segment(segment, needed_to=end if is_open else segment.end))
        for segment, data in zip(segments, contents, strict=True):
            if ours:
                self._compare(segment.start, segment.end, data, backup, ours)
        self._compare_own(start, contents[0])
        names = {_name(segment.start) for segment in segments}
        told = f"{', '.join(sorted(names))} taken from the backup"
        self._report.mended += [_told(finding, told) for finding in findings]
        if not self._is_planning:
            for segment, data in zip(segments, contents, strict=True):
                self._put_segment(segment, data)
        return names

    def _put_segment(self, segment: LogSegment, data: bytes) -> None:
        pieces = ((at, data[at : at + SLICE_BYTES]) for at in range(0, len(data), SLICE_BYTES))
        self._put(_name(segment.start), segment.size, pieces)

    def _put(self, name: str, size: int, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Make a whole segment, durable before it has its name; a crash before leaves what was."""
        disk, temporary = self._disk, f"{LOG_FOLDER}/{PREPARED}"
        if temporary in disk.names(LOG_FOLDER):
            disk.delete(temporary)
        file = disk.open(temporary, create=True)
        file.resize(size)
        for at, data in pieces:
            file.write_at(at, [data])
        file.sync()
        file.close()
        disk.rename(temporary, name)
        disk.folder(LOG_FOLDER).sync()

    def _compare(
        self, begin: int, end: int, data: bytes, backup: _Backup, segments: list[LogSegment]
    ) -> None:
        """Raise NotMended unless the records around a stretch are the same in the backup."""
        neighbours = [*self._before(begin, segments), *self._after(end, segments)]
        same = [backup.has(one) for one in neighbours]
        if False in same:
            raise NotMended("the backup has other records around it: its store has lived on")
        head = self._head_of(begin, segments)
        if True not in same and not (head and data.startswith(head)):
            raise NotMended("the backup has no record beside it that could be compared")

    def _compare_own(self, begin: int, data: bytes) -> None:
        """Raise NotMended unless what is left of a cut segment is in the backup's bytes."""
        for found in _walk_from(self._source, list_segments(self._disk).segments, begin):
            at = found.log_offset - begin
            if data[at : at + found.header.size] != bytes(found.data):
                raise NotMended("the backup has other records in it: its store has lived on")

    def _head_of(self, begin: int, segments: list[LogSegment]) -> bytes:
        """Return the intact head of a record whose tail is damaged, b"" where there is none."""
        for segment in segments:
            if segment.start <= begin < segment.end:
                file = self._source.open(segment.name)
                found = read_one(Window(file), segment, begin - segment.start)
                file.close()
                if isinstance(found, Broken) and found.header is not None:
                    return found.remains[: found.header.head_size]
        return b""

    def _before(self, log_offset: int, segments: list[LogSegment]) -> Iterator[_Neighbour]:
        """Yield the last intact record in front of a stretch."""
        last = None
        for segment in [one for one in segments if one.start < log_offset][-1:]:
            for found in _walk_from(self._source, segments, segment.start):
                if found.end > log_offset:
                    break
                last = _Neighbour(found.log_offset, bytes(found.data))
        if last is not None:
            yield last

    def _after(self, log_offset: int, segments: list[LogSegment]) -> Iterator[_Neighbour]:
        """Yield the first intact record behind a stretch."""
        for segment in [one for one in segments if one.end > log_offset][:2]:
            begin = max(log_offset, segment.start)
            for found in _walk_from(self._source, segments, begin):
                yield _Neighbour(found.log_offset, bytes(found.data))
                return

    # ------------------------------------------------------------ what a start makes again

    def _derived_from(self, damages: list[Finding]) -> set[str]:
        """Return the files that may have been derived from the log while it was damaged.

        No broker runs on a log of which a segment is missing or cut; where nothing is left of one,
        nothing shows that a file was derived from what the backup has.
        """
        if not list_segments(self._disk).segments:
            return {name for folder in _DERIVED_FOLDERS for name in self._disk.names(folder)}
        ranges = [_range(one) for one in damages if one.damage not in _WHOLE]
        return {
            file.name
            for kind in (block_files.QUEUES, block_files.INDEX)
            for file in block_files.list_files(self._disk, kind)
            if any(file.from_offset < end and begin < file.to_offset for begin, end in ranges)
        }

    def _drop(self, names: set[str]) -> list[str]:
        """Delete files that are not to be believed, durably; return what there is to tell of it."""
        folders, told = set(), []
        for name in sorted(names):
            folder = name.rpartition("/")[0]
            if name not in self._disk.names(folder):
                told.append(f"{name}: the next start makes it again")
                continue
            told.append(f"{name}: deleted; the next start makes it again")
            if not self._is_dry:
                self._disk.delete(name)
                folders.add(folder)
        for folder in sorted(folders):
            self._disk.folder(folder).sync()
        return told


# Snapshots say whose the store is, to a second repair too; without the others none is used.
_DERIVED_FOLDERS = (
    block_files.QUEUES.folder,
    block_files.INDEX.folder,
    "timer",
    "timer/state",
    "timer/timerlog",
)
_SET_ASIDE = {Damage.HELD, Damage.HELD_MISSING}
_WHOLE = {Damage.SEGMENT_MISSING, Damage.SEGMENT_CUT}
_IN_PLACE = {Damage.RECORD, Damage.HOLE}


@final
class _Backup:
    """A copy of the store, of which nothing is believed that does not check."""

    def __init__(self, source: Source) -> None:
        self._source = readable(source)
        self.segments = list_segments(source).segments
        self._files = [*self.segments, *list_held(source)]
        self.names = Names()
        self.epoch = 0  # of its last record
        self.is_of_this_life = False  # by the store's secret, and by the epoch that both are in
        if not self.segments:
            raise NoStore("the backup is no store: its folder log holds no segment")

    def look(self) -> Steps[None]:
        """Learn which store it is."""
        checkpoint = store_checkpoint.find(self._source.read(CHECKPOINT_FILE))
        durable_offset = checkpoint.durable_offset if checkpoint else 0
        scan = LogScan(self._source, self.segments, begin=0, durable_offset=durable_offset)
        for n, found in enumerate(scan.walk()):
            if n % 4096 == 0:
                yield Progress("backup", found.log_offset - self.segments[0].start, 0)
            if isinstance(found, Intact):
                self.names.learn_record(found)
                self.epoch = max(self.epoch, found.header.epoch)

    def has(self, record: _Neighbour) -> bool | None:
        """Return whether it has a record; None where it knows nothing of that place."""
        for segment in self._files:
            if segment.start <= record.log_offset < segment.end:
                file = self._source.open(segment.name)
                found = read_one(Window(file), segment, record.log_offset - segment.start)
                file.close()
                if isinstance(found, Intact):
                    return bytes(found.data) == record.data
                # It may end there; where records follow, they begin elsewhere.
                return None
        return None

    def take(self, begin: int, end: int, *, ends_segment: bool) -> bytes:
        """Return the bytes of intact records from `begin` to exactly `end`. Raises NotMended."""
        for segment in self._files:
            if segment.start <= begin < segment.end:
                return self._take(segment, begin, end, ends_segment=ends_segment)
        raise NotMended("the backup has nothing at this log offset")

    def segment_with(self, finding: Finding) -> LogSegment:
        """Return the file with the message of a timer that is in none of ours. Raises NotMended."""
        at, _ = _range(finding)
        (concern,) = finding.concerns
        for segment in self._files:
            if segment.start <= at < segment.end:
                file = self._source.open(segment.name)
                found = read_one(Window(file), segment, at - segment.start)
                file.close()
                if not isinstance(found, Intact):
                    raise NotMended("the backup is not whole there")
                if not _is_message_of(found, concern):
                    raise NotMended("the backup has another record there: its store has lived on")
                return segment
        raise NotMended("the backup has nothing at this log offset")

    def pieces(self, segment: LogSegment) -> Iterator[tuple[int, bytes]]:
        """Yield what a file has, and where; behind the end of the backup's log a pad ends it."""
        file = self._source.open(segment.name)
        try:
            window, end = Window(file), segment.size
            if segment == self.segments[-1]:
                end = 0
                while isinstance(found := read_one(window, segment, end), Intact):
                    end = found.end - segment.start
            for at in range(0, end, SLICE_BYTES):
                yield at, file.read_at(at, min(SLICE_BYTES, end - at))
            if segment.size - end >= PAD.size:
                yield end, PAD.pack(PAD_MAGIC, segment.size - end)
        finally:
            file.close()

    def take_segment(self, segment: LogSegment, *, needed_to: int) -> bytes:
        """Return what a segment has, intact at least up to a log offset. Raises NotMended."""
        return self._take(segment, segment.start, needed_to, ends_segment=True)

    def _take(self, segment: LogSegment, begin: int, end: int, *, ends_segment: bool) -> bytes:
        file = self._source.open(segment.name)
        try:
            window, at = Window(file), begin - segment.start
            parts: list[bytes] = []
            while segment.start + at < end or ends_segment:
                found = read_one(window, segment, at)
                if isinstance(found, Pad) and ends_segment:
                    parts.append(bytes(window.view(at, PAD.size)))
                    return b"".join(parts)
                if found is None and ends_segment:
                    return b"".join(parts)
                if not isinstance(found, Intact):
                    if ends_segment and segment.start + at >= end and parts:
                        return b"".join(parts)  # Its log ends there, behind all that is needed.
                    raise NotMended(f"the backup is not whole there, at log offset {begin}")
                parts.append(bytes(found.data))
                at += found.header.size
        finally:
            file.close()
        if segment.start + at != end:
            raise NotMended("the backup has other records there: its store has lived on")
        return b"".join(parts)


def _segment_of(segments: list[LogSegment], log_offset: int) -> LogSegment:
    found = [one for one in segments if one.start <= log_offset < one.end]
    if not found:
        raise NotMended("its file is missing")
    return found[0]


def _walk_from(source: Source, segments: list[LogSegment], log_offset: int) -> Iterator[Intact]:
    """Yield the intact records of one segment from a log offset on, past damaged ones."""
    for segment in segments:
        if segment.start <= log_offset < segment.end:
            file = source.open(segment.name)
            try:
                window, at = Window(file), log_offset - segment.start
                while (found := read_one(window, segment, at)) is not None:
                    if isinstance(found, Pad):
                        return
                    if isinstance(found, Intact):
                        yield found
                    at = found.end - segment.start
            finally:
                file.close()
            return


def _is_message_of(found: Intact, concern: Concern) -> bool:
    """Whether a record is the message of the timer that damage concerns."""
    flags = found.header.flags & (FLAG_SCHEDULE | FLAG_REMAINS)
    if found.header.kind != RecordKind.MESSAGE or flags != FLAG_SCHEDULE or concern.timer is None:
        return False
    message_id = salvage.properties_of(bytes(found.tail)).message_id.decode(errors="replace")
    is_its = message.decode_target(found.body).timer_id == concern.timer.timer_id
    return is_its and concern.message_id in ("", message_id)


def _name(start: int) -> str:
    return f"{LOG_FOLDER}/{start:020d}{SUFFIX}"


def _range(finding: Finding) -> tuple[int, int]:
    assert finding.log_offset is not None, "it is of the log"
    assert finding.log_end is not None, "it is of the log"
    return finding.log_offset, finding.log_end


def _told(finding: Finding, what: str) -> str:
    where = finding.file
    if finding.log_offset is not None:
        where += f" at log offset {finding.log_offset}"
    return f"{where}, {finding.damage.value}: {what}"
