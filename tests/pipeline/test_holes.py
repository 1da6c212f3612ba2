"""Damaged messages at a broker: holes between other messages. Without a Spark session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS, PAGE_ROWS, FakeCluster
from tests.support.worlds.micro_batches import Stream, read_batch
from tidemill_pipeline.errors import DataLoss
from tidemill_pipeline.jobs.archive_upkeep import expire

COUNT = 3 * PAGE_ROWS
LATER_MS = FIRST_STORED_AT_MS + 86_400_000


def damage(cluster: FakeCluster, *offsets: int) -> None:
    """Make some offsets of the broker unreadable."""
    for each in offsets:
        cluster.brokers["a"].queues["orders", 0].messages[each] = None


@pytest.mark.parametrize(
    ("holes", "text"),
    [
        ((0,), "from 0 to 1"),
        ((5, 6), "from 5 to 7"),
        ((PAGE_ROWS - 1,), f"from {PAGE_ROWS - 1} to {PAGE_ROWS}"),
        ((COUNT - 2, COUNT - 1), f"from {COUNT - 2} to {COUNT}"),
        (tuple(range(PAGE_ROWS, 2 * PAGE_ROWS)), f"from {PAGE_ROWS} to {2 * PAGE_ROWS}"),
    ],
)
def test_a_damaged_message_is_data_loss(
    cluster: FakeCluster, holes: tuple[int, ...], text: str
) -> None:
    cluster.add("orders", "a", 0, COUNT, tag="a")
    damage(cluster, *holes)
    with pytest.raises(DataLoss, match=f"offsets {text} are lost: the broker cannot read them"):
        read_batch(cluster, topic="orders")
    rows = read_batch(cluster, topic="orders", failOnDataLoss="false")
    assert [row["queue_offset"] for row in rows] == sorted(set(range(COUNT)) - set(holes))
    # A message that a filter excludes is also absent, but not lost.
    assert len(read_batch(cluster, topic="orders", filter="a")) == COUNT - len(holes)


def test_a_damaged_and_expired_range_is_reported_as_data_loss(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 30)
    stream = Stream(cluster, topic="orders", failOnDataLoss="false")

    def lose() -> None:
        damage(cluster, 12)
        cluster.on_pull = lambda _request: cluster.expire("orders", "a", 0, 10)

    assert len(stream.run(lose)) == 19
    assert "offsets from 0 to 10 are lost: retention" in caplog.text
    assert "offsets from 12 to 13 are lost: the broker cannot" in caplog.text
    assert caplog.text.count("are lost") == 2


def test_an_archive_records_messages_damaged_before_archiving(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    archive = ArchiveWorld(cluster, tmp_path)
    cluster.add("orders", "a", 0, 20)
    damage(cluster, 5, 6)
    (wrong,) = archive.append().wrong
    assert "from 5 to 7 were lost before they were archived" in wrong
    assert archive.job(failOnDataLoss="false").append().rows == 18
    (queue,) = archive.manifest().queues.values()
    assert sum(each.lost for each in queue.ranges) == 2
    # The archive has the messages that were damaged later. It compares its own checksums.
    damage(cluster, 9)
    verified = archive.verify()
    assert verified.wrong == []
    assert "mend the log from a replica" in verified.closed[0]
    assert archive.sealed() == [("orders", 20, 20)]


@pytest.mark.parametrize("holes", [(3,), (38,), (39,), tuple(range(20, 39)), tuple(range(30, 40))])
@pytest.mark.parametrize("left", [5, 28])
def test_a_restored_store_is_detected_beside_earlier_losses(
    cluster: FakeCluster, archive: ArchiveWorld, holes: tuple[int, ...], left: int
) -> None:
    cluster.add("orders", "a", 0, 40)
    damage(cluster, *holes)
    archive.job(failOnDataLoss="false", batch_rows=10, task_rows=10).append()
    # A replica may have mended a damaged message. The message exists, and the store is the same.
    cluster.restore("orders", "a", 0, holes[0])
    cluster.add("orders", "a", 0, 40 - holes[0])
    assert archive.append().wrong == ()
    assert archive.verify().wrong == []
    assert archive.append().wrong == ()
    cluster.restore("orders", "a", 0, left)
    cluster.add("orders", "a", 0, 60, stored_at_ms=LATER_MS)
    last = max(set(range(40)) - set(holes))
    other = f"its message at offset {last} has another store time than in the archive"
    (wrong,) = archive.append().wrong
    assert other in wrong
    (wrong,) = archive.verify().wrong
    assert other in wrong
    assert expire(archive.job(), before_ms=LATER_MS) > 0
    (wrong,) = archive.append().wrong
    assert other in wrong
