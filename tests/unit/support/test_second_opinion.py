"""The comparison of a history with an audit names differences and lists lost answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clients.history import History, Outcome
from tests.support.clients.history_against_audit import (
    Comparison,
    Delivery,
    LostAnswerSpan,
    Witness,
    compare,
    witness_of,
)

SLACK_MS = 100


def seen(
    *failed: LostAnswerSpan, early: frozenset[str] = frozenset(), group: str = "g", **more: Any
) -> Witness:
    """Return a subscription that received `m1` once and `m2` twice and acked both."""
    return witness_of(history(), topic="t", group=group, early=early, failed=failed, **more)


def history() -> History:
    noted = History()
    for key in ("m1", "m2"):
        noted.send(key).ended(Outcome.OK)
    noted.received(["m1", "m2"], [1, 1])
    noted.ack("m1", 1).ended(Outcome.OK)
    noted.received(["m2"], [2])
    noted.ack("m2", 2).ended(Outcome.OK)
    return noted


def deliveries_to(group: str) -> list[Delivery]:
    return [
        Delivery(group, "m1", 1, 1_000),
        Delivery(group, "m2", 1, 1_000),
        Delivery(group, "m2", 2, 4_000),
    ]


REPORTED = deliveries_to("g")


def finding(kind: str, key: str, detail: str = "", group: str | None = "g") -> dict[str, Any]:
    return {
        "kind": kind,
        "topic": "t",
        "consumer_group": group,
        "message_id": key,
        "detail": detail,
    }


AGAIN = finding("redelivered", "m2", "delivered 1 times more, without an ack before")
TWICE = AGAIN | {"detail": "delivered 2 times more, without an ack before"}


def compared(witness: Witness, *findings: dict[str, Any], reported: Any = REPORTED) -> Comparison:
    return compare([witness], findings, reported, slack_ms=SLACK_MS)


def test_two_that_saw_the_same_agree() -> None:
    opinion = compared(seen(), AGAIN)
    assert (opinion.differences, opinion.lost_answers) == ([], [])


def test_findings_of_other_groups_and_topics_are_not_compared() -> None:
    other = finding("missing", "m1", group="another")
    elsewhere = finding("early", "m1") | {"topic": "another"}
    assert not compared(seen(), AGAIN, other, elsewhere, finding("late", "m1")).differences


def test_findings_of_different_groups_differ() -> None:
    both = [seen(early=frozenset({"m1"})), seen(group="h")]
    reported = [*REPORTED, *deliveries_to("h")]
    again = [AGAIN, AGAIN | {"consumer_group": "h"}]
    mistaken = finding("early", "m1", group="h")
    assert compare(both, [*again, mistaken], reported, slack_ms=SLACK_MS).differences == [
        "early: m1 of g is found by the history alone",
        "early: m1 of h is found by the audit alone",
    ]
    # A finding without a consumer group agrees with the finding of any group.
    of_all = finding("early", "m1", group=None)
    assert not compare(both, [*again, of_all], reported, slack_ms=SLACK_MS).differences


def test_a_delivery_with_a_lost_answer_is_listed() -> None:
    reported = (*REPORTED, Delivery("g", "m2", 3, 9_000))
    opinion = compared(seen(LostAnswerSpan(8_000, 8_950)), TWICE, reported=reported)
    assert opinion.differences == []
    assert opinion.lost_answers == ["g: m2, attempt 3, at 9000"]


@pytest.mark.parametrize(
    "failed", [(), (LostAnswerSpan(9_001, 9_002),), (LostAnswerSpan(1, 8_899),)]
)
def test_an_unexplained_delivery_is_a_difference(failed: tuple[LostAnswerSpan, ...]) -> None:
    reported = (*REPORTED, Delivery("g", "m2", 3, 9_000))
    opinion = compared(seen(*failed), TWICE, reported=reported)
    assert opinion.differences == [
        "redelivered: g: m2, attempt 3, at 9000 came to nobody, and no answer was lost then"
    ]
    assert opinion.lost_answers == []


def test_lost_answers_of_another_group_explain_nothing() -> None:
    both = [seen(), seen(LostAnswerSpan(8_000, 8_950), group="h")]
    reported = [*REPORTED, *deliveries_to("h"), Delivery("g", "m2", 3, 9_000)]
    found = [TWICE, AGAIN | {"consumer_group": "h"}]
    opinion = compare(both, found, reported, slack_ms=SLACK_MS)
    assert len(opinion.differences) == 1
    assert opinion.lost_answers == []


def test_a_message_stored_twice_is_not_a_redelivery() -> None:
    again = Delivery("g", "m1", 1, 2_000, "another place")
    noted = history()
    noted.received(["m1"], [1])
    witness = witness_of(noted, topic="t", group="g", early=(), failed=(), duplicate=())
    assert compared(witness, AGAIN, reported=[*REPORTED, again]).differences == []
    # Two equal deliveries were sent and one arrived, so the other was lost.
    (difference,) = compared(seen(), AGAIN, reported=[*REPORTED, again]).differences
    assert difference.startswith("redelivered: g: m1, attempt 1")
    lost = compared(seen(LostAnswerSpan(1_900, 2_000)), AGAIN, reported=[*REPORTED, again])
    assert (lost.differences, lost.lost_answers) == ([], ["g: m1, attempt 1, at 2000"])


def test_a_finding_of_only_the_audit_is_a_difference() -> None:
    found = [finding("missing", "m1", group=None), finding("early", "m2")]
    assert compared(seen(), AGAIN, *found).differences == [
        "missing: m1 is found by the audit alone",
        "early: m2 of g is found by the audit alone",
    ]


def test_a_finding_of_only_the_history_is_a_difference() -> None:
    noted = history()
    noted.send("m3").ended(Outcome.OK)
    noted.received(["m1"], [2])
    witness = witness_of(noted, topic="t", group="g", early={"m1"}, failed=())
    reported = (*REPORTED, Delivery("g", "m1", 2, 9_000))
    again = AGAIN | {"message_id": "m1"}
    assert compared(witness, AGAIN, again, reported=reported).differences == [
        "missing: m3 of g is found by the history alone",
        "duplicate: m1 of g is found by the history alone",
        "early: m1 of g is found by the history alone",
    ]


def test_repeats_that_the_audit_does_not_count_are_a_difference() -> None:
    assert compared(seen()).differences == [
        "redelivered: m2 of g was delivered 2 times at 1 places, and the audit has 0 repeats"
    ]


def test_a_delivery_without_an_event_is_a_difference() -> None:
    assert compared(seen(), AGAIN, reported=REPORTED[1:]).differences == [
        "redelivered: m1 of g came in attempt 1, and no event tells it"
    ]


def test_an_attempt_that_a_client_makes_by_itself_is_none() -> None:
    once = REPORTED[:2]
    assert compared(seen(repeats_itself=True), reported=once).differences == []
    assert compared(seen(repeats_itself=True), reported=once[:1]).differences == [
        f"redelivered: m2 of g came in attempt {n}, and no event tells it" for n in (1, 2)
    ]
    assert len(compared(seen(), reported=once).differences) == 1
