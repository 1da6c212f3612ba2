"""Streams of events over a log that was replaced or is shorter. Without a Spark session."""

from __future__ import annotations

import pytest

from tests.support.worlds.fake_cluster import EVENT_BYTES, FakeCluster
from tests.support.worlds.micro_batches import EVENT_COLUMNS, Stream
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.errors import DataLoss
from tidemill_pipeline.pulling import SHORT_S
from tidemill_pipeline.schema import arrow_schema
from tidemill_pipeline.source.events import LogRange, read_events


def happen(cluster: FakeCluster, *ids: str, broker: str = "a") -> None:
    cluster.add_events(
        broker, *[pb.Event(kind=pb.EVENT_KIND_STORED, message_id=each) for each in ids]
    )


def numbered(word: str, count: int, first: int = 0) -> list[str]:
    return [f"{word}{i}" for i in range(first, first + count)]


def streams(cluster: FakeCluster) -> tuple[Stream, Stream]:
    """Return a stream that fails on data loss and one that does not, both at the log's end."""
    strict = Stream(cluster, dataset="events")
    lax = Stream(cluster, dataset="events", failOnDataLoss="false")
    happen(cluster, *numbered("m", 10))
    assert strict.run() == lax.run() == numbered("m", 10)
    return strict, lax


def test_a_log_that_ends_before_where_a_stream_is_was_restored(cluster: FakeCluster) -> None:
    strict, lax = streams(cluster)
    cluster.restore_log("a", 5)
    happen(cluster, "n5")
    with pytest.raises(DataLoss, match="the log of a ends at 600 but should be read up to 1000"):
        strict.run()
    assert lax.run() == []
    happen(cluster, "n6")
    assert lax.run() == ["n6"]


def test_restoring_a_log_during_a_batch_is_data_loss(cluster: FakeCluster) -> None:
    strict, lax = streams(cluster)
    happen(cluster, *numbered("m", 10, first=10))
    with pytest.raises(DataLoss, match="ends at 1200 but should be read up to 2000"):
        strict.run(lambda: cluster.restore_log("a", 12))
    with pytest.raises(DataLoss, match="ends at 1200"):
        strict.run()  # The plan is in the checkpoint.
    happen(cluster, *numbered("m", 8, first=12))
    assert lax.run(lambda: cluster.restore_log("a", 12)) == ["m10", "m11"]
    happen(cluster, "n12")
    assert lax.run() == ["n12"]


def test_recreating_a_store_during_a_batch_does_not_stop_the_stream(cluster: FakeCluster) -> None:
    strict, lax = streams(cluster)
    happen(cluster, "m10")

    def recreate() -> None:
        cluster.recreate_store("a")
        happen(cluster, "n0", "n1")

    with pytest.raises(DataLoss, match="a has another log than before"):
        strict.run(recreate)
    with pytest.raises(DataLoss, match="a has another log than before"):
        strict.run()
    assert lax.run() == ["n0", "n1"]
    happen(cluster, "n2")
    assert lax.run(recreate) == ["n0", "n1"], "and not what was planned of the one before"


@pytest.mark.parametrize("is_anew", [True, False])
def test_a_task_with_a_deleted_log_reports_data_loss(
    cluster: FakeCluster, *, is_anew: bool
) -> None:
    """The log is replaced after the tasks are planned."""
    strict, lax = streams(cluster)

    def lose() -> None:
        cluster.on_events = lambda: None
        if is_anew:
            cluster.recreate_store("a")
        else:
            cluster.restore_log("a", 7)

    log_id = cluster.brokers["a"].log_id
    part = LogRange(broker="a", log_id=log_id, start=8 * EVENT_BYTES, end=10 * EVENT_BYTES)
    schema = arrow_schema(EVENT_COLUMNS)
    cluster.on_events = lose
    with pytest.raises(DataLoss):
        list(read_events(strict.options, schema, part, short_s=0))
    (batch,) = read_events(lax.options, schema, part, short_s=0)
    assert batch.to_pylist() == [{"message_id": None, "log_position": 8 * EVENT_BYTES}], "the gap"


def test_a_briefly_shorter_log_is_not_data_loss(cluster: FakeCluster) -> None:
    """For example, a new master does not yet know the log ends of the other replicas."""
    _, lax = streams(cluster)
    lax.short_s = SHORT_S
    cluster.restore_log("a", 8)
    looks = []

    def come_back() -> None:
        looks.append(1)
        if len(looks) == 4:
            happen(cluster, "m8", "m9")

    cluster.on_look = come_back
    assert lax.run() == []
    cluster.on_look = lambda: None
    assert lax.start["e"]["a"]["at"] == 10 * EVENT_BYTES
    happen(cluster, "m10")
    # The same in a task.
    reads = []

    def come_back_to_a_task() -> None:
        reads.append(1)
        if len(reads) == 3:
            happen(cluster, "m9", "m10")

    cluster.restore_log("a", 9)
    cluster.on_events = come_back_to_a_task
    part = LogRange(broker="a", log_id=cluster.brokers["a"].log_id, start=900, end=1100)
    batches = read_events(lax.options, arrow_schema(EVENT_COLUMNS), part)
    assert [row["message_id"] for batch in batches for row in batch.to_pylist()] == ["m9", "m10"]


def test_a_broker_group_that_was_removed_has_taken_its_log_with_it(cluster: FakeCluster) -> None:
    happen(cluster, "b0", broker="b")
    strict = Stream(cluster, dataset="events")
    lax = Stream(cluster, dataset="events", failOnDataLoss="false")
    happen(cluster, "a0")
    assert strict.run() == lax.run() == ["a0", "b0"]
    happen(cluster, "b1", broker="b")
    with pytest.raises(DataLoss, match="the broker group b was removed"):
        strict.run(lambda: cluster.remove("b"))
    with pytest.raises(DataLoss, match="the broker group b was removed"):
        strict.run()
    happen(cluster, "a1")
    assert lax.run() == ["a1"]
    assert set(lax.start["e"]) == {"a"}
