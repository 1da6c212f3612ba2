"""J1: topics into an archive, exactly once, and what an archive needs afterwards.

    append   pull what is new, write it, commit one entry of the manifest; until caught up
    verify   compare what is not sealed with the broker, and seal what agrees
    compact  write the small files of an hour as larger ones
    expire   let go of what is older than it has to be kept
    vacuum   delete files that no entry names, when nobody can be reading them

The manifest is the only thing that is remembered (ADR 0050): where a batch begins is where the
manifest ends, so a job that is killed anywhere is simply started again.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from tidemill.pipeline import schema as columns
from tidemill.pipeline.archive.manifest import (
    Archive,
    DataFile,
    Entry,
    QueueKey,
    Range,
    data_file,
    expiring,
    renumbered,
    sealing,
    settled,
)
from tidemill.pipeline.archive.store import ArchiveStore
from tidemill.pipeline.archive.tasks import Runner, Task
from tidemill.pipeline.client import Cluster, connect
from tidemill.pipeline.errors import AnotherWriter, ArchiveError, DataLoss, Refused, Unreachable
from tidemill.pipeline.offsets import QueueEnds, QueueName, QueueRange, split, take_rows
from tidemill.pipeline.options import LATEST, SourceOptions

BATCH_ROWS: Final = 1_000_000  # of one commit: about a minute of two cores, and what a kill repeats
TASK_ROWS: Final = 100_000  # of one task, so that a few large queues keep all cores at work
COMMITS_MAX: Final = 10  # attempts to take a number while others take them
FILE_BYTES: Final = 256 << 20  # of a compacted file, before compression: 128 MiB or less after it
SMALL_BYTES: Final = 64 << 20  # a file of fewer bytes is worth compacting
ORPHAN_AGE_MS: Final = 86_400_000  # a file that no entry names may be of a job that still runs

Progress = Callable[["Done"], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How far a run is, after each commit."""

    rows: int
    bytes: int
    batches: int
    waiting: int  # rows that are there and not archived yet
    stored_to_ms: int = 0  # of the last batch: when the last of its messages was stored
    by_topic: Mapping[str, int] = field(default_factory=dict)  # rows of the last batch


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
    ) -> None:
        """With a `gate_group` brokers keep what is not sealed, by its pull offsets (ADR 0053)."""
        self._gate_group = gate_group
        self._options = options
        self._run_tasks = run_tasks
        self._now_ms = now_ms
        self._store = store or ArchiveStore(options.archive_path)
        self._batch_rows, self._task_rows, self._cores = batch_rows, task_rows, cores
        self.run = f"{now_ms():x}-{secrets.token_hex(4)}"

    # ------------------------------------------------------------ append

    def append(self, progress: Progress = lambda _: None) -> Done:
        """Archive what is there now, in batches, and say how much that was."""
        cluster = self.look()
        self._hold(cluster)
        target = {name: queue.max_offset for name, queue in cluster.queues.items()}
        done = Done(rows=0, bytes=0, batches=0, waiting=0)
        while True:
            archive = self._store.archive()
            tasks, lost = self.plan(archive, cluster, target)
            if not tasks and not lost:
                return done
            ranges, files = _made(self._run_tasks(self._options, tasks))
            self.commit("append", ranges=(*lost, *ranges), files=files)
            ended = {(each.key.topic, each.key.broker, each.key.queue_id): each.end
                     for each in ranges}  # fmt: skip
            done = Done(
                rows=done.rows + sum(each.rows for each in ranges),
                bytes=done.bytes + sum(each.bytes for each in ranges),
                batches=done.batches + 1,
                waiting=self._waiting(archive, cluster, target, ended),
                stored_to_ms=max((each.max_store_ms for each in ranges), default=0),
                by_topic=_by_topic(ranges),
            )
            progress(done)

    def look(self) -> Cluster:
        """Ask where the queues end; all broker groups must answer, or what is new is not known."""
        cluster = connect(self._options.connection).cluster(self._options.topics)
        missing = sorted(cluster.unreachable)
        if missing:
            raise Unreachable(f"no answer from {', '.join(missing)}: what is new is not known")
        return cluster

    def plan(
        self, archive: Archive, cluster: Cluster, target: dict[QueueName, int]
    ) -> tuple[list[Task], list[Range]]:
        """Return the tasks of the next batch, and ranges that retention took before it."""
        starts, lost = {}, []
        for name, queue in sorted(cluster.queues.items()):
            key = self.key_of(queue)
            archived = archive.queues.get(key)
            begin = self._begin(queue) if archived is None else archived.end
            if begin < queue.min_offset:
                lost.append(self._lost(key, begin, queue.min_offset))
                begin = queue.min_offset
            starts[name] = begin
        until = take_rows(starts, target, self._batch_rows)
        ranges = [
            QueueRange(name=name, start=start, end=until[name])
            for name, start in sorted(starts.items())
            if until[name] > start
        ]
        parts = split(ranges, rows_per_partition=self._task_rows, partitions_min=self._cores)
        return [
            Task(
                work="append", run=self.run, key=self.key_of(cluster.queues[part.name]),
                start=part.start, end=part.end,
            )
            for part in parts
        ], lost  # fmt: skip

    def key_of(self, queue: QueueEnds) -> QueueKey:
        """Return the name of a queue in the archive."""
        return QueueKey(
            self._options.connection.namespace, queue.name.topic, queue.name.broker,
            queue.name.queue_id, queue.incarnation,
        )  # fmt: skip

    def _begin(self, queue: QueueEnds) -> int:
        # A queue that is not archived yet: all of it, unless the start was asked to be the end.
        return queue.max_offset if self._options.start.everywhere == LATEST else queue.min_offset

    def _lost(self, key: QueueKey, start: int, end: int) -> Range:
        if self._options.fails_on_data_loss:
            raise DataLoss(
                f"{key}: offsets from {start} to {end} were gone before they were archived. With"
                " --allow-loss the archive goes on behind them, and says so in its manifest"
            )
        return Range(
            key=key, start=start, end=end, rows=0, bytes=0, min_store_ms=0, max_store_ms=0,
            crc_xor=0, lost=end - start,
        )  # fmt: skip

    def _waiting(
        self,
        archive: Archive,
        cluster: Cluster,
        target: dict[QueueName, int],
        ended: dict[tuple[str, str, int], int],
    ) -> int:
        waiting = 0
        for name, queue in cluster.queues.items():
            archived = archive.queues.get(self.key_of(queue))
            begin = self._begin(queue) if archived is None else archived.end
            to = ended.get((name.topic, name.broker, name.queue_id), begin)
            waiting += max(0, target[name] - max(begin, to))
        return waiting

    # ------------------------------------------------------------ afterwards

    def verify(self) -> list[str]:
        """Compare what is not sealed, seal what agrees, and return what does not."""
        archive = self._store.archive()
        tasks = [
            Task(
                work="verify", run=self.run, key=key, start=each.start, end=each.end,
                expected=each, files=tuple(archive.holding(key, each.start, each.end)),
            )
            for key, queue in sorted(archive.queues.items())
            for each in queue.unsealed()
        ]  # fmt: skip
        passed, wrong = [], []
        for answer in self._run_tasks(self._options, tasks):
            of = _range(answer["range"])
            told = answer["wrong"] or answer["gone"]
            if told:
                wrong.append(f"{of.key}, offsets from {of.start} to {of.end}: {told}")
            else:
                passed.append(of)
        marks = sealing(archive, passed)
        if marks:
            self.commit("seal", marks=marks)
        self._release(passed)
        return sorted(wrong)

    # ------------------------------------------------------------ what brokers keep

    def _hold(self, cluster: Cluster) -> None:
        """Have brokers keep queues of which they were told nothing yet, before they are read."""
        if not self._gate_group:
            return
        told, archive = self._told(cluster), self._store.archive()
        for name, queue in sorted(cluster.queues.items()):
            if name not in told:
                archived = archive.queues.get(self.key_of(queue))
                at = self._begin(queue) if archived is None else archived.sealed
                self._tell(name, at)

    def _release(self, passed: Iterable[Range]) -> None:
        """Tell brokers what they need not keep any more."""
        if not self._gate_group:
            return
        cluster, archive = self.look(), self._store.archive()
        known = {
            key: queue
            for queue in cluster.queues.values()
            if (key := self.key_of(queue)) in archive.queues
        }
        first = {key: queue.min_offset for key, queue in known.items()}
        told = self._told(cluster)
        for key, at in settled(archive, passed, first):
            name = known[key].name
            if told.get(name) != at:
                self._tell(name, at)

    def _told(self, cluster: Cluster) -> dict[QueueName, int]:
        """Return how far brokers think that queues are sealed."""
        client, told = connect(self._options.connection), {}
        for broker in sorted(cluster.logs):
            try:
                found = client.progress(broker, [self._gate_group])
            except Refused as error:
                raise Refused(
                    f"{broker} keeps nothing for the archive: {error}. Make the group, `tidemill"
                    f" group create {self._gate_group}`, or go without --gate"
                ) from error
            for each in found:
                if each.pull_offset >= 0:
                    name = QueueName(each.topic, broker, each.queue_id)
                    told[name] = each.pull_offset
        return told

    def _tell(self, name: QueueName, at: int) -> None:
        connect(self._options.connection).update_offset(self._gate_group, name, at)

    def compact(self, *, bytes_max: int = FILE_BYTES) -> tuple[int, int]:
        """Write small files of a folder together; return how many there were and are."""
        archive = self._store.archive()
        folders: dict[str, list[DataFile]] = {}
        for path, file in sorted(archive.files.items()):
            if file.bytes < SMALL_BYTES:
                folders.setdefault(path.rpartition("/")[0], []).append(file)
        tasks = [
            Task(
                work="compact", run=self.run, key=files[0].spans[0].key, start=0, end=0,
                files=tuple(files), folder=folder, bytes_max=bytes_max,
            )
            for folder, files in sorted(folders.items())
            if len(files) > 1
        ]  # fmt: skip
        answers = self._run_tasks(self._options, tasks)
        removed = tuple(path for answer in answers for path in answer["removed"])
        files = tuple(data_file(each) for answer in answers for each in answer["files"])
        if removed:
            self.commit("compact", files=files, removed=removed)
        return len(removed), len(files)

    def expire(self, *, before_ms: int, topics: Iterable[str] = ()) -> int:
        """Let go of ranges that were stored before an instant; return how many files that were."""
        marks, removed = expiring(self._store.archive(), before_ms=before_ms, topics=topics)
        if marks:
            self.commit("expire", marks=marks, removed=removed)
        return len(removed)

    def vacuum(self, *, age_ms: int = ORPHAN_AGE_MS) -> int:
        """Delete files that no entry names and that are older than any job; return how many."""
        alive = self._store.archive().files
        latest_ms = self._now_ms() - age_ms
        gone = [
            path
            for path, made_at_ms in self._store.data_files()
            if path not in alive and made_at_ms <= latest_ms
        ]
        for path in gone:
            self._store.delete(path)
        return len(gone)

    # ------------------------------------------------------------ the manifest

    def commit(
        self,
        kind: Any,
        *,
        ranges: Iterable[Range] = (),
        files: Iterable[DataFile] = (),
        removed: tuple[str, ...] = (),
        marks: tuple[tuple[QueueKey, int], ...] = (),
    ) -> None:
        """Commit an entry behind those that are there, if it still follows them.

        Whoever compacts or seals beside an archiver does not disturb it; a second archiver does.
        """
        entry = Entry(
            number=0, kind=kind, at_ms=self._now_ms(), run=self.run,
            schema_version=columns.VERSION, ranges=tuple(ranges), files=tuple(files),
            removed=removed, marks=marks,
        )  # fmt: skip
        for attempt in range(COMMITS_MAX):
            archive = self._store.archive()
            numbered = renumbered(entry, archive.next_number)
            try:
                archive.apply(numbered)
            except ArchiveError as error:
                raise AnotherWriter(
                    f"another one changed the archive meanwhile ({error}); run one archiver at a"
                    " time, and start this again"
                ) from error
            try:
                self._store.commit(numbered)
            except AnotherWriter:
                if attempt == COMMITS_MAX - 1:
                    raise
            else:
                return


def _by_topic(ranges: Iterable[Range]) -> dict[str, int]:
    rows: Counter[str] = Counter()
    for each in ranges:
        rows[each.key.topic] += each.rows
    return dict(rows)


def _made(answers: Iterable[dict[str, Any]]) -> tuple[list[Range], list[DataFile]]:
    """Return what tasks made, in the order in which it follows."""
    ranges: list[Range] = []
    files: list[DataFile] = []
    for answer in answers:
        ranges.append(_range(answer["range"]))
        files.extend(data_file(each) for each in answer["files"])
    return sorted(ranges, key=lambda each: (each.key, each.start)), files


def _range(found: dict[str, Any]) -> Range:
    return Range(**{**found, "key": QueueKey(*found["key"])})
