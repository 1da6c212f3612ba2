"""Archives of restored stores that are longer than the archive. Without Spark."""

from __future__ import annotations

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS, FakeCluster
from tidemill_pipeline.jobs.archive_verify import verify

GATE = "archive"
LATER_MS = FIRST_STORED_AT_MS + 86_400_000


def grow_past(cluster: FakeCluster) -> None:
    """Restore the store of 10 messages to its state with 6, and send 8 messages a day later."""
    cluster.restore("orders", "a", 0, 6)
    cluster.add("orders", "a", 0, 8, stored_at_ms=LATER_MS)


@pytest.mark.parametrize("gate", ["", GATE])
def test_messages_of_a_restored_and_grown_store_are_sealed_by_their_files(
    cluster: FakeCluster, archive: ArchiveWorld, gate: str
) -> None:
    cluster.add("orders", "a", 0, 10)
    archive.job(gate_group=gate).append()
    grow_past(cluster)
    (wrong,) = verify(archive.job(gate_group=gate)).wrong
    assert "offset 9 has another store time than in the archive" in wrong
    assert wrong.endswith("--store-is-gone seals it by its files alone")
    assert archive.sealed() == [("orders", 0, 10)]
    verified = verify(archive.job(gate_group=gate, store_is_gone=True))
    assert verified.wrong == []
    (closed,) = verified.closed
    assert "restored from a backup" in closed
    assert archive.sealed() == [("orders", 10, 10)]
    assert verify(archive.job(gate_group=gate, store_is_gone=True)).wrong == [], "again"
    # The later messages are not archived, so brokers keep them.
    assert {each.pull_offset for each in cluster.brokers["a"].progress} <= {0}


@pytest.mark.parametrize("gate", ["", GATE])
def test_seals_by_files_remain_after_the_store_has_grown(
    cluster: FakeCluster, archive: ArchiveWorld, gate: str
) -> None:
    cluster.add("orders", "a", 0, 10)
    archive.job(gate_group=gate).append()
    cluster.restore("orders", "a", 0, 6)
    assert verify(archive.job(gate_group=gate, store_is_gone=True)).wrong == []
    cluster.add("orders", "a", 0, 8, stored_at_ms=LATER_MS)
    assert verify(archive.job(gate_group=gate, store_is_gone=True)).wrong == []
    (wrong,) = verify(archive.job(gate_group=gate)).wrong
    assert "has another store time" in wrong, "without an operator's word"


def test_other_messages_with_the_same_bodies_are_not_sealed(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 10)
    archive.append()
    grow_past(cluster)
    queue = cluster.brokers["a"].queues["orders", 0]
    kept = [row["body"] for row in archive.read()]
    for message, body in zip(queue.messages, kept, strict=False):
        assert message is not None
        message.body = body
    (wrong,) = archive.verify().wrong
    assert "has another store time" in wrong
    assert archive.sealed() == [("orders", 0, 10)]


def test_a_restored_store_is_found_out_where_its_clock_is_behind(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """The message at the last archived offset has the time of other archived messages."""
    hour_ms = FIRST_STORED_AT_MS // 3_600_000 * 3_600_000
    cluster.add("orders", "a", 0, 10, stored_at_ms=hour_ms, step_ms=60_000)
    archive.append()
    assert archive.verify().wrong == []
    cluster.restore("orders", "a", 0, 6)
    cluster.add("orders", "a", 0, 8, stored_at_ms=hour_ms + 4 * 60_000, step_ms=1_000)
    (wrong,) = archive.append().wrong
    assert "offset 9 has another store time than in the archive" in wrong
    (wrong,) = archive.verify().wrong
    assert "offset 9 has another store time than in the archive" in wrong
    assert archive.sealed() == [("orders", 10, 10)]


def test_a_store_recreated_during_the_comparison_needs_confirmation(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 5)
    archive.append()

    def recreate(_request: object) -> None:
        cluster.on_pull = lambda _: None
        cluster.recreate_store("a")

    cluster.on_pull = recreate
    (wrong,) = archive.verify().wrong
    assert "another store than the one that was archived" in wrong
    assert archive.sealed() == [("orders", 0, 5)]
    assert verify(archive.job(store_is_gone=True)).wrong == []
    assert archive.sealed() == [("orders", 5, 5)]
