"""The sink and the replay: content, order, repeats, delays, bad rows, and the round trip."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.functions import element_at, lit

from tests.support.clients.pipeline_load import send_some
from tests.support.processes.processes import standalone
from tests.support.worlds.streaming_queries import run_to_end
from tidemill.common.clock import SystemClock
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.archive.spark_tasks import SparkRunner
from tidemill_pipeline.client import connect, ordinary_topics
from tidemill_pipeline.jobs import replay, replay_plan
from tidemill_pipeline.jobs.archive import ArchiveJob
from tidemill_pipeline.options import ConnectionOptions, parse_source
from tidemill_pipeline.sink.messages import COLUMNS
from tidemill_pipeline.transforms.replay import ORIGINAL_ID

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.worlds.fake_cluster import FakeCluster


TOPICS = ("orders", "later", "alarms")


@pytest.fixture(autouse=True)
def topics(cluster: FakeCluster) -> None:
    cluster.create(*TOPICS)


def write(frame: DataFrame, cluster: FakeCluster, **options: object) -> None:
    given = {"endpoints": cluster.endpoint, "maxRetries": 2, "retryBackoffMs": 5, **options}
    writer = frame.write.format("rocketmq").mode("append")
    for name, value in given.items():
        writer = writer.option(name, str(value))
    writer.save()


def rows(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).selectExpr(
        "concat('body-', id) as body",
        "concat('t', id % 2) as tag",
        "array('k', string(id)) as keys",
        "map('n', string(id)) as properties",
    )


def test_every_row_is_a_message_also_when_sends_fail(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    cluster.failing = {"SendMessage": 2}
    write(rows(spark, 500), cluster, topic="orders")
    assert {each.body for each in cluster.sent} == {f"body-{i}".encode() for i in range(500)}
    one = next(each for each in cluster.sent if each.body == b"body-7")
    assert (one.topic.name, one.system_properties.tag) == ("orders", "t1")
    assert list(one.system_properties.keys) == ["k", "7"]
    assert dict(one.user_properties) == {"n": "7"}


def test_groups_keep_their_order_and_delays_their_times(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    fifo = spark.range(60).selectExpr("string(id) as body", "concat('g', id % 3) as message_group")
    write(fifo.coalesce(1), cluster, topic="orders", batchSize=4)
    for group in ("g0", "g1", "g2"):
        bodies = [
            int(each.body) for each in cluster.sent if each.system_properties.message_group == group
        ]
        assert bodies == sorted(bodies)
        assert len(bodies) == 20
    cluster.sent.clear()
    delayed = spark.sql(
        "select 'a' as body, 'later' as topic, timestamp_millis(1900000000123) as due_timestamp"
    )
    write(delayed, cluster)
    due = cluster.sent[0].system_properties.delivery_timestamp.ToMilliseconds()
    assert (due, cluster.sent[0].topic.name) == (1_900_000_000_123, "later")


def test_bad_rows_fail_or_go_to_a_table(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    frame = spark.sql("select explode(array('one', 'refuse me', null, 'two')) as body")
    with pytest.raises(
        Exception, match=r"row 1 of partition 0 cannot be sent: it has no body; onE"
    ):
        write(frame.where("body is null or body = 'one'").coalesce(1), cluster, topic="orders")
    with pytest.raises(Exception, match=r"row 1 of partition 0 cannot be sent: MESSAGE_BODY_TOO"):
        write(frame.where("body is not null").coalesce(1), cluster, topic="orders")
    cluster.sent.clear()
    table = str(tmp_path / "bad")
    write(frame, cluster, topic="orders", onError="dead-letter", deadLetterPath=table)
    assert {each.body for each in cluster.sent} == {b"one", b"refuse me", b"two"}
    bad = {(row.row, row.why) for row in spark.read.parquet(table).collect()}
    assert bad == {(1, "MESSAGE_BODY_TOO_LARGE: too large"), (2, "it has no body")}


def test_bad_rows_are_kept_whole_so_that_they_can_be_sent_again(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    table = str(tmp_path / "bad")
    frame = spark.sql(
        "select 'refuse me' as body, 'orders' as topic, 'eu' as message_group,"
        " array('k') as keys, map('a', 'b') as properties, cast(null as string) as tag"
        " union all select 'one', null, 'us', null, null, cast(x'ff' as string)"
    )
    write(frame, cluster, onError="dead-letter", deadLetterPath=table)
    # A frame with other columns, into the same table.
    other = spark.sql("select binary('refuse me') as body, 7 as delay_ms")
    write(other, cluster, topic="later", onError="dead-letter", deadLetterPath=table)
    kept = spark.read.parquet(table)
    assert {row.why for row in kept.collect()} == {
        "MESSAGE_BODY_TOO_LARGE: too large",
        "its tag is not valid UTF-8",
    }
    assert set(kept.columns) == {*COLUMNS, "row", "why"}
    cluster.sent.clear()
    mended = kept.where("tag is null").drop("row", "why").selectExpr("* except (body)", "'1' body")
    write(mended.fillna("later", ["topic"]), cluster)
    sent, later = sorted(cluster.sent, key=lambda each: each.topic.name, reverse=True)
    system = sent.system_properties
    assert (sent.topic.name, sent.body, dict(sent.user_properties)) == ("orders", b"1", {"a": "b"})
    assert (system.message_group, list(system.keys)) == ("eu", ["k"])
    assert later.system_properties.message_type == v2.DELAY


@pytest.mark.parametrize("columns", ["'one' as body", "'one' as body, 'ordres' as topic"])
def test_a_misspelt_topic_is_an_error_and_is_not_created(
    spark: SparkSession, tmp_path: Path, columns: str
) -> None:
    """Clusters create topics on first use, as this one does."""
    given = {} if "topic" in columns else {"topic": "ordres"}
    with standalone(tmp_path / "data") as broker:
        broker.put("topics/orders", queues=1)
        writer = spark.sql(f"select {columns}").write.format("rocketmq").mode("append")
        writer = writer.options(endpoints=broker.grpc, **given)
        with pytest.raises(
            Exception, match=r"no topic ordres; did you mean orders\? Create it with"
        ):
            writer.save()
        assert topic_names(broker.grpc) == {"orders"}
        writer.option("createTopics", "true").save()
        assert topic_names(broker.grpc) == {"orders", "ordres"}


def test_mode_dedup_stores_the_rows_of_a_repeated_write_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    with standalone(tmp_path / "data") as broker:
        broker.put("topics/plain", queues=1)
        broker.put("topics/once", queues=2, dedup={"windowMs": 86_400_000})
        broker.put("topics/ids", dedup={"windowMs": 86_400_000, "keyFrom": "messageId"})
        frame = rows(spark, 40).withColumn("dedup_key", element_at("properties", lit("n")))

        def save(topic: str) -> None:
            writer = frame.write.format("rocketmq").mode("append")
            writer.options(endpoints=broker.grpc, topic=topic, mode="dedup").save()

        for topic in ("plain", "ids"):
            with pytest.raises(Exception, match=f"tidemill topic set {topic} --dedup-window"):
                save(topic)
        for _ in range(2):
            save("once")
        queues = broker.get("topics/once")["queueStatus"]
        assert sum(queue["maxOffset"] for queue in queues) == 40


def topic_names(endpoint: str) -> set[str]:
    return ordinary_topics(connect(ConnectionOptions(endpoints=(endpoint,))))


def test_a_delayed_row_has_one_due_time(spark: SparkSession, cluster: FakeCluster) -> None:
    frame = spark.sql("select 'a' as body, 7 as delay_ms, timestamp_millis(9) as due_timestamp")
    with pytest.raises(Exception, match="it has due_timestamp and delay_ms"):
        write(frame, cluster, topic="orders")
    assert cluster.sent == []


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ("1 as body", "column body is binary or string, not int"),
        ("'a' as bodi", "column bodi cannot be sent"),
        ("'a' as topic", "has no column body"),
        ("'a' as body", "no topic; set the option topic"),
    ],
)
def test_frames_that_cannot_be_sent_are_refused(
    spark: SparkSession, cluster: FakeCluster, columns: str, sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        write(spark.sql(f"select {columns}"), cluster)
    assert cluster.sent == []


def test_each_write_of_a_batch_of_a_stream_has_ids_of_its_own(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    """Two writes of the same batch in one `foreachBatch` have different ids."""
    cluster.add("orders", "a", 0, 4)

    def alarm_twice(frame: DataFrame, _batch: int) -> None:
        for _ in range(2):
            write(frame.coalesce(1).selectExpr("'alarm' as body"), cluster, topic="alarms")

    reader = spark.readStream.format("rocketmq").option("startingOffsets", "earliest")
    orders = reader.options(endpoints=cluster.endpoint, topic="orders").load()
    run_to_end(
        orders.writeStream.foreachBatch(alarm_twice).option("checkpointLocation", str(tmp_path))
    )
    assert len({each.system_properties.message_id for each in cluster.sent}) == 8


def test_an_archive_that_was_replayed_and_archived_is_the_same(
    spark: SparkSession, tmp_path: Path
) -> None:
    with standalone(tmp_path / "data") as broker:
        send_some(broker.grpc, "orders", 300)

        def archived(topic: str) -> list[Any]:
            to = str(tmp_path / f"archive-{topic}")
            given = {
                "endpoints": broker.grpc,
                "topic": topic,
                "archivePath": to,
                "readMode": "broker",
            }
            options = parse_source(given, is_stream=False)
            job = ArchiveJob(options, SparkRunner(spark, given), now_ms=SystemClock().wall_ms)
            job.append()
            reader = spark.read.format("rocketmq").option("readMode", "archive")
            frame = reader.option("archivePath", to).option("topic", topic).load()
            return list(frame.collect())

        first = archived("orders")
        broker.put("topics/again", queues=4)
        settings = replay_plan.ReplaySettings(
            archive=str(tmp_path / "archive-orders"),
            given={"topics": "orders"},
            sink={"endpoints": broker.grpc, "topic": "again"},
            state=str(tmp_path / "state"),
        )
        now_ms = SystemClock().wall_ms()
        assert replay_plan.plan(spark, settings).rows == 300
        batches: list[replay.ReplayBatch] = []
        done = replay.send(spark, settings, now_ms=lambda: now_ms, report=batches.append)
        assert (done.plan.rows, done.sent, [each.sent for each in batches]) == (300, 300, [300])
        # The replay is finished. A second run sends nothing.
        again = replay.send(spark, settings, now_ms=lambda: now_ms)
        assert (again.plan, again.sent) == (done.plan, 0)
        second = archived("again")
    assert {(r.message_id, bytes(r.body), r.tag, tuple(r.keys)) for r in first} == {
        (r.properties[ORIGINAL_ID], bytes(r.body), r.tag, tuple(r.keys)) for r in second
    }
    assert len(second) == 300
    assert {r.message_id for r in first}.isdisjoint(r.message_id for r in second)


def test_a_replay_covers_the_archive_at_its_begin(spark: SparkSession, tmp_path: Path) -> None:
    to = str(tmp_path / "archive")
    with standalone(tmp_path / "data") as broker:
        connection = {"endpoints": broker.grpc, "namespace": "tenant"}

        def archive() -> None:
            given = {**connection, "topicPattern": ".*", "archivePath": to, "readMode": "broker"}
            options = parse_source(given, is_stream=False)
            ArchiveJob(options, SparkRunner(spark, given), now_ms=SystemClock().wall_ms).append()

        def sent() -> int:
            reader = spark.read.format("rocketmq").options(**connection, topic="again")
            return int(reader.load().count())

        send_some(broker.grpc, "orders", 20, namespace="tenant")
        archive()
        settings = replay_plan.ReplaySettings(
            archive=to,
            given={"topicPattern": ".*"},
            state=str(tmp_path / "state"),
            sink={"endpoints": broker.grpc, "topic": "again"},
            # One option for both sides, one for the source, two for the sink.
            more={
                "namespace": "tenant",
                "failOnDataLoss": "false",
                "batchSize": "8",
                "createTopics": "true",
            },
        )
        now_ms = SystemClock().wall_ms()
        assert replay.send(spark, settings, now_ms=lambda: now_ms).sent == 20
        # The sent messages and new messages of the first topic are archived.
        send_some(broker.grpc, "orders", 5, namespace="tenant")
        archive()
        assert replay.send(spark, settings, now_ms=lambda: now_ms).sent == 0
        assert sent() == 20
        # A new replay reads the archive as it is now, except the topic to which it sends.
        other = dataclasses.replace(settings, state=str(tmp_path / "other"))
        assert replay_plan.plan(spark, other).rows == 25
