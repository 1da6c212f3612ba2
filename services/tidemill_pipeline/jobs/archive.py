"""J1: topics into an archive, exactly once: what is new is pulled, written, and committed.

    append   pull what is new, write it, commit one entry of the manifest; until caught up
    commit   what `archive_verify` and `archive_upkeep` change of the same archive afterwards

The manifest is the only thing that is remembered (ADR 0050): where a batch begins is where the
manifest ends, so a job that is killed anywhere is simply started again.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from tidemill_pipeline import schema as columns
from tidemill_pipeline.archive.manifest import (
    Archive,
    ArchivedRange,
    ClosedRanges,
    DataFile,
    ManifestEntry,
    QueueKey,
    QueueMarks,
    data_file,
    renumbered,
)
from tidemill_pipeline.archive.store import ArchiveStore, no_archive
from tidemill_pipeline.archive.tasks import (
    ArchiveTask,
    Runner,
    foreign_queue,
    lost_before_archived,
    shorter,
)
from tidemill_pipeline.client import connect
from tidemill_pipeline.cluster_state import ClusterState
from tidemill_pipeline.errors import AnotherWriter, ArchiveError, BadOption, DataLoss
from tidemill_pipeline.jobs.gate import Gate
from tidemill_pipeline.jobs.inputs import Inputs
from tidemill_pipeline.offsets import QueueEnds, SourceQueue, SourceRange, split, take_rows
from tidemill_pipeline.options import EARLIEST, LATEST, ReadBoundary, SourceOptions
from tidemill_pipeline.pulling import TAKEN
from tidemill_pipeline.source.topics import meant, names_of

BATCH_ROWS: Final = 1_000_000  # of one commit: about a minute of two cores, and what a kill repeats
TASK_ROWS: Final = 100_000  # of one task, so that a few large queues keep all cores at work
COMMITS_MAX: Final = 10  # attempts to take a number while others take them
_DELETED: Final = "the topic was deleted, or the store of the broker group made anew"

Progress = Callable[["Done"], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How far a run is, after each commit."""

    rows: int
    bytes: int
    batches: int
    waiting: int  # rows that are there and not archived yet
    stored_to_ms: int = 0  # when the last archived message was stored; 0: none is
    by_topic: Mapping[str, int] = field(default_factory=dict)  # rows of the last batch
    # At the end: what may have been lost with queues that are there no more, in sentences, once.
    over: tuple[str, ...] = ()
    is_over_allowed: bool = True  # each of them was said to be right beforehand
    wrong: tuple[str, ...] = ()  # At the end: with which queues it could not go on, in sentences.


def check_options(options: SourceOptions) -> None:
    """Raise BadOption for what means something to a read, and cannot to an archive.

    It has whole queues: who reads goes by that, and a verification compares it with that.
    """
    asked = {
        "startingOffsets or startingTimestamp": options.start != ReadBoundary(everywhere=EARLIEST),
        "endingOffsets or endingTimestamp": options.end != ReadBoundary(everywhere=LATEST),
        "filter": options.filter != "*",
        "includeBody": not options.includes_body,
    }
    found = [name for name, is_asked in asked.items() if is_asked]
    if found:
        raise BadOption(
            "an archive has queues from their first message on and whole, without"
            f" {' and '.join(found)}; choose topics instead, or when it is read"
        )


@final
class ArchiveJob:
    """One run over one archive."""

    def __init__(
        self,
        options: SourceOptions,
        run_tasks: Runner,
        *,
        now_ms: Callable[[], int],
        store: ArchiveStore | None = None,
        batch_rows: int = BATCH_ROWS,
        task_rows: int = TASK_ROWS,
        cores: int = 2,
        gate_group: str = "",
        store_is_gone: bool = False,
    ) -> None:
        """With a `gate_group` brokers keep what is not sealed, by its pull offsets (ADR 0053).

        `store_is_gone`: an operator's word that it is for good where a broker group has another
        store than the one that was archived, or one that was restored, or is not there, and that
        not the wrong cluster is asked. Raises BadOption.
        """
        check_options(options)
        self.store_is_gone = store_is_gone
        self.gate = Gate(options, gate_group)
        self.options = options
        self.run_tasks = run_tasks
        self.now_ms = now_ms
        self.store = store or ArchiveStore(options.archive_path)
        self._batch_rows, self._task_rows, self._cores = batch_rows, task_rows, cores
        self._was_there = False
        # With which queues a run cannot go on, and why; empty: its broker group has another one.
        self._stuck: dict[SourceQueue, str] = {}
        self.run = f"{now_ms():x}-{secrets.token_hex(4)}"
        self.inputs = Inputs()

    def archive(self) -> Archive:
        """Return what the manifest says now. Raises ArchiveError where it was there, and is away.

        What a folder is mounted on may be away for a moment: another archive would begin below it.
        """
        archive = self.store.existing() if self._was_there else self.store.archive()
        self._was_there = archive.next_number > 0
        return archive

    # ------------------------------------------------------------ append

    def append(self, progress: Progress = lambda _: None) -> Done:
        """Archive what is there now, in batches, and say how much that was.

        What keeps one queue from being archived does not keep the others: it is told at the end.
        """
        self._stuck = {}
        cluster = self.look()
        self.check_known(cluster)
        self._stuck |= self.gate.hold(self.archive(), cluster)
        self._leave_out_restored(cluster)
        target = dict(cluster.queues)
        done = Done(rows=0, bytes=0, batches=0, waiting=0, stored_to_ms=self._stored_to_ms())
        while True:
            tasks, lost = self.plan(self.archive(), cluster, target)
            if not tasks and not lost:
                over, is_allowed = self._write_over(cluster)
                wrong = tuple(sorted(filter(None, self._stuck.values())))
                return replace(
                    done,
                    waiting=self._waiting(target),
                    over=over,
                    is_over_allowed=is_allowed,
                    wrong=wrong,
                )
            ranges, files, failed = _made(self.run_tasks(self.options, tasks))
            self._stuck |= failed
            if not ranges and not lost:
                continue
            self.commit("append", ranges=(*lost, *ranges), files=files)
            for each in (*lost, *ranges):
                self.inputs.note(each.key.queue, each.start, each.end)
            done = Done(
                rows=done.rows + sum(each.rows for each in ranges),
                bytes=done.bytes + sum(each.bytes for each in ranges),
                batches=done.batches + 1,
                waiting=self._waiting(target),
                stored_to_ms=max([done.stored_to_ms, *(each.max_store_ms for each in ranges)]),
                by_topic=_by_topic(ranges),
            )
            progress(done)
            # A topic may have been deleted, or made anew, since.
            cluster = self.look()
            self._leave_out_restored(cluster)

    def check_known(self, cluster: ClusterState) -> None:
        """Raise BadOption for a topic that is asked for by name, and is nowhere."""
        known = {queue.topic for queue in cluster.queues}
        known |= {key.topic for key in self.archive().queues}
        missing = sorted(set(self.options.topics.names) - known)
        if missing:
            everything = known | names_of(connect(self.options.connection))
            raise BadOption(
                f"there is no topic {', '.join(missing)}, and none in the archive"
                f"{meant(missing[0], everything)}"
            )

    def _leave_out_restored(self, cluster: ClusterState) -> None:
        """Leave out broker groups of which a queue ends before what is archived of it.

        Their others may have got as far again, and it would not be seen that they do not follow.
        """
        archive = self.archive()
        restored = set()
        for queue, ends in sorted(cluster.queues.items()):
            archived = archive.queues.get(self.key_of(queue))
            if archived is not None and ends.max_offset < archived.end:
                error = foreign_queue(queue, shorter(archived, ends))
                self._stuck[queue] = f"{error}. Nothing of {queue.broker} is archived meanwhile"
                restored.add(queue.broker)
        for queue in cluster.queues:
            if queue.broker in restored:
                self._stuck.setdefault(queue, "")

    def look(self) -> ClusterState:
        """Ask where the queues end; all broker groups must answer, or what is new is not known."""
        return connect(self.options.connection).whole_cluster(self.options.topics)

    def plan(
        self, archive: Archive, cluster: ClusterState, target: Mapping[SourceQueue, QueueEnds]
    ) -> tuple[list[ArchiveTask], list[ArchivedRange]]:
        """Return the tasks of the next batch, and ranges that were gone before it.

        `target`: what is to be archived, as it was when that began.
        """
        starts, lost = {}, []
        for queue, ends in sorted(target.items()):
            if queue in self._stuck:
                continue
            key = self.key_of(queue)
            begin = self._begin(archive, ends)
            now = cluster.queues.get(queue)
            least, why = (ends.max_offset, _DELETED) if now is None else (now.min_offset, TAKEN)
            if begin < least:
                try:
                    lost.append(self._lost(key, begin, least, why))
                except DataLoss as error:
                    self._stuck[queue] = str(error)
                    continue
            starts[queue] = max(begin, least)
        until = take_rows(
            starts, {queue: target[queue].max_offset for queue in starts}, self._batch_rows
        )
        ranges = [
            SourceRange(queue=queue, start=start, end=until[queue])
            for queue, start in sorted(starts.items())
            if until[queue] > start
        ]
        parts = split(ranges, rows_per_partition=self._task_rows, partitions_min=self._cores)
        tasks = []
        for part in parts:
            key = self.key_of(part.queue)
            archived = archive.queues.get(key)
            before = None if archived is None else archived.last_before(part.start)
            task = ArchiveTask(
                work="append",
                run=self.run,
                key=key,
                start=part.start,
                end=part.end,
                expected=before,
            )
            tasks.append(task)
        return tasks, lost

    def key_of(self, queue: SourceQueue) -> QueueKey:
        """Return the name of a queue in the archive."""
        return QueueKey.of(self.options.connection.namespace, queue)

    def _begin(self, archive: Archive, ends: QueueEnds) -> int:
        """Return where the next batch of a queue begins; the first has all of it."""
        archived = archive.queues.get(self.key_of(ends.queue))
        if archived is not None:
            return archived.end
        return ends.min_offset

    def _lost(self, key: QueueKey, start: int, end: int, why: str) -> ArchivedRange:
        if self.options.fails_on_data_loss:
            raise lost_before_archived(key.queue, start, end, why)
        return ArchivedRange(
            key=key,
            start=start,
            end=end,
            rows=0,
            bytes=0,
            min_store_ms=0,
            max_store_ms=0,
            crc_xor=0,
            lost=end - start,
        )

    def _write_over(self, cluster: ClusterState) -> tuple[tuple[str, ...], bool]:
        """Write down which queues are there no more, and say so of those of which it is new.

        Another store, or none, is what the wrong cluster has, too: that takes an operator's word.
        Returns whether all of it was allowed, too.
        """
        told, over, is_allowed = [], [], True
        for key, archived in sorted(self.archive().queues.items()):
            is_asked = (
                key.namespace == self.options.connection.namespace
                and self.options.topics.have(key.topic)
            )
            if not is_asked or key.queue in cluster.queues or archived.has_ended:
                continue
            nobody = nobody_has(key, cluster)
            lost = f"what came behind offset {archived.end}, if anything did, is lost"
            is_allowed &= self.store_is_gone if nobody else not self.options.fails_on_data_loss
            if nobody and not self.store_is_gone:
                told.append(
                    f"{key}: {nobody}. If that is for good, {lost}: --store-is-gone says so"
                )
            else:
                why = nobody or "its topic was deleted"
                told.append(f"{key} is not there any more, {why}; {lost}")
                over.append((key, archived.end, archived.end))
        if over:
            self.commit("append", closed=tuple(over))
        return tuple(told), is_allowed

    def _waiting(self, target: Mapping[SourceQueue, QueueEnds]) -> int:
        archive = self.archive()
        return sum(max(0, ends.max_offset - self._begin(archive, ends)) for ends in target.values())

    def _stored_to_ms(self) -> int:
        """Return when the last archived message was stored; 0: there is none."""
        last = (queue.ranges[-1] for queue in self.archive().queues.values() if queue.ranges)
        return max((each.max_store_ms for each in last), default=0)

    # ------------------------------------------------------------ the manifest

    @property
    def has_entries(self) -> bool:
        """Say whether anything was ever archived."""
        return self.store.has_entries

    def check_there(self) -> None:
        """Raise BadOption where nothing was ever archived."""
        if not self.has_entries:
            raise BadOption(no_archive(self.store.path))

    def commit(
        self,
        kind: Any,
        *,
        ranges: Iterable[ArchivedRange] = (),
        files: Iterable[DataFile] = (),
        removed: tuple[str, ...] = (),
        marks: QueueMarks = (),
        closed: ClosedRanges = (),
    ) -> None:
        """Commit an entry behind those that are there, if it still follows them.

        Whoever compacts or seals beside an archiver does not disturb it; a second archiver does.
        """
        entry = ManifestEntry(
            number=0,
            kind=kind,
            at_ms=self.now_ms(),
            run=self.run,
            schema_version=columns.VERSION,
            ranges=tuple(ranges),
            files=tuple(files),
            removed=removed,
            marks=marks,
            closed=closed,
        )
        for attempt in range(COMMITS_MAX):
            archive = self.archive()
            numbered = renumbered(entry, archive.next_number)
            try:
                archive.check(numbered)
            except ArchiveError as error:
                raise AnotherWriter(
                    f"another one changed the archive meanwhile ({error}); run one archiver at a"
                    " time, and start this again"
                ) from error
            try:
                self.store.commit(numbered)
            except AnotherWriter:
                if attempt == COMMITS_MAX - 1:
                    raise
            else:
                return


def nobody_has(key: QueueKey, cluster: ClusterState) -> str:
    """Return why nobody can be asked for what a queue had; empty: its broker group can."""
    log = cluster.logs.get(key.broker)
    if log is None:
        return f"there is no broker group {key.broker}"
    if log.log_id != key.queue.incarnation.log_id:
        return f"{key.broker} has another store than the one that was archived"
    return ""


def _by_topic(ranges: Iterable[ArchivedRange]) -> dict[str, int]:
    rows: Counter[str] = Counter()
    for each in ranges:
        rows[each.key.topic] += each.rows
    return dict(rows)


def _made(
    answers: Iterable[dict[str, Any]],
) -> tuple[list[ArchivedRange], list[DataFile], dict[SourceQueue, str]]:
    """Return what tasks made, in the order in which it follows, and with which queues they failed.

    What was made of a queue behind a task that failed does not follow, and does not count.
    """
    made: list[tuple[ArchivedRange, list[DataFile]]] = []
    failed: dict[QueueKey, tuple[int, str]] = {}
    for answer in answers:
        if answer.get("wrong"):
            key = QueueKey(*answer["key"])
            at = (answer["start"], answer["wrong"])
            failed[key] = min(at, failed.get(key, at))
        else:
            files = [data_file(each) for each in answer["files"]]
            made.append((range_of(answer["range"]), files))
    counts = [
        (each, files)
        for each, files in made
        if each.key not in failed or each.start < failed[each.key][0]
    ]
    return (
        sorted((each for each, _ in counts), key=lambda each: (each.key, each.start)),
        [file for _, files in counts for file in files],
        {key.queue: why for key, (_, why) in failed.items()},
    )


def range_of(found: dict[str, Any]) -> ArchivedRange:
    """Return a range of which a task answered."""
    return ArchivedRange(**{**found, "key": QueueKey(*found["key"])})
