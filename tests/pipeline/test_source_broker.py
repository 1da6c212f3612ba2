"""The source against a real broker: Spark reads the messages that a producer stored."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pyarrow as pa
import pytest

from tests.support.clients.api import change_request
from tests.support.clients.pipeline_life import ACKED, DELAYED, GROUP, SENT, TOPIC, live
from tests.support.clients.pipeline_load import send_some
from tests.support.clients.pulling import METADATA, PullClient, message_of
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.tcp_links import BACK, tcp_links
from tests.support.worlds.streaming_queries import run_to_end
from tidemill.common.clock import SystemClock
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.data_source import RocketMQDataSource
from tidemill_pipeline.jobs.audit import AuditSettings, judge
from tidemill_pipeline.jobs.events import read_events

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BODY_BYTES = 4 << 10


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


def test_stored_messages_are_read_in_every_column(spark: SparkSession, broker: Standalone) -> None:
    broker.put("topics/orders", queues=4)
    sent = send_some(broker.grpc, "orders", 400)
    frame = spark.read.format("rocketmq").option("endpoints", broker.grpc).option("topic", "orders")
    rows = frame.load().collect()
    assert {(row.message_id, bytes(row.body)) for row in rows} == sent
    assert {row.queue_id for row in rows} == {0, 1, 2, 3}
    row = rows[0]
    assert row.properties == {"colour": "red"}
    assert row.tag == "t"
    assert row.keys == ["k1", "k2"]
    assert row.broker == "broker-0"
    assert row.commitlog_offset > 0
    assert row.message_type == "normal"
    assert row.body_size == len(row.body)


@pytest.fixture
def client(broker: Standalone) -> Iterator[PullClient]:
    with grpc.insecure_channel(broker.grpc) as channel:
        yield PullClient(channel)


def read(spark: SparkSession, endpoint: str, **options: object) -> DataFrame:
    reader = spark.read.format("rocketmq").option("endpoints", endpoint)
    return reader.options(**options).load()


def test_bodies_that_are_not_wanted_do_not_travel(spark: SparkSession, broker: Standalone) -> None:
    broker.put("topics/large", queues=2)
    sent = send_some(broker.grpc, "large", 200, body_size=BODY_BYTES)
    with tcp_links() as links:
        link = links.make(broker.grpc)

        def travelled(frame: DataFrame) -> tuple[int, list[Any]]:
            """Return the received bytes of a frame, and its rows."""
            before = link.passed_bytes[BACK]
            rows = frame.collect()
            return link.passed_bytes[BACK] - before, rows

        whole, rows = travelled(read(spark, link.address, topic="large"))
        assert {(row.message_id, bytes(row.body)) for row in rows} == sent
        assert whole > len(sent) * BODY_BYTES
        without, rows = travelled(read(spark, link.address, topic="large", includeBody="false"))
        assert {(row.message_id, row.body_size) for row in rows} == {
            (message_id, BODY_BYTES) for message_id, _ in sent
        }
        assert without < whole / 5
        assert {"body", "body_crc32"}.isdisjoint(rows[0].asDict())
        reader = spark.read.format("rocketmq").schema("message_id string, tag string")
        some, rows = travelled(reader.options(endpoints=link.address, topic="large").load())
        assert {row.message_id for row in rows} == {message_id for message_id, _ in sent}
        assert some < whole / 5


def work_on_bills(broker: Standalone, client: PullClient) -> None:
    """Store five bills: three dead letters, and two in flight, one for the second time."""
    broker.put("topics/bills", queues=1)
    broker.put("groups/billing", maxAttempts=5)
    for n in range(5):
        client.send(
            "bills",
            b"bill %d" % n,
            message_id=f"b{n}",
            tag="t",
            keys=(f"k{n}",),
            properties={"n": str(n)},
        )
    taken = client.receive("bills", "billing", wait_s=20, invisible_s=600)
    assert [message.system_properties.message_id for message in taken] == [
        f"b{n}" for n in range(5)
    ]
    for message in taken[:3]:
        client.forward_to_dead_letters("bills", "billing", message)
    given_back = taken[4].system_properties.receipt_handle
    client.stub.ChangeInvisibleDuration(
        change_request("bills", "billing", given_back, 0), metadata=METADATA
    )
    (again,) = client.receive("bills", "billing", wait_s=20, invisible_s=600)
    assert again.system_properties.message_id == "b4"


def dead_letters(frame: DataFrame) -> list[tuple[Any, ...]]:
    rows = frame.select(
        "topic",
        "broker",
        "message_id",
        "body",
        "tag",
        "keys",
        "properties",
        "origin_topic",
        "origin_message_id",
        "dlq_reason",
        "message_type",
    ).collect()
    return sorted((*row[:3], bytes(row.body), *row[4:]) for row in rows)


def dead_bill(n: int) -> tuple[Any, ...]:
    return (
        "%DLQ%billing",
        "broker-0",
        f"b{n}",
        b"bill %d" % n,
        "t",
        [f"k{n}"],
        {"n": str(n)},
        "bills",
        f"b{n}",
        "forwarded_by_client",
        "normal",
    )


def test_every_dataset_reports_the_state_of_messages(
    spark: SparkSession, broker: Standalone, client: PullClient, tmp_path: Path
) -> None:
    work_on_bills(broker, client)
    assert client.update_offset("billing", "bills", 1).status.code == v2.OK
    given = {"groups": "billing"}

    out = read(spark, broker.grpc, dataset="inflight", **given).collect()
    assert sorted(
        (
            row.consumer_group,
            row.topic,
            row.broker,
            row.queue_offset,
            row.message_id,
            row.attempt,
            row.client_id,
            row.is_retry,
        )
        for row in out
    ) == [
        ("billing", "bills", "broker-0", 0, "b4", 2, "puller", True),
        ("billing", "bills", "broker-0", 3, "b3", 1, "puller", False),
    ]
    assert all(row.popped_at < row.invisible_until for row in out)
    assert len({row.delivery for row in out}) == 2

    far = read(spark, broker.grpc, dataset="groups", topic="bills", **given)
    assert sorted(
        (
            row.is_retry,
            row.consumer_group,
            row.topic,
            row.broker,
            row.min_offset,
            row.max_offset,
            row.commit_offset,
            row.pop_offset,
            row.pull_offset,
            row.lag,
            row.oldest_unacked_ts is None,
        )
        for row in far.where("max_offset > 0").collect()
    ) == [
        # One pop returned the five messages, and this delivery is not completely settled.
        (False, "billing", "bills", "broker-0", 0, 5, 0, 5, 1, 5, False),
        (True, "billing", "bills", "broker-0", 0, 1, 0, 1, None, 1, False),
    ]
    # The retry topic's queue has the same number, but it is not read.
    begun = read(spark, broker.grpc, topic="bills", startingOffsets="group:billing")
    assert sorted(row.queue_offset for row in begun.collect()) == [1, 2, 3, 4]

    dead = read(spark, broker.grpc, dataset="dlq", **given)
    assert dead_letters(dead) == [dead_bill(n) for n in range(3)]
    assert read(spark, broker.grpc, dataset="dlq").count() == 3
    stream = spark.readStream.format("rocketmq").options(
        endpoints=broker.grpc, dataset="dlq", startingOffsets="earliest", **given
    )
    batches: list[list[tuple[Any, ...]]] = []

    def run() -> list[list[tuple[Any, ...]]]:
        batches.clear()
        writer = stream.load().writeStream.foreachBatch(
            lambda batch, _number: batches.append(dead_letters(batch))
        )
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        run_to_end(writer)
        return batches

    assert run() == [[dead_bill(n) for n in range(3)]]
    client.send("bills", b"bill 5", message_id="b5", tag="t", keys=("k5",), properties={"n": "5"})
    (late,) = client.receive("bills", "billing", wait_s=20, invisible_s=600)
    client.forward_to_dead_letters("bills", "billing", late)
    assert run() == [[dead_bill(5)]]


def test_the_lag_of_a_pulling_group_is_its_unpulled_messages(
    spark: SparkSession, broker: Standalone, client: PullClient
) -> None:
    broker.put("topics/copied", queues=1)
    broker.put("groups/copiers")
    for n in range(5):
        client.send("copied", b"c%d" % n)
    assert client.update_offset("copiers", "copied", 2).status.code == v2.OK
    (row,) = read(spark, broker.grpc, dataset="groups", groups="copiers").collect()
    assert (row.max_offset, row.commit_offset, row.pop_offset) == (5, None, None)
    assert (row.pull_offset, row.lag, row.oldest_unacked_ts) == (2, 3, None)


def test_a_pending_timer_is_listed_once_with_its_due_time(
    spark: SparkSession, broker: Standalone, client: PullClient
) -> None:
    broker.put("topics/later", queues=2, messageType="DELAY")
    broker.put("topics/other", queues=1, messageType="DELAY")
    begin_ms = SystemClock().wall_ms()
    due_ms = {f"p{n}": begin_ms + 3_600_000 + n for n in range(1_500)}
    client.send_all(
        [message_of("later", b"x", message_id=name, due_at_ms=at) for name, at in due_ms.items()]
    )
    client.send("other", b"x", message_id="o", due_at_ms=begin_ms + 3_600_000)
    end_ms = SystemClock().wall_ms()
    frame = read(spark, broker.grpc, dataset="pending", topic="later")
    rows = frame.selectExpr(
        "topic",
        "broker",
        "message_id",
        "timer_id",
        "log_position",
        "unix_millis(due_timestamp) as due_ms",
        "unix_millis(scheduled_timestamp) as scheduled_ms",
    ).collect()
    assert len(rows) == len({row.timer_id for row in rows}) == len(due_ms)
    assert {row.message_id: row.due_ms for row in rows} == due_ms
    assert {(row.topic, row.broker) for row in rows} == {("later", "broker-0")}
    assert all(begin_ms <= row.scheduled_ms <= end_ms and row.log_position > 0 for row in rows)
    # A few of them, by their due times.
    first_ms = begin_ms + 3_600_000
    some = read(
        spark,
        broker.grpc,
        dataset="pending",
        topic="later",
        startingTimestamp=first_ms + 10,
        endingTimestamp=first_ms + 13,
    )
    assert {row.message_id for row in some.collect()} == {"p10", "p11", "p12"}
    assert read(spark, broker.grpc, dataset="pending").count() == len(due_ms) + 1


def test_a_message_that_waits_is_read_with_all_that_it_has(
    spark: SparkSession, broker: Standalone, client: PullClient
) -> None:
    broker.put("topics/hidden", queues=1, messageType="DELAY")
    due_ms = SystemClock().wall_ms() + 3_600_000
    whole = message_of(
        "hidden",
        b"\xffbody",
        tag="blue",
        keys=("k1", "k2"),
        message_id="w",
        due_at_ms=due_ms,
        properties={"colour": "red"},
    )
    client.send_all([whole, message_of("hidden", b"plain", message_id="v", due_at_ms=due_ms)])
    frame = read(spark, broker.grpc, dataset="pending", topic="hidden")
    row, plain = sorted(frame.collect(), key=lambda one: one.message_id, reverse=True)
    assert (bytes(row.body), row.body_size, row.body_crc32) == (
        b"\xffbody",
        5,
        zlib.crc32(b"\xffbody"),
    )
    assert (row.tag, row.keys, row.properties) == ("blue", ["k1", "k2"], {"colour": "red"})
    assert (row.born_host, row.message_group, row.trace_parent) == ("here", None, None)
    assert row.system_properties.keys() == {"body_encoding", "body_digest", "body_digest_type"}
    assert row.wheel_slot == due_ms // 1_000 % 1_209_600
    assert (plain.tag, plain.keys, plain.properties, bytes(plain.body)) == (None, [], {}, b"plain")
    short = read(spark, broker.grpc, dataset="pending", topic="hidden", includeBody="false")
    assert {"body", "tag", "properties"}.isdisjoint(short.columns)
    assert short.where(f"unix_millis(due_timestamp) = {due_ms}").count() == 2


def test_large_messages_that_wait_come_in_several_batches(
    spark: SparkSession, broker: Standalone, client: PullClient
) -> None:
    broker.put("topics/laden", queues=1, messageType="DELAY")
    due_ms = SystemClock().wall_ms() + 3_600_000
    body = b"x" * 4_000_000
    for n in range(5):
        client.send("laden", body, message_id=f"l{n}", due_at_ms=due_ms)
    options = {"endpoints": broker.grpc, "dataset": "pending", "topic": "laden"}
    schema = read(spark, broker.grpc, dataset="pending").schema
    reader = RocketMQDataSource(options).reader(schema)
    (part,) = reader.partitions()
    batches = [batch for batch in reader.read(part) if isinstance(batch, pa.RecordBatch)]
    assert [batch.num_rows for batch in batches] == [3, 2]
    ids = [name for batch in batches for name in batch["message_id"].to_pylist()]
    assert sorted(ids) == [f"l{n}" for n in range(5)]
    assert all(value == len(body) for batch in batches for value in batch["body_size"].to_pylist())


def test_an_audit_of_a_real_life_finds_nothing_and_counts_right(
    spark: SparkSession, tmp_path: Path
) -> None:
    with standalone(tmp_path / "data") as own:
        ids = asyncio.run(live(own.grpc))
        sends = tmp_path / "sends.jsonl"
        sends.write_text(
            "".join(json.dumps({"message_id": each, "topic": TOPIC}) + "\n" for each in ids)
        )
        settings = AuditSettings(
            to=str(tmp_path), given={"endpoints": own.grpc}, sends=str(sends), grace_s=0
        )
        events = read_events(spark, settings.given)
        verdict = judge(spark, events, settings, now_ms=SystemClock().wall_ms())
    assert sum(verdict.counts.values()) == 0, verdict.findings
    of = {(row["topic"], row["consumer_group"]): row for row in verdict.totals}
    assert of[TOPIC, None]["produced"] == SENT + DELAYED
    assert of[TOPIC, None]["fired"] == DELAYED
    readers = of[TOPIC, GROUP]
    assert (readers["delivered"], readers["acked"]) == (SENT + DELAYED, ACKED)
    assert readers["in_flight"] == SENT + DELAYED - ACKED
