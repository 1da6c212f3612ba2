"""Where the audit of a fault and the history of its clients differ, and what only the log knows."""

from __future__ import annotations

from typing import Any

from tests.chaos.audit import acknowledged, differing, lost_answers

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
    assert differing(lost, [], KEY_OF) == [f"missing: {KEY} is found by the history alone"]
    whole = [*lost, *seen("push")]
    assert differing(whole, [], KEY_OF) == []
    assert differing(whole, [found("duplicate", "id-0", "push")], KEY_OF) == [
        f"duplicate: {KEY} is found by the audit alone"
    ]


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


def test_a_delivery_that_no_client_tells_is_listed() -> None:
    told = [("simple", KEY, 1), ("simple", KEY, 2), ("simple", "other/normal/9", 1)]
    assert lost_answers([SEND, *seen("simple")], told) == [f"simple: {KEY}, attempt 2"]
