"""Less is there than there was: a store that was restored, a broker group that was removed.

Without a session of Spark.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.support.worlds.archiving import archive_job
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import COLUMNS, Stream, read_batch
from tidemill_pipeline.errors import ArchiveError, DataLoss, QueueLoss
from tidemill_pipeline.jobs.archive_upkeep import expire
from tidemill_pipeline.jobs.archive_verify import verify
from tidemill_pipeline.pulling import SHORT_S
from tidemill_pipeline.source.message_stream import MessageStreamReader

HOUR_MS = 3_600_000


def bodies(*offsets: range, size: int = 10, broker: str = "a") -> list[bytes]:
    return [f"orders/{broker}/0/{i}".encode().ljust(size, b".") for each in offsets for i in each]


def restore(cluster: FakeCluster, end: int, then: int) -> None:
    """Put the store back as it was with so many messages, and send some of other bodies."""
    cluster.restore("orders", "a", 0, end)
    cluster.add("orders", "a", 0, then, body_size=20)


# ---------------------------------------------------------------- queues


def test_a_queue_that_ends_before_where_a_stream_is_was_restored(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 100)
    strict = Stream(cluster, topic="orders")
    lax = Stream(cluster, topic="orders", failOnDataLoss="false")
    assert strict.run() == lax.run() == bodies(range(100))
    restore(cluster, 50, then=40)
    with pytest.raises(DataLoss, match="ends at offset 90 but was read up to 100"):
        strict.run()
    assert lax.run() == []
    cluster.add("orders", "a", 0, 20, body_size=20)
    assert lax.run() == bodies(range(90, 110), size=20), "from where it was found to end"
    assert lax.run() == []


def test_restoring_a_store_during_a_batch_is_data_loss(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 100)
    strict = Stream(cluster, topic="orders")
    lax = Stream(cluster, topic="orders", failOnDataLoss="false")
    with pytest.raises(DataLoss, match="ends at offset 50 but the plan reads it up to 100"):
        strict.run(lambda: restore(cluster, 50, then=0))
    cluster.add("orders", "a", 0, 50)
    assert lax.run(lambda: restore(cluster, 50, then=10)) == (
        bodies(range(50)) + bodies(range(50, 60), size=20)
    )
    assert lax.start["o"]["orders"]["a"]["log-of-a/1"]["0"] == 60


def test_a_briefly_shorter_queue_is_not_data_loss(cluster: FakeCluster) -> None:
    """As by a master that was replaced and has not heard of it."""
    cluster.add("orders", "a", 0, 30)
    stream = Stream(cluster, topic="orders", failOnDataLoss="false")
    stream.short_s = SHORT_S
    assert stream.run() == bodies(range(30))
    cluster.restore("orders", "a", 0, 20)
    looks = []

    def come_back() -> None:
        looks.append(1)
        if len(looks) == 4:
            cluster.add("orders", "a", 0, 12)

    cluster.on_look = come_back
    assert stream.run() == []
    cluster.on_look = lambda: None
    assert stream.run() == bodies(range(30, 32)), "and nothing a second time"


def test_auto_says_so_where_the_archive_has_more_than_the_broker(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    to = str(tmp_path)
    cluster.add("orders", "a", 0, 100)
    archive_job(cluster, to).append()
    strict = Stream(cluster, topic="orders", archivePath=to)
    lax = Stream(cluster, topic="orders", archivePath=to, failOnDataLoss="false")
    assert strict.run() == lax.run() == bodies(range(100))
    restore(cluster, 50, then=40)
    with pytest.raises(DataLoss, match="ends at offset 90 but is archived up to 100"):
        strict.run()
    with pytest.raises(DataLoss, match="ends at offset 90 but is archived up to 100"):
        read_batch(cluster, topic="orders", archivePath=to)
    assert lax.run() == []
    rows = read_batch(cluster, topic="orders", archivePath=to, failOnDataLoss="false")
    assert [row["body"] for row in rows] == bodies(range(100))
    cluster.add("orders", "a", 0, 20, body_size=20)
    assert lax.run() == bodies(range(100, 110), size=20)


def test_auto_reads_expired_archive_ranges_from_the_broker(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    to = str(tmp_path)
    # Ten an hour.
    cluster.add("orders", "a", 0, 50, stored_at_ms=HOUR_MS, step_ms=HOUR_MS // 10)
    archive_job(cluster, to, batch_rows=10, task_rows=10).append()
    verify(archive_job(cluster, to))
    cluster.add("orders", "a", 0, 10, stored_at_ms=HOUR_MS, step_ms=HOUR_MS // 10)
    expire(archive_job(cluster, to), before_ms=4 * HOUR_MS)
    auto = {"topic": "orders", "archivePath": to}
    assert sorted(Stream(cluster, **auto).run()) == sorted(bodies(range(60)))

    def read(**options: str) -> list[int]:
        return sorted(row["queue_offset"] for row in read_batch(cluster, **auto, **options))

    assert read() == list(range(60))
    assert read(readMode="archive") == list(range(30, 50))
    # An instant of before the archive's begin is the broker's.
    assert read(startingTimestamp=f"{3 * HOUR_MS}") == list(range(20, 60))
    assert read(startingTimestamp=f"{5 * HOUR_MS}") == list(range(40, 60))
    # And what neither has is nowhere.
    cluster.expire("orders", "a", 0, 20)
    assert read() == list(range(20, 60))
    cluster.expire("orders", "a", 0, 40)
    assert read() == list(range(30, 60))


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_stream_waits_for_an_archive_that_is_behind_it(
    cluster: FakeCluster, tmp_path: Path, fails: str
) -> None:
    """Brokers were read as far as they went, and the archive alone has less yet."""
    to = str(tmp_path)
    options = {"topic": "orders", "archivePath": to, "failOnDataLoss": fails}
    cluster.add("orders", "a", 0, 1)
    archive_job(cluster, to).append()
    cluster.add("orders", "a", 0, 3)
    auto = Stream(cluster, **options)
    assert auto.run() == bodies(range(4))
    alone = Stream(cluster, **options, readMode="archive")
    alone.start = auto.start
    assert alone.run() == []
    archive_job(cluster, to).append()
    assert alone.run() == []
    cluster.add("orders", "a", 0, 2)
    archive_job(cluster, to).append()
    assert alone.run() == bodies(range(4, 6))


def test_a_batch_that_brokers_were_to_give_is_not_read_from_an_archive_that_is_behind(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    to = str(tmp_path)
    options = {"topic": "orders", "archivePath": to}
    cluster.add("orders", "a", 0, 1)
    archive_job(cluster, to).append()
    cluster.add("orders", "a", 0, 3)
    auto = Stream(cluster, **options)
    with pytest.raises(KeyboardInterrupt):
        auto.run(between=_killed)
    alone = Stream(cluster, **options, readMode="archive")
    alone.start, alone.planned = auto.start, auto.planned
    with pytest.raises(ArchiveError, match="archived up to 1 but the plan reads it up to 4"):
        alone.run()
    archive_job(cluster, to).append()
    assert alone.run() == bodies(range(4))


def _killed() -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------- broker groups


def test_a_broker_group_that_was_removed_has_taken_its_queues_with_it(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 5)
    cluster.add("orders", "b", 0, 5)
    strict = Stream(cluster, topic="orders")
    lax = Stream(cluster, topic="orders", failOnDataLoss="false")
    assert len(strict.run()) == len(lax.run()) == 10
    cluster.add("orders", "a", 0, 1)
    cluster.remove("b")
    # One that gives no answer, and never told its name, may be it.
    cluster.add("orders", "10.0.0.2:8082", 0, 1)
    cluster.brokers["10.0.0.2:8082"].error = "the broker group has not reported yet"
    reader = MessageStreamReader(strict.options, COLUMNS, short_s=0)
    end = reader.latestOffset(strict.start, ReadAllAvailable())
    assert set(end["o"]["orders"]) == {"a", "b"}
    del cluster.brokers["10.0.0.2:8082"]
    with pytest.raises(
        QueueLoss, match=r"queue 0 of orders at b .* or the broker group was removed"
    ):
        strict.run()
    assert lax.run() == bodies(range(5, 6))
    assert set(lax.start["o"]["orders"]) == {"a"}
