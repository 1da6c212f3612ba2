"""An archive continues with the other queues and files after a fault. Without Spark."""

from __future__ import annotations

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.errors import ArchiveError
from tidemill_pipeline.jobs.archive_commands import closing_text


def ends(archive: ArchiveWorld) -> dict[str, int]:
    """Return how far each topic is archived."""
    return {key.topic: queue.end for key, queue in archive.manifest().queues.items()}


def damage(cluster: FakeCluster, topic: str, offset: int) -> None:
    cluster.brokers["a"].queues[topic, 0].messages[offset] = None


@pytest.mark.parametrize(("batch_rows", "end"), [(50, 33), (1000, 40)])
def test_a_damaged_message_keeps_its_own_queue_alone(
    cluster: FakeCluster, archive: ArchiveWorld, batch_rows: int, end: int
) -> None:
    """And what tasks made of that queue behind it does not count."""
    for topic in ("bills", "orders", "payments"):
        cluster.add(topic, "a", 0, 100)
    damage(cluster, "orders", 47)
    for _ in range(2):
        done = archive.job(batch_rows=batch_rows).append()
        (wrong,) = done.wrong
        assert wrong.startswith("queue 0 of orders at a: offsets from 47 to 48 were lost")
        assert "With --allow-loss the archive continues after them" in wrong
        assert ends(archive) == {"bills": 100, "orders": end, "payments": 100}
    assert archive.verify().wrong == []
    assert sum(map(len, archive.bodies())) == 200 + end
    done = archive.job(failOnDataLoss="false").append()
    assert done.wrong == ()
    assert ends(archive)["orders"] == 100


def test_a_run_reports_archived_messages_and_whether_it_caught_up(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for topic in ("orders", "payments"):
        cluster.add(topic, "a", 0, 600, body_size=1_000)
    ending = "messages, {} MB of bodies; the archive has caught up"
    done = archive.job(batch_rows=500).append()
    assert closing_text(done) == f"archived 1,200 {ending.format('1.2')}"
    for topic in ("orders", "payments"):
        cluster.add(topic, "a", 0, 200, body_size=1_000)
    damage(cluster, "orders", 600)
    assert closing_text(archive.append()) == (
        f"archived 200 {ending.format('0.2')} except for the queues with errors"
    )


def test_expired_messages_block_only_their_own_queue(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for topic in ("orders", "payments"):
        cluster.add(topic, "a", 0, 10)
    archive.append()
    for topic in ("orders", "payments"):
        cluster.add(topic, "a", 0, 10)
    cluster.expire("orders", "a", 0, 15)
    (wrong,) = archive.append().wrong
    assert "queue 0 of orders at a: offsets from 10 to 15 were lost" in wrong
    assert ends(archive) == {"orders": 10, "payments": 20}


def test_a_topic_that_is_refused_keeps_its_own_queue_alone(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for topic in ("bills", "orders", "payments"):
        cluster.add(topic, "a", 0, 10)
    archive.append()
    cluster.add("bills", "a", 0, 10)
    cluster.refused.add("orders")
    cluster.add("orders", "a", 0, 10)
    (wrong,) = archive.append().wrong
    assert wrong.startswith("queue 0 of orders at a: it is not allowed")
    assert ends(archive) == {"bills": 20, "orders": 10, "payments": 10}
    (wrong,) = archive.verify().wrong
    assert wrong.startswith("queue 0 of orders at a, offsets from 0 to 10: it cannot be compared")
    assert archive.sealed() == [("bills", 20, 20), ("orders", 0, 10), ("payments", 10, 10)]
    cluster.refused.clear()
    assert archive.append().wrong == ()
    assert archive.verify().wrong == []
    cluster.refused.add("orders")
    (wrong,) = archive.verify().wrong
    assert wrong.startswith("queue 0 of orders at a: it is not allowed"), (
        "sealed, and of which it is asked whether it follows"
    )


def test_a_queue_that_brokers_do_not_keep_is_not_archived_and_others_are(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for topic in ("orders", "payments"):
        cluster.add(topic, "a", 0, 10)
    cluster.refused.add("orders")
    (wrong,) = archive.job(gate_group="archive").append().wrong
    assert wrong.startswith(
        "queue 0 of orders at a is not archived, as its broker refused the gate: "
    )
    assert ends(archive) == {"payments": 10}


def test_a_restored_store_keeps_its_own_queues_alone(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for topic, broker in (("orders", "a"), ("payments", "a"), ("bills", "b")):
        cluster.add(topic, broker, 0, 20)
    archive.append()
    cluster.restore("orders", "a", 0, 10)
    for topic, broker in (("payments", "a"), ("bills", "b")):
        cluster.add(topic, broker, 0, 10)
    (wrong,) = archive.append().wrong
    assert wrong.startswith("queue 0 of orders at a: it ends at 10 but is archived up to 20")
    assert wrong.endswith("No queue of a is archived")
    assert ends(archive) == {"orders": 20, "payments": 20, "bills": 30}


def test_a_rotten_file_keeps_its_own_folder_alone(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for _ in range(3):
        for topic in ("orders", "payments"):
            cluster.add(topic, "a", 0, 10)
        archive.append()
    path = next(each for each in archive.files() if "topic=orders" in str(each))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(ArchiveError, match=path.name):
            archive.compact()
        names = [str(each) for each in archive.files()]
        assert sum("topic=payments" in name for name in names) == 1
        assert sum("topic=orders" in name for name in names) == 3
