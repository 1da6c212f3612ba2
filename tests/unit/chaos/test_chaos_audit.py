"""Where the audit of a fault and the history of its clients differ, and what only the log knows."""

from __future__ import annotations

from typing import Any

from tests.chaos.audit import Delivery, acknowledged, differing, untold
from tests.chaos.figures import DISTURBED
from tests.support.looping_clients import EFFECT_US

KEY = "fault/normal/0"
SEND = {
    "fact": "send", "key": KEY, "topic": "normal", "group": "", "due": 0, "begun": 1, "ended": 2,
    "error": "",
}  # fmt: skip
KEY_OF = {"id-0": KEY, "id-9": "other/normal/9"}


def found(kind: str, message_id: str, group: str | None) -> dict[str, Any]:
    return {"kind": kind, "message_id": message_id, "consumer_group": group}


def seen(role: str) -> list[dict[str, Any]]:
    received = {"fact": "received", "role": role, "topic": "normal", "keys": [KEY], "attempts": [1]}
    ack = {"fact": "ack", "role": role, "topic": "normal", "key": KEY, "attempt": 1, "error": ""}
    return [received | {"at": 3}, ack | {"begun": 4, "ended": 5}]


def test_what_both_find_is_no_difference_and_what_one_finds_is() -> None:
    lost = [SEND, *seen("simple")]  # Nobody gave it to the push consumers.
    assert differing(lost, [found("missing", "id-0", "push")], KEY_OF) == []
    assert differing(lost, [], KEY_OF) == [f"missing: {KEY} of push is found by the history alone"]
    whole = [*lost, *seen("push")]
    assert differing(whole, [], KEY_OF) == []
    assert differing(whole, [found("duplicate", "id-0", "push")], KEY_OF) == [
        f"duplicate: {KEY} of push is found by the audit alone"
    ]


def test_what_each_finds_of_another_consumer_group_differs() -> None:
    lost = [SEND, *seen("simple")]
    assert differing(lost, [found("missing", "id-0", "simple")], KEY_OF) == [
        f"missing: {KEY} of push is found by the history alone",
        f"missing: {KEY} of simple is found by the audit alone",
    ]


def test_what_was_never_stored_is_missing_to_all_groups() -> None:
    assert differing([SEND], [found("missing", "id-0", None)], KEY_OF) == []


def test_other_faults_and_what_is_under_way_are_not_compared() -> None:
    under_way = [SEND, *seen("simple"), seen("push")[0]]
    assert differing(under_way, [found("missing", "id-9", "push")], KEY_OF) == []


def test_what_was_never_stored_goes_by_its_key() -> None:
    never = SEND | {"key": "fault/normal/1"}
    refused = SEND | {"key": "fault/normal/2", "error": "away"}
    assert acknowledged([SEND, never, refused], KEY_OF) == [
        {"message_id": "id-0", "topic": "normal"},
        {"message_id": "fault/normal/1", "topic": "normal"},
    ]


def test_a_delivery_that_no_client_tells_is_explained_by_what_met_its_answer() -> None:
    told = [
        Delivery("simple", KEY, 1, 2),
        Delivery("simple", KEY, 2, 3),
        Delivery("simple", "other/normal/9", 1, 3),
    ]
    facts = [SEND, *seen("simple"), *seen("push")]
    again = f"simple: {KEY}, attempt 2"
    assert untold(facts, told) == ([], [again])
    kill = {"fact": DISTURBED, "begun": 1, "ended": 2}
    assert untold([*facts, kill], told) == ([again], [])
    failed = {"fact": "failed", "during": "receive", "role": "simple", "begun": 1, "ended": 2}
    assert untold([*facts, failed], told) == ([again], [])
    assert untold([*facts, failed | {"role": "push"}], told) == ([], [again])
    # Long after the kill; behind all that was received its client was ending.
    late = EFFECT_US + 3
    later = [*facts, kill, seen("push")[0] | {"at": late}]
    assert untold(later, [Delivery("simple", KEY, 2, late)]) == ([], [again])
    assert untold(later, [Delivery("simple", KEY, 2, late + 1)]) == ([again], [])
