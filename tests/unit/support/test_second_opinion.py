"""The comparison of a history with an audit: what differs is named, lost answers are listed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.history import History, Outcome
from tests.support.second_opinion import Compared, Delivery, Failed, Witness, compare

SLACK_MS = 100


def seen(*failed: Failed, early: frozenset[str] = frozenset()) -> Witness:
    """Return a subscription in which `m1` came once and `m2` twice, and both were acked."""
    history = History()
    for key in ("m1", "m2"):
        history.send(key).ended(Outcome.OK)
    history.received(["m1", "m2"], [1, 1])
    history.ack("m1", 1).ended(Outcome.OK)
    history.received(["m2"], [2])
    history.ack("m2", 2).ended(Outcome.OK)
    return Witness(topic="t", group="g", history=history, early=early, failed=failed)


TOLD = (Delivery("m1", 1, 1_000), Delivery("m2", 1, 1_000), Delivery("m2", 2, 4_000))


def finding(kind: str, key: str, detail: str = "", group: str | None = "g") -> dict[str, Any]:
    return {
        "kind": kind, "topic": "t", "consumer_group": group, "message_id": key, "detail": detail,
    }  # fmt: skip


AGAIN = finding("redelivered", "m2", "delivered 1 times more, without an ack before")


def compared(witness: Witness, *findings: dict[str, Any], told: Any = TOLD) -> Compared:
    return compare(witness, findings, told, slack_ms=SLACK_MS)


def test_two_that_saw_the_same_agree() -> None:
    opinion = compared(seen(), AGAIN)
    assert (opinion.differences, opinion.lost_answers) == ([], [])


def test_findings_of_other_groups_and_topics_are_not_compared() -> None:
    other = finding("missing", "m1", group="another")
    elsewhere = finding("early", "m1") | {"topic": "another"}
    assert not compared(seen(), AGAIN, other, elsewhere, finding("late", "m1")).differences


def test_a_delivery_whose_answer_was_lost_is_listed() -> None:
    told = (*TOLD, Delivery("m2", 3, 9_000))
    twice = AGAIN | {"detail": "delivered 2 times more, without an ack before"}
    opinion = compared(seen(Failed(8_000, 8_950)), twice, told=told)
    assert opinion.differences == []
    assert opinion.lost_answers == ["g: m2, attempt 3, at 9000"]


@pytest.mark.parametrize("failed", [(), (Failed(9_001, 9_002),), (Failed(1, 8_899),)])
def test_one_that_nothing_explains_is_a_difference(failed: tuple[Failed, ...]) -> None:
    told = (*TOLD, Delivery("m2", 3, 9_000))
    twice = AGAIN | {"detail": "delivered 2 times more, without an ack before"}
    (difference,) = compared(seen(*failed), twice, told=told).differences
    assert difference == (
        "redelivered: m2, attempt 3, was made at 9000 and came to nobody, and no answer was lost"
        " then"
    )


def test_what_the_audit_alone_finds_is_a_difference() -> None:
    found = [finding("missing", "m1", group=None), finding("early", "m2")]
    assert compared(seen(), AGAIN, *found).differences == [
        "missing: m1 is found by the audit alone", "early: m2 is found by the audit alone",
    ]  # fmt: skip


def test_what_the_history_alone_finds_is_a_difference() -> None:
    witness = seen(early=frozenset({"m1"}))
    witness.history.send("m3").ended(Outcome.OK)
    witness.history.received(["m1"], [2])
    told = (*TOLD, Delivery("m1", 2, 9_000))
    again = AGAIN | {"message_id": "m1"}
    assert compared(witness, AGAIN, again, told=told).differences == [
        "missing: m3 is found by the history alone",
        "duplicate: m1 is found by the history alone",
        "early: m1 is found by the history alone",
    ]  # fmt: skip


def test_repeats_that_the_audit_does_not_count_are_a_difference() -> None:
    assert compared(seen()).differences == [
        "redelivered: m2 came 2 times, 0 answers were lost, and the audit has 0 repeats"
    ]


def test_a_delivery_that_no_event_tells_is_a_difference() -> None:
    assert compared(seen(), AGAIN, told=TOLD[1:]).differences == [
        "redelivered: m1 came in attempt 1, and no event tells it"
    ]
