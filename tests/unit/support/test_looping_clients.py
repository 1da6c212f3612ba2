"""The verdict on clients that go on whatever happens finds what it is for, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.clients.client_process import Fact
from tests.support.clients.looping_clients import (
    ACKED_US,
    EFFECT_US,
    LATE_ANSWER_US,
    Disturbance,
    judge,
)

KILL = Disturbance("kill", 1_000, 2_000, frozenset({"normal", "receive", "ack"}))
STOP = Disturbance("stop", 1_000, 2_000, frozenset())
LATER = KILL.ended + EFFECT_US + 1


def send(
    key: str, begun: int, *, topic: str = "normal", group: str = "", due: int = 0, error: str = ""
) -> Fact:
    return {
        "fact": "send",
        "key": key,
        "topic": topic,
        "group": group,
        "due": due,
        "begun": begun,
        "ended": begun + 1,
        "error": error,
    }


def taken(
    role: str, key: str, at: int, *, topic: str = "normal", attempt: int = 1, error: str = ""
) -> list[Fact]:
    """A message that is received, and acked a microsecond later."""
    common = {"role": role, "topic": topic}
    return [
        {"fact": "received", **common, "keys": [key], "attempts": [attempt], "at": at},
        {
            "fact": "ack",
            **common,
            "key": key,
            "attempt": attempt,
            "begun": at + 1,
            "ended": at + 2,
            "error": error,
        },
    ]


def taken_by_both(key: str, at: int, topic: str = "normal", prefix: str = "") -> list[Fact]:
    roles = f"{prefix}simple", f"{prefix}push"
    return [fact for role in roles for fact in taken(role, key, at, topic=topic)]


def test_what_everybody_got_is_clean_in_whatever_order_it_was_told() -> None:
    facts = [*taken_by_both("a", 10), send("a", 1)]
    judged = judge(facts, [])
    assert judged.is_clean
    assert not judged.explained


def test_what_one_consumer_group_never_got_is_lost() -> None:
    judged = judge([send("a", 1), *taken("simple", "a", 10)], [KILL])
    assert judged.broken == {"lost": ["push, normal: a was stored and never received"]}


def test_what_comes_before_it_is_due_is_early() -> None:
    facts = [send("a", 1, topic="delayed", due=1), *taken_by_both("a", 999, "delayed")]
    assert list(judge(facts, []).broken) == ["early"]


def test_what_overtakes_an_earlier_message_of_its_message_group_is_out_of_order() -> None:
    facts = [
        send("a", 1, topic="ordered", group="g"),
        send("b", 3, topic="ordered", group="g"),
        *taken_by_both("b", 10, "ordered", "ordered-"),
        *taken_by_both("a", 20, "ordered", "ordered-"),
    ]
    assert list(judge(facts, []).broken) == ["out_of_order"]


@pytest.mark.parametrize("role", ["simple", "push"])
def test_what_comes_again_is_explained_by_a_disturbance_of_its_send_alone(role: str) -> None:
    def facts(begun: int) -> list[Fact]:
        again = begun + 3 * ACKED_US
        return [send("a", begun), *taken_by_both("a", begun + 10), *taken(role, "a", again)]

    assert judge(facts(KILL.begun), [KILL]).explained == {"stored twice": 1}
    assert list(judge(facts(LATER), [KILL]).broken) == ["duplicated"]


def test_a_lost_ack_explains_what_comes_again_to_a_push_consumer_and_not_to_a_simple_one() -> None:
    late = LATER + ACKED_US
    kill = KILL._replace(begun=late, ended=late)
    for role, is_clean in (("push", True), ("simple", False)):
        facts = [
            send("a", 1),
            *taken_by_both("a", late - 3),
            *taken(role, "a", late + 9, attempt=2),
        ]
        judged = judge(facts, [kill])
        assert judged.is_clean is is_clean
        assert judged.explained == ({"an ack was lost": 1} if is_clean else {})


def test_what_comes_again_although_it_was_not_acked_is_no_duplicate() -> None:
    facts = [send("a", 1), *taken("simple", "a", 10, error="lost"), *taken_by_both("a", 20)]
    assert list(judge(facts, []).broken) == ["errors"]


def test_an_error_is_explained_by_what_may_fail_that_call_while_it_has_effect() -> None:
    def judged(at: int, disturbance: Disturbance) -> dict[str, int]:
        return dict(judge([send("a", at, error="no")], [disturbance]).explained)

    assert judged(KILL.ended, KILL) == {"error of normal": 1}
    assert judged(LATER - 1, KILL) == {"error of normal": 1}
    assert judged(LATER, KILL) == {}
    assert judged(STOP.ended, STOP) == {}


def test_an_ack_whose_end_a_client_keeps_to_itself_may_have_failed_in_a_disturbance() -> None:
    [received, ack] = taken("simple", "a", 1_500)
    again = taken("simple", "a", LATER, attempt=2)
    told = [send("a", 1), received, ack, *again, *taken("push", "a", 10)]
    assert list(judge(told, [KILL]).broken) == ["duplicated"]
    untold = [send("a", 1), received, ack | {"untold": True}, *again, *taken("push", "a", 10)]
    assert judge(untold, [KILL]).is_clean
    assert list(judge(untold, []).broken) == ["duplicated"]


def test_an_ack_whose_end_a_client_keeps_to_itself_may_have_taken_too_long() -> None:
    [received, ack] = taken("simple", "a", 1_500)
    again = taken("simple", "a", LATER, attempt=2)
    rest = [*again, *taken("push", "a", 10)]
    for untold, took_us, broken in (
        (True, LATE_ANSWER_US, []),
        (True, LATE_ANSWER_US - 1, ["duplicated"]),
        (False, LATE_ANSWER_US, ["duplicated"]),
    ):
        late = ack | {"ended": ack["begun"] + took_us, "untold": untold}
        assert list(judge([send("a", 1), received, late, *rest], []).broken) == broken
