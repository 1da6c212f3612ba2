"""What the history of a fault is measured and judged as."""

from __future__ import annotations

from typing import Any

from tests.chaos.figures import figures, longest_gap_s, percentile
from tests.support.clients.looping_clients import Disturbance

S = 1_000_000


def send(key: str, at_s: float, error: str = "", topic: str = "normal") -> dict[str, Any]:
    at = int(at_s * S)
    return {
        "fact": "send",
        "key": key,
        "topic": topic,
        "group": "",
        "due": 0,
        "begun": at,
        "ended": at,
        "error": error,
    }


def taken(role: str, key: str, at_s: float, *, acked: bool = True) -> list[dict[str, Any]]:
    at = int(at_s * S)
    received = {
        "fact": "received",
        "role": role,
        "topic": "normal",
        "keys": [key],
        "attempts": [1],
        "at": at,
    }
    ack = {
        "fact": "ack",
        "role": role,
        "topic": "normal",
        "key": key,
        "attempt": 1,
        "begun": at + 1,
        "ended": at + 2,
        "error": "",
    }
    return [received, ack] if acked else [received]


def disturbance(begun_s: float, ended_s: float, *fails: str) -> Disturbance:
    return Disturbance("it", int(begun_s * S), int(ended_s * S), frozenset(fails))


def test_a_message_acked_by_only_one_group_is_lost_to_the_other() -> None:
    found = figures([send("a", 1), *taken("simple", "a", 2)], [disturbance(0, 3)])
    assert (found.stored, found.received, found.lost) == (1, 1, 1)
    assert found.findings["lost"] == ["push, normal: a was stored and never received"]
    assert not found.is_clean


def test_an_error_is_judged_by_the_errors_its_fault_permits() -> None:
    facts = [send("a", 1, error="no"), send("b", 2)]
    facts += [*taken("simple", "b", 3), *taken("push", "b", 3)]
    permitted = figures(facts, [disturbance(1, 2, "normal")])
    assert (permitted.errors["send"], permitted.unpromised_errors) == (1, 0)
    assert permitted.is_clean
    refused = figures(facts, [disturbance(1, 2, "receive", "ack")])
    assert (refused.errors["send"], refused.unpromised_errors) == (1, 1)
    assert not refused.is_clean


def test_errors_of_starting_clients_do_not_count_for_a_fault() -> None:
    facts = [send("a", 1, error="no"), send("b", 2)]
    facts += [*taken("simple", "b", 3), *taken("push", "b", 3)]
    found = figures(facts, [disturbance(1.5, 2)])
    assert (found.errors["send"], found.unpromised_errors, found.errors_before) == (0, 0, 1)
    assert found.is_clean


def test_a_gap_counts_from_the_last_success_before_a_fault_to_the_first_after_it() -> None:
    moments = [1 * S, 4 * S, 5 * S, 9 * S, 20 * S]
    assert longest_gap_s(moments, disturbance(6, 8)) == 4
    assert longest_gap_s(moments, disturbance(4.5, 6)) == 4
    assert longest_gap_s(moments, disturbance(1.5, 3)) == 3
    # What never came back lasts until the end.
    assert longest_gap_s(moments, disturbance(19, 26)) == 11
    assert longest_gap_s([], disturbance(2, 8)) == 6


def test_a_gap_of_another_disturbance_is_not_counted() -> None:
    moments = [at * S for at in (1, 2, 3, 20, 21, 22)]
    assert longest_gap_s(moments, disturbance(20.5, 21.5)) == 1


def test_the_99th_percentile_of_twenty_is_the_worst() -> None:
    values = [float(value) for value in range(20)]
    assert percentile(values, 0.99) == 19
    assert percentile(values, 0.5) == 9
    assert percentile([3.0], 0.99) == 3


def test_where_messages_may_be_lost_no_other_has_to_wait_for_one() -> None:
    facts = []
    for key, at_s in (("a", 1), ("b", 2)):
        facts.append(send(key, at_s, topic="ordered") | {"group": "g"})
    for role in ("ordered-simple", "ordered-push"):
        facts += [fact | {"topic": "ordered"} for fact in taken(role, "b", 5)]
    strict = figures(facts, [disturbance(3, 4)])
    assert (strict.lost, strict.out_of_order) == (2, 2)
    lenient = figures(facts, [disturbance(3, 4)], loses=True)
    assert (lenient.lost, lenient.out_of_order) == (2, 0)
    assert lenient.is_clean_but_for_losses
    assert not lenient.is_clean
