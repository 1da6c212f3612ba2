"""The verdict on clients that go on whatever happens finds what it is for, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.clients.client_process import Fact
from tests.support.clients.looping_clients import (
    ACKED_US,
    EFFECT_US,
    LATE_ANSWER_US,
    MOVED_SEND_US,
    Disturbance,
    LoopReport,
    LoopVerdict,
    judge,
    unsettled,
)
from tests.support.clients.message_kinds import ROLES, TOPICS

KILL = Disturbance("kill", 1_000, 2_000, frozenset({*TOPICS, "receive", "ack"}))
STOP = Disturbance("stop", 1_000, 2_000, frozenset())
LATER = KILL.ended + EFFECT_US + 1


def send(
    key: str,
    begun: int,
    *,
    topic: str = "normal",
    group: str = "",
    due: int = 0,
    error: str = "",
    id_: str = "",
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
        "id": id_,
    }


def taken(
    role: str,
    key: str,
    at: int,
    *,
    topic: str = "normal",
    attempt: int = 1,
    error: str = "",
    id_: str = "",
) -> list[Fact]:
    """A message that is received, and acked a microsecond later."""
    common = {"role": role, "topic": topic}
    received = {"keys": [key], "attempts": [attempt], "ids": [id_], "at": at}
    return [
        {"fact": "received", **common, **received},
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


def taken_by_both(
    key: str, at: int, topic: str = "normal", prefix: str = "", id_: str = ""
) -> list[Fact]:
    roles = f"{prefix}simple", f"{prefix}push"
    return [fact for role in roles for fact in taken(role, key, at, topic=topic, id_=id_)]


def test_complete_deliveries_are_clean_in_any_order_of_reports() -> None:
    facts = [*taken_by_both("a", 10), send("a", 1)]
    judged = judge(facts, [])
    assert judged.is_clean
    assert not judged.explained


def test_only_a_disturbed_message_of_a_push_consumer_may_expire() -> None:
    retention = 5_000
    facts = [send("a", 1), *taken("simple", "a", 10), send("b", LATER), *taken("push", "b", LATER)]
    judged = judge(facts, [KILL], retention)
    assert judged.explained["expired"] == 1
    assert judged.broken == {"lost": ["simple, normal: b was stored and never received"]}
    undisturbed = judge([send("a", LATER), *taken("simple", "a", LATER)], [KILL], retention)
    assert undisturbed.broken == {"lost": ["push, normal: a was stored and never received"]}


@pytest.mark.parametrize(("disturbances", "is_clean"), [([KILL], True), ([], False)])
def test_an_ordered_message_older_than_the_retention_may_be_overtaken(
    disturbances: list[Disturbance], *, is_clean: bool
) -> None:
    retention = 5_000
    facts = [send(key, at, topic="ordered", group="g") for key, at in (("a", 1), ("b", 3))]
    for at, key in enumerate("ab"):
        facts += taken("ordered-simple", key, 10 + 10 * at, topic="ordered")
    received, ack = taken("ordered-push", "a", 10, topic="ordered")
    ack |= {"begun": retention + 20, "ended": retention + 21}
    facts += [received, *taken("ordered-push", "b", retention + 10, topic="ordered"), ack]
    judged = judge(facts, disturbances, retention)
    assert judged.is_clean == is_clean
    assert ("out_of_order" in judged.broken) != is_clean


def test_a_message_missing_at_one_consumer_group_is_lost() -> None:
    judged = judge([send("a", 1), *taken("simple", "a", 10)], [KILL])
    assert judged.broken == {"lost": ["push, normal: a was stored and never received"]}


def test_a_delivery_before_the_due_time_is_early() -> None:
    facts = [send("a", 1, topic="delayed", due=1), *taken_by_both("a", 999, "delayed")]
    assert list(judge(facts, []).broken) == ["early"]


def test_a_message_before_an_earlier_one_of_its_message_group_is_out_of_order() -> None:
    facts = [
        send("a", 1, topic="ordered", group="g"),
        send("b", 3, topic="ordered", group="g"),
        *taken_by_both("b", 10, "ordered", "ordered-"),
        *taken_by_both("a", 20, "ordered", "ordered-"),
    ]
    assert list(judge(facts, []).broken) == ["out_of_order"]


@pytest.mark.parametrize("role", ["simple", "push"])
def test_a_duplicate_is_explained_only_by_a_disturbance_of_its_send(role: str) -> None:
    def facts(begun: int) -> list[Fact]:
        again = begun + 3 * ACKED_US
        return [send("a", begun), *taken_by_both("a", begun + 10), *taken(role, "a", again)]

    assert judge(facts(KILL.begun), [KILL]).explained == {"stored twice": 1}
    assert list(judge(facts(LATER), [KILL]).broken) == ["duplicated"]


def test_a_send_that_took_long_explains_a_duplicate() -> None:
    """On a busy machine a client or a proxy sends again without an error for the application."""

    def judged(duration_us: int) -> LoopVerdict:
        late = send("a", 1) | {"ended": 1 + duration_us}
        return judge([late, *taken_by_both("a", 10), *taken("push", "a", 20)], [])

    assert judged(MOVED_SEND_US).explained == {"stored twice": 1}
    assert list(judged(MOVED_SEND_US - 1).broken) == ["duplicated"]


def test_a_lost_ack_explains_a_duplicate_for_push_consumers_only() -> None:
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


def test_a_redelivery_without_an_ack_is_not_a_duplicate() -> None:
    facts = [send("a", 1), *taken("simple", "a", 10, error="lost"), *taken_by_both("a", 20)]
    assert list(judge(facts, []).broken) == ["errors"]


def test_an_error_is_explained_by_a_disturbance_of_its_call() -> None:
    def judged(at: int, disturbance: Disturbance) -> dict[str, int]:
        return dict(judge([send("a", at, error="no")], [disturbance]).explained)

    assert judged(KILL.ended, KILL) == {"error of normal": 1}
    assert judged(LATER - 1, KILL) == {"error of normal": 1}
    assert judged(LATER, KILL) == {}
    assert judged(STOP.ended, STOP) == {}


def test_an_ack_with_an_unreported_end_may_have_failed_in_a_disturbance() -> None:
    [received, ack] = taken("simple", "a", 1_500)
    again = taken("simple", "a", LATER, attempt=2)
    facts = [send("a", 1), received, ack, *again, *taken("push", "a", 10)]
    assert list(judge(facts, [KILL]).broken) == ["duplicated"]
    hidden = [send("a", 1), received, ack | {"hidden": True}, *again, *taken("push", "a", 10)]
    assert judge(hidden, [KILL]).is_clean
    assert list(judge(hidden, []).broken) == ["duplicated"]


def test_an_ack_with_an_unreported_end_may_have_taken_too_long() -> None:
    [received, ack] = taken("simple", "a", 1_500)
    again = taken("simple", "a", LATER, attempt=2)
    rest = [*again, *taken("push", "a", 10)]
    for hidden, took_us, broken in (
        (True, LATE_ANSWER_US, []),
        (True, LATE_ANSWER_US - 1, ["duplicated"]),
        (False, LATE_ANSWER_US, ["duplicated"]),
    ):
        late = ack | {"ended": ack["begun"] + took_us, "hidden": hidden}
        assert list(judge([send("a", 1), received, late, *rest], []).broken) == broken


COMMITTED, ROLLED_BACK = "go/transaction/4", "go/transaction/5"


def test_only_committed_messages_must_be_delivered() -> None:
    sends = [send(COMMITTED, 1, topic="transaction"), send(ROLLED_BACK, 3, topic="transaction")]
    delivered = taken_by_both(COMMITTED, 10, "transaction")
    assert judge([*sends, *delivered], []).is_clean
    assert judge(sends, []).broken == {
        "lost": [
            f"{role}, transaction: {COMMITTED} was stored and never received"
            for role in ("simple", "push")
        ]
    }


def test_a_delivery_of_a_rolled_back_message_is_unexpected_even_after_an_error() -> None:
    for error in ("", "no answer"):
        facts = [
            send(ROLLED_BACK, KILL.begun, topic="transaction", error=error),
            *taken("push", ROLLED_BACK, KILL.ended, topic="transaction"),
        ]
        assert judge(facts, [KILL]).broken == {
            "unexpected": [f"push, transaction: {ROLLED_BACK} was rolled back"]
        }


@pytest.mark.parametrize(("at", "is_clean"), [(KILL.begun, True), (LATER, False)])
def test_a_commit_may_fail_only_in_a_disturbance(at: int, *, is_clean: bool) -> None:
    failed = {"fact": "failed", "role": "", "during": "transaction", "error": "no answer"}
    facts = [
        send(COMMITTED, 1, topic="transaction"),
        failed | {"begun": at, "ended": at + 1},
        *taken_by_both(COMMITTED, LATER + 9, "transaction"),
    ]
    assert judge(facts, [KILL]).is_clean is is_clean


@pytest.mark.parametrize(
    ("number", "expecting"),
    [
        (0, {"tag-simple"}),  # red, level 0
        (2, set()),  # blue, level 2
        (5, {"sql-push"}),  # blue, level 5
        (9, {"tag-simple", "sql-push"}),  # red, level 9
    ],
)
def test_consumers_with_a_filter_get_the_messages_that_match(
    number: int, expecting: set[str]
) -> None:
    roles = ["tag-simple", "sql-push"]
    key = f"go/filtered/{number}"

    def judged(receiving: set[str]) -> LoopVerdict:
        facts = [send(key, 1, topic="filtered")]
        for role in receiving:
            facts += taken(role, key, 10, topic="filtered")
        return judge(facts, [])

    assert judged(expecting).is_clean
    assert len(judged(set()).broken["lost"]) == len(expecting)
    assert len(judged(set(roles)).broken["unexpected"]) == len(roles) - len(expecting)


def test_a_dedup_key_has_one_message() -> None:
    def judged(second_id: str, received_id: str) -> list[str]:
        facts = [
            send("k", 1, topic="dedup", id_="m1"),
            send("k", 3, topic="dedup", id_=second_id),
            *taken_by_both("k", 10, "dedup", id_=received_id),
        ]
        return list(judge(facts, []).broken)

    assert judged("m1", "m1") == []
    assert judged("m2", "m1") == ["not deduplicated"]
    assert judged("m1", "m2") == ["not deduplicated"]


@pytest.mark.parametrize("errors", [("", "no"), ("no", ""), ("no", "no")])
def test_a_dedup_key_is_stored_if_one_of_its_sends_has_an_answer(errors: tuple[str, str]) -> None:
    facts = [
        send("k", KILL.begun + 2 * n, topic="dedup", error=error, id_="" if error else "m")
        for n, error in enumerate(errors)
    ]
    assert ("lost" in judge(facts, [KILL]).broken) == ("" in errors)


def test_a_lost_answer_does_not_explain_a_second_message_of_a_dedup_key() -> None:
    facts = [
        send("k", KILL.begun, topic="dedup", id_="m"),
        *taken_by_both("k", KILL.begun + 10, "dedup", id_="m"),
        *taken("simple", "k", LATER + ACKED_US, topic="dedup", id_="m"),
    ]
    assert list(judge(facts, [KILL]).broken) == ["duplicated"]


def test_only_expected_messages_are_unsettled() -> None:
    report = LoopReport()
    for topic in TOPICS:
        for number in range(4):
            report.note(send(f"go/{topic}/{number}", number, topic=topic))
    found = unsettled([report])
    assert set(found) == {(role, topic) for role, topics in ROLES.items() for topic in topics} - {
        ("sql-push", "filtered")  # levels 0 to 3
    }
    assert found["push", "transaction"] == {"go/transaction/0", "go/transaction/2"}
    assert found["tag-simple", "filtered"] == {f"go/filtered/{n}" for n in (0, 1, 3)}
