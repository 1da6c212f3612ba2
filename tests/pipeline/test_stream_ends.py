"""A stream with end offsets, and a replay that ends at the archive's end at its start."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import COLUMNS, Stream
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.jobs import replay, replay_plan
from tidemill_pipeline.offsets import Offsets
from tidemill_pipeline.source.message_stream import MessageStreamReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW_MS = 1_800_000_000_000


def bodies(queue_id: int, *offsets: range) -> list[bytes]:
    return [f"orders/a/{queue_id}/{i}".encode().ljust(10, b".") for each in offsets for i in each]


def test_a_stream_reads_nothing_behind_where_it_ends_and_nothing_of_other_queues(
    cluster: FakeCluster,
) -> None:
    for queue_id in (0, 1, 2):
        cluster.add("orders", "a", queue_id, 10)
    ends = json.dumps({"orders": {"a": {"0": 15, "1": -1}}})
    stream = Stream(cluster, topic="orders", endingOffsets=ends)
    assert sorted(stream.run()) == sorted(bodies(0, range(10)) + bodies(1, range(10)))
    for queue_id in (0, 1, 2, 3):
        cluster.add("orders", "a", queue_id, 10)
    assert sorted(stream.run()) == sorted(bodies(0, range(10, 15)) + bodies(1, range(10, 20)))
    cluster.add("orders", "a", 0, 10)
    assert stream.run() == []
    # The lag of the stream is 0.
    reader = MessageStreamReader(stream.options, COLUMNS, short_s=0)
    at = stream.start
    assert reader.latestOffset(at, reader.getDefaultReadLimit()) == at
    seen = reader.reportLatestOffset()
    assert seen is not None
    assert sorted(Offsets.from_document(seen).at.values()) == [0, 0, 15, 20]


def test_ending_offsets_in_a_missing_queue_are_rejected(cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 10)
    stream = Stream(cluster, topic="orders", endingOffsets='{"orders": {"b": {"0": 5}}}')
    with pytest.raises(BadOption, match="queue 0 of orders at b, which does not exist"):
        stream.run()


def test_a_stream_ends_in_the_topic_that_was_meant_though_its_name_is_given_again(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 30)
    archive.append()
    (key,) = archive.manifest().queues
    ends = json.dumps({"orders": {f"a#{key.incarnation}": {"0": 20}}})
    stream = Stream(
        cluster, topic="orders", archivePath=archive.path, readMode="archive", endingOffsets=ends
    )
    assert stream.run() == bodies(0, range(20))
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 50)
    archive.append()
    assert stream.run() == []


def test_a_name_does_not_match_the_previous_topic_while_its_broker_is_down(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 30)
    archive.append()
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 10)
    stream = Stream(
        cluster,
        topic="orders",
        archivePath=archive.path,
        endingOffsets='{"orders": {"a": {"0": 25}}}',
    )
    assert stream.run() == bodies(0, range(10))
    cluster.add("orders", "a", 0, 10)
    reader, _ = stream.reader()
    limit = reader.getDefaultReadLimit()
    cluster.away["a"] = 1
    assert reader.latestOffset(stream.start, limit) == stream.start
    assert stream.run() == bodies(0, range(10, 20))
    cluster.delete("orders")
    archive.append()
    alone = Stream(
        cluster,
        topic="orders",
        archivePath=archive.path,
        endingOffsets='{"orders": {"a": {"0": 25}}}',
    )
    with pytest.raises(BadOption, match="queue 0 of orders at a, which does not exist"):
        alone.run()


def replaying(
    cluster: FakeCluster, archive: ArchiveWorld, state: Path
) -> replay_plan.ReplaySettings:
    cluster.create("again")
    return replay_plan.ReplaySettings(
        archive=archive.path,
        given={"topics": "orders"},
        state=str(state),
        sink={"endpoints": cluster.endpoint, "topic": "again"},
    )


def test_a_replay_excludes_later_messages_of_a_recreated_topic(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 30)
    archive.append()
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 10)
    archive.append()
    settings = replaying(cluster, archive, tmp_path / "state")
    done = replay.send(spark, settings, now_ms=lambda: NOW_MS)
    assert (done.plan.rows, done.sent, len(cluster.sent)) == (40, 40, 40)
    # A message of the current topic, at an offset before the previous topic's end.
    cluster.add("orders", "a", 0, 15)
    archive.append()
    again = replay.send(spark, settings, now_ms=lambda: NOW_MS)
    assert (again.plan, again.sent, len(cluster.sent)) == (done.plan, 0, 40)


def test_a_replay_begun_by_an_earlier_version_continues_or_fails_with_the_reason(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 30)
    archive.append()
    settings = replaying(cluster, archive, tmp_path)
    done = replay.send(spark, settings, now_ms=lambda: NOW_MS)
    of_one_tag = dataclasses.replace(settings, more={"filter": "tea"})
    with pytest.raises(BadOption, match="belongs to another replay"):
        replay.send(spark, of_one_tag, now_ms=lambda: NOW_MS)
    path = tmp_path / "plan.json"
    kept = json.loads(path.read_text())
    kept["plan"]["ends"] = [["orders", "a", 0, 30]]
    del kept["asked"]["filter"]
    path.write_text(json.dumps(kept))
    cluster.add("orders", "a", 0, 5)
    archive.append()
    again = replay.send(spark, settings, now_ms=lambda: NOW_MS)
    assert (again.plan, again.sent) == (done.plan, 0)
    # The earlier program did not store its filter.
    assert replay.send(spark, of_one_tag, now_ms=lambda: NOW_MS).sent == 0
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 20)
    archive.append()
    twice = "the archive has 2 queues with the name queue 0 of orders at a"
    with pytest.raises(BadOption, match=twice):
        replay.send(spark, settings, now_ms=lambda: NOW_MS)
    assert len(cluster.sent) == 30
    for text in ("", "[]", "{}", path.read_text()[:30]):
        path.write_text(text)
        with pytest.raises(BadOption, match=r"plan.json is damaged, .* Give another --state"):
            replay.send(spark, settings, now_ms=lambda: NOW_MS)
