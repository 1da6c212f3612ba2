"""J2 of a partly unreadable log: events that may stand in the unreadable part are unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pipeline.test_audit import START_MS, Story
from tidemill_pipeline.transforms.audit import audit
from tidemill_pipeline.transforms.findings import ACK_MS, AuditRules

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LATER_MS = 2 * ACK_MS


def test_messages_near_an_unreadable_part_have_an_unknown_state(spark: SparkSession) -> None:
    story = Story()
    for i in range(4):
        story.add("stored", i, i)
    # The unreadable part had events of m1 and m2, and the delivery that is acked below.
    story.add("unreadable", 0, 0, body_size=9, end_offset=900, detail="a: 9 bytes")
    for column in ("topic", "queue_id", "queue_offset", "message_id", "event_ts"):
        story.rows[-1][column] = None
    story.consumed(0, 20)
    story.acked(2, 25, "a:150:0")
    story.consumed(3, 30)
    for i in range(4, 7):
        story.add("stored", i, LATER_MS + i)
    story.consumed(4, LATER_MS + 20)
    story.consumed(6, LATER_MS + 30)
    rows: list[tuple[str, str, int | None]] = [
        ("m1", "orders", START_MS + 1),
        ("lost", "orders", START_MS + 2),
    ]
    rows += [("lost later", "orders", START_MS + LATER_MS), ("no time", "orders", None)]
    sends = spark.createDataFrame(rows, "message_id string, topic string, at_ms bigint")
    made = audit(story.frame(spark), AuditRules(), sends=sends)
    found = {(row.kind, row.message_id): row.detail for row in made.findings.collect()}
    assert set(found) == {
        ("unreadable", None),
        ("unknown", "m1"),
        ("unknown", "m2"),
        ("unknown", "lost"),
        ("unknown", "no time"),
        # Everything behind the unreadable part is readable.
        ("missing", "m5"),
        ("missing", "lost later"),
    }
    assert found["unknown", "m1"].startswith("missing, if a part of a log that cannot be read told")
