"""Triggers with a limit of bytes, for messages of brokers and archives. Without Spark."""

from __future__ import annotations

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS, FakeCluster
from tests.support.worlds.micro_batches import Stream
from tidemill_pipeline.jobs.archive_upkeep import expire
from tidemill_pipeline.offsets import Offsets
from tidemill_pipeline.source.queue_bounds import BESIDE_BODY_BYTES

BODY = 1_000
LATER_MS = FIRST_STORED_AT_MS + 3_600_000
ROW = BODY + BESIDE_BODY_BYTES


def rows_of_a_trigger(cluster: FakeCluster, **options: str) -> int:
    stream = Stream(cluster, topic="orders", maxBytesPerTrigger=str(20 * ROW), **options)
    reader, _ = stream.reader()
    first = reader.initialOffset()
    target = reader.latestOffset(first, reader.getDefaultReadLimit())
    (start,) = Offsets.from_document(first).at.values()
    (end,) = Offsets.from_document(target).at.values()
    return int(end - start)


@pytest.mark.parametrize("mode", ["archive", "auto"])
def test_a_trigger_over_an_archive_has_as_many_bytes_as_over_brokers(
    cluster: FakeCluster, archive: ArchiveWorld, mode: str
) -> None:
    cluster.add("orders", "a", 0, 100, body_size=BODY)
    cluster.add("orders", "a", 0, 100, body_size=BODY, stored_at_ms=LATER_MS)
    archive.append()
    given = {"archivePath": archive.path, "readMode": mode}
    assert rows_of_a_trigger(cluster, **given) == 20
    # Deleted messages have no bytes.
    cluster.expire("orders", "a", 0, 200)
    expire(archive.job(), before_ms=LATER_MS, topics=["orders"])
    (queue,) = archive.manifest().queues.values()
    assert (queue.start, queue.end) == (100, 200)
    assert rows_of_a_trigger(cluster, **given) == 20


def test_the_size_of_a_partly_archived_queue_counts_archive_and_broker(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 100, body_size=BODY)
    archive.append()
    cluster.add("orders", "a", 0, 100, body_size=BODY)
    cluster.expire("orders", "a", 0, 90)
    # The cluster of the tests adds fewer bytes to a body.
    assert rows_of_a_trigger(cluster, archivePath=archive.path) in {20, 21}
