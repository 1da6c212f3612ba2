"""Rounds of a continuous archiver: its output, its record and its metrics."""

from __future__ import annotations

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS, FakeCluster
from tidemill.common.clock import SystemClock
from tidemill_pipeline.jobs.archive_commands import ArchiveRounds
from tidemill_pipeline.jobs.running import RunRecord
from tidemill_pipeline.metrics import PipelineMetrics


class ContinuousArchiver:
    """A continuous archiver."""

    def __init__(self, archive: ArchiveWorld, *, then_verify: bool, **options: str) -> None:
        self.run = RunRecord(job="archive", run="1")
        self.metrics = PipelineMetrics("archive")
        self.said: list[str] = []
        self._rounds = ArchiveRounds(
            archive.job(**options),
            self.run,
            self.metrics,
            self.said.append,
            then_verify=then_verify,
        )

    def round(self) -> None:
        self._rounds.report(self._rounds.one())

    def sample(self, name: str) -> float | None:
        """Return the value of a metric."""
        found = [
            sample.value
            for metric in self.metrics.collect()
            for sample in metric.samples
            if sample.name == f"rocketmq_pipeline_{name}"
        ]
        return found[0] if found else None


@pytest.mark.parametrize("then_verify", [False, True])
def test_closed_queues_are_reported_once_per_round_and_recorded_once(
    cluster: FakeCluster, archive: ArchiveWorld, then_verify: bool
) -> None:
    for broker in ("a", "b"):
        cluster.add("orders", broker, 0, 5)
    going = ContinuousArchiver(archive, then_verify=then_verify)
    going.round()
    assert going.metrics.succeeded_at_ms
    assert "over" not in str(going.said)
    cluster.remove("b")
    going.metrics.succeeded_at_ms = 0
    for _ in range(3):
        going.said.clear()
        going.round()
        assert len([each for each in going.said if "confirm it with --store-is-gone" in each]) == 1
    assert len(going.run.detail["over"]) == 1
    assert going.run.rows == 10
    # Loss is not allowed: a single run would exit with 1.
    assert going.metrics.succeeded_at_ms == 0


def test_a_round_with_verification_findings_is_not_a_success(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 5, body_size=500)
    archive.append()
    (path,) = archive.files()
    path.write_bytes(path.read_bytes()[:-100])
    going = ContinuousArchiver(archive, then_verify=True)
    going.round()
    assert going.metrics.succeeded_at_ms == 0
    assert path.name in "".join(going.said)


def test_a_failed_round_exports_no_lag(cluster: FakeCluster, archive: ArchiveWorld) -> None:
    cluster.add("orders", "a", 0, 10)
    archive.append()
    cluster.add("orders", "a", 0, 10)
    going = ContinuousArchiver(archive, then_verify=True, topicPattern="", topics="orders,nosuch")
    going.round()
    assert going.sample("archive_lag_seconds") is None
    assert going.sample("success_timestamp_seconds") is None
    assert archive.sealed() == [("orders", 10, 10)]


def test_the_lag_is_exported_while_queues_are_blocked(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 10)
    going = ContinuousArchiver(archive, then_verify=False)
    assert going.sample("archive_lag_seconds") is None
    going.round()
    assert (going.sample("archive_lag_seconds"), going.sample("lag_messages")) == (0, 0)
    # Retention deletes some of the new messages. The queue is blocked, and its lag grows.
    cluster.add("orders", "a", 0, 10)
    cluster.expire("orders", "a", 0, 15)
    stuck = ContinuousArchiver(archive, then_verify=False)
    stuck.round()
    lag_s = stuck.sample("archive_lag_seconds")
    assert lag_s is not None
    assert lag_s > 0
    assert lag_s <= (SystemClock().wall_ms() - FIRST_STORED_AT_MS) / 1000
    # Including the five expired messages: skipping them is not allowed yet.
    assert stuck.sample("lag_messages") == 10
    assert stuck.sample("success_timestamp_seconds") is None
