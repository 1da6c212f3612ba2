"""J1: archive topics exactly once.

    append   pull new messages, write files, commit one manifest entry; repeat until caught up
    commit   commit a manifest entry; `archive_verify` and `archive_upkeep` use it as well

The manifest is the only state (ADR 0050). A batch begins where the manifest ends, so a killed job
is simply started again.
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
from tidemill_pipeline.client import connect, ordinary_topics
from tidemill_pipeline.cluster_state import ClusterState
from tidemill_pipeline.errors import AnotherWriter, ArchiveError, BadOption, DataLoss, suggestion
from tidemill_pipeline.jobs.gate import GateReporter
from tidemill_pipeline.jobs.inputs import InputRanges
from tidemill_pipeline.offsets import QueueEnds, SourceQueue, SourceRange, split, take_rows
from tidemill_pipeline.options import EARLIEST, LATEST, ReadBoundary, SourceOptions
from tidemill_pipeline.pulling import EXPIRED

BATCH_ROWS: Final = 1_000_000  # per commit: about a minute on two cores; a kill repeats one batch
TASK_ROWS: Final = 100_000  # per task: a few large queues keep all cores busy
COMMITS_MAX: Final = 10  # attempts to get a manifest number while other jobs commit
_DELETED: Final = "the topic was deleted, or the store of the broker group was created again"

Progress = Callable[["ArchiveProgress"], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveProgress:
    """Progress of a run after a commit, and its result after the last one."""

    rows: int
    bytes: int
    batches: int
    waiting: int  # rows of the brokers that are not archived yet
    stored_to_ms: int = 0  # store time of the last archived message; 0: the archive is empty
    by_topic: Mapping[str, int] = field(default_factory=dict)  # rows of the last batch
    # At the end: one sentence per ended queue on the messages that may be lost.
    over: tuple[str, ...] = ()
    is_over_allowed: bool = True  # options allow the end of each of these queues
    wrong: tuple[str, ...] = ()  # at the end: one sentence per queue that could not be archived


def check_options(options: SourceOptions) -> None:
    """Raise BadOption for an option that reads a part of a queue.

    Readers and verification rely on whole queues.
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
            f"an archive contains whole queues; remove {' and '.join(found)}, choose topics, or"
            " use these options when you read the archive"
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
        """Create the job. Raises BadOption.

        `gate_group`: its pull offsets make brokers keep unsealed messages (ADR 0053).
        `store_is_gone`: the operator confirms that the archived store was replaced, restored or
        removed for good, and that this is the right cluster.
        """
        check_options(options)
        self.store_is_gone = store_is_gone
        self.gate = GateReporter(options, gate_group)
        self.options = options
        self.run_tasks = run_tasks
        self.now_ms = now_ms
        self.store = store or ArchiveStore(options.archive_path)
        self._batch_rows, self._task_rows, self._cores = batch_rows, task_rows, cores
        self._was_there = False
        # Queues that cannot be archived, with the reason. An empty reason: another queue of the
        # same broker group has one.
        self._stuck: dict[SourceQueue, str] = {}
        self.run = f"{now_ms():x}-{secrets.token_hex(4)}"
        self.inputs = InputRanges()

    def archive(self) -> Archive:
        """Return the current archive. Raises ArchiveError if its manifest disappeared.

        A volume may be unmounted for a moment. Another archive must not begin below it.
        """
        archive = self.store.existing() if self._was_there else self.store.archive()
        self._was_there = archive.next_number > 0
        return archive

    # ------------------------------------------------------------ append

    def append(self, progress: Progress = lambda _: None) -> ArchiveProgress:
        """Archive all current messages in batches; return the totals.

        If one queue cannot be archived, the others are. The result names it.
        """
        self._stuck = {}
        cluster = self.look()
        self.check_known(cluster)
        self._stuck |= self.gate.hold(self.archive(), cluster)
        self._leave_out_restored(cluster)
        target = dict(cluster.queues)
        done = ArchiveProgress(
            rows=0, bytes=0, batches=0, waiting=0, stored_to_ms=self._stored_to_ms()
        )
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
            done = ArchiveProgress(
                rows=done.rows + sum(each.rows for each in ranges),
                bytes=done.bytes + sum(each.bytes for each in ranges),
                batches=done.batches + 1,
                waiting=self._waiting(target),
                stored_to_ms=max([done.stored_to_ms, *(each.max_store_ms for each in ranges)]),
                by_topic=_by_topic(ranges),
            )
            progress(done)
            # A topic may have been deleted or created again since.
            cluster = self.look()
            self._leave_out_restored(cluster)

    def check_known(self, cluster: ClusterState) -> None:
        """Raise BadOption for a named topic that neither the cluster nor the archive has."""
        known = {queue.topic for queue in cluster.queues}
        known |= {key.topic for key in self.archive().queues}
        missing = sorted(set(self.options.topics.names) - known)
        if missing:
            everything = known | ordinary_topics(connect(self.options.connection))
            raise BadOption(
                f"there is no topic {', '.join(missing)}, and none in the archive"
                f"{suggestion(missing[0], everything)}"
            )

    def _leave_out_restored(self, cluster: ClusterState) -> None:
        """Exclude broker groups that have a queue which ends before its archived end.

        Other queues of such a group may be long enough again with different messages.
        """
        archive = self.archive()
        restored = set()
        for queue, ends in sorted(cluster.queues.items()):
            archived = archive.queues.get(self.key_of(queue))
            if archived is not None and ends.max_offset < archived.end:
                error = foreign_queue(queue, shorter(archived, ends))
                self._stuck[queue] = f"{error}. No queue of {queue.broker} is archived"
                restored.add(queue.broker)
        for queue in cluster.queues:
            if queue.broker in restored:
                self._stuck.setdefault(queue, "")

    def look(self) -> ClusterState:
        """Query the bounds of all queues. Raises NoAnswer unless all broker groups answer."""
        return connect(self.options.connection).whole_cluster(self.options.topics)

    def plan(
        self, archive: Archive, cluster: ClusterState, target: Mapping[SourceQueue, QueueEnds]
    ) -> tuple[list[ArchiveTask], list[ArchivedRange]]:
        """Return the tasks of the next batch, and ranges that were lost before it.

        `target`: the bounds of the queues when the run began.
        """
        starts, lost = {}, []
        for queue, ends in sorted(target.items()):
            if queue in self._stuck:
                continue
            key = self.key_of(queue)
            begin = self._begin(archive, ends)
            now = cluster.queues.get(queue)
            least, why = (ends.max_offset, _DELETED) if now is None else (now.min_offset, EXPIRED)
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
        """Return the first offset of a queue's next batch."""
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
        """Record ended queues in the manifest; return new reports and whether options allow all.

        The wrong cluster looks like a replaced or removed store, so only `store_is_gone` ends
        queues of such a broker group.
        """
        reports, over, is_allowed = [], [], True
        for key, archived in sorted(self.archive().queues.items()):
            is_asked = (
                key.namespace == self.options.connection.namespace
                and self.options.topics.have(key.topic)
            )
            if not is_asked or key.queue in cluster.queues or archived.has_ended:
                continue
            missing = missing_store(key, cluster)
            lost = f"messages after offset {archived.end}, if there were any, are lost"
            is_allowed &= self.store_is_gone if missing else not self.options.fails_on_data_loss
            if missing and not self.store_is_gone:
                reports.append(
                    f"{key}: {missing}. If this is permanent, {lost}; confirm it with"
                    " --store-is-gone"
                )
            else:
                why = missing or "its topic was deleted"
                reports.append(f"{key} does not exist any more: {why}; {lost}")
                over.append((key, archived.end, archived.end))
        if over:
            self.commit("append", closed=tuple(over))
        return tuple(reports), is_allowed

    def _waiting(self, target: Mapping[SourceQueue, QueueEnds]) -> int:
        archive = self.archive()
        return sum(max(0, ends.max_offset - self._begin(archive, ends)) for ends in target.values())

    def _stored_to_ms(self) -> int:
        """Return the store time of the last archived message; 0 if the archive is empty."""
        last = (queue.ranges[-1] for queue in self.archive().queues.values() if queue.ranges)
        return max((each.max_store_ms for each in last), default=0)

    # ------------------------------------------------------------ the manifest

    @property
    def has_entries(self) -> bool:
        """Whether the manifest has an entry."""
        return self.store.has_entries

    def check_there(self) -> None:
        """Raise BadOption if there is no archive."""
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
        """Append an entry to the manifest. Raises AnotherWriter if it does not follow the others.

        A compaction or verification may commit beside an archiver. A second archiver may not.
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
                    f"another job changed the archive ({error}); run one archiver at a time, and"
                    " start this job again"
                ) from error
            try:
                self.store.commit(numbered)
            except AnotherWriter:
                if attempt == COMMITS_MAX - 1:
                    raise
            else:
                return


def missing_store(key: QueueKey, cluster: ClusterState) -> str:
    """Return why the store of a queue is missing; "" if its broker group has it."""
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
    """Return ranges in offset order, their files, and the queues that failed with the reason.

    Ranges of a queue after a failed task leave a gap and do not count.
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
    """Return the range in a task's answer."""
    return ArchivedRange(**{**found, "key": QueueKey(*found["key"])})
