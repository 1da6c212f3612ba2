"""Reads of topics and offsets that do not exist. Without a Spark session."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import Stream, read_batch
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.client import NAMES_MAX, connect
from tidemill_pipeline.cluster_state import OmittedItems
from tidemill_pipeline.data_source import RocketMQDataSource
from tidemill_pipeline.errors import BadOption, NoAnswer, QueueLoss
from tidemill_pipeline.jobs.events import report_missing
from tidemill_pipeline.jobs.replay import topic_warning
from tidemill_pipeline.jobs.replay_plan import ReplaySettings
from tidemill_pipeline.jobs.running import progress_line
from tidemill_pipeline.options import parse_source
from tidemill_pipeline.source.events import EventReader
from tidemill_pipeline.source.listings import BrokerPart

TOPIC = StructType([StructField("topic", StringType())])


def read_stream(cluster: FakeCluster, **options: str) -> list[Any]:
    return Stream(cluster, **options).run()


Read = Callable[..., list[Any]]
both_reads = pytest.mark.parametrize("read", [read_batch, read_stream])


def listed(cluster: FakeCluster, dataset: str, **options: str) -> dict[str, int]:
    """Return the number of rows in each broker group's task."""
    given = {"endpoints": cluster.endpoint, "maxRetries": "0", "dataset": dataset, **options}
    reader = RocketMQDataSource(given).reader(TOPIC)
    found = {}
    for part in reader.partitions():
        assert isinstance(part, BrokerPart)
        batches = [batch for batch in reader.read(part) if isinstance(batch, pa.RecordBatch)]
        found[part.broker] = sum(batch.num_rows for batch in batches)
    return found


# ---------------------------------------------------------------- topics


@both_reads
def test_a_topic_that_is_nowhere_is_refused_with_the_nearest_one(
    cluster: FakeCluster, read: Read
) -> None:
    cluster.add("orders", "a", 0, 5)
    with pytest.raises(BadOption, match=r"^there is no topic oders; did you mean orders\?$"):
        read(cluster, topic="oders")
    with pytest.raises(BadOption, match=r"^there is no topic payments$"):
        read(cluster, topics="orders,payments")
    assert len(read(cluster, topics="orders")) == 5


@both_reads
def test_a_missing_topic_is_not_reported_while_a_broker_group_is_down(
    cluster: FakeCluster, read: Read
) -> None:
    cluster.add("orders", "a", 0, 5)
    cluster.brokers["a"].error = "it is away"
    with pytest.raises(NoAnswer):
        read(cluster, topic="orders")


def test_a_topic_deleted_during_a_stream_is_reported(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 5)
    stream = Stream(cluster, topic="orders")
    stream.run()
    cluster.delete("orders")
    with pytest.raises(QueueLoss):
        stream.run()


def test_a_topic_removed_from_a_stream_keeps_its_offsets_and_is_reported(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 2)
    cluster.add("others", "a", 0, 3)
    stream = Stream(cluster, topic="orders")
    assert len(stream.run()) == 2
    other = Stream(cluster, topic="others")
    other.start = stream.start
    cluster.add("orders", "a", 0, 4)
    assert caplog.text == ""
    assert len(other.run()) == 3
    assert caplog.text.count("has offsets of orders, which the options no longer name") == 1
    both = Stream(cluster, topics="orders,others")
    both.start = other.start
    assert len(both.run()) == 4, "it goes on where it was"


@pytest.mark.parametrize("mode", ["archive", "auto"])
def test_a_planned_range_of_a_removed_topic_is_read(
    cluster: FakeCluster, archive: ArchiveWorld, mode: str
) -> None:
    """Also if only the archive has it by then."""
    for topic in ("orders", "others"):
        cluster.add(topic, "a", 0, 5)
    archive.append()
    of = {"archivePath": archive.path, "readMode": mode}
    stream = Stream(cluster, topics="orders,others", **of)
    assert len(stream.run()) == 10
    cluster.add("orders", "a", 0, 5)
    archive.append()
    cluster.add("orders", "a", 0, 2)
    reader, _ = stream.reader()
    reader.prepareForTriggerAvailableNow()
    planned = reader.latestOffset(stream.start, reader.getDefaultReadLimit())
    cluster.expire("orders", "a", 0, 10)
    left = Stream(cluster, topics="others", **of)
    left.start, left.planned = stream.start, json.loads(json.dumps(planned))
    assert len(left.run()) == (7 if mode == "auto" else 5)
    assert left.run() == []


@both_reads
def test_a_topic_that_an_archive_has_is_one(
    cluster: FakeCluster, archive: ArchiveWorld, read: Read
) -> None:
    cluster.add("orders", "a", 0, 5)
    cluster.add("others", "a", 0, 5)
    archive.append()
    cluster.delete("orders")
    of = {"archivePath": archive.path}
    assert len(archive.job().append().over) == 1
    assert len(read(cluster, topic="orders", readMode="archive", **of)) == 5
    where = f" in the archive at {archive.path}"
    with pytest.raises(BadOption, match=rf"no topic oders{where}; did you mean orders"):
        read(cluster, topic="oders", readMode="archive", **of)
    assert len(read(cluster, topic="orders", **of)) == 5
    with pytest.raises(BadOption, match=r"no topic oders; did you mean orders\?$"):
        read(cluster, topic="oders", **of)


def test_a_dry_run_of_a_replay_reports_a_missing_or_misspelt_topic(cluster: FakeCluster) -> None:
    cluster.create("again")

    def warning_for(topic: str, *, endpoint: str = cluster.endpoint, **more: str) -> str:
        sink = {"endpoints": endpoint, "topic": topic, "maxRetries": "0"}
        settings = ReplaySettings(archive="a", given={}, sink=sink, state="s", more=more)
        return topic_warning(settings)

    assert warning_for("again") == ""
    remedy = "Create it with `tidemill topic create`, or set createTopics=true"
    assert warning_for("agian") == f"there is no topic agian; did you mean again? {remedy}"
    assert warning_for("else") == f"there is no topic else. {remedy}"
    assert warning_for("else", createTopics="true") == ""
    assert "topic again exists: no answer" in warning_for("again", endpoint="127.0.0.1:1")
    cluster.add("orders", "b", 0, 1)
    cluster.brokers["b"].error = "it is away"
    assert warning_for("again") == ""
    assert warning_for("orders").startswith("cannot check whether topic orders exists: no answer")


def test_a_missing_topic_of_an_event_query_is_an_immediate_error(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The topics may have been deleted, but the read searches for them."""
    cluster.add("orders", "a", 0, 1)

    def warning_for(**options: str) -> str:
        say = progress_line()
        return report_missing(say, {"endpoints": cluster.endpoint, "maxRetries": "0", **options})

    assert warning_for() == warning_for(topic="orders") == warning_for(topicPattern="o.*") == ""
    # The topic is created on first use.
    assert warning_for(topics="orders,%DLQ%g") == ""
    assert capsys.readouterr().err == ""
    sentence = "there is no topic oders; did you mean orders?"
    assert warning_for(topics="orders,oders") == sentence
    assert capsys.readouterr().err.startswith(f"{sentence} Events of a deleted topic")
    assert warning_for(topic="else") == "there is no topic else."
    with pytest.raises(NoAnswer):
        warning_for(topic="oders", endpoints="127.0.0.1:1")
    cluster.add("orders", "b", 0, 1)
    cluster.brokers["b"].error = "it is away"
    assert warning_for(topic="oders") == ""


def test_a_pattern_without_a_match_is_a_warning_of_a_batch_alone(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 5)
    assert read_stream(cluster, topicPattern="bill.*") == []
    assert read_stream(cluster, dataset="dlq", groups="g") == []
    assert caplog.text == ""
    assert read_batch(cluster, topicPattern="bill.*") == []
    assert "no topic matches bill.*: the read is empty" in caplog.text
    assert read_batch(cluster, dataset="dlq") == []
    assert "no topic matches %DLQ%.*" in caplog.text
    # The cluster creates it with the first dead letter.
    assert read_batch(cluster, dataset="dlq", groups="g") == []
    assert "there is no topic %DLQ%g yet" in caplog.text


@pytest.mark.parametrize("dataset", ["pending", "inflight", "groups"])
def test_a_listing_queries_the_brokers_with_the_topics(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, dataset: str
) -> None:
    cluster.add("orders", "a", 0, 5)
    cluster.add("others", "b", 0, 5)
    for broker in cluster.brokers.values():
        for topic in ("orders", "others"):
            broker.pending.append(pb.Pending(topic=topic))
            broker.in_flight.append(pb.InFlight(topic=topic, consumer_group="g"))
            broker.progress.append(pb.Progress(topic=topic, consumer_group="g"))
    assert listed(cluster, dataset) == {"a": 2, "b": 2}
    # The other broker would reject a request for a topic that it does not have.
    assert listed(cluster, dataset, topic="orders") == {"a": 1}
    assert listed(cluster, dataset, topicPattern="o.*") == {"a": 1, "b": 1}
    assert caplog.text == ""
    assert listed(cluster, dataset, topicPattern="bill.*") == {}
    assert "no topic matches bill.*: the read is empty" in caplog.text
    with pytest.raises(BadOption, match=r"there is no topic oders; did you mean orders\?"):
        listed(cluster, dataset, topic="oders")


def test_an_interrupted_listing_continues_at_its_cursor(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 1)
    cluster.brokers["a"].pending = [pb.Pending(topic="orders", timer_id=n) for n in range(6)]
    cluster.breaks_after = 2
    given = {
        "endpoints": cluster.endpoint,
        "maxRetries": "1",
        "retryBackoffMs": "5",
        "topic": "orders",
    }
    client = connect(parse_source(given, is_stream=False).connection)
    found = client.pending("a", topics=())
    # A page's rows arrive before the next request: a million rows do not fit into memory.
    assert [next(found).timer_id for _ in range(4)] == [0, 1, 2, 3]
    assert cluster.calls.count("ListPending") == 1
    assert [one.timer_id for one in found] == [4, 5]
    assert cluster.calls.count("ListPending") == 2


def test_listings_of_many_topics_are_split_into_several_calls(cluster: FakeCluster) -> None:
    names = [f"topic-{n}" for n in range(NAMES_MAX + 1)]
    cluster.add(names[0], "a", 0, 1)
    for name in names:
        cluster.brokers["a"].pending.append(pb.Pending(topic=name))
    given = {"endpoints": cluster.endpoint, "topic": names[0]}
    client = connect(parse_source(given, is_stream=False).connection)
    found = client.pending("a", topics=names, left=OmittedItems())
    assert [one.topic for one in found] == names
    assert cluster.calls.count("ListPending") == 2


def test_a_batch_of_events_warns_about_missing_topics(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The read still works: the log may have events of a deleted topic."""
    cluster.add_events("a", pb.Event(topic="gone", message_id="m"))
    cluster.add("orders", "a", 0, 1)

    def parts(**options: str) -> int:
        given = {"endpoints": cluster.endpoint, "dataset": "events", **options}
        return len(EventReader(parse_source(given, is_stream=False), TOPIC).partitions())

    assert parts() == parts(topic="orders") == 1
    assert caplog.text == ""
    assert parts(topic="gone") == 1
    assert "there is no topic gone: the read finds only events before its deletion" in caplog.text
    parts(topicPattern="bill.*")
    assert "no topic matches bill.*" in caplog.text


# ---------------------------------------------------------------- offsets


def at(offset: int) -> str:
    return json.dumps({"orders": {"a": {"0": offset}}})


@both_reads
def test_a_start_behind_the_end_of_its_queue_is_refused(cluster: FakeCluster, read: Read) -> None:
    cluster.add("orders", "a", 0, 40)
    with pytest.raises(BadOption, match=r"offset 41 is given for queue 0 .*, which ends at 40"):
        read(cluster, topic="orders", startingOffsets=at(41))
    assert read(cluster, topic="orders", startingOffsets=at(40)) == []
    assert len(read(cluster, topic="orders", startingOffsets=at(39))) == 1


def test_an_end_behind_the_end_of_its_queue_is_refused_at_once(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    for more in ({}, {"failOnDataLoss": "false"}):
        with pytest.raises(BadOption, match=r"offset 41 is given for queue 0 .*, which ends at 40"):
            read_batch(cluster, topic="orders", endingOffsets=at(41), **more)
    assert cluster.pulls == []
    assert len(read_batch(cluster, topic="orders", endingOffsets=at(40))) == 40
    archive.append()
    cluster.add("orders", "a", 0, 10)
    with pytest.raises(BadOption, match=r"offset 41 .*, which ends at 40"):
        archive.read(endingOffsets=at(41))
    assert len(archive.read(endingOffsets=at(45), readMode="auto")) == 45
