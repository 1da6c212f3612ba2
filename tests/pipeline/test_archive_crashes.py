"""J1 in random batches with random crashes: manifest = archive = broker.

Without Spark: the job's tasks run here, one after the other, over a store that dies at a chosen
operation. After a killed job, the next run continues at the end of the manifest.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.archive.manifest import ManifestEntry
from tidemill_pipeline.archive.reading import read_range
from tidemill_pipeline.archive.store import ArchiveStore
from tidemill_pipeline.archive.tasks import ArchiveTask, run_task
from tidemill_pipeline.errors import AnotherWriter
from tidemill_pipeline.jobs.archive import ArchiveJob, _made
from tidemill_pipeline.jobs.archive_upkeep import compact, expire, vacuum
from tidemill_pipeline.jobs.archive_verify import verify
from tidemill_pipeline.options import SourceOptions, parse_source

HOUR_MS = 3_600_000


class ProcessKilled(BaseException):
    """The process died."""


class DyingStore(ArchiveStore):
    """A store that kills its process at one operation, before or after the operation."""

    def __init__(self, path: str, dies_at: int) -> None:
        super().__init__(path)
        self._left = dies_at

    def _step(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise ProcessKilled

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Any]:
        self._step()
        with super().writing(path) as file:
            yield file
        self._step()

    def commit(self, entry: ManifestEntry) -> None:
        self._step()
        super().commit(entry)
        self._step()


def a_job(cluster: FakeCluster, path: str, *, dies_at: int = 0, batch_rows: int = 50) -> ArchiveJob:
    options = parse_source(
        {
            "endpoints": cluster.endpoint,
            "topicPattern": ".*",
            "archivePath": path,
            "readMode": "broker",
            "pullBatchSize": "7",
        },
        is_stream=False,
    )
    store = DyingStore(path, dies_at)
    clock = itertools.count(1_800_000_000_000)

    def run_here(options: SourceOptions, tasks: Sequence[ArchiveTask]) -> list[dict[str, Any]]:
        return [run_task(options, task, store) for task in tasks]

    return ArchiveJob(
        options,
        run_here,
        now_ms=lambda: next(clock),
        store=store,
        batch_rows=batch_rows,
        task_rows=20,
    )


def archived_rows(path: str) -> list[tuple[str, str, int, int, str]]:
    """Return a reader's view of the archive, from the manifest alone."""
    store = ArchiveStore(path)
    archive = store.archive()
    rows = []
    for key, queue in archive.queues.items():
        for batch in read_range(
            store,
            archive.holding(key, queue.start, queue.end),
            key,
            start=queue.start,
            end=queue.end,
            columns=["queue_offset", "body"],
        ):
            rows += [
                (key.topic, key.broker, key.queue_id, row["queue_offset"], row["body"].decode())
                for row in batch.to_pylist()
            ]
        assert sum(each.rows for each in queue.ranges) == sum(
            span.rows for file in archive.files.values() for span in file.spans if span.key == key
        ), "the rows of the manifest are those of its files"
    return rows


def stored_rows(cluster: FakeCluster) -> list[tuple[str, str, int, int, str]]:
    return [
        (topic, broker, queue_id, i, message.body.decode())
        for broker, of in cluster.brokers.items()
        for (topic, queue_id), queue in of.queues.items()
        for i, message in enumerate(queue.messages)
        if message is not None
    ]


SendCounts = st.tuples(
    st.sampled_from(["orders", "payments"]),
    st.sampled_from(["a", "b"]),
    st.integers(0, 1),
    st.integers(1, 60),
)
ArchiveRounds = st.lists(
    st.tuples(
        st.lists(SendCounts, max_size=3),
        st.integers(1, 14),
        st.sampled_from([ArchiveJob.append, compact, verify]),
    ),
    min_size=1,
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=25)
@given(ArchiveRounds)
def test_manifest_archive_and_broker_agree_after_any_crashes(
    rounds: list[tuple[list[tuple[str, str, int, int]], int, Callable[[ArchiveJob], object]]],
) -> None:
    with FakeCluster().serving() as cluster, tempfile.TemporaryDirectory() as path:
        for sends, dies_at, work in rounds:
            for topic, broker, queue_id, count in sends:
                cluster.add(
                    topic,
                    broker,
                    queue_id,
                    count,
                    # Some batches cross an hour.
                    step_ms=HOUR_MS // 40,
                )
            with contextlib.suppress(ProcessKilled):
                work(a_job(cluster, path, dies_at=dies_at))
        a_job(cluster, path).append()
        assert sorted(archived_rows(path)) == sorted(stored_rows(cluster))
        assert verify(a_job(cluster, path)).wrong == []
        compact(a_job(cluster, path))
        assert sorted(archived_rows(path)) == sorted(stored_rows(cluster))
        archive = ArchiveStore(path).archive()
        assert all(queue.sealed == queue.end for queue in archive.queues.values())


def test_a_second_archiver_is_refused_and_doubles_nothing() -> None:
    with FakeCluster().serving() as cluster, tempfile.TemporaryDirectory() as path:
        cluster.add("orders", "a", 0, 30)
        first, second = a_job(cluster, path), a_job(cluster, path)
        looked = second.look()
        tasks, lost = second.plan(ArchiveStore(path).archive(), looked, looked.queues)
        assert tasks
        assert not lost
        first.append()
        answers = [run_task(second.options, task) for task in tasks]
        ranges, files, failed = _made(answers)
        assert not failed
        with pytest.raises(AnotherWriter, match="one archiver at a time"):
            second.commit("append", ranges=ranges, files=files)
        assert len(archived_rows(path)) == 30


def test_damage_is_named_by_a_verification_and_not_sealed() -> None:
    with FakeCluster().serving() as cluster, tempfile.TemporaryDirectory() as path:
        cluster.add("orders", "a", 0, 30)
        a_job(cluster, path).append()
        # The broker's body differs from the archived one.
        message = cluster.brokers["a"].queues["orders", 0].messages[4]
        assert message is not None
        message.body = b"another"
        wrong = verify(a_job(cluster, path)).wrong
        assert len(wrong) == 1
        assert "with other bodies" in wrong[0]
        queue = next(iter(ArchiveStore(path).archive().queues.values()))
        assert queue.sealed == 0


def test_expired_messages_fail_the_archive_or_are_recorded_as_lost() -> None:
    with FakeCluster().serving() as cluster, tempfile.TemporaryDirectory() as path:
        cluster.add("orders", "a", 0, 30)
        a_job(cluster, path).append()
        cluster.add("orders", "a", 0, 30)
        cluster.expire("orders", "a", 0, 40)
        (wrong,) = a_job(cluster, path).append().wrong
        assert "from 30 to 40 were lost" in wrong
        job = a_job(cluster, path)
        job.options = parse_source(
            {
                "endpoints": cluster.endpoint,
                "topic": "orders",
                "archivePath": path,
                "readMode": "broker",
                "failOnDataLoss": "false",
            },
            is_stream=False,
        )
        assert job.append().rows == 20
        queue = next(iter(ArchiveStore(path).archive().queues.values()))
        assert [each.lost for each in queue.ranges if each.lost] == [10]


def test_expired_ranges_are_read_no_more_and_their_files_deleted() -> None:
    with FakeCluster().serving() as cluster, tempfile.TemporaryDirectory() as path:
        cluster.add("orders", "a", 0, 30, stored_at_ms=1_600_000_000_000)
        a_job(cluster, path).append()
        cluster.add("orders", "a", 0, 10, stored_at_ms=1_700_000_000_000)
        a_job(cluster, path).append()
        # 30 rows are two tasks, so two files.
        assert expire(a_job(cluster, path), before_ms=1_650_000_000_000) == 2
        assert [row[3] for row in archived_rows(path)] == list(range(30, 40))
        assert vacuum(a_job(cluster, path), age_ms=-(2**60)) == 2
        assert [row[3] for row in archived_rows(path)] == list(range(30, 40))
