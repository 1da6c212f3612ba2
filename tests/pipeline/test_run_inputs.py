"""What the record of a run has of where it read from and to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.jobs.archive_verify import verify
from tidemill_pipeline.jobs.events import read_events
from tidemill_pipeline.jobs.inputs import QUEUES_MAX, InputRanges, logs_before, note_events
from tidemill_pipeline.offsets import Incarnation, Offsets, SourceQueue
from tidemill_pipeline.source.events import places_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OF_CHARACTERS_MAX = 64 * 1024


def spans(inputs: InputRanges) -> dict[int, tuple[int, int]]:
    """Return from where to where queues were read, by queue id."""
    document = inputs.as_document()
    start, end = (Offsets.from_document(document[name]).at for name in ("start", "end"))
    assert start.keys() == end.keys()
    return {queue.queue_id: (start[queue], end[queue]) for queue in start}


def test_a_run_record_is_bounded_and_counts_its_omissions() -> None:
    inputs = InputRanges()
    for queue_id in reversed(range(QUEUES_MAX + 5)):
        inputs.note(
            SourceQueue("orders", "broker-0", queue_id, Incarnation("LOG", 7)), 10_000, 20_000
        )
    document = inputs.as_document()
    assert document["queues_left_out"] == 5
    assert list(spans(inputs)) == list(range(QUEUES_MAX))
    assert len(json.dumps(document)) < OF_CHARACTERS_MAX


def test_a_run_that_reads_nothing_has_nothing_to_say() -> None:
    assert InputRanges().as_document() == {}


def test_run_inputs_of_an_archiver_include_earlier_losses(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 100)
    cluster.add("orders", "a", 1, 10)
    job = archive.job()
    job.append()
    assert spans(job.inputs) == {0: (0, 100), 1: (0, 10)}
    cluster.add("orders", "a", 0, 100)
    cluster.expire("orders", "a", 0, 120)
    job = archive.job(failOnDataLoss="false")
    job.append()
    assert spans(job.inputs) == {0: (100, 200)}


def test_run_inputs_of_a_verification_are_the_compared_ranges(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 30)
    archive.append()
    archive.verify()
    cluster.add("orders", "a", 0, 30)
    archive.append()
    job = archive.job()
    assert verify(job).wrong == []
    assert spans(job.inputs) == {0: (30, 60)}
    job = archive.job()
    verify(job)
    assert job.inputs.as_document() == {}


def test_run_inputs_of_events_include_logs_and_later_appends(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    def stored(count: int) -> list[Any]:
        return [pb.Event(kind=pb.EVENT_KIND_STORED, topic="orders", at_ms=1_000)] * count

    cluster.add_events("a", *stored(3))
    cluster.add_events("b", *stored(1))
    given = {"endpoints": cluster.endpoint}
    logs = logs_before(given)
    cluster.add_events("a", *stored(2))
    events = read_events(spark, given)
    inputs = InputRanges()
    note_events(inputs, given, logs, events)
    document = inputs.as_document()
    start, end = (places_of(document[name]) for name in ("start", "end"))
    assert {broker: place.at for broker, place in start.items()} == {"a": 0, "b": 0}
    last = {row.broker: row[1] for row in events.groupBy("broker").max("log_position").collect()}
    assert end["a"].at == last["a"] > logs["a"].log_end
    assert end["b"] == (logs["b"].log_end, logs["b"].log_id)
