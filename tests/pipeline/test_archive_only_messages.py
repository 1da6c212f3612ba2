"""`readMode=auto` reads from the archive what brokers do not have. Without Spark."""

from __future__ import annotations

import json

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS, FakeCluster
from tests.support.worlds.micro_batches import Stream, read_batch
from tidemill_pipeline.errors import DataLoss, QueueLoss
from tidemill_pipeline.offsets import Offsets

LATER_MS = FIRST_STORED_AT_MS + 86_400_000


def read_auto(archive: ArchiveWorld, **options: str) -> list[int]:
    rows = read_batch(archive.cluster, topic="orders", archivePath=archive.path, **options)
    return [row["queue_offset"] for row in rows]


def auto_stream(archive: ArchiveWorld, **options: str) -> Stream:
    return Stream(archive.cluster, topic="orders", archivePath=archive.path, **options)


@pytest.mark.parametrize("away", ["removed", "deleted", "anew"])
def test_a_batch_includes_messages_that_only_the_archive_has(
    cluster: FakeCluster, archive: ArchiveWorld, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 30)
    cluster.add("others", "b", 0, 10)
    archive.append()
    match away:
        case "removed":
            cluster.remove("a")
        case "deleted":
            cluster.delete("orders")
        case "anew":
            cluster.delete("orders")
            cluster.add("orders", "a", 0, 5)
    behind = list(range(5)) if away == "anew" else []
    assert read_auto(archive, startingOffsets="latest") == []
    # Whether the topic had more messages is unknown.
    rest = "up to offset 30: later messages, if any, are lost"
    assert rest not in caplog.text
    assert read_auto(archive) == [*range(30), *behind]
    assert rest in caplog.text
    assert read_auto(archive, startingTimestamp=str(FIRST_STORED_AT_MS)) == [*range(30), *behind]


def test_an_explicit_start_offset_excludes_the_previous_topic(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 100)
    archive.append()
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 18)
    place = {"startingOffsets": json.dumps({"orders": {"a": {"0": 15}}})}
    assert read_auto(archive, **place) == [15, 16, 17]
    before = json.dumps({"orders": {"a#log-of-a/1": {"0": 98}, "a": {"0": 16}}})
    assert read_auto(archive, startingOffsets=before) == [98, 99, 16, 17]


def test_a_stream_reads_archived_messages_of_a_removed_broker_group(
    cluster: FakeCluster, archive: ArchiveWorld, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 20)
    cluster.add("orders", "b", 0, 10)
    archive.append()
    stream = auto_stream(archive, maxRowsPerTrigger="1000")
    assert len(stream.run()) == 30
    cluster.add("orders", "a", 0, 20)
    archive.append()
    cluster.remove("a")
    # All messages are archived, but the queue is not sealed yet.
    with pytest.raises(QueueLoss, match="is archived only up to offset 40: later messages"):
        stream.run()
    given = auto_stream(archive, failOnDataLoss="false")
    given.start = stream.start
    assert given.run() == []
    assert caplog.text.count("later messages, if any, are lost") == 1
    assert len(archive.job(store_is_gone=True).append().over) == 1
    assert stream.run() == []
    fresh = auto_stream(archive)
    assert len(fresh.run()) == 50
    assert fresh.run() == []


@pytest.mark.parametrize("is_read", [True, False])
def test_a_closed_queue_is_data_loss_for_readers_with_later_offsets(
    cluster: FakeCluster, archive: ArchiveWorld, *, is_read: bool
) -> None:
    """A stream that has read more than is archived, and a run that has seen more."""
    cluster.add("orders", "a", 0, 20)
    cluster.add("orders", "b", 0, 10)
    archive.append()
    cluster.add("orders", "a", 0, 10)
    stream = auto_stream(archive, maxRowsPerTrigger="1000" if is_read else "10")

    def lose() -> None:
        if len(cluster.brokers) == 2:
            cluster.remove("a")
            assert archive.job(store_is_gone=True).append().over

    if is_read:
        assert len(stream.run()) == 40
        lose()
    with pytest.raises(QueueLoss, match="is archived only up to offset 20: later messages"):
        stream.run(lose)
    given = auto_stream(archive, failOnDataLoss="false")
    given.start = stream.start
    given.run()
    stream.start = given.start
    assert stream.run() == []


def test_a_stream_that_was_behind_gets_the_rest_from_the_archive(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 20)
    cluster.add("orders", "b", 0, 10)
    stream = auto_stream(archive)
    archive.append()
    assert len(stream.run()) == 30
    cluster.add("orders", "a", 0, 20)
    archive.append()
    cluster.delete("orders")
    assert len(archive.job().append().over) == 2
    assert sorted(stream.run()) == sorted(read_bodies(archive)[20:40])


def test_a_stream_with_a_checkpoint_without_archive_skips_deleted_topics(
    cluster: FakeCluster, archive: ArchiveWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """The earlier query read the queue that only the archive has, or began behind it."""
    cluster.add("orders", "a", 0, 30)
    archive.append()
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 20)
    archive.append()
    before = Stream(cluster, topic="orders")
    assert len(before.run()) == 20
    assert before.start is not None
    stream = auto_stream(archive)
    stream.start = before.start
    assert stream.run() == []
    assert "only the archive has" in caplog.text
    cluster.add("orders", "a", 0, 5)
    assert len(stream.run()) == 5
    # From here on the stream reads messages that were archived and deleted before its first look.
    cluster.add("payments", "a", 0, 7)
    archive.append()
    cluster.delete("payments")
    assert archive.job().append().over
    every = Stream(cluster, topics="orders,payments", archivePath=archive.path)
    every.start = stream.start
    assert len(every.run()) == 7


def test_a_stream_that_asked_for_nothing_of_a_deleted_topic_loses_nothing_with_it(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """The archive has no entry about the end of the topic."""
    cluster.add("orders", "a", 0, 10)
    cluster.add("orders", "b", 0, 10)
    archive.append()
    away = cluster.brokers["b"]
    cluster.remove("b")
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 20)
    place = json.dumps({"orders": {"a": {"0": 18}}})
    latest = auto_stream(archive, startingOffsets="latest")
    named = auto_stream(archive, startingOffsets=place)
    before = Stream(cluster, topic="orders")
    before.run()
    known = auto_stream(archive)
    known.start = before.start
    assert (latest.run(), len(named.run()), known.run()) == ([], 2, [])
    for _ in range(2):
        cluster.add("orders", "a", 0, 5)
        assert [len(stream.run()) for stream in (latest, named, known)] == [5, 5, 5]
    # A broker group that returns with its store continues at its offsets.
    cluster.brokers["b"] = away
    cluster.add("orders", "b", 0, 3)
    assert [len(stream.run()) for stream in (latest, named)] == [3, 3]


def test_an_added_queue_is_not_confused_with_a_topic_created_again(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """The archive has an earlier topic of the same name."""
    cluster.add("orders", "a", 0, 10)
    archive.append()
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 10)
    stream = auto_stream(archive, newQueues="latest", failOnDataLoss="false")
    assert len(stream.run()) == 20
    cluster.add("orders", "a", 1, 10)
    assert stream.run() == []
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 7)
    assert len(stream.run()) == 7


def test_a_new_queue_planned_without_an_archive_is_read_whole_from_it(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """The topic existed at the time of the plan and is deleted now."""
    cluster.add("orders", "a", 0, 10)
    cluster.add("others", "a", 0, 50)
    every = Stream(cluster, topicPattern="o.*")
    assert len(every.run()) == 60
    planned = Offsets.from_document(every.start)
    known = {queue: at for queue, at in planned.at.items() if queue.topic == "orders"}
    archive.append()
    cluster.delete("others")
    assert archive.append().over
    stream = Stream(cluster, topicPattern="o.*", archivePath=archive.path)
    stream.start, stream.planned = Offsets(at=known).as_document(), every.start
    assert len(stream.run()) == 50


def read_bodies(archive: ArchiveWorld) -> list[bytes]:
    return [body for queue in archive.bodies() for body in queue]


def test_a_planned_range_is_read_from_the_archive_while_its_broker_is_down(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """Retention deleted the messages at the broker. Only the archive has them."""
    cluster.add("orders", "a", 0, 30)
    archive.append()
    stream = auto_stream(archive, failOnDataLoss="false")

    def go_away() -> None:
        cluster.expire("orders", "a", 0, 30)
        cluster.away["a"] = 1

    assert len(stream.run(go_away)) == 30


def test_expiry_at_the_beginning_of_an_unread_new_queue_is_data_loss(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 5)
    stream = Stream(cluster, topic="orders")
    assert len(stream.run()) == 5
    cluster.add("orders", "a", 1, 21)
    reader, _ = stream.reader()
    # A trigger finds the queue and records its offsets. The next trigger returns the rows.
    found = reader.latestOffset(stream.start, reader.getDefaultReadLimit())
    assert reader.partitions(stream.start, found) == []
    cluster.expire("orders", "a", 1, 20)
    stream.start = json.loads(json.dumps(found))
    with pytest.raises(DataLoss, match="queue 1 of orders at a: offsets from 0 to 20 are lost"):
        stream.run()


def test_a_restored_queue_that_is_longer_again_does_not_follow_its_archive(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 100)
    archive.append()
    assert archive.verify().wrong == []
    assert read_auto(archive) == list(range(100))
    cluster.restore("orders", "a", 0, 50)
    cluster.add("orders", "a", 0, 60, stored_at_ms=LATER_MS)
    other = "its message at offset 99 has another store time than in the archive"
    with pytest.raises(DataLoss, match=f"{other}.*With failOnDataLoss=false"):
        read_auto(archive)
    with pytest.raises(DataLoss, match=other):
        read_auto(archive, filter="nothing has this tag")
    with pytest.raises(DataLoss, match=other):
        auto_stream(archive).run()
    assert read_auto(archive, failOnDataLoss="false") == list(range(110))
    (wrong,) = archive.verify().wrong
    assert other in wrong


def test_messages_that_reappear_at_the_broker_do_not_prevent_sealing(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """For example, a damaged message that was mended from a replica later."""
    cluster.add("orders", "a", 0, 40)
    messages = cluster.brokers["a"].queues["orders", 0].messages
    damaged, messages[10] = messages[10], None
    archive.job(failOnDataLoss="false").append()
    messages[10] = damaged
    verified = archive.verify()
    assert verified.wrong == []
    assert "the broker has messages again that were damaged or lost when it was archived" in str(
        verified
    )
    assert archive.sealed() == [("orders", 40, 40)]


def test_a_changed_body_is_wrong_although_lost_messages_reappeared(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    messages = cluster.brokers["a"].queues["orders", 0].messages
    damaged, messages[10] = messages[10], None
    archive.job(failOnDataLoss="false").append()
    messages[10] = damaged
    other = messages[11]
    assert other is not None
    other.body = b"another"
    (wrong,) = archive.verify().wrong
    assert "the archive has 19 rows, but the broker 20" in wrong


def test_tasks_of_a_batch_do_not_change_when_the_archive_grows(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """A row is identified by its task and its number in the task, like the ids of the sink."""
    cluster.add("orders", "a", 0, 40)
    cluster.add("orders", "a", 1, 40)
    archive.job(batch_rows=20).append()
    cluster.add("orders", "a", 0, 40)
    stream = auto_stream(archive, rowsPerPartition="25")
    reader, _ = stream.reader()
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())

    def tasks() -> list[list[tuple[int, int]]]:
        return [
            [
                (row["queue_id"], row["queue_offset"])
                for batch in reader.read(task)
                for row in batch.to_pylist()
            ]
            for task in reader.partitions(start, end)
        ]

    before = tasks()
    archive.append()
    assert tasks() == before
    assert sum(map(len, before)) == 120
