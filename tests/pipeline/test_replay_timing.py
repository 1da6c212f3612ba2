"""J7: sent properties, due times, and the shift of a schedule after a pause."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tests.support.worlds.archiving import NOW_MS, ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.replaying import FIRST_MS, breaks_off, replaying, stored
from tidemill.common.clock import SystemClock
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.archive.spark_tasks import SparkRunner
from tidemill_pipeline.client import ClusterClient
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.jobs import replay, replay_plan
from tidemill_pipeline.jobs.archive import ArchiveJob
from tidemill_pipeline.options import parse_sink, parse_source
from tidemill_pipeline.rows import ENCODING
from tidemill_pipeline.sink.messages import RowIds
from tidemill_pipeline.sink.sending import Sender
from tidemill_pipeline.transforms.replay import (
    ORIGINAL_GROUP,
    ORIGINAL_ID,
    ORIGINAL_PLACE,
    PROPERTIES_MAX,
    ReplaySchedule,
    between,
    to_send,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

BEGIN_MS = 1_900_000_000_000
STEP_MS = 2_000  # between two messages of an archive that is replayed with its timing


def sent(frame: DataFrame, timing: ReplaySchedule | None = None) -> list[Row]:
    return list(to_send(frame, timing).collect())


@pytest.mark.parametrize(("speed", "span_ms"), [(1.0, 90_000), (10.0, 9_000), (0.5, 180_000)])
def test_due_times_keep_the_spacing_divided_by_the_speed(
    spark: SparkSession, speed: float, span_ms: int
) -> None:
    frame = stored(spark, {}, {"stored_ms": FIRST_MS + 1}, {"stored_ms": FIRST_MS + 90_000})
    rows = sent(frame, ReplaySchedule(first_stored_ms=FIRST_MS, begin_ms=BEGIN_MS, speed=speed))
    due_ms = [round(row.due_timestamp.timestamp() * 1000) - BEGIN_MS for row in rows]
    assert due_ms == [0, int(1 / speed), span_ms]


def test_a_replay_keeps_the_message_group_or_stores_it_in_a_property(spark: SparkSession) -> None:
    frame = stored(spark, {"message_group": "g", "tag": "t", "keys": ["k"]}, {})
    at_once, without = sent(frame)
    assert (at_once.message_group, at_once.tag, at_once["keys"]) == ("g", "t", ["k"])
    assert at_once.properties == {ORIGINAL_ID: "m0", ORIGINAL_PLACE: "orders/a/1/0"}
    assert without.message_group is None
    timing = ReplaySchedule(first_stored_ms=FIRST_MS, begin_ms=BEGIN_MS)
    delayed, without = sent(frame, timing)
    assert "message_group" not in delayed.asDict()
    assert delayed.properties[ORIGINAL_GROUP] == "g"
    assert ORIGINAL_GROUP not in without.properties


def test_a_message_that_was_replayed_before_keeps_its_first_id(spark: SparkSession) -> None:
    first = {ORIGINAL_ID: "FIRST", ORIGINAL_PLACE: "orders/b/7/1", ORIGINAL_GROUP: "g", "own": "1"}
    for timing in (None, ReplaySchedule(first_stored_ms=FIRST_MS, begin_ms=BEGIN_MS)):
        (row,) = sent(stored(spark, {"properties": first}), timing)
        assert row.properties == first


@pytest.mark.parametrize(
    ("own", "added"),
    [
        (PROPERTIES_MAX - 2, {ORIGINAL_ID, ORIGINAL_PLACE}),
        (PROPERTIES_MAX - 1, {ORIGINAL_ID}),
        # The send of that message fails.
        (PROPERTIES_MAX, {ORIGINAL_ID}),
    ],
)
def test_the_first_id_comes_first_where_there_is_little_room(
    spark: SparkSession, own: int, added: set[str]
) -> None:
    (row,) = sent(stored(spark, {"properties": {f"p{i}": "v" for i in range(own)}}))
    assert {name for name in row.properties if not name.startswith("p")} == added
    assert len(row.properties) == own + len(added)


def test_a_packed_body_stays_packed(spark: SparkSession) -> None:
    frame = stored(spark, {"system_properties": {ENCODING: "GZIP"}}, {})
    assert [row.body_encoding for row in sent(frame)] == ["GZIP", None]


def test_messages_are_of_the_times_that_were_asked_for(spark: SparkSession) -> None:
    frame = stored(spark, *({"stored_ms": FIRST_MS + i} for i in range(5)))

    def kept(since: int | None, until: int | None) -> list[int]:
        of = between(
            frame,
            since_ms=None if since is None else FIRST_MS + since,
            until_ms=None if until is None else FIRST_MS + until,
        )
        return [row.queue_offset for row in of.collect()]

    assert kept(None, None) == [0, 1, 2, 3, 4]
    assert kept(1, None) == [1, 2, 3, 4]
    assert kept(None, 3) == [0, 1, 2]
    assert kept(1, 3) == [1, 2]


# ---------------------------------------------------------------- a run, and one that goes on


def timed(cluster: FakeCluster, archive: ArchiveWorld, state: Path) -> replay_plan.ReplaySettings:
    return replaying(cluster, archive, state, timing="original")


def broken_off(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, state: Path, *, after: int = 0
) -> replay_plan.ReplaySettings:
    """Return a replay of ten messages that stopped after `after` sends."""
    cluster.add("orders", "a", 0, 10, step_ms=STEP_MS)
    archive.append()
    settings = timed(cluster, archive, state)
    breaks_off(spark, cluster, settings, after=after)
    return settings


def due_ms(cluster: FakeCluster) -> list[int]:
    return sorted(
        message.system_properties.delivery_timestamp.ToMilliseconds() for message in cluster.sent
    )


def spaced(begin_ms: int, count: int, *, first: int = 0) -> list[int]:
    return [begin_ms + i * STEP_MS for i in range(first, count)]


def test_late_messages_keep_their_spacing(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    settings = broken_off(spark, cluster, archive, tmp_path)
    cluster.sent.clear()
    # An hour later all due times are in the past.
    later_ms = NOW_MS + 3_600_000
    shifts: list[int] = []
    done = replay.send(spark, settings, now_ms=lambda: later_ms, report_shift=shifts.append)
    assert done.sent == 10
    assert due_ms(cluster) == spaced(later_ms + replay_plan.LEAD_MS, 10)
    assert shifts == [3_600_000]
    # A finished replay sends nothing again and has no remaining due times to shift.
    done = replay.send(spark, settings, now_ms=lambda: 2 * NOW_MS, report_shift=shifts.append)
    assert (done.sent, shifts) == (0, [3_600_000])


def test_a_schedule_that_lies_ahead_is_kept(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    settings = broken_off(spark, cluster, archive, tmp_path)
    soon_ms = NOW_MS + replay_plan.LEAD_MS - 1
    assert replay.send(spark, settings, now_ms=lambda: soon_ms).sent == 10
    assert due_ms(cluster) == spaced(NOW_MS + replay_plan.LEAD_MS, 10)


def test_of_a_part_that_was_sent_the_rest_alone_is_shifted(
    spark: SparkSession,
    cluster: FakeCluster,
    archive: ArchiveWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "TRIGGER_ROWS", 4)
    settings = broken_off(spark, cluster, archive, tmp_path, after=1)
    assert due_ms(cluster) == spaced(NOW_MS + replay_plan.LEAD_MS, 4)
    cluster.sent.clear()
    # A dry run reports the range and the remaining messages. It sends nothing.
    looked = replay.look(spark, settings)
    assert (looked.plan.rows, looked.left, cluster.sent) == (10, 6, [])
    elsewhere = replay.look(spark, dataclasses.replace(settings, state=f"{tmp_path}/new"))
    assert (elsewhere.plan.rows, elsewhere.left) == (10, None)
    later_ms = NOW_MS + 3_600_000
    assert replay.send(spark, settings, now_ms=lambda: later_ms).sent == 6
    # The fifth message is the first of the remaining ones.
    assert due_ms(cluster) == spaced(later_ms + replay_plan.LEAD_MS, 6)


def test_a_replay_slower_than_its_source_is_reported(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 10, step_ms=STEP_MS)
    archive.append()
    clock, hour_ms = SystemClock(), 3_600_000
    settings = timed(cluster, archive, tmp_path / "late")
    done = replay.send(spark, settings, now_ms=lambda: clock.wall_ms() - hour_ms)
    assert done.late_ms >= hour_ms - replay_plan.LEAD_MS
    settings = timed(cluster, archive, tmp_path / "in-time")
    done = replay.send(spark, settings, now_ms=lambda: clock.wall_ms() + hour_ms)
    assert done.late_ms == 0


@pytest.mark.parametrize(
    ("first_due_ms", "last_due_ms", "late_ms"),
    [
        (1_000, 1_500, 0),
        (900, 9_000, 100),  # The first message was due before, the last one is due later.
        (1_100, 1_300, 200),  # All messages were due during the send.
        (400, 1_000, 600),
    ],
)
def test_a_batch_is_late_if_it_begins_or_ends_after_its_due_time(
    first_due_ms: int, last_due_ms: int, late_ms: int
) -> None:
    found = replay.late_of(
        began_ms=1_000, took_ms=500, first_due_ms=first_due_ms, last_due_ms=last_due_ms
    )
    assert found == late_ms


@pytest.mark.parametrize("name", ["startingOffsets", "endingtimestamp", "bodyEncoding"])
def test_options_that_a_replay_sets_itself_are_rejected(
    cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path, name: str
) -> None:
    cluster.add("orders", "a", 0, 1)
    archive.append()
    settings = dataclasses.replace(timed(cluster, archive, tmp_path), more={name: "1"})
    with pytest.raises(BadOption, match="a replay sets this option itself"):
        replay.run(settings, is_dry=True)


def test_replay_options_are_checked_before_spark_starts(
    cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    """A dry run fails in the same way."""
    cluster.add("orders", "a", 0, 1)
    archive.append()
    settings = timed(cluster, archive, tmp_path)
    misspelt = dataclasses.replace(settings, given={"topics": "oders"})
    with pytest.raises(BadOption, match="the archive has no topic oders; did you mean orders"):
        replay.run(misspelt, is_dry=True)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadOption, match="is not a folder"):
        replay.run(dataclasses.replace(settings, state=str(file)), is_dry=True)
    plan = replay_plan.ReplayPlan(rows=1, first_stored_ms=0, last_stored_ms=0, ends={})
    replay_plan.store_plan(dataclasses.replace(settings, speed=2.0), plan)
    with pytest.raises(BadOption, match="belongs to another replay"):
        replay.run(settings, is_dry=True)


def test_an_earlier_plan_without_a_filter_continues_with_the_given_one(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 3, tag="x")
    cluster.add("orders", "a", 0, 3, tag="y")
    archive.append()
    settings = dataclasses.replace(timed(cluster, archive, tmp_path), more={"filter": "x||z"})
    assert replay.send(spark, settings, now_ms=lambda: NOW_MS).sent == 3
    spelt = dataclasses.replace(settings, more={"filter": "x || z"})
    assert replay.send(spark, spelt, now_ms=lambda: NOW_MS).sent == 0


# ---------------------------------------------------------------- a real broker


def send(broker: Standalone, rows: list[dict[str, Any]]) -> None:
    options = parse_sink({"endpoints": broker.grpc, "topic": "orders"})
    client = ClusterClient(options.connection)
    try:
        sender = Sender(
            client, options, max_retries=5, ids=RowIds("w", 0), now_ms=SystemClock().wall_ms
        )
        assert sender.send(rows).rows == len(rows)
    finally:
        client.close()


def test_a_replay_accepts_all_messages_that_brokers_accept(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Packed bodies that are too large when unpacked, many properties, and due times."""
    packed = gzip.compress(bytes(6_000_000))
    rows: list[dict[str, Any]] = [
        {"body": packed, "body_encoding": "GZIP"},
        {"body": b"a", "properties": {f"p{i}": "v" for i in range(PROPERTIES_MAX - 1)}},
        {"body": b"b"},
    ]
    with standalone(tmp_path / "data") as broker:
        broker.put("topics/orders", queues=1)
        send(broker, rows)
        to = str(tmp_path / "archive")
        given = {
            "endpoints": broker.grpc,
            "topic": "orders",
            "archivePath": to,
            "readMode": "broker",
        }
        options = parse_source(given, is_stream=False)
        ArchiveJob(options, SparkRunner(spark, given), now_ms=SystemClock().wall_ms).append()
        settings = replay_plan.ReplaySettings(
            archive=to,
            given={"topics": "orders"},
            state=str(tmp_path / "state"),
            sink={"endpoints": broker.grpc, "topic": "again", "createTopics": "true"},
            timing="original",
        )
        before_ms = SystemClock().wall_ms()
        done = replay.send(spark, settings, now_ms=SystemClock().wall_ms)
        assert done.sent == 3
        reader = spark.readStream.format("rocketmq").option("endpoints", broker.grpc)
        # The consumer waits for delayed messages.
        stream = reader.options(topic="again", startingOffsets="earliest", bodyEncoding="raw")
        query = stream.load().writeStream.format("memory").queryName("again")
        running = query.option("checkpointLocation", str(tmp_path / "again")).start()
        try:
            eventually(lambda: spark.table("again").count() == 3, every_s=1.0)
            found = spark.table("again").orderBy("queue_offset").collect()
        finally:
            running.stop()
    assert sorted(bytes(row.body) for row in found) == sorted(row["body"] for row in rows)
    assert {row.system_properties[ENCODING] for row in found if len(row.body) > 1} == {
        v2.Encoding.Name(v2.GZIP)
    }
    # No message is early: the first is due after the lead.
    assert all(row.store_timestamp.timestamp() * 1000 >= before_ms for row in found)


def test_a_broker_gives_nothing_earlier_than_its_spacing(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    """The archive comes from a cluster in memory, as its messages need no pauses."""
    cluster.add("orders", "a", 0, 5, step_ms=500)
    archive.append()
    with standalone(tmp_path / "data") as broker:
        broker.put("topics/again", queues=1, messageType="DELAY")
        settings = dataclasses.replace(
            timed(cluster, archive, tmp_path / "state"),
            more={},
            sink={"endpoints": broker.grpc, "topic": "again"},
        )
        done = replay.send(spark, settings, now_ms=SystemClock().wall_ms)
        reader = spark.read.format("rocketmq").options(endpoints=broker.grpc, topic="again")
        found: list[Row] = []

        def are_all_there() -> bool:
            found[:] = reader.load().collect()
            return len(found) == 5

        eventually(are_all_there, every_s=1.0)
    stored_ms = {
        int(row.properties[ORIGINAL_PLACE].rpartition("/")[2]): row.store_timestamp.timestamp()
        * 1000
        for row in found
    }
    assert sorted(stored_ms) == [0, 1, 2, 3, 4]
    assert all(at_ms >= done.plan.begin_ms + i * 500 for i, at_ms in stored_ms.items())
