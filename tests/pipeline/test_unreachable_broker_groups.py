"""Broker groups that are unreachable for a moment or for good. Without a Spark session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.worlds.archiving import archive_job
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import Stream, read_batch
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.errors import BadOption, NoAnswer

Work = Callable[[FakeCluster, Path], int]

WORKS: dict[str, Work] = {
    "batch": lambda cluster, _: len(read_batch(cluster, topic="orders")),
    "stream": lambda cluster, _: len(Stream(cluster, topic="orders").run()),
    "archive": lambda cluster, to: archive_job(cluster, str(to)).append().rows,
}


@pytest.mark.parametrize("name", WORKS)
def test_complete_listings_retry_unreachable_broker_groups(
    cluster: FakeCluster, tmp_path: Path, name: str
) -> None:
    cluster.add("orders", "a", 0, 5)
    cluster.add("orders", "b", 0, 5)
    cluster.away = {"b": 2}
    assert WORKS[name](cluster, tmp_path) == 10
    cluster.away = {"b": 1000}
    with pytest.raises(NoAnswer, match=r"after 3 attempts: b: it is away"):
        WORKS[name](cluster, tmp_path)


def test_a_missing_topic_fails_only_the_job_that_names_it(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 5)
    job = archive_job(cluster, str(tmp_path), topicPattern="", topics="orders,nosuch")
    with pytest.raises(BadOption, match="there is no topic nosuch"):
        job.append()
    own = {"topicPattern": "", "topics": "orders"}
    assert archive_job(cluster, str(tmp_path), **own).append().rows == 5  # type: ignore[arg-type]  # By name.
    # One that is in the archive was there.
    cluster.delete("orders")
    assert archive_job(cluster, str(tmp_path), **own).append().rows == 0  # type: ignore[arg-type]  # By name.


@pytest.mark.parametrize("dataset", ["messages", "events"])
def test_a_stream_waits_for_a_broker_group_but_not_for_ever(
    cluster: FakeCluster, dataset: str
) -> None:
    """And anew from when it was there again."""
    for broker in ("a", "b"):
        cluster.add("orders", broker, 0, 5)
        cluster.add_events(broker, pb.Event(kind=pb.EVENT_KIND_STORED, topic="orders"))
    stream = Stream(cluster, topic="orders", dataset=dataset, failAfterMs="60000")
    reader, _ = stream.reader()
    start, limit = reader.initialOffset(), reader.getDefaultReadLimit()
    for _ in range(2):
        cluster.brokers["b"].error = "it is away"
        reader.latestOffset(start, limit)
        stream.now_s += 60
        assert reader.latestOffset(start, limit) != start, "the other one is read"
        cluster.brokers["b"].error = ""
        reader.latestOffset(start, limit)
    cluster.brokers["b"].error = "it is away"
    reader.latestOffset(start, limit)
    stream.now_s += 61
    with pytest.raises(NoAnswer, match="b has been unreachable for 61 s, longer than failAfterMs"):
        reader.latestOffset(start, limit)
