"""Unreadable parts of a log: event streams report them, and an audit is incomplete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.worlds.fake_cluster import EVENT_BYTES, FakeCluster
from tests.support.worlds.micro_batches import EVENT_COLUMNS, Stream
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.errors import BadOption, DataLoss
from tidemill_pipeline.jobs.audit import AuditSettings, judge
from tidemill_pipeline.jobs.events import check_any, read_events, unreadable_in
from tidemill_pipeline.jobs.verdict import AuditVerdict, headlines
from tidemill_pipeline.options import parse_source
from tidemill_pipeline.schema import of_dataset
from tidemill_pipeline.source import events as source
from tidemill_pipeline.transforms.findings import KINDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 250  # More events than one response holds.
DAMAGE = "a: 200 bytes of its log between 0 and "


def happen(cluster: FakeCluster) -> list[str]:
    """Create events, make two of them unreadable and return the ids of the others."""
    ids = [f"m{i}" for i in range(COUNT)]
    cluster.add_events(
        "a",
        *[
            pb.Event(
                kind=pb.EVENT_KIND_STORED,
                topic="orders",
                topic_id=1,
                queue_offset=i,
                message_id=each,
                at_ms=1_700_000_000_000 + i,
            )
            for i, each in enumerate(ids)
        ],
    )
    cluster.damage_events("a", 7, 8)
    return [each for each in ids if each not in {"m7", "m8"}]


def test_an_unreadable_event_range_is_data_loss_for_a_stream(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_events("a", pb.Event(kind=pb.EVENT_KIND_STORED, message_id="before"))
    strict = Stream(cluster, dataset="events")
    lax = Stream(cluster, dataset="events", failOnDataLoss="false")
    assert strict.run() == lax.run() == ["before"]
    happen(cluster)
    cluster.brokers["a"].damaged = {EVENT_BYTES * 9}
    for _ in range(2):
        with pytest.raises(DataLoss, match="a: 100 bytes of its log between 100 and"):
            strict.run()
    found = lax.run()
    assert "100 bytes of its log" in caplog.text
    # A row without a message replaces the unreadable part.
    assert [each for each in found if each is not None] == [f"m{i}" for i in range(COUNT) if i != 8]
    assert found.count(None) == 1


def test_a_row_describes_the_unreadable_part_of_a_batch(cluster: FakeCluster) -> None:
    rest = happen(cluster)
    given = {"endpoints": cluster.endpoint, "dataset": "events"}

    def rows(**more: str) -> list[dict[str, object]]:
        options = parse_source({**given, **more}, is_stream=False)
        reader = source.EventReader(options, EVENT_COLUMNS)
        reader.schema = of_dataset("events")
        parts = reader.partitions()
        return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]

    with pytest.raises(DataLoss, match=DAMAGE):
        rows()
    # For every filter: the content of the unreadable part is unknown.
    for more in ({}, {"topic": "other"}, {"startingTimestamp": "2026-01-01T00:00:00Z"}):
        found = rows(failOnDataLoss="false", **more)
        (row,) = [row for row in found if row["event"] == "unreadable"]
        assert (row["broker"], row["body_size"], row["event_ts"]) == ("a", 200, None)
        # The end of the page that contains the unreadable part.
        assert row["end_offset"] in range(9 * EVENT_BYTES, COUNT * EVENT_BYTES + 1)
        assert str(row["detail"]).startswith(DAMAGE)
        assert [r["message_id"] for r in found if r is not row] == ([] if more else rest)


def test_an_audit_reports_unreadable_events(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    happen(cluster)
    given = {"endpoints": cluster.endpoint, "topic": "orders"}
    events = read_events(spark, given)
    check_any(events, given)
    settings = AuditSettings(to=str(tmp_path), given=given)
    verdict = judge(spark, events, settings, now_ms=1_800_000_000_000)
    assert (verdict.is_incomplete, verdict.is_broken) == (True, False)
    assert verdict.counts["unreadable"] == 1
    assert verdict.by_topic()["", "unreadable"] == 1
    assert [one.startswith(DAMAGE) for one in verdict.unreadable] == [True]
    assert [one.startswith(DAMAGE) for one in unreadable_in(events)] == [True]
    page = (tmp_path / "audit" / "index.html").read_text("utf-8")
    assert "This audit is incomplete: a part of the log cannot be read." in page
    assert "No message was lost" not in page
    assert DAMAGE in page
    # A report about an unreadable part does not belong to a topic.
    nobody = {**given, "topic": "nobody"}
    with pytest.raises(BadOption, match="no events of topic nobody"):
        check_any(read_events(spark, nobody), nobody)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({}, "No message was lost or early."),
        ({"unknown": 1_200}, "It is unknown whether 1,200 messages were lost."),
        ({"early": 1}, "Something was lost or early."),
    ],
)
def test_the_audit_page_begins_with_the_verdict(counts: dict[str, int], sentence: str) -> None:
    verdict = AuditVerdict(
        counts=dict.fromkeys(KINDS, 0) | counts, totals=[], findings=[], unreadable=[]
    )
    assert [sentence for _, sentence in headlines(verdict)] == [sentence]
