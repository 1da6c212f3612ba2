"""Reports of an archive to the gate of brokers (ADR 0053). Without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.worlds.archiving import archive_job
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS, FakeCluster
from tidemill_pipeline.jobs.archive import ArchiveJob
from tidemill_pipeline.jobs.archive_upkeep import expire
from tidemill_pipeline.jobs.archive_verify import verify

GATE = "archive"
LATER_MS = FIRST_STORED_AT_MS + 86_400_000


def a_job(cluster: FakeCluster, to: Path, **options: Any) -> ArchiveJob:
    return archive_job(cluster, str(to), gate_group=GATE, **options)


def reported_offsets(cluster: FakeCluster) -> dict[str, int]:
    return {each.topic: each.pull_offset for each in cluster.brokers["a"].progress}


def test_a_queue_that_is_shorter_than_its_archive_holds_no_other_one_up(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """A store that was restored from a backup is shorter. The gate releases the other topics."""
    cluster.add("orders", "a", 0, 40)
    a_job(cluster, tmp_path).append()
    assert verify(a_job(cluster, tmp_path)).wrong == []
    assert reported_offsets(cluster) == {"orders": 40}
    cluster.restore("orders", "a", 0, 20)
    cluster.brokers["a"].progress.clear()
    cluster.add("zebras", "a", 0, 10)
    done = a_job(cluster, tmp_path).append()
    assert done.rows == 0, "other queues of that store may be as long as they were"
    assert "ends at 20" in done.wrong[0]
    assert len(done.wrong) == 1
    assert reported_offsets(cluster) == {"orders": 0, "zebras": 0}, (
        "the contents of the restored store are unknown"
    )
    a_job(cluster, tmp_path, topicPattern="zebras").append()
    (wrong,) = verify(a_job(cluster, tmp_path)).wrong
    assert "ends at 20" in wrong
    assert reported_offsets(cluster) == {"orders": 0, "zebras": 10}


def test_unarchived_messages_of_a_shorter_queue_are_kept(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """Before the end of the old archive, the store of a message is unknown."""
    cluster.add("orders", "a", 0, 40)
    a_job(cluster, tmp_path).append()
    assert verify(a_job(cluster, tmp_path)).wrong == []
    cluster.restore("orders", "a", 0, 10)
    cluster.add("orders", "a", 0, 15, stored_at_ms=LATER_MS)
    (of,) = cluster.brokers["a"].progress
    of.pull_offset = 10
    (wrong,) = verify(a_job(cluster, tmp_path)).wrong
    assert "ends at 25" in wrong
    assert reported_offsets(cluster) == {"orders": 10}
    assert verify(a_job(cluster, tmp_path, store_is_gone=True)).wrong == []
    assert reported_offsets(cluster) == {"orders": 10}


def test_messages_of_a_restored_store_after_its_backup_are_kept(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """The queue is as long as before, and longer than the sealed part of the other store."""
    cluster.add("orders", "a", 0, 40)
    a_job(cluster, tmp_path).append()
    cluster.add("zebras", "a", 0, 10)
    a_job(cluster, tmp_path, topicPattern="zebras").append()
    assert verify(a_job(cluster, tmp_path)).wrong == []
    cluster.restore("orders", "a", 0, 20)
    cluster.add("orders", "a", 0, 20, stored_at_ms=LATER_MS)
    cluster.brokers["a"].progress.clear()
    assert a_job(cluster, tmp_path).append().rows == 0
    assert reported_offsets(cluster) == {"orders": 0, "zebras": 10}
    (wrong,) = verify(a_job(cluster, tmp_path)).wrong
    assert "its message at offset 39 has another store time than in the archive" in wrong
    assert reported_offsets(cluster) == {"orders": 0, "zebras": 10}


def test_a_restored_store_is_found_out_though_all_of_the_archive_has_expired(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 40)
    a_job(cluster, tmp_path).append()
    assert verify(a_job(cluster, tmp_path)).wrong == []
    assert expire(a_job(cluster, tmp_path), before_ms=LATER_MS) > 0
    cluster.restore("orders", "a", 0, 20)
    cluster.add("orders", "a", 0, 30, stored_at_ms=LATER_MS)
    (wrong,) = a_job(cluster, tmp_path).append().wrong
    assert "its message at offset 39 has another store time than in the archive" in wrong
    (wrong,) = verify(a_job(cluster, tmp_path)).wrong
    assert "its message at offset 39 has another store time" in wrong
    assert reported_offsets(cluster) == {"orders": 40}


def test_a_topic_that_was_lifted_from_the_gate_is_held_when_it_is_archived_again(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """A verification reads the whole archive, but it does not hold the topic."""
    for topic in ("orders", "zebras"):
        cluster.add(topic, "a", 0, 10)
    a_job(cluster, tmp_path).append()
    assert verify(a_job(cluster, tmp_path)).wrong == []
    # As `tidemill pull-offset delete`.
    of = cluster.brokers["a"]
    of.progress = [each for each in of.progress if each.topic != "orders"]
    cluster.add("zebras", "a", 0, 10)
    a_job(cluster, tmp_path, topicPattern="zebras").append()
    assert verify(a_job(cluster, tmp_path)).wrong == []
    assert reported_offsets(cluster) == {"zebras": 20}
    a_job(cluster, tmp_path).append()
    assert reported_offsets(cluster) == {"orders": 10, "zebras": 20}


def test_brokers_keep_messages_that_another_archive_has_not_sealed(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 40)
    a_job(cluster, tmp_path / "first").append()
    assert verify(a_job(cluster, tmp_path / "first")).wrong == []
    assert reported_offsets(cluster) == {"orders": 40}
    a_job(cluster, tmp_path / "second").append()
    assert reported_offsets(cluster) == {"orders": 0}
    assert verify(a_job(cluster, tmp_path / "second")).wrong == []
    assert reported_offsets(cluster) == {"orders": 40}


@pytest.mark.parametrize("topic", ["%DLQ%copies", "%RETRY%copies"])
def test_sealed_dead_letters_and_retries_are_released(
    cluster: FakeCluster, tmp_path: Path, topic: str
) -> None:
    """A verification asks for all topics except system topics."""
    cluster.add(topic, "a", 0, 10)
    a_job(cluster, tmp_path, topicPattern="", topic=topic).append()
    assert reported_offsets(cluster) == {topic: 0}
    assert verify(a_job(cluster, tmp_path)).wrong == []
    assert reported_offsets(cluster) == {topic: 10}


def test_messages_that_expired_before_sealing_are_released(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    for topic in ("orders", "zebras"):
        cluster.add(topic, "a", 0, 10)
    a_job(cluster, tmp_path).append()
    assert expire(a_job(cluster, tmp_path), before_ms=LATER_MS, topics=["orders"]) == 1
    assert reported_offsets(cluster) == {"orders": 0, "zebras": 0}
    assert verify(a_job(cluster, tmp_path)).wrong == []
    assert reported_offsets(cluster) == {"orders": 10, "zebras": 10}
    # After the next run, brokers keep only later messages.
    a_job(cluster, tmp_path).append()
    cluster.add("orders", "a", 0, 5)
    a_job(cluster, tmp_path).append()
    assert reported_offsets(cluster) == {"orders": 10, "zebras": 10}


def test_another_namespace_is_verified_and_released_only_if_named(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("mill%orders", "a", 0, 10)
    a_job(cluster, tmp_path, namespace="mill").append()
    for _ in range(2):
        (wrong,) = verify(a_job(cluster, tmp_path)).wrong
        assert "of the namespace 'mill'" in wrong
        assert wrong.endswith("use --option namespace=mill to do so")
        assert reported_offsets(cluster) == {"mill%orders": 0}
    # Sealed, but not reported to brokers.
    assert verify(archive_job(cluster, str(tmp_path), namespace="mill")).wrong == []
    (wrong,) = verify(a_job(cluster, tmp_path)).wrong
    assert wrong.endswith("use --option namespace=mill to do so")
    assert verify(a_job(cluster, tmp_path, namespace="mill")).wrong == []
    assert reported_offsets(cluster) == {"mill%orders": 10}
    assert verify(a_job(cluster, tmp_path)).wrong == []


def test_an_archive_without_namespace_is_not_verified_with_one(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 10)
    a_job(cluster, tmp_path).append()
    (wrong,) = verify(a_job(cluster, tmp_path, namespace="mill")).wrong
    assert wrong.endswith("released; omit --option namespace to do so")


def test_a_topic_that_may_not_be_read_holds_no_other_one_up(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    for topic in ("orders", "others"):
        cluster.add(topic, "a", 0, 5)
    archive_job(cluster, str(tmp_path)).append()
    assert verify(archive_job(cluster, str(tmp_path))).wrong == []
    for topic in ("orders", "others"):
        cluster.add(topic, "a", 0, 5)
    cluster.refused = {"orders"}
    (wrong,) = a_job(cluster, tmp_path).append().wrong
    assert wrong.startswith(
        "queue 0 of orders at a is not archived, as its broker refused the gate: "
    )
    assert reported_offsets(cluster) == {"others": 5}
    cluster.refused = set()
    assert a_job(cluster, tmp_path).append().rows == 5
