"""J2 for consumers of dead letters: the audit judges the dead-letter topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.test_audit import Story
from tidemill_pipeline.jobs.audit import AuditSettings, rules_of
from tidemill_pipeline.transforms.audit import audit
from tidemill_pipeline.transforms.findings import AuditRules

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LETTERS = 8


class Letters:
    """Messages of `orders` that became dead letters of `g`, with their new offsets."""

    def __init__(self) -> None:
        self.story = Story()
        for i in range(LETTERS):
            self.story.add("stored", 10 + i, i)
            self.story.delivered(10 + i, 100 + i)
        for i in range(LETTERS):
            self._add("dead-lettered", i, 200 + i, group="g", reason="attempts")

    def _add(self, event: str, letter: int, at_ms: int, *, group: str, **more: Any) -> None:
        where = {"topic": "%DLQ%g", "topic_id": 50, "message_id": f"m{10 + letter}"}
        origin = {
            "origin_topic": "orders",
            "origin_queue_id": 0,
            "origin_queue_offset": 10 + letter,
        }
        self.story.add(event, letter, at_ms, consumer_group=group, **where, **origin, **more)

    def given(self, at_ms: int, *letters: int, group: str) -> None:
        for letter in letters:
            self._add("delivered", letter, at_ms + letter, group=group, attempt=1)
            self._add("acked", letter, at_ms + letter + 1, group=group)


def found(spark: SparkSession, letters: Letters, **rules: Any) -> dict[tuple[str, int], str]:
    """Return the journeys of missing dead letters, by group and offset."""
    made = audit(letters.story.frame(spark), AuditRules(**rules))
    rows = [row for row in made.findings.collect() if row.kind == "missing"]
    summed = {(row.topic, row.consumer_group) for row in made.summary.collect() if row.missing}
    assert summed == {(row.topic, row.consumer_group) for row in rows}
    assert all(row.topic == "%DLQ%g" for row in rows)
    return {(row.consumer_group, row.queue_offset): row.journey for row in rows}


def test_a_dead_letter_reader_is_audited_between_its_first_and_last_delivery(
    spark: SparkSession,
) -> None:
    letters = Letters()
    # Offsets 1 to 6 without 3 and 4; g itself with all messages; and one dead letter.
    letters.given(300, 1, 2, 5, 6, group="handler")
    letters.given(400, 0, 2, group="g")
    letters.given(500, 7, group="late")
    missing = found(spark, letters)
    assert set(missing) == {("handler", 3), ("handler", 4), ("g", 1)}
    assert "dead-lettered" in missing["handler", 3]
    assert found(spark, letters, is_whole=False) == {}


def test_dead_letters_that_expired_or_were_passed_by_a_reset_are_no_losses(
    spark: SparkSession,
) -> None:
    where = {"topic": "%DLQ%g", "topic_id": 50}
    letters = Letters()
    for group in ("reader", "handler", "again"):
        letters.given(300, 0, group=group)
    letters.story.add("expired", 1, 350, consumer_group="reader", end_offset=4, **where)
    letters.story.add("reset", 4, 350, consumer_group="handler", **where)
    # A consumer group that is deleted and created again is a different group.
    letters.story.add("reset", 0, 350, topic="", consumer_group="again", reason="group_deleted")
    letters.given(400, 4, 6, group="reader")
    letters.given(400, 4, 5, 7, group="handler")
    letters.given(400, 5, 6, group="again")
    assert set(found(spark, letters)) == {("reader", 5), ("handler", 6)}


@pytest.mark.parametrize(
    ("given", "is_whole"),
    [({}, True), ({"topics": "orders"}, False), ({"topicPattern": "o.*"}, False)],
)
def test_dead_letters_are_judged_where_all_topics_are_read(
    given: dict[str, str], is_whole: bool
) -> None:
    """The report of expired dead letters names the dead-letter topic, not the first topic."""
    settings = AuditSettings(to="a", given={"endpoints": "a:1", **given})
    assert rules_of(settings, now_ms=0).is_whole == is_whole
