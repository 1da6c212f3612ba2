"""Reports to readers about messages that were lost before they were archived. Without Spark."""

from __future__ import annotations

import json

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import Stream
from tidemill_pipeline.errors import DataLoss
from tidemill_pipeline.offsets import SourceRange
from tidemill_pipeline.options import parse_source
from tidemill_pipeline.source.message_ranges import plan_ranges
from tidemill_pipeline.source.queue_bounds import OffsetResolver

MODES = ("archive", "auto")
GONE = "are lost: they were lost before they were archived"


@pytest.fixture
def lossy(cluster: FakeCluster, archive: ArchiveWorld) -> ArchiveWorld:
    """Return an archive without the expired offsets 10 to 20 and the damaged offset 25."""
    cluster.add("orders", "a", 0, 10)
    archive.append()
    cluster.add("orders", "a", 0, 30)
    cluster.expire("orders", "a", 0, 20)
    cluster.brokers["a"].queues["orders", 0].messages[25] = None
    archive.job(failOnDataLoss="false").append()
    return archive


def offsets(archive: ArchiveWorld, start: int = 0, **options: str) -> list[int]:
    first = json.dumps({"orders": {"a": {"0": start}}})
    rows = archive.read(startingOffsets=first, **options)
    return sorted(row["queue_offset"] for row in rows)


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_reports_the_losses_of_its_archive(
    lossy: ArchiveWorld, caplog: pytest.LogCaptureFixture, mode: str, is_sealed: bool
) -> None:
    if is_sealed:
        assert lossy.verify().wrong == [], "it knows what was lost"
    with pytest.raises(DataLoss, match=f"queue 0 of orders at a: offsets from 10 to 20 {GONE}"):
        offsets(lossy, readMode=mode)
    with pytest.raises(DataLoss, match=f"offsets from 15 to 20 {GONE}"):
        offsets(lossy, 15, readMode=mode)
    with pytest.raises(DataLoss, match=f"offsets from 25 to 26 {GONE}"):
        offsets(lossy, 20, readMode=mode)
    assert offsets(lossy, 26, readMode=mode) == list(range(26, 40))
    caplog.clear()
    kept = [*range(10), *range(20, 25), *range(26, 40)]
    assert offsets(lossy, readMode=mode, failOnDataLoss="false", rowsPerPartition="3") == kept
    assert caplog.text.count(GONE) == 2


def test_ranges_outside_a_lost_range_are_complete(lossy: ArchiveWorld) -> None:
    end = json.dumps({"orders": {"a": {"0": 10}}})
    assert offsets(lossy, endingOffsets=end) == list(range(10))


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_reports_the_losses_of_its_archive(
    cluster: FakeCluster, lossy: ArchiveWorld, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    def stream(**options: str) -> Stream:
        return Stream(cluster, topic="orders", archivePath=lossy.path, readMode=mode, **options)

    strict = stream(maxRowsPerTrigger="10")
    for _ in range(2):  # At each start.
        with pytest.raises(DataLoss, match=f"offsets from 10 to 20 {GONE}"):
            strict.run()
    lax = stream(failOnDataLoss="false")
    assert len(lax.run()) == 29
    assert caplog.text.count(GONE) == 2
    assert lax.run() == []


def test_losses_at_the_end_of_a_range_and_whole_ranges_are_reported(
    cluster: FakeCluster, archive: ArchiveWorld, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 20)
    messages = cluster.brokers["a"].queues["orders", 0].messages
    messages[0] = messages[18] = messages[19] = None
    archive.job(failOnDataLoss="false").append()
    assert offsets(archive, failOnDataLoss="false") == list(range(1, 18))
    assert f"from 0 to 1 {GONE}" in caplog.text
    assert f"from 18 to 20 {GONE}" in caplog.text
    # Also if a task has no rows.
    assert offsets(archive, 18, failOnDataLoss="false") == []
    with pytest.raises(DataLoss, match=f"from 18 to 20 {GONE}"):
        offsets(archive, 18)


def test_a_completely_lost_range_is_not_read(lossy: ArchiveWorld) -> None:
    given = {
        "topic": "orders",
        "archivePath": lossy.path,
        "readMode": "archive",
        "failOnDataLoss": "false",
    }
    options = parse_source(given, is_stream=False)
    view = OffsetResolver(options).whole_view()
    (queue,) = view.queues
    (task,) = plan_ranges(options, [SourceRange(queue=queue, start=0, end=40)], view)
    assert [(each.part.start, each.part.end) for each in task.pieces] == [(0, 10), (20, 40)]


@pytest.mark.parametrize("rows", [5, 50])
def test_sealing_reports_lost_messages_that_reappeared(
    cluster: FakeCluster, archive: ArchiveWorld, rows: int
) -> None:
    """For a range that was lost as a whole and for a range that was lost in part."""
    cluster.add("orders", "a", 0, 15)
    queue = cluster.brokers["a"].queues["orders", 0]
    whole = list(queue.messages)
    queue.messages[5:10] = [None] * 5
    archive.job(batch_rows=rows, task_rows=rows, failOnDataLoss="false").append()
    queue.messages[:] = whole
    verified = archive.verify()
    (closed,) = verified.closed
    assert "the broker has messages again that were damaged or lost when it was archived" in closed
    assert verified.wrong == []
    assert archive.sealed() == [("orders", 15, 15)]


def test_a_permanent_loss_is_sealed_silently(cluster: FakeCluster, archive: ArchiveWorld) -> None:
    cluster.add("orders", "a", 0, 10)
    archive.append()
    cluster.add("orders", "a", 0, 10)
    cluster.expire("orders", "a", 0, 15)
    archive.job(failOnDataLoss="false").append()
    cluster.expire("orders", "a", 0, 16)
    verified = archive.verify()
    assert verified.wrong == []
    assert not any("from 10 to 15" in each for each in verified.closed)
    assert archive.sealed() == [("orders", 20, 20)]
