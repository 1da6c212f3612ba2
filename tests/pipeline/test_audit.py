"""J2 on golden sets: a known number of lost, doubled, early and late messages, named exactly."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.jobs.audit import AuditSettings, judge, rules_of
from tidemill_pipeline.jobs.delay_accuracy import worse_than
from tidemill_pipeline.jobs.events import check_any, complete_from_ms, read_events, removed_at_ms
from tidemill_pipeline.jobs.sends import SENDS, of_topics, read_sends
from tidemill_pipeline.jobs.verdict import SENTENCES_MAX, AuditVerdict, SendCounts, count_of
from tidemill_pipeline.schema import EVENTS
from tidemill_pipeline.transforms.audit import audit, lateness
from tidemill_pipeline.transforms.delay_accuracy import by_band, by_minute, fired
from tidemill_pipeline.transforms.findings import ACK_MS, KINDS, AuditRules, never_stored

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START_MS = 1_700_000_000_000


class Story:
    """A short notation for events in the order of one log."""

    def __init__(self, broker: str = "a", topic: str = "orders") -> None:
        self.broker = broker
        self.topic = topic
        self.rows: list[dict[str, Any]] = []

    def add(self, event: str, offset: int, at_ms: int, **more: Any) -> int:
        """Add an event and return its position, which identifies a delivery."""
        position = (len(self.rows) + 1) * 100
        due = more.pop("due_ms", None)
        self.rows.append(
            {
                "event_id": f"{self.broker}:{position}:0",
                "event": event,
                "broker": self.broker,
                "topic": self.topic,
                "queue_id": 0,
                "queue_offset": offset,
                "message_id": f"m{offset}",
                "log_position": position,
                "event_index": 0,
                "event_ts": _at(at_ms),
                "due_timestamp": None if due is None else _at(due),
                **more,
            }
        )
        return position

    def delivered(
        self, offset: int, at_ms: int, *, attempt: int = 1, group: str = "g", **more: Any
    ) -> str:
        position = self.add(
            "delivered", offset, at_ms, consumer_group=group, attempt=attempt, **more
        )
        self.rows[-1]["delivery"] = delivery = f"{self.broker}:{position}:0"
        return delivery

    def acked(
        self, offset: int, at_ms: int, delivery: str, *, group: str = "g", **more: Any
    ) -> None:
        self.add("acked", offset, at_ms, consumer_group=group, delivery=delivery, **more)

    def consumed(self, offset: int, at_ms: int, *, group: str = "g", **more: Any) -> None:
        delivery = self.delivered(offset, at_ms, group=group, **more)
        self.acked(offset, at_ms + 1, delivery, group=group, **more)

    def frame(self, spark: SparkSession, *others: Story) -> DataFrame:
        """Return the events with other broker groups' events: one audit takes seconds of Spark."""
        names = [column.name for column in EVENTS]
        schema = ", ".join(f"{column.name} {column.type}" for column in EVENTS)
        rows = [row for story in (self, *others) for row in story.rows]
        return spark.createDataFrame([tuple(row.get(n) for n in names) for row in rows], schema)


def _at(at_ms: int) -> datetime:
    return datetime.fromtimestamp((START_MS + at_ms) / 1000, UTC)


def a_day() -> Story:
    """100 messages to two consumer groups, with ten faults."""
    story = Story()
    for i in range(100):
        story.add("stored", i, i)
    for i in range(100):
        if i != 7:  # Group g never receives 7.
            delivery = story.delivered(i, 1000 + i)
            if i == 20:  # Delivered again without an ack: through the retry topic.
                story.add("revived", i, 1030, consumer_group="g")
                again = story.delivered(
                    3,
                    1040,
                    attempt=2,
                    origin_topic="orders",
                    origin_queue_id=0,
                    origin_queue_offset=20,
                    topic="%RETRY%g",
                    message_id="m20",
                )
                story.add(
                    "acked",
                    3,
                    1041,
                    consumer_group="g",
                    delivery=again,
                    origin_topic="orders",
                    origin_queue_id=0,
                    origin_queue_offset=20,
                    topic="%RETRY%g",
                    message_id="m20",
                )
            elif i == 90:
                story.add(
                    "dead-lettered",
                    i,
                    1095,
                    consumer_group="g",
                    reason="attempts",
                    topic="%DLQ%g",
                    origin_topic="orders",
                    origin_queue_id=0,
                    origin_queue_offset=90,
                )
            elif i not in {98, 99}:  # In flight.
                story.acked(i, 1001 + i, delivery)
    story.delivered(30, 1200, attempt=2)  # After its ack, twice.
    story.delivered(30, 1201, attempt=3)
    story.acked(31, 1300, "a:77777:0")  # The delivery does not exist.
    for i in range(50, 60):  # Group h began in the middle and is not at the end.
        story.consumed(i, 1400 + i, group="h")
    for timer, (due, at) in enumerate([(5000, 5002), (5000, 4990), (5000, 9000), (6000, 0)], 1):
        story.add("scheduled", timer, 100, due_ms=due, timer_id=timer, message_id=f"t{timer}")
        if at:
            story.add("fired", 99 + timer, at, due_ms=due, timer_id=timer, message_id=f"t{timer}")
    story.add("scheduled", 5, 100, due_ms=6000, timer_id=5, message_id="t5")
    story.add("recalled", 5, 200, timer_id=5, message_id="t5")
    return story


def test_lists_of_nothing_are_an_error(spark: SparkSession, tmp_path: Path) -> None:
    nothing = Story().frame(spark)
    check_any(nothing, {})
    with pytest.raises(BadOption, match="no events of topic nosuch"):
        check_any(nothing, {"topics": "nosuch"})
    sends = tmp_path / "sends.jsonl"
    sends.write_text('{"message_id": "a", "topic": "t"}\nnot json\n')
    settings = AuditSettings(to=str(tmp_path), given={}, sends=str(sends))
    with pytest.raises(BadOption, match="not a JSON object with a message_id"):
        judge(spark, nothing, settings, now_ms=START_MS)


def test_a_topic_and_a_group_that_were_made_again_are_others(spark: SparkSession) -> None:
    story = Story()
    for topic_id, at_ms in ((7, 0), (8, 1000)):
        for i in range(5):
            story.add("stored", i, at_ms + i, topic_id=topic_id)
        for i in range(5):
            # No group receives 3 of the second topic.
            if (topic_id, i) != (8, 3):
                story.consumed(i, at_ms + 10 + i, topic_id=topic_id)
        # The event of a copy has only the name of its topic.
        story.add(
            "revived",
            0,
            at_ms + 20,
            consumer_group="g",
            topic="%RETRY%g",
            topic_id=99,
            origin_topic="orders",
            origin_queue_id=0,
            origin_queue_offset=4,
        )

    again = Story("b")
    for i in range(5):
        again.add("stored", i, i)
    for i in range(5):
        again.consumed(i, 100 + i)
    again.add("reset", 0, 200, topic="", consumer_group="g", reason="group_deleted")
    for i in range(1, 5):
        if i != 2:
            again.consumed(i, 300 + i)
    found = audit(story.frame(spark, again), AuditRules()).findings.collect()
    assert sorted((r.broker, r.kind, r.topic_id, r.queue_offset) for r in found) == [
        ("a", "missing", 8, 3),
        ("b", "missing", 0, 2),
    ]
    (journey,) = (r.journey for r in found if r.broker == "a")
    assert journey.count('"event"') == 1, "of the first topic's message 3 it tells nothing"


def test_every_finding_is_named_and_no_other(spark: SparkSession) -> None:
    events = a_day().frame(spark)
    names = ("m5", "t1", "lost")
    sends = spark.createDataFrame([(name, "orders", None) for name in names], SENDS)
    made = audit(events, AuditRules(), sends=sends)
    found = made.findings.collect()
    assert {(r.kind, r.consumer_group, r.message_id) for r in found} == {
        ("missing", "g", "m7"),
        ("missing", None, "t4"),
        ("missing", None, "lost"),
        ("redelivered", "g", "m20"),
        ("duplicate", "g", "m30"),
        ("orphan-ack", "g", "m31"),
        ("early", None, "t2"),
        ("late", None, "t3"),
    }
    assert len(found) == 8
    of = {r.message_id: r for r in found}
    assert of["t2"].detail == "fired 10 ms before it was due"
    assert of["m30"].detail == "delivered 2 times after its ack"
    journey = of["m20"].journey
    assert [word for word in ("stored", "delivered", "revived", "acked") if word in journey]
    assert journey.index("stored") < journey.index("revived") < journey.index("%RETRY%g")
    total: Counter[str] = Counter()
    for row in made.summary.collect():
        total.update({name: n for name, n in row.asDict().items() if isinstance(n, int)})
    assert total["produced"] == 103
    assert total["delivered"] == 99 + 10
    assert total["acked"] == 96 + 10
    assert total["dead_lettered"] == 1
    assert total["in_flight"] == 2
    assert (total["scheduled"], total["fired"], total["recalled"]) == (5, 3, 1)
    assert (total["missing"], total["early"], total["duplicate"]) == (3, 1, 1)


def test_a_send_of_before_the_first_event_is_not_missing(spark: SparkSession) -> None:
    begins_at_ms = START_MS + 1_000_000
    story = Story()
    # For a message that was stored earlier, only the later events are known.
    story.consumed(3, 1_000_000)
    story.add("stored", 4, 1_000_001)
    named = {
        "m3": 0,  # milliseconds from the start
        "m4": 1_000_001,
        "before": 999_000,
        "about then": 1_000_000 + ACK_MS - 1,
        "after": 1_000_000 + ACK_MS,
        "sometime": None,
        "still open": 5_000_000,
    }
    at = {name: None if at_ms is None else START_MS + at_ms for name, at_ms in named.items()}
    rows = [(name, "orders", at_ms) for name, at_ms in at.items()]
    sends = spark.createDataFrame(rows, SENDS)

    def found(begins_at_ms: int) -> dict[str, set[str]]:
        rules = AuditRules(begins_at_ms=begins_at_ms, closed_at_ms=START_MS + 5_000_000)
        kinds: dict[str, set[str]] = {}
        for row in never_stored(sends, story.frame(spark), rules).collect():
            kinds.setdefault(row.kind, set()).add(row.message_id)
        return kinds

    assert found(begins_at_ms) == {
        "missing": {"after"},
        "unknown": {"before", "about then", "sometime"},
    }
    # With complete events, nothing is unknown.
    assert found(0) == {"missing": {"after", "before", "about then", "sometime"}}


def test_a_dead_letter_reader_is_not_audited_for_the_original_topics(spark: SparkSession) -> None:
    story = Story()
    for i in range(20):
        story.add("stored", i, i)
        if i in {3, 15}:
            story.delivered(i, 100 + i)
            copy: dict[str, Any] = {
                "topic": "%DLQ%g",
                "origin_topic": "orders",
                "origin_queue_id": 0,
                "origin_queue_offset": i,
            }
            story.add("dead-lettered", i, 200 + i, consumer_group="g", reason="attempts", **copy)
            story.consumed(i, 300 + i, group="handler", **copy)
        elif i != 9:
            story.consumed(i, 100 + i)
    found = audit(story.frame(spark), AuditRules()).findings.collect()
    assert [(r.kind, r.consumer_group, r.queue_offset) for r in found] == [("missing", "g", 9)]


def test_findings_of_a_topic_sum_over_its_groups() -> None:
    one = dict.fromkeys((kind.replace("-", "_") for kind in KINDS), 0)
    totals: list[dict[str, Any]] = [
        {**one, "topic": "orders", "consumer_group": None, "late": 5},
        {**one, "topic": "orders", "consumer_group": "g", "redelivered": 4, "late": 1},
        {**one, "topic": "orders", "consumer_group": "h"},
    ]
    found = AuditVerdict(counts={}, totals=totals, findings=[], unreadable=[]).by_topic()
    assert {key: count for key, count in found.items() if count} == {
        ("orders", "late"): 6,
        ("orders", "redelivered"): 4,
    }


@pytest.mark.parametrize("name", ["_lost.jsonl", ".lost.jsonl", "lost[1].jsonl", "lost.jsonl"])
def test_a_list_of_sends_is_read_whatever_its_name(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_text('{"message_id": "a", "more": {"x": [1]}}\n\n{"message_id": "b", "at_ms": 7}\n')
    found = [tuple(row) for row in read_sends(spark, str(path)).collect()]
    assert found == [("a", None, None), ("b", None, 7)]
    path.write_text("\n")
    assert read_sends(spark, str(path)).collect() == []


def test_a_list_of_sends_elsewhere_is_held_to_the_same(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "sends.jsonl"
    path.write_text('{"message_id": "a", "more": {"x": [1]}}\n\n{"message_id": "b", "at_ms": 7}\n')
    found = [tuple(row) for row in read_sends(spark, path.as_uri()).collect()]
    assert found == [("a", None, None), ("b", None, 7)]
    with pytest.raises(BadOption, match="in one line: topic is missing, which is required"):
        read_sends(spark, path.as_uri(), needs_topic=True)
    path.write_bytes(b'{"message_id": "a", "topic": "\xff"}\n')
    with pytest.raises(BadOption, match="not a JSON object"):
        read_sends(spark, path.as_uri())


def test_an_audit_of_some_topics_leaves_out_no_send_without_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    sends = tmp_path / "sends.jsonl"
    sends.write_text('{"message_id": "a", "topic": "orders"}\n{"message_id": "lost"}\n')
    given = {"topics": "orders"}
    settings = AuditSettings(to=str(tmp_path), given=given, sends=str(sends))
    with pytest.raises(BadOption, match="line 2: topic is missing, which is required with --topic"):
        judge(spark, Story().frame(spark), settings, now_ms=START_MS)


def test_a_timer_due_after_the_end_of_the_events_is_not_missing(
    spark: SparkSession, tmp_path: Path
) -> None:
    story = Story()
    for timer, due_ms in enumerate((1_000, 5_000), 1):
        story.add("scheduled", timer, 100, due_ms=due_ms, timer_id=timer, message_id=f"t{timer}")
    given = {"endpoints": "127.0.0.1:1", "endingTimestamp": str(START_MS + 3_000)}
    settings = AuditSettings(to=str(tmp_path), given=given, grace_s=0)
    rules = rules_of(settings, now_ms=START_MS + 60_000)
    found = audit(story.frame(spark), rules).findings.collect()
    assert [row.message_id for row in found] == ["t1"]
    # The same holds for a timer that may have fired right after the end.
    within = dataclasses.replace(settings, grace_s=2.0)
    rules = rules_of(within, now_ms=START_MS + 60_000)
    assert audit(story.frame(spark), rules).findings.collect() == []


def test_a_send_without_a_time_is_unknown_instead_of_missing(
    spark: SparkSession, tmp_path: Path
) -> None:
    given = {"endpoints": "127.0.0.1:1", "endingTimestamp": str(START_MS + 3_000)}
    settings = AuditSettings(to=str(tmp_path), given=given, grace_s=0)
    rules = rules_of(settings, now_ms=START_MS + 60_000)
    rows = [("sometime", "orders", None), ("before", "orders", START_MS + 1)]
    sends = spark.createDataFrame(rows, SENDS)
    found = never_stored(sends, Story().frame(spark), rules).collect()
    assert {(row.message_id, row.kind) for row in found} == {
        ("sometime", "unknown"),
        ("before", "missing"),
    }


def test_events_tell_everything_unless_retention_took_some(cluster: FakeCluster) -> None:
    given = {"endpoints": cluster.endpoint}
    cluster.add_events("a", pb.Event(at_ms=500), pb.Event(at_ms=600))
    cluster.add_events("b", pb.Event(at_ms=900))
    assert complete_from_ms(given) == 0
    cluster.brokers["a"].log_min = cluster.brokers["a"].events[1].position
    assert complete_from_ms(given) == 600
    # Events before the requested start do not count as complete.
    assert complete_from_ms({**given, "startingTimestamp": "700"}) == 700


def test_sends_before_a_broker_group_removal_may_be_in_its_lost_events(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    given = {"endpoints": cluster.endpoint, "topicPattern": "or.*"}
    cluster.add("orders", "a", 0, 1)
    cluster.add_events(
        "a", pb.Event(kind=pb.EVENT_KIND_STORED, at_ms=500, topic="orders", message_id="m")
    )
    assert removed_at_ms(spark, read_events(spark, given), given) == 0
    for at_ms in (600, 700):
        cluster.add_events(
            "a", pb.Event(kind=pb.EVENT_KIND_BROKER_GROUP_REMOVED, at_ms=at_ms, reason=f"b{at_ms}")
        )
    events = read_events(spark, given)
    assert removed_at_ms(spark, events, given) == 700
    # Also after the end of the events.
    ending = {**given, "endingTimestamp": "600"}
    events = read_events(spark, ending)
    assert events.count() == 1
    assert removed_at_ms(spark, events, ending) == 700


def test_sends_to_topics_that_are_not_read_are_none(spark: SparkSession) -> None:
    sends = spark.createDataFrame([("a", "orders", 1), ("b", "others", 1)], SENDS)

    def kept(**given: str) -> set[str]:
        return {row.message_id for row in of_topics(sends, given).collect()}

    assert kept() == {"a", "b"}
    assert kept(topics="orders") == kept(topic="orders, more") == {"a"}
    assert kept(topicPattern="oth.*") == {"b"}


def test_expired_ranges_filters_and_open_windows_are_no_losses(spark: SparkSession) -> None:
    story = Story()
    for queue_id, at_ms in ((0, 0), (1, 1000)):
        for i in range(10):
            story.add("stored", i, at_ms + i, queue_id=queue_id)
        for group in ("g", "filtered"):
            for i in (0, 9):
                story.consumed(i, at_ms + 100, group=group, queue_id=queue_id)
        story.add(
            "expired",
            1,
            at_ms + 200,
            consumer_group="g",
            end_offset=6,
            message_id=None,
            queue_id=queue_id,
        )
    # In the second queue, the time window of offset 6 and later is still open.
    rules = AuditRules(filtered_groups=["filtered"], closed_at_ms=START_MS + 1006)
    lost = audit(story.frame(spark), rules).findings.collect()
    assert sorted((r.consumer_group, r.queue_id, r.queue_offset) for r in lost) == [
        ("g", 0, 6),
        ("g", 0, 7),
        ("g", 0, 8),
    ]


def test_curves_and_accuracy(spark: SparkSession) -> None:
    events = a_day().frame(spark)
    late = lateness(events, "1 hour").collect()
    assert [(r.p50, r.max) for r in late] == [(2, 4000)]
    waits = {
        r.consumer_group: r.p99 for r in audit(events, AuditRules(window="1 hour")).lag.collect()
    }
    assert waits == {"g": 1000, "h": 1400}
    bands = by_band(fired(events)).collect()
    assert [(r.band, r["count"], r.early, r["max"]) for r in bands] == [("< 1 min", 3, 1, 4000)]
    assert sum(r["count"] for r in by_minute(fired(events)).collect()) == 3


def counted(verdict: AuditVerdict, group: str | None) -> dict[str, int | None]:
    """Return some columns of the tables for a topic, or for one consumer group of it."""
    (row,) = (row for row in verdict.totals if row["consumer_group"] == group)
    return {name: count_of(row, name) for name in ("produced", "fired", "recalled", "acked")}


def test_an_audit_reports_the_number_of_compared_sends(spark: SparkSession, tmp_path: Path) -> None:
    """One message more than the list's limit is missing."""
    lost, closed_ms = SENTENCES_MAX + 1, START_MS + 10_000_000
    sends = tmp_path / "sends.jsonl"
    lines = [
        *({"message_id": f"lost{i}", "topic": "orders", "at_ms": START_MS} for i in range(lost)),
        {"message_id": "young", "topic": "orders", "at_ms": closed_ms},
        {"message_id": "other", "topic": "payments", "at_ms": START_MS},
    ]
    sends.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings = AuditSettings(
        to=str(tmp_path), given={"topic": "orders"}, sends=str(sends), grace_s=0
    )
    story = Story()
    story.add("stored", 0, 0)
    verdict = judge(spark, story.frame(spark), settings, now_ms=closed_ms)
    assert verdict.sends == SendCounts(compared=lost, young=1, elsewhere=1)
    assert len(verdict.broken) == SENTENCES_MAX + 1
    assert verdict.broken[-1] == "and 1 more; see the page or the table"
    page = (tmp_path / "audit" / "index.html").read_text()
    assert f"{verdict.sends}." in page
    assert str(verdict.sends) == (
        f"{lost} acknowledged sends were compared with stored messages;"
        " 1 are younger than --grace, and 1 are to other topics"
    )


def test_an_audit_writes_tables_and_a_page_and_reports_broken_promises(
    spark: SparkSession, tmp_path: Path
) -> None:
    settings = AuditSettings(to=str(tmp_path), given={}, grace_s=0)
    verdict = judge(spark, a_day().frame(spark), settings, now_ms=START_MS + 10_000_000)
    assert verdict.is_broken
    assert verdict.counts == {
        "missing": 2,
        "unexpected": 0,
        "duplicate": 1,
        "redelivered": 1,
        "early": 1,
        "late": 1,
        "orphan-ack": 1,
        "unknown": 0,
        "unreadable": 0,
    }
    text = (tmp_path / "audit" / "index.html").read_text()
    assert "Something was lost or early." in text
    assert [reason.split(":")[0] for reason in verdict.broken] == ["early", "missing", "missing"]
    assert "early: t2, orders/0/101: fired 10 ms before it was due" in verdict.broken
    # Findings of groups and findings of topics are separate.
    assert counted(verdict, None) == {"produced": 103, "fired": 3, "recalled": 1, "acked": None}
    assert counted(verdict, "h") == {"produced": None, "fired": None, "recalled": None, "acked": 10}
    assert "fired 10 ms before it was due" in text
    assert text.count("<svg") == 2
    assert "<script" not in text
    clean = Story()
    clean.add("stored", 0, 0)
    clean.consumed(0, 10)
    again = judge(spark, clean.frame(spark), settings, now_ms=START_MS + 10_000_000)
    assert not again.is_broken
    assert sum(again.counts.values()) == 0


def test_a_worse_release_is_named() -> None:
    band = {"topic": "orders", "band": "< 1 h", "p99": 31}
    assert worse_than({("orders", "< 1 h"): 20}, [band]) == []
    assert len(worse_than({("orders", "< 1 h"): 10}, [band])) == 1
    assert worse_than({}, [band]) == []
