"""Checking every byte of a data directory, and naming the messages that damage affects.

Nothing is changed, and a broker may run on the directory. A file that it deletes or replaces
meanwhile is not damaged, so each damage is looked up a second time by the name of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar, final

from tidemill.broker.engine.layout import block_file, record, snapshot, store_checkpoint
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.store_checkpoint import StoreCheckpoint
from tidemill.broker.engine.store.segment import FOLDER as LOG_FOLDER
from tidemill.broker.engine.store.segment import SUFFIX
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.upkeep.checkpoint import CHECKPOINT_FILE
from tidemill.broker.offline import block_files, check_timers
from tidemill.broker.offline.affected_messages import AffectedMessageCollector
from tidemill.broker.offline.block_files import BlockDamage, FileRange
from tidemill.broker.offline.findings import OF_THE_LOG, Damage, Finding, WorkProgress
from tidemill.broker.offline.log_scan import (
    BrokenRange,
    IntactRecord,
    LogScan,
    LogSegment,
    is_cut,
    list_held,
    list_segments,
    read_one,
    walk_held,
)
from tidemill.broker.offline.names import TopicNames
from tidemill.broker.offline.packed_file import open_segment
from tidemill.broker.offline.replica_files import find_damage, read_replica_files
from tidemill.broker.offline.source import FileWindow, Source, salvaging

NO_START = {Damage.SEGMENT_MISSING, Damage.SEGMENT_CUT}  # at any log offset
PROGRESS_BYTES = 4 << 20  # between two reports of progress
T = TypeVar("T")
Steps = Generator[WorkProgress, None, T]


class NoStore(Exception):
    """There is no store to check; the message says why."""


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """The result of a check."""

    findings: list[Finding] = field(default_factory=list)
    log_from: int = 0
    log_end: int = 0
    record_count: int = 0
    derived_offset: int = 0
    epoch: int = 0
    names: TopicNames = field(default_factory=TopicNames)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged. Derived files may be missing, such as after a mend."""
        return all(one.is_missing for one in self.findings)


def check(source: Source, timer: TimerConfig | None = None) -> Steps[CheckReport]:
    """Check a store. Yields its progress.

    Raises NoStore; UnknownRecord for records of a newer version; OSError if files cannot be opened;
    ReadFailed if too many pages are unreadable.
    """
    return (yield from _Check(source, timer or TimerConfig()).run())


@final
class _Check:
    """One check."""

    def __init__(self, source: Source, timer: TimerConfig) -> None:
        self._source = salvaging(source)
        self._timer = timer
        self._report = CheckReport()
        self._names = self._report.names
        self._replica = read_replica_files(self._source)
        self._affected = AffectedMessageCollector(self._source, self._names)
        self._broken: list[tuple[Damage, BrokenRange]] = []
        self._usable: dict[str, list[FileRange]] = {kind.folder: [] for kind in block_files.KINDS}
        self._snapshots: list[FileRange] = []

    def run(self) -> Steps[CheckReport]:
        source, report = self._source, self._report
        before = source.read(CHECKPOINT_FILE)
        folder = list_segments(source)
        if before is None and not folder.segments and not folder.strange:
            raise NoStore("there is no store here: no log and no checkpoint file")
        checkpoint = store_checkpoint.find(before)
        # A replica writes its first checkpoint after some tens of megabytes.
        if checkpoint is None and not (before is None and self._replica.is_replica):
            why = "the file is missing" if before is None else "checksum mismatch"
            self._add(Damage.CHECKPOINT, CHECKPOINT_FILE, 0, len(before or b""), why)
        for name in folder.strange:
            self._add(
                Damage.STRANGE_FILE, name, 0, 0, "its name is not a log offset", stops_start=True
            )
        # Read again: the broker notes there that it drops a segment before it deletes the file.
        now = store_checkpoint.find(source.read(CHECKPOINT_FILE)) or checkpoint
        segments = self._without_unused(folder.segments)
        self._check_shape(segments, now)
        report.findings += find_damage(source)
        held = list_held(source)
        yield from self._scan(segments, checkpoint)
        self._check_held()
        # A file that existed before may be unneeded by now.
        self._find_missing_held(segments, [*held, *list_held(source)])
        for kind in block_files.KINDS:
            yield from self._check_files(kind)
        self._check_chains(checkpoint)
        yield WorkProgress("timers", 0, 0)
        timers = self._check_timers()
        self._add_log_findings(timers)
        self._add_unreadable(timers)
        report.findings.sort(key=lambda one: (one.damage not in OF_THE_LOG, one.file, one.position))
        return report

    def _add(
        self,
        damage: Damage,
        file: str,
        position: int,
        size: int,
        detail: str,
        *,
        stops_start: bool = False,
        is_missing: bool = False,
    ) -> None:
        self._report.findings.append(
            Finding(
                damage=damage,
                file=file,
                position=position,
                size=size,
                detail=detail,
                stops_start=stops_start,
                is_missing=is_missing,
            )
        )

    # ------------------------------------------------------------ the log

    def _without_unused(self, segments: list[LogSegment]) -> list[LogSegment]:
        """Omit unused files behind a gap: a start deletes them."""
        kept: list[LogSegment] = []
        for segment in segments:
            if kept and kept[-1].end != segment.start and self._is_unused(segment):
                continue
            kept.append(segment)
        return kept

    def _is_unused(self, segment: LogSegment) -> bool:
        file = open_segment(self._source, segment.name)
        try:
            data = FileWindow(file).record(0)
        finally:
            file.close()
        return record.find_head(data, 0, log_offset=LogOffset(segment.start)) is None

    def _check_shape(self, segments: list[LogSegment], checkpoint: StoreCheckpoint | None) -> None:
        """Find missing and cut files of the log."""
        if checkpoint is not None and (not segments or segments[0].start > checkpoint.min_offset):
            begin = checkpoint.min_offset
            end = segments[0].start if segments else max(checkpoint.durable_offset, begin + 1)
            self._add_missing(begin, end)
        for segment, following in zip_longest(segments, segments[1:]):
            end = following.start if following else segment.end
            if is_cut(segment):
                why = f"it has {segment.size} bytes"
                self._add_damage(
                    Damage.SEGMENT_CUT, BrokenRange(segment, segment.end, end, why, None, b"")
                )
            elif end != segment.end:
                self._add_missing(segment.end, end)

    def _add_missing(self, begin: int, end: int) -> None:
        segment = LogSegment(f"{LOG_FOLDER}/{begin:020d}{SUFFIX}", begin, 0)
        why = f"log offsets {begin} to {end} are missing"
        self._add_damage(Damage.SEGMENT_MISSING, BrokenRange(segment, begin, end, why, None, b""))

    def _add_damage(self, damage: Damage, broken: BrokenRange) -> None:
        if self._replica.cut is not None and broken.log_offset >= self._replica.cut:
            return  # A crash interrupted a cut there. The next start repeats it.
        self._broken.append((damage, broken))
        self._affected.add_damage(broken)

    def _scan(self, segments: list[LogSegment], checkpoint: StoreCheckpoint | None) -> Steps[None]:
        report, durable_offset = self._report, self._replica.durable
        durable_offset = max(durable_offset, checkpoint.durable_offset if checkpoint else 0)
        report.epoch = checkpoint.epoch if checkpoint else 0
        if not segments:
            return
        report.log_from = segments[0].start
        total = sum(segment.size for segment in segments)
        scan = LogScan(self._source, segments, begin=0, durable_offset=durable_offset)
        reported = 0
        for found in scan.walk():
            if found.log_offset - report.log_from - reported >= PROGRESS_BYTES:
                reported = found.log_offset - report.log_from
                yield WorkProgress("log", reported, total)
            if isinstance(found, BrokenRange):
                if found.segment.name in self._source.names(LOG_FOLDER):
                    self._add_damage(Damage.RECORD if found.header else Damage.HOLE, found)
                continue
            report.record_count += 1
            report.epoch = max(report.epoch, found.header.epoch)
            self._names.learn_record(found)
            if found.header.kind == RecordKind.MESSAGE:
                self._affected.add_message(found)
            elif found.header.kind == RecordKind.TIMER:
                self._affected.add_control(found)
        cut = self._replica.cut
        report.log_end = scan.end if cut is None else min(scan.end, cut)
        if scan.end < durable_offset:
            self._add_missing(scan.end, durable_offset)

    def _check_held(self) -> None:
        """Check the segments that were set aside; the log names their timers."""
        for segment in list_held(self._source):
            for broken in _twice(lambda segment=segment: walk_held(self._source, segment)):  # type: ignore[misc]  # as below
                self._report.findings.append(
                    Finding(
                        damage=Damage.HELD,
                        file=segment.name,
                        position=broken.log_offset - segment.start,
                        size=broken.end - broken.log_offset,
                        log_offset=broken.log_offset,
                        log_end=broken.end,
                        detail=broken.why,
                        affected=tuple(self._affected.of_held(broken)),
                    )
                )

    def _find_missing_held(self, segments: list[LogSegment], held: list[LogSegment]) -> None:
        """Find originals of timers that are in no segment that was set aside.

        If a file would have one at its full length, that file was cut.
        """
        size = max([one.size for one in [*segments, *held]], default=0)
        for original, affected in self._affected.find_missing_originals(self._report.log_from):
            if any(self._is_known_in(one, original) for one in held):
                continue
            is_near = [one for one in held if one.start <= original < one.start + size]
            before = max(is_near, default=None)
            self._report.findings.append(
                Finding(
                    damage=Damage.HELD_MISSING,
                    file=before.name if before else LOG_FOLDER,
                    position=original - before.start if before else 0,
                    size=0,
                    log_offset=original,
                    log_end=original + 1,
                    detail=f"no file has log offset {original}",
                    affected=(affected,),
                )
            )

    def _is_known_in(self, segment: LogSegment, log_offset: int) -> bool:
        """Whether a held segment has a record there, or its damage was found."""
        if not segment.start <= log_offset < segment.end:
            return False
        try:
            file = open_segment(self._source, segment.name)
        except FileNotFoundError:
            return True  # It is unneeded by now.
        found = read_one(FileWindow(file), segment, log_offset - segment.start)
        file.close()
        return isinstance(found, IntactRecord) or any(
            one.file == segment.name
            and one.log_offset is not None
            and one.log_end is not None
            and one.log_offset <= log_offset < one.log_end
            for one in self._report.findings
        )

    # ------------------------------------------------------------ queues, index, snapshots

    def _check_files(self, kind: block_files.BlockFileKind) -> Steps[None]:
        for file in block_files.list_files(self._source, kind):
            yield WorkProgress(kind.folder, 0, 0)
            damages = _twice(lambda file=file: self._walk_file(kind, file))  # type: ignore[misc]  # mypy cannot infer a lambda's default.
            for damage in damages:
                self._add(kind.damage, file.name, *damage)
            if not any(damage.position < block_file.HEADER_SIZE for damage in damages):
                self._usable[kind.folder].append(file)
            if kind is block_files.SNAPSHOTS and not damages:
                self._snapshots.append(file)

    def _walk_file(self, kind: block_files.BlockFileKind, file: FileRange) -> list[BlockDamage]:
        """Return the damage of a file; none if the file does not exist."""
        damages = []
        try:
            for one in block_files.walk(self._source, kind, file):
                if isinstance(one, BlockDamage):
                    damages.append(one)
                elif kind is block_files.QUEUES:
                    self._affected.add_queue_block(one.row, one.data)
                elif (
                    kind is block_files.SNAPSHOTS
                    and one.row.key_1 == snapshot.SnapshotSection.CATALOG
                ):
                    for item in snapshot.decode_items(one.data):
                        self._names.learn(item)
        except FileNotFoundError:
            return []
        return damages

    def _check_chains(self, checkpoint: StoreCheckpoint | None) -> None:
        """Find missing files up to the derived offset of the checkpoint file."""
        wanted = checkpoint.derived_offset if checkpoint else 0
        for kind in (block_files.QUEUES, block_files.INDEX):
            damaged = {one.file for one in self._report.findings}
            if any(name in damaged for name in self._source.names(kind.folder)):
                continue
            # Listed twice: a broker may have replaced two files by one.
            reach = max(self._reach(kind), self._reach(kind))
            if reach < wanted:
                why = f"no file continues at log offset {reach}, up to {wanted}"
                file = f"{kind.folder}/{reach:020d}-"
                self._add(kind.damage, file, 0, 0, why, is_missing=True)

    def _reach(self, kind: block_files.BlockFileKind) -> int:
        files = block_files.list_files(self._source, kind)
        # In this order: a segment is dropped before its derived files.
        segments = list_segments(self._source).segments
        low = segments[0].start if segments else self._report.log_from
        return block_files.reach(files, min_offset=max(low, self._report.log_from))

    # ------------------------------------------------------------ timers, and the verdict

    def _check_timers(self) -> list[check_timers.TimerDamage]:
        found = _twice(
            lambda: check_timers.find_damage(self._source, self._timer, self._names.store_uuid)
        )
        for one in found:
            self._add(*one[:5], is_missing=one.is_missing)
        return found

    def _add_log_findings(self, timers: list[check_timers.TimerDamage]) -> None:
        """Add the damage of the log, its messages, and whether a start must read it."""
        report = self._report
        replay_from = self._replay_from(timers)
        for damage, broken in self._broken:
            detail = broken.why
            if broken.header is not None:
                detail = f"{detail} in a record of kind {RecordKind(broken.header.kind).name}"
            report.findings.append(
                Finding(
                    damage=damage,
                    file=broken.segment.name,
                    position=broken.log_offset - broken.segment.start,
                    size=broken.end - broken.log_offset,
                    log_offset=broken.log_offset,
                    log_end=broken.end,
                    detail=detail,
                    affected=tuple(self._affected.of_log(broken)),
                    stops_start=damage in NO_START or broken.end > replay_from,
                )
            )

    def _add_unreadable(self, timers: list[check_timers.TimerDamage]) -> None:
        """Add unreadable pages; a start reads the log from its replay offset on."""
        replay_from = self._replay_from(timers)
        starts = {one.name: one.start for one in list_segments(self._source).segments}
        for name, begin, end, why in self._source.unreadable:
            is_replayed = name in starts and starts[name] + end > replay_from
            self._add(Damage.UNREADABLE, name, begin, end - begin, why, stops_start=is_replayed)

    def _replay_from(self, timers: list[check_timers.TimerDamage]) -> int:
        """Return the log offset from which the next start replays the log."""
        report = self._report
        _, _, derived = block_files.best_chains(
            self._usable[block_files.QUEUES.folder],
            self._usable[block_files.INDEX.folder],
            min_offset=report.log_from,
            end=report.log_end,
        )
        report.derived_offset = derived
        if any(one.damage is Damage.CHECKPOINT for one in report.findings):
            derived = 0
        begins = [one.from_offset for one in self._snapshots]
        covered = max((b for b in begins if report.log_from <= b <= derived), default=0)
        timers_from = report.log_end
        if self._names.timer_topic_id is not None:
            checkpoint = check_timers.newest_checkpoint(self._source)
            is_table_sound = not any(one.damage is Damage.TIMER_TABLE for one in timers)
            timers_from = checkpoint.replay_from if checkpoint and is_table_sound else 0
        return max(min(derived, covered, timers_from), report.log_from)


def _twice(look: Callable[[], Iterable[T]]) -> list[T]:
    """Return the items that a first look finds, and a second one too."""
    first = list(look())
    if not first:
        return first
    second = list(look())
    return [one for one in second if one in first]
