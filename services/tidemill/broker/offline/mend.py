"""Mending a data directory from a backup, segment by segment (ADR 0059). No broker runs on it.

A damaged segment is written again as a whole: the records of the backup's segment, then the store's
own records behind them. It takes its place by a rename, so a crash leaves the old segment or the
new one.

    backup  ████████████│                the backup ends in this segment
    store   ███░██░█████│█████████       damage where the backup has records
    mended  ████████████│█████████

All records that both have in the segment and in the two beside it must be equal. A store that was
restored from the same backup and lived on has other records at the same log offsets.

Behind the backup's records, the store's own must be intact and readable up to the end of the log.
The last record of the mended log must be an intact record of the store. Otherwise acknowledged
messages may have followed the end of the backup, and the segment is not mended unless the operator
accepts their loss. Derived files that a broker may have derived from the damaged log are deleted
first; the next start rebuilds them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar, final

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.floor import decode_gap
from tidemill.broker.engine.layout.record import (
    HEADER,
    PAD,
    PAD_MAGIC,
    RecordHeader,
    RecordKind,
    is_gap,
    is_stub,
    stored_size,
)
from tidemill.broker.engine.store.disk import Disk, DiskFailed
from tidemill.broker.engine.store.segment import FOLDER as LOG_FOLDER
from tidemill.broker.engine.store.segment import HELD, PACK_SUFFIX, PREPARED, SUFFIX
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.offline.backup import Backup
from tidemill.broker.offline.check import check
from tidemill.broker.offline.findings import OF_THE_LOG, Damage, Finding, WorkProgress
from tidemill.broker.offline.log_scan import (
    BrokenRange,
    IntactRecord,
    LogSegment,
    Pad,
    is_cut,
    list_held,
    list_segments,
    read_one,
)
from tidemill.broker.offline.packed_file import open_segment
from tidemill.broker.offline.rebuild import (
    MendReport,
    derived_findings,
    drop,
    kept,
    list_derived,
    sentence,
)
from tidemill.broker.offline.replica_files import read_replica_files
from tidemill.broker.offline.source import FileWindow, Source, salvaging

SLICE_BYTES: Final = 1 << 20  # written at once
ENDLESS: Final = 1 << 62  # a log offset that no log reaches
UNCONFIRMED: Final = (
    "the broker group may not have confirmed it: start the replica, which asks the other replicas;"
    " or empty its data directory, and it is copied again"
)
_UNREADABLE: Final = "copy the store to a sound disk, or restore a backup there"
_ANSWERED: Final = f"an unreadable page may hold acknowledged messages; {_UNREADABLE}"
_DAMAGED_BEHIND: Final = "the store is damaged behind the end of the backup, too"
_END_UNKNOWN: Final = (
    "the mended log would end with the backup at log offset {end}, and nothing in the store shows"
    " that no acknowledged messages followed; use a newer backup, or accept the loss of such"
    " messages with --accept-loss"
)
_SET_ASIDE: Final = {Damage.HELD, Damage.HELD_MISSING}
T = TypeVar("T")
Steps = Generator[WorkProgress, None, T]


class NotMendable(Exception):
    """A segment cannot be mended from this backup; the message says why."""


class _Part(NamedTuple):
    """The bytes of one file that a new segment begins or continues with."""

    source: Source
    name: str
    begin: int
    end: int


@dataclass(slots=True, kw_only=True)
class _NewSegment:
    """A segment to be written: parts of files, and the pad behind them if it ends there."""

    name: str
    size: int
    parts: list[_Part] = field(default_factory=list)
    pad_at: int | None = None


class _Extent(NamedTuple):
    """The intact records of a segment from a byte on."""

    end: int  # the byte behind them, or behind the pad
    is_complete: bool  # they reach the end of the segment


def mend(
    disk: Disk,
    backup: Source,
    timer: TimerConfig | None = None,
    *,
    is_dry: bool,
    accepts_loss: bool = False,
) -> Steps[MendReport]:
    """Mend the damaged segments that the backup has. Yields its progress.

    With `accepts_loss`, the mended log may end with the backup. The caller owns the directory.
    Raises as `check`, NoStore if the backup is not a backup of this store, and DiskFailed.
    """
    return (yield from _Mending(disk, backup, timer, is_dry, accepts_loss).run())


@final
class _Mending:
    """One mend."""

    def __init__(
        self,
        disk: Disk,
        backup: Source,
        timer: TimerConfig | None,
        is_dry: bool,
        accepts_loss: bool,
    ) -> None:
        self._disk = disk
        self._source = salvaging(disk)
        self._backup = Backup(backup)
        self._timer = timer
        self._is_dry = is_dry
        self._accepts_loss = accepts_loss
        self._report = MendReport()
        self._log_end = 0
        self._segments: list[LogSegment] = []
        self._new: dict[int, _NewSegment] = {}  # by log offset
        self._new_held: dict[int, _NewSegment] = {}

    def run(self) -> Steps[MendReport]:
        before = yield from check(self._source, self._timer)
        self._log_end = before.log_end
        self._segments = list_segments(self._disk).segments
        damages = self._mendable(before.findings)
        held = [one for one in before.findings if one.damage in _SET_ASIDE]
        if damages or held:
            yield from self._backup.identify(before)
        self._plan(damages)
        self._report_unreadable(before.findings)
        derived = derived_findings(before.findings)
        report = self._report
        is_log_mendable = not report.left
        self._plan_held(held)
        if report.mended and not self._is_dry:
            self._check_room()
        if not is_log_mendable:
            report.left += kept(derived)
        elif derived or damages:
            names = {one.file for one in derived}
            if damages:
                # Not only those of the mended ranges: after an earlier mend that left damage, the
                # broker may have derived files around a range that is sound by now.
                # Timer files stay: a start that rebuilds them refuses a damaged log.
                # If the mend then fails, the log is still damaged, and the next mend deletes again.
                names |= list_derived(self._disk)
            report.mended += drop(self._disk, names, is_dry=self._is_dry)
        if self._is_dry or not report.mended:
            return report
        yield WorkProgress("mending", 0, 0)
        for segment in [*self._new.values(), *self._new_held.values()]:
            self._write(segment)
        if not report.left:
            yield from self._check_again()
        return report

    def _mendable(self, findings: list[Finding]) -> list[Finding]:
        """Return the damages of the log that a backup may mend; report the others."""
        damages = [one for one in findings if one.damage in OF_THE_LOG]
        strange = [one for one in damages if one.damage is Damage.STRANGE_FILE]
        why = "give it the name that it had, or move it away"
        self._report.left += [sentence(one, why) for one in strange]
        damages = [one for one in damages if one not in strange]
        replica = read_replica_files(self._source)
        if replica.is_replica:
            # The group may have other records there than any backup.
            unsure = [one for one in damages if _range(one)[1] > replica.confirmed]
            self._report.left += [sentence(one, UNCONFIRMED) for one in unsure]
            damages = [one for one in damages if one not in unsure]
        return damages

    def _check_room(self) -> None:
        """Raise DiskFailed if the new segments do not fit, before anything is changed."""
        sizes = {one.name: one.size for one in [*self._segments, *list_held(self._disk)]}
        missing = largest = 0
        for new in [*self._new.values(), *self._new_held.values()]:
            wanted = sum(part.end - part.begin for part in new.parts)
            missing += max(wanted - sizes.get(new.name, 0), 0)
            largest = max(largest, wanted)
        free = self._disk.free_bytes()
        if missing + largest > free:
            raise DiskFailed(
                f"the mend needs {missing + largest} bytes; the disk has {free} free bytes"
            )

    def _check_again(self) -> Steps[None]:
        """Report the damage that is still there."""
        after = yield from check(salvaging(self._disk), self._timer)
        self._report.left += [
            sentence(one, f"{one.detail}; it is still there after the mend")
            for one in after.findings
            if one.damage in OF_THE_LOG | _SET_ASIDE or one.stops_start
        ]

    # ------------------------------------------------------------ which segments

    def _plan(self, damages: list[Finding]) -> None:
        """Plan the segments of the log in which something is damaged or missing."""
        needed_to: dict[int, int] = defaultdict(int)
        starts_of: dict[int, list[int]] = {}
        for number, finding in enumerate(damages):
            begin, end = _range(finding)
            theirs = [one for one in self._backup.segments if one.start < end and begin < one.end]
            is_covered = bool(theirs) and theirs[0].start <= begin and end <= theirs[-1].end
            starts_of[number] = [one.start for one in theirs] if is_covered else []
            for one in theirs:
                needed_to[one.start] = max(needed_to[one.start], min(end, one.end))
        reasons: dict[int, str] = {}
        for start, end in needed_to.items():
            try:
                self._new[start] = self._plan_segment(start, end)
            except NotMendable as error:
                reasons[start] = str(error)
        written: set[int] = set()
        for number, finding in enumerate(damages):
            starts = starts_of[number]
            failed = next((reasons[start] for start in starts if start in reasons), "")
            if not starts:
                failed = "the backup has nothing at this log offset"
            if failed:
                self._report.left.append(sentence(finding, failed))
            else:
                written.update(starts)
                names = ", ".join(self._new[start].name for start in starts)
                self._report.mended.append(sentence(finding, f"{names} taken from the backup"))
        self._new = {start: new for start, new in self._new.items() if start in written}

    def _plan_segment(self, start: int, needed_to: int) -> _NewSegment:
        """Plan a segment of the log, intact at least up to a log offset."""
        theirs = self._backup.find_segment(start)
        assert theirs is not None, "it was found among the backup's segments"
        own = next((one for one in self._segments if one.start == start), None)
        if is_cut(theirs):
            raise NotMendable(f"{theirs.name} of the backup is cut")
        if any(start < one.start < theirs.end for one in self._segments):
            raise NotMendable(f"{theirs.name} of the backup has another size")
        before = [one for one in self._segments if one.start < start]
        behind = [one for one in self._segments if one.start > start]
        compared = sum(map(self._compare, [*before[-1:], *([own] if own else []), *behind[:1]]))
        if not compared and (self._segments or not self._backup.is_same_life):
            raise NotMendable("the backup has no record beside it that could be compared")
        name = f"{LOG_FOLDER}/{start:020d}{SUFFIX}"
        new = self._spliced(name, theirs, own, needed_to=needed_to, log_end=self._log_end)
        if not behind and not self._accepts_loss:
            self._check_last_record(new, theirs, own)
        return new

    def _report_unreadable(self, findings: list[Finding]) -> None:
        """Report unreadable pages of the log: a segment that is written again gets other pages."""
        starts = {one.name: one.start for one in self._segments}
        for finding in findings:
            start = starts.get(finding.file)
            if finding.damage is not Damage.UNREADABLE or start is None:
                continue
            if start in self._new:
                self._report.mended.append(sentence(finding, "written again to other pages"))
            else:
                self._report.left.append(sentence(finding, _UNREADABLE))

    def _plan_held(self, findings: list[Finding]) -> None:
        """Plan segments that were set aside."""
        held = {one.name: one for one in list_held(self._disk)}
        for finding in findings:
            try:
                if finding.damage is Damage.HELD_MISSING:
                    segment = self._plan_missing_held(finding)
                else:
                    segment = self._plan_damaged_held(held[finding.file], finding)
            except NotMendable as error:
                self._report.left.append(sentence(finding, str(error)))
            else:
                what = f"{segment.name} taken from the backup"
                self._report.mended.append(sentence(finding, what))

    def _plan_missing_held(self, finding: Finding) -> _NewSegment:
        theirs = self._backup.find_message(finding)
        if theirs is None:
            raise NotMendable("the backup does not have this message at this log offset")
        if theirs.start not in self._new_held:
            name = f"{LOG_FOLDER}/{theirs.start:020d}{HELD}"
            self._new_held[theirs.start] = self._spliced(name, theirs, None)
        return self._new_held[theirs.start]

    def _plan_damaged_held(self, own: LogSegment, finding: Finding) -> _NewSegment:
        theirs = self._backup.find_segment(own.start)
        if theirs is None or is_cut(theirs):
            raise NotMendable("the backup has no whole segment at this log offset")
        if own.start not in self._new_held:
            if not self._compare(own):
                raise NotMendable("the backup has no record beside it that could be compared")
            needed_to = _range(finding)[1]
            self._new_held[own.start] = self._spliced(own.name, theirs, own, needed_to=needed_to)
        return self._new_held[own.start]

    # ------------------------------------------------------------ one segment

    def _spliced(
        self,
        name: str,
        theirs: LogSegment,
        own: LogSegment | None,
        *,
        needed_to: int = 0,
        log_end: int = ENDLESS,
    ) -> _NewSegment:
        """Put the store's own records behind those of the backup; the log ends at `log_end`.

        A segment that was set aside has no such end: a pad ends it.
        """
        self._check_gaps(theirs)
        extent = _extent(self._backup.source, theirs, 0)
        new = _NewSegment(name=name, size=theirs.size)
        new.parts.append(_Part(self._backup.source, theirs.name, 0, extent.end))
        if not extent.is_complete and own is not None and own.size > extent.end:
            if own.size < theirs.size:
                # The last intact record before the cut looks like the end of the segment.
                raise NotMendable(_DAMAGED_BEHIND)
            begin = extent.end
            extent = _extent(self._source, own, begin)
            new.parts.append(_Part(self._source, own.name, begin, extent.end))
            self._check_end(own, extent, log_end)
        elif not extent.is_complete and log_end == ENDLESS:
            new.pad_at = extent.end if theirs.size - extent.end >= PAD.size else None
        reach = theirs.size if extent.is_complete else extent.end
        if theirs.start + reach < needed_to:
            raise NotMendable("the backup is damaged there, or ends before")
        return new

    def _check_gaps(self, theirs: LogSegment) -> None:
        """Raise NotMendable if the log does not state what the backup's state floor relies on."""
        for found in _intact(self._backup.source, theirs):
            if is_gap(found.header) and decode_gap(found.body).stated_before > self._log_end:
                raise NotMendable("the backup is newer: it lacks records that this log still needs")

    def _check_end(self, own: LogSegment, extent: _Extent, log_end: int) -> None:
        """Raise NotMendable if the store may have other records behind its intact ones."""
        if extent.is_complete:
            return
        if own.start + extent.end < log_end:
            raise NotMendable(_DAMAGED_BEHIND)
        for name, _, end, _ in self._source.unreadable:
            if name == own.name and end > extent.end:
                raise NotMendable(_ANSWERED)

    def _check_last_record(
        self, new: _NewSegment, theirs: LogSegment, own: LogSegment | None
    ) -> None:
        """Raise NotMendable if the last record of the mended log is not intact in the store."""
        last = new.parts[-1]
        if last.source is self._source and last.end > last.begin:
            return  # The store's own records end the log.
        end = theirs.start + last.end
        ends = (end, end - PAD.size)  # A pad may stand behind the last record.
        if (
            own is None
            or own.size != theirs.size
            or all(one.end not in ends for one in _intact(self._source, own))
        ):
            raise NotMendable(_END_UNKNOWN.format(end=end))

    def _compare(self, own: LogSegment) -> int:
        """Return how many records a segment has in common with the backup.

        Raises NotMendable if another record stands in its place there.
        """
        theirs, count = self._backup.find_segment(own.start), 0
        if theirs is None:
            return 0
        end = theirs.start + _extent(self._backup.source, theirs, 0).end
        known: dict[int, bytes] = {}
        gap_ends: dict[int, int] = {}  # by the begin of a gap
        for found in _intact(self._backup.source, theirs):
            if found.log_offset >= end:
                break
            if is_gap(found.header):
                gap_ends[found.log_offset] = found.end
            else:
                known[found.log_offset] = _stubbed(found.data)
        begins = list(gap_ends)
        for found in _intact(self._source, own):
            at = found.log_offset
            if at >= end:
                break
            if is_gap(found.header):
                continue  # The backup may have the records that are missing here.
            number = bisect_right(begins, at) - 1
            if at not in known and number >= 0 and at < gap_ends[begins[number]]:
                continue
            if known.get(at) != _stubbed(found.data):
                raise NotMendable("the backup has other records there: its store lived on")
            count += 1
        return count

    def _write(self, new: _NewSegment) -> None:
        """Write a segment under another name, make it durable, and rename it."""
        disk, temporary = self._disk, f"{LOG_FOLDER}/{PREPARED}"
        if temporary in disk.names(LOG_FOLDER):
            disk.delete(temporary)
        file = disk.open(temporary, create=True)
        file.resize(new.size)
        for source, name, begin, end in new.parts:
            opened = open_segment(source, name)
            for at in range(begin, end, SLICE_BYTES):
                file.write_at(at, [opened.read_at(at, min(SLICE_BYTES, end - at))])
            opened.close()
        if new.pad_at is not None:
            file.write_at(new.pad_at, [PAD.pack(PAD_MAGIC, new.size - new.pad_at)])
        file.sync()
        file.close()
        disk.rename(temporary, new.name)
        disk.folder(LOG_FOLDER).sync()
        packed = new.name.removesuffix(SUFFIX) + PACK_SUFFIX
        if packed in disk.names(LOG_FOLDER):
            # Behind the segment: until then a start uses the pack, as before the mend.
            disk.delete(packed)
            disk.folder(LOG_FOLDER).sync()


def _stubbed(data: memoryview) -> bytes:
    """Return the stub of a message, and other records unchanged."""
    header = RecordHeader._make(HEADER.unpack_from(data))
    size = stored_size(data, 0, header)
    if header.kind == RecordKind.MESSAGE and not is_stub(header):
        with suppress(ValueError):
            return message.encode_stub(data)
    return bytes(data[:size])


def _extent(source: Source, segment: LogSegment, begin: int) -> _Extent:
    """Return how far the records of a segment are intact from byte `begin` on."""
    file = open_segment(source, segment.name)
    try:
        window, at = FileWindow(file), begin
        while isinstance(found := read_one(window, segment, at), IntactRecord):
            at = found.end - segment.start
    finally:
        file.close()
    if isinstance(found, Pad):
        return _Extent(at + PAD.size, is_complete=True)
    return _Extent(at, is_complete=found is None)


def _intact(source: Source, segment: LogSegment) -> Iterator[IntactRecord]:
    """Yield the intact records of a segment, past damaged ones."""
    file = open_segment(source, segment.name)
    try:
        window, at = FileWindow(file), 0
        while isinstance(found := read_one(window, segment, at), IntactRecord | BrokenRange):
            if isinstance(found, IntactRecord):
                yield found
            at = found.end - segment.start
    finally:
        file.close()


def _range(finding: Finding) -> tuple[int, int]:
    assert finding.log_offset is not None, "it is of the log"
    assert finding.log_end is not None, "it is of the log"
    return finding.log_offset, finding.log_end
