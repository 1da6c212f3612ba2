"""How much is read at a time, and when. Without a session of Spark."""

from __future__ import annotations

import time

from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import Stream
from tidemill_pipeline.client import connect
from tidemill_pipeline.offsets import SourceRange
from tidemill_pipeline.options import TopicSelection, parse_source
from tidemill_pipeline.pulling import pull_range


def test_a_rate_is_kept_in_small_calls(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 110)
    options = parse_source(
        {"endpoints": cluster.endpoint, "topic": "orders", "maxRatePerTask": "400"}, is_stream=False
    )
    client = connect(options.connection)
    (queue,) = client.cluster(TopicSelection(names=("orders",))).queues
    begin_s = time.monotonic()
    part = SourceRange(queue=queue, start=5, end=105)
    batches = list(pull_range(client, options, part))
    # Never too soon; how late is the machine's affair.
    assert time.monotonic() - begin_s >= 100 / 400
    assert [at for _, _, at in cluster.pulls] == list(range(5, 105, 10))
    found = [each.system_properties.queue_offset for batch in batches for each in batch]
    assert found == list(range(5, 105))


def test_a_read_that_a_quota_holds_goes_on_after_many_deadlines(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 20)
    cluster.held_calls = 30
    given = {"topic": "orders", "quotaGroup": "archive", "maxRetries": "0"}
    options = parse_source({"endpoints": cluster.endpoint, **given}, is_stream=False)
    client = connect(options.connection)
    (queue,) = client.cluster(TopicSelection(names=("orders",))).queues
    part = SourceRange(queue=queue, start=0, end=20)
    batches = list(pull_range(client, options, part))
    found = [each.system_properties.queue_offset for batch in batches for each in batch]
    assert found == list(range(20))
    assert (cluster.held_calls, cluster.quota_groups) == (0, {"archive"})


def test_a_new_queue_is_taken_in_before_there_are_so_many_rows(cluster: FakeCluster) -> None:
    """It is written down with its place first, and its rows count from then on."""
    cluster.add("orders", "a", 0, 10)
    stream = Stream(cluster, topicPattern=".*", minRowsPerTrigger="100", maxTriggerDelay="1h")
    reader, _ = stream.reader()
    limit = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    assert reader.latestOffset(start, limit) == start, "ten rows are too few"
    cluster.add("payments", "a", 0, 500)
    known = reader.latestOffset(start, limit)
    (first,) = reader.partitions(start, known)
    assert (first.part.queue.topic, first.part.rows) == ("orders", 10)
    (second,) = reader.partitions(known, reader.latestOffset(known, limit))
    assert (second.part.queue.topic, second.part.rows) == ("payments", 500)


def test_a_stream_waits_for_so_many_rows_but_not_for_ever(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 10)
    stream = Stream(cluster, topic="orders", minRowsPerTrigger="100", maxTriggerDelay="15m")
    reader, _ = stream.reader()
    limit = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    stream.now_s = 15 * 60 - 1
    assert reader.latestOffset(start, limit) == start, "ten rows are too few"
    stream.now_s += 2
    (part,) = reader.partitions(start, reader.latestOffset(start, limit))
    assert part.part.rows == 10
