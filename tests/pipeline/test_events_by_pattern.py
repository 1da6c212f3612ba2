"""Events of topics that match an expression, also if brokers list no topics. Without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import EVENT_COLUMNS, Stream
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.options import parse_source
from tidemill_pipeline.source.events import EventReader


def happen(cluster: FakeCluster, topic: str, *ids: str, **more: Any) -> None:
    of = [pb.Event(kind=pb.EVENT_KIND_STORED, topic=topic, message_id=each, **more) for each in ids]
    cluster.add_events("a", *of)


def read(cluster: FakeCluster, **options: str) -> list[str | None]:
    """Return the message ids of the events of a batch read."""
    given = {"endpoints": cluster.endpoint, "dataset": "events", **options}
    reader = EventReader(parse_source(given, is_stream=False), EVENT_COLUMNS)
    return [
        row["message_id"]
        for partition in reader.partitions()
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


@pytest.mark.parametrize("chosen", [{"topicPattern": "ord.*"}, {"topic": "orders"}])
def test_events_of_a_broker_with_unknown_topics_are_read(
    cluster: FakeCluster, chosen: dict[str, str]
) -> None:
    cluster.add("orders", "a", 0, 1)
    stream = Stream(cluster, dataset="events", **chosen)
    assert stream.run() == []
    happen(cluster, "orders", "m0", "m1")
    happen(cluster, "bills", "b0")
    # The broker does not answer requests of the plan and the tasks.
    assert stream.run(lambda: cluster.away.update(a=100)) == ["m0", "m1"]
    cluster.away.clear()
    happen(cluster, "orders", "m2")
    assert stream.run() == ["m2"]


def test_an_expression_is_of_the_first_topic_of_a_message_also_of_deleted_ones(
    cluster: FakeCluster,
) -> None:
    cluster.add("bills", "a", 0, 1)
    happen(cluster, "orders", "gone")
    happen(cluster, "bills", "b0")
    happen(cluster, "%RETRY%g", "again", origin_topic="orders")
    happen(cluster, "%DLQ%orders", "letter", origin_topic="bills")
    happen(cluster, "", "nowhere")
    cluster.add_events(
        "a",
        pb.Event(kind=pb.EVENT_KIND_RESET, consumer_group="g", reason="group_deleted"),
        pb.Event(kind=pb.EVENT_KIND_RESET, topic="bills", consumer_group="g"),
        pb.Event(kind=pb.EVENT_KIND_BROKER_GROUP_REMOVED, reason="b"),
    )
    # An event without a message and without a topic belongs to all topics.
    assert read(cluster, topicPattern="or.*") == ["gone", "again", None, None]
    assert read(cluster, topicPattern="bills|orders") == [
        "gone",
        "b0",
        "again",
        "letter",
        None,
        None,
        None,
    ]
