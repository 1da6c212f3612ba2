"""Where the audit of a fault and the history of its clients differ, and what only the log knows."""

from __future__ import annotations

from typing import Any

from tests.chaos.audit import acknowledged, compared, witnesses_of
from tests.chaos.figures import DISTURBED
from tests.support.clients.history_against_audit import Delivery
from tests.support.clients.looping_clients import EFFECT_US

KEY = "fault/normal/0"
MS = 1_000  # in microseconds
SEND = {
    "fact": "send",
    "key": KEY,
    "topic": "normal",
    "group": "",
    "due": 0,
    "begun": MS,
    "ended": 2 * MS,
    "error": "",
}
KEY_OF = {"id-0": KEY, "id-9": "other/normal/9"}


def found(kind: str, key: str, group: str | None) -> dict[str, Any]:
    return {
        "kind": kind,
        "topic": "normal",
        "message_id": key,
        "consumer_group": group,
        "detail": "delivered 1 times",
    }


def seen(role: str) -> list[dict[str, Any]]:
    received = {"fact": "received", "role": role, "topic": "normal", "keys": [KEY], "attempts": [1]}
    ack = {"fact": "ack", "role": role, "topic": "normal", "key": KEY, "attempt": 1, "error": ""}
    return [received | {"at": 3 * MS}, ack | {"begun": 4 * MS, "ended": 5 * MS}]


def delivery_to(role: str) -> Delivery:
    return Delivery(role, KEY, 1, 2)


WHOLE = [SEND, *seen("simple"), *seen("push")]
BOTH = [delivery_to("simple"), delivery_to("push")]


def test_a_finding_of_only_one_side_is_a_difference() -> None:
    lost = [SEND, *seen("simple")]  # No push consumer got it.
    given = [delivery_to("simple")]
    assert not compared(lost, [found("missing", KEY, "push")], given).differences
    assert compared(lost, [], given).differences == [
        f"missing: {KEY} of push is found by the history alone"
    ]
    assert not compared(WHOLE, [], BOTH).differences


def test_a_message_that_was_not_stored_is_missing_for_all_groups() -> None:
    assert not compared([SEND], [found("missing", KEY, None)], []).differences


def test_other_faults_and_unfinished_messages_are_not_compared() -> None:
    under_way = [SEND, *seen("simple"), seen("push")[0]]
    others = Delivery("simple", "other/normal/9", 1, 3)
    missing = found("missing", "other/normal/9", "push")
    assert not compared(under_way, [missing], [*BOTH, others]).differences


def test_early_deliveries_are_reported_for_each_group() -> None:
    due = [SEND | {"due": 4}, *seen("simple"), *seen("push")]
    due[3] = due[3] | {"at": 4 * MS}
    early = {seen.group: seen.found["early"] for seen in witnesses_of(due) if seen.found["early"]}
    assert early == {"simple": {KEY}}


def test_a_disturbance_explains_a_duplicate_after_an_ack() -> None:
    again = seen("push")[0] | {"at": 6 * MS, "attempts": [2]}
    kill = {"fact": DISTURBED, "what": "a kill", "fails": [], "begun": 0, "ended": MS}

    def duplicates(*facts: dict[str, Any]) -> dict[str, frozenset[str]]:
        own = [seen for seen in witnesses_of(facts) if seen.topic == "normal"]
        return {seen.group: seen.found["duplicate"] for seen in own}

    assert duplicates(*WHOLE, again)["push"] == {KEY}
    assert duplicates(*WHOLE, again)["simple"] == set()
    assert duplicates(*WHOLE, again, kill)["push"] == set()


def test_an_unstored_send_is_identified_by_its_key() -> None:
    never = SEND | {"key": "fault/normal/1"}
    refused = SEND | {"key": "fault/normal/2", "error": "away"}
    assert acknowledged([SEND, never, refused], KEY_OF) == [
        {"message_id": "id-0", "topic": "normal", "at_ms": 2},
        {"message_id": "fault/normal/1", "topic": "normal", "at_ms": 2},
    ]


def test_each_stored_message_has_one_acknowledged_send() -> None:
    again = SEND | {"ended": 9 * MS}
    rolled_back = SEND | {"topic": "transaction", "key": "fault/transaction/5"}
    committed = SEND | {"topic": "transaction", "key": "fault/transaction/6"}
    assert [
        one["message_id"] for one in acknowledged([SEND, again, rolled_back, committed], {})
    ] == [KEY, "fault/transaction/6"]


def test_an_unreported_delivery_is_explained_by_a_lost_answer() -> None:
    again = Delivery("simple", KEY, 2, 3)
    twice = [found("redelivered", KEY, "simple")]

    def lost(*more: dict[str, Any], one: Delivery = again) -> list[str]:
        """Return the lost answers; a delivery that is none of them is a difference."""
        opinion = compared([*WHOLE, *more], twice, [*BOTH, one])
        assert len(opinion.lost_answers) + len(opinion.differences) == 1
        return list(opinion.lost_answers)

    assert lost() == []
    kill = {"fact": DISTURBED, "what": "a kill", "fails": [], "begun": MS, "ended": 2 * MS}
    assert lost(kill) == [str(again)]
    failed = {"fact": "failed", "during": "receive", "role": "simple", "begun": MS, "ended": 2 * MS}
    assert lost(failed) == [str(again)]
    assert lost(failed | {"role": "push"}) == []
    assert lost(failed | {"during": "ack"}) == []
    # Long after the kill; behind all that was received its client was ending.
    late = EFFECT_US + 3 * MS
    last = seen("push")[0] | {"at": late, "keys": [], "attempts": []}
    assert lost(kill, last, one=again._replace(at_ms=late // MS)) == []
    assert len(lost(kill, last, one=again._replace(at_ms=late // MS + 1))) == 1
