"""A task that is held to a rate asks for little at a time. Without a session of Spark."""

from __future__ import annotations

import time

from tests.support.fake_cluster import FakeCluster
from tidemill.pipeline.client import connect
from tidemill.pipeline.offsets import QueueRange
from tidemill.pipeline.options import Topics, parse_source
from tidemill.pipeline.pulling import pull_range


def test_a_rate_is_kept_in_small_calls(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 110)
    options = parse_source(
        {"endpoints": cluster.endpoint, "topic": "orders", "maxRatePerTask": "400"},
        is_stream=False,
    )
    client = connect(options.connection)
    (queue,) = client.cluster(Topics(names=("orders",))).queues
    begin_s = time.monotonic()
    part = QueueRange(queue=queue, start=5, end=105)
    batches = list(pull_range(client, options, part))
    # Never too soon; how late is the machine's affair.
    assert time.monotonic() - begin_s >= 100 / 400
    assert [at for _, _, at in cluster.pulls] == list(range(5, 105, 10))
    found = [each.system_properties.queue_offset for batch in batches for each in batch]
    assert found == list(range(5, 105))
