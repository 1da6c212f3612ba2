"""Topics and stores that are created again under the same name. Without Spark (ADR 0054)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import COLUMNS, Stream, read_batch
from tidemill_pipeline.errors import DataLoss, NoAnswer, QueueLoss
from tidemill_pipeline.jobs.archive import ArchiveProgress
from tidemill_pipeline.jobs.archive_upkeep import expire
from tidemill_pipeline.jobs.archive_verify import verify
from tidemill_pipeline.offsets import Offsets
from tidemill_pipeline.source.message_stream import MessageStreamReader

HOUR_MS = 3_600_000
LATER_MS = 1_700_000_000_000 + 10 * HOUR_MS


def bodies(*offsets: range) -> list[bytes]:
    return [f"orders/a/0/{i}".encode().ljust(10, b".") for each in offsets for i in each]


def recreate(cluster: FakeCluster, count: int) -> None:
    """Delete the topic, create it again and send `count` messages with other bodies."""
    cluster.delete("orders")
    cluster.add("orders", "a", 0, count, body_size=20, stored_at_ms=LATER_MS)


def new_bodies(count: int) -> list[bytes]:
    return [f"orders/a/0/{i}".encode().ljust(20, b".") for i in range(count)]


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("count", [20, 60])
def test_a_recreated_store_differs_although_its_ids_are_equal(
    cluster: FakeCluster, count: int
) -> None:
    cluster.add("orders", "a", 0, 30)
    strict, lax = (
        Stream(cluster, topic="orders"),
        Stream(cluster, topic="orders", failOnDataLoss="false"),
    )
    assert strict.run() == lax.run() == bodies(range(30))
    cluster.recreate_store("a")
    cluster.add("orders", "a", 0, count)
    with pytest.raises(QueueLoss, match="store of the broker group was created again"):
        strict.run()
    assert lax.run() == bodies(range(count))
    assert lax.run() == []


def test_deleting_a_topic_with_unread_messages_is_data_loss(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 30)
    cluster.add("others", "a", 0, 1)
    stream = Stream(cluster, topic="orders")
    lax = Stream(cluster, topic="orders", failOnDataLoss="false")
    assert stream.run() == lax.run() == bodies(range(30))
    cluster.add("orders", "a", 0, 10)
    cluster.delete("orders")
    with pytest.raises(QueueLoss, match="read up to offset 30"):
        stream.run()
    assert lax.run() == []
    recreate(cluster, 20)
    assert lax.run() == new_bodies(20)


def test_recreating_a_topic_during_a_batch_does_not_stop_the_stream(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 30)
    lax = Stream(cluster, topic="orders", failOnDataLoss="false", newQueues="latest")
    strict = Stream(cluster, topic="orders")
    with pytest.raises(QueueLoss):
        strict.run(lambda: recreate(cluster, 20))
    with pytest.raises(QueueLoss):
        strict.run()  # The plan is in the checkpoint.
    assert lax.run(lambda: recreate(cluster, 25)) == []
    # The stream already read this name, so it reads the new topic from its start.
    assert lax.run() == new_bodies(25)


def recreate_at_next_pull(cluster: FakeCluster, count: int) -> None:
    def once(request: object) -> None:
        del request
        cluster.on_pull = lambda _request: None
        recreate(cluster, count)

    cluster.on_pull = once


def test_a_pull_never_returns_messages_of_a_recreated_topic(cluster: FakeCluster) -> None:
    """The topic is deleted and created again after the tasks are planned."""
    cluster.add("orders", "a", 0, 30)
    recreate_at_next_pull(cluster, 60)
    with pytest.raises(DataLoss, match="offsets from 0 to 30 are lost"):
        read_batch(cluster, topic="orders")
    recreate_at_next_pull(cluster, 90)
    assert read_batch(cluster, topic="orders", failOnDataLoss="false") == []


def test_a_broker_group_that_is_away_has_lost_nothing(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 30)
    cluster.add("orders", "b", 0, 5)
    stream = Stream(cluster, topic="orders")
    assert len(stream.run()) == 35
    cluster.add("orders", "a", 0, 3)
    cluster.brokers["b"].error = "it is away"
    reader = MessageStreamReader(stream.options, COLUMNS)
    end = reader.latestOffset(stream.start, ReadAllAvailable())
    at = {queue.broker: at for queue, at in Offsets.from_document(end).at.items()}
    assert at == {"a": 33, "b": 5}
    assert [part.part.start for part in reader.partitions(stream.start, end)] == [30]
    # The stream does not skip a queue that this batch found.
    del stream.start["o"]["orders"]["b"]
    with pytest.raises(NoAnswer):
        reader.partitions(stream.start, end)


# ---------------------------------------------------------------- archives


def test_a_stream_over_an_archive_reads_each_topic_of_a_name_once(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 30)
    archive.append()
    stream = Stream(cluster, topic="orders", archivePath=archive.path, readMode="archive")
    assert stream.run() == bodies(range(30))
    recreate(cluster, 50)
    archive.append()
    assert stream.run() == new_bodies(50)
    both = archive.read()
    assert [row["body"] for row in both] == bodies(range(30)) + new_bodies(50)
    alone = archive.read(endpoints="")
    assert alone == both, "and without a cluster"
    # The name means the newest topic. The previous topic has another name.
    key = next(iter(archive.manifest().queues))
    first = json.dumps({"orders": {f"a#{key.incarnation}": {"0": 28}, "a": {"0": 49}}})
    some = archive.read(startingOffsets=first)
    assert [row["body"] for row in some] == bodies(range(28, 30)) + new_bodies(50)[49:]


def recreate_after(batches: int, cluster: FakeCluster) -> Callable[[ArchiveProgress], None]:
    def progress(done: ArchiveProgress) -> None:
        if done.batches == batches:
            recreate(cluster, 60)

    return progress


def test_an_archive_run_never_files_one_topic_under_another(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    job = archive.job(batch_rows=10)
    (wrong,) = job.append(recreate_after(2, cluster)).wrong
    assert "from 20 to 40 were lost before they were archived" in wrong
    archive.append()
    assert archive.bodies() == [bodies(range(20)), new_bodies(60)]


def test_an_archive_run_with_allowed_loss_records_it(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    job = archive.job(batch_rows=10, failOnDataLoss="false")
    job.append(recreate_after(2, cluster))
    archive.append()
    assert archive.bodies() == [bodies(range(20)), new_bodies(60)]
    old = next(iter(archive.manifest().queues.values()))
    assert (old.end, sum(each.lost for each in old.ranges)) == (40, 20)


def test_a_task_of_an_archive_run_takes_nothing_of_another_topic(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    recreate_at_next_pull(cluster, 60)
    (wrong,) = archive.append().wrong
    assert "from 0 to 20 were lost before they were archived" in wrong
    recreate_at_next_pull(cluster, 30)
    archive.job(failOnDataLoss="false").append()
    assert archive.bodies() == [[]]
    (lost,) = archive.manifest().queues.values()
    assert (lost.end, sum(each.lost for each in lost.ranges)) == (60, 60)


def test_messages_missing_at_all_brokers_are_sealed_once_by_their_files(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    cluster.add("gone", "a", 0, 5)
    cluster.add("others", "a", 0, 5)
    archive.append()
    recreate(cluster, 40)
    cluster.delete("gone")
    archive.append()
    verified = archive.verify()
    assert verified.wrong == []
    assert len(verified.closed) == 3  # two tasks of the one, one of the other
    assert "is not there any more" in verified.closed[0]
    assert all(at == end for _, at, end in archive.sealed())
    closed = {
        key.topic: queue.closed for key, queue in archive.manifest().queues.items() if queue.closed
    }
    # The entry includes the end of each queue: later messages are unknown.
    assert closed == {"orders": [(40, 40), (0, 20), (20, 40)], "gone": [(5, 5), (0, 5)]}
    again = archive.verify()
    assert (again.wrong, again.closed) == ([], [])


def test_a_store_that_is_another_one_is_sealed_on_an_operators_word(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for broker in ("a", "b", "c"):
        cluster.add("orders", broker, 0, 5)
    archive.append()
    cluster.recreate_store("a")
    del cluster.brokers["b"]
    verified = archive.verify()
    assert [sentence.partition(": ")[2] for sentence in verified.wrong] == [
        f"{why}. If this is permanent, --store-is-gone seals them by their files alone"
        for why in (
            "a has another store than the one that was archived",
            "there is no broker group b",
        )
    ]
    assert [at for _, at, _ in archive.sealed()] == [0, 0, 5]
    # Skipping expired messages is not the operator's confirmation.
    assert len(verify(archive.job(failOnDataLoss="false")).wrong) == 2
    verified = verify(archive.job(store_is_gone=True))
    assert (verified.wrong, len(verified.closed)) == ([], 2)
    assert [at for _, at, _ in archive.sealed()] == [5, 5, 5]


def test_expired_messages_do_not_prevent_sealing_of_later_ones(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 30)
    archive.append()
    cluster.add("orders", "a", 0, 30)
    # Offsets 30 to 40 were never archived. The broker has deleted 0 to 20 and 20 to 30.
    cluster.expire("orders", "a", 0, 40)
    archive.job(failOnDataLoss="false").append()
    cluster.expire("orders", "a", 0, 45)
    # The verification compares the remaining messages.
    message = cluster.brokers["a"].queues["orders", 0].messages[47]
    assert message is not None
    right, message.body = message.body, b"another"
    verified = archive.verify()
    assert len(verified.wrong) == 1
    assert archive.sealed() == [("orders", 40, 60)]
    message.body = right
    verified = archive.verify()
    assert (verified.wrong, len(verified.closed)) == ([], 1)
    assert archive.sealed() == [("orders", 60, 60)]


@pytest.mark.parametrize("batch_rows", [10, 1000])
def test_a_store_restored_from_a_backup_is_not_archived_further(
    cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path, batch_rows: int
) -> None:
    """Its log has the same id and assigns the offsets behind the backup again."""
    cluster.add("orders", "a", 0, 40)
    cluster.add("others", "a", 0, 5)
    archive.job(batch_rows=batch_rows).append()
    assert archive.verify().wrong == []
    cluster.restore("orders", "a", 0, 20)
    for strict in ("true", "false"):
        (wrong,) = archive.job(failOnDataLoss=strict).append().wrong
        assert "ends at 20 but is archived up to 40" in wrong
    (wrong,) = archive.verify().wrong
    assert "ends at 20 but is archived up to 40" in wrong
    # The same holds if the store is longer than before.
    cluster.add("orders", "a", 0, 30, stored_at_ms=LATER_MS)
    (wrong,) = archive.job(batch_rows=batch_rows).append().wrong
    assert "message at offset 39 has another store time" in wrong
    assert archive.bodies()[0] == bodies(range(40))
    # An archive in another folder gets the whole store.
    assert ArchiveWorld(cluster, tmp_path / "new").append().rows == 55


def test_messages_missing_in_a_restored_store_are_sealed_after_confirmation(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    archive.append()
    cluster.restore("orders", "a", 0, 30)
    (wrong,) = archive.verify().wrong
    assert "--store-is-gone seals" in wrong
    assert len(verify(archive.job(failOnDataLoss="false")).wrong) == 1
    assert archive.sealed() == [("orders", 0, 40)]
    verified = verify(archive.job(store_is_gone=True))
    assert (verified.wrong, len(verified.closed)) == ([], 2)
    assert archive.sealed() == [("orders", 40, 40)]


def test_deleting_a_topic_with_unarchived_messages_is_reported_once(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for topic in ("orders", "others"):
        cluster.add(topic, "a", 0, 5)
    assert archive.append().over == ()
    cluster.add("orders", "a", 0, 10)
    cluster.delete("orders")
    assert archive.job(topicPattern="", topic="others").append().over == (), "it is not asked for"
    (text,) = archive.append().over
    assert text.startswith("queue 0 of orders at a does not exist any more: its topic was deleted")
    assert "after offset 5, if there were any, are lost" in text
    (queue, other) = archive.manifest().queues.values()
    assert (queue.closed, other.closed) == ([(5, 5)], [])
    assert archive.append().over == ()
    # Also if only its end is known, and if the name is used again.
    expire(archive.job(), before_ms=LATER_MS, topics=["orders"])
    assert archive.append().over == ()
    cluster.add("orders", "a", 0, 20)
    assert archive.append().over == ()
    cluster.delete("orders")
    done = archive.append()
    (text,) = done.over
    assert "after offset 20, if there were any, are lost" in text
    assert not done.is_over_allowed
    cluster.add("orders", "a", 0, 1)
    archive.append()
    cluster.delete("orders")
    done = archive.job(failOnDataLoss="false").append()
    assert (len(done.over), done.is_over_allowed) == (1, True)


def test_queues_of_a_previous_store_are_reported_until_an_operator_confirms_the_loss(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """The archiver may be connected to the wrong cluster."""
    for broker in ("a", "b"):
        cluster.add("orders", broker, 0, 5)
    archive.append()
    cluster.recreate_store("a")
    del cluster.brokers["b"]
    for lax in ("false", "true"):
        done = archive.job(failOnDataLoss=lax).append()
        assert ["--store-is-gone" in text for text in done.over] == [True, True]
        assert not done.is_over_allowed
    done = archive.job(store_is_gone=True).append()
    over = done.over
    assert done.is_over_allowed
    assert [text.partition(": ")[2].partition(";")[0] for text in over] == [
        "a has another store than the one that was archived",
        "there is no broker group b",
    ]
    assert archive.append().over == ()
