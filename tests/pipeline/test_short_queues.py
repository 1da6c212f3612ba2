"""A queue that ends before its reported end. Without a Spark session."""

from __future__ import annotations

import pytest

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.client import connect
from tidemill_pipeline.errors import DataLoss
from tidemill_pipeline.offsets import SourceRange
from tidemill_pipeline.options import TopicSelection, parse_source
from tidemill_pipeline.pulling import SHORT_S, pull_range


def pull_all(cluster: FakeCluster, *, told_end: int, short_s: float, **given: str) -> list[int]:
    """Pull up to an end and return the received offsets."""
    options = parse_source(
        {"endpoints": cluster.endpoint, "topic": "orders", "retryBackoffMs": "1", **given},
        is_stream=False,
    )
    client = connect(options.connection)
    (queue,) = client.cluster(TopicSelection(names=("orders",))).queues
    part = SourceRange(queue=queue, start=0, end=told_end)
    return [
        message.system_properties.queue_offset
        for messages in pull_range(client, options, part, short_s=short_s)
        for message in messages
    ]


def test_messages_missing_after_the_timeout_are_data_loss(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 30)
    with pytest.raises(DataLoss, match=r"offsets from 30 to 40 are lost: .* for 0 s: the broker"):
        pull_all(cluster, told_end=40, short_s=0)
    assert "ends at 30 but should end at 40" in caplog.text
    found = pull_all(cluster, told_end=40, short_s=0, failOnDataLoss="false")
    assert found == list(range(30))


def test_messages_that_appear_within_the_timeout_are_read(cluster: FakeCluster) -> None:
    """For example, a replaced master lacks the messages, but its successor has them."""
    cluster.add("orders", "a", 0, 30)

    def grow(request: object) -> None:
        del request
        if len(cluster.pulls) == 3:
            cluster.add("orders", "a", 0, 10)

    cluster.on_pull = grow
    assert pull_all(cluster, told_end=40, short_s=SHORT_S) == list(range(40))
    assert len(cluster.pulls) > 3
