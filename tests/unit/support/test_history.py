"""The history checker finds what it is for, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.clients.history import History, Outcome, Verdict


def sent(history: History, *keys: str, message_group: str = "") -> None:
    for key in keys:
        history.send(key, message_group=message_group).ended(Outcome.OK)


def acked(history: History, *keys: str, outcome: Outcome = Outcome.OK) -> None:
    for key in keys:
        history.ack(key).ended(outcome)


def findings(verdict: Verdict) -> dict[str, list[str]]:
    """The keys at the head of each finding, by kind, without the kinds that found nothing."""
    return {
        kind: [finding.split()[0] for finding in found]
        for kind, found in verdict._asdict().items()
        if found
    }


def test_a_history_of_sent_received_and_acked_messages_is_clean() -> None:
    history = History()
    sent(history, "a", "b")
    history.received(["a", "b"])
    acked(history, "a", "b")
    assert history.judge().is_clean


def test_a_stored_message_that_is_never_received_is_lost() -> None:
    history = History()
    sent(history, "a", "b")
    history.received(["b"])
    acked(history, "b")
    assert findings(history.judge()) == {"lost": ["a"]}
    assert history.unsettled() == {"a"}


def test_a_received_message_that_never_returns_after_a_refused_ack_is_lost() -> None:
    history = History()
    sent(history, "a")
    history.received(["a"])
    acked(history, "a", outcome=Outcome.FAILED)
    assert findings(history.judge()) == {"lost": ["a"]}


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.FAILED])
def test_a_message_whose_send_was_not_answered_with_ok_cannot_be_lost(outcome: Outcome) -> None:
    history = History()
    history.send("a").ended(outcome)
    assert history.judge().is_clean


def test_an_ack_of_unknown_outcome_settles_and_permits_a_redelivery() -> None:
    history = History()
    sent(history, "a", "b")
    history.received(["a", "b"])
    acked(history, "a", "b", outcome=Outcome.UNKNOWN)
    history.received(["b"])
    acked(history, "b")
    assert history.judge().is_clean


def test_a_message_that_comes_again_before_its_ack_is_clean() -> None:
    history = History()
    sent(history, "a")
    history.received(["a"])
    history.received(["a"])
    acked(history, "a", outcome=Outcome.FAILED)
    acked(history, "a")
    assert history.judge().is_clean


def test_a_message_that_comes_again_after_its_ack_is_duplicated() -> None:
    history = History()
    sent(history, "a")
    history.received(["a"])
    acked(history, "a")
    history.received(["a"])
    assert findings(history.judge()) == {"duplicated": ["a"]}


@pytest.mark.parametrize(("attempt", "is_found"), [(1, False), (2, True), (3, True)])
def test_an_earlier_delivery_that_comes_late_is_not_duplicated(
    attempt: int, is_found: bool
) -> None:
    """Its answer was on the way for longer than the message was hidden from others."""
    history = History()
    sent(history, "a")
    history.received(["a"], [2])
    history.ack("a", 2).ended(Outcome.OK)
    history.received(["a"], [attempt])
    assert history.judge().is_clean is not is_found


def test_a_message_that_comes_while_its_ack_is_under_way_is_not_duplicated() -> None:
    history = History()
    sent(history, "a")
    history.received(["a"])
    ack = history.ack("a")
    history.received(["a"])
    ack.ended(Outcome.OK)
    assert history.judge().is_clean


def test_a_received_message_without_a_send_is_unexpected() -> None:
    history = History()
    history.received(["a"])
    assert findings(history.judge()) == {"unexpected": ["a"]}


def test_a_message_that_comes_before_its_send_began_is_unexpected() -> None:
    history = History()
    history.received(["a"])
    sent(history, "a")
    acked(history, "a")
    assert findings(history.judge()) == {"unexpected": ["a"]}


def test_a_message_whose_send_was_refused_is_unexpected() -> None:
    history = History()
    history.send("a").ended(Outcome.FAILED)
    history.received(["a"])
    assert findings(history.judge()) == {"unexpected": ["a"]}


def test_a_message_may_come_before_its_send_is_answered() -> None:
    history = History()
    send = history.send("a")
    history.received(["a"])
    send.ended(Outcome.OK)
    acked(history, "a")
    assert history.judge().is_clean


def test_a_message_group_in_order_is_clean() -> None:
    history = History()
    sent(history, "a", "b", "c", message_group="g")
    history.received(["a", "b"])
    acked(history, "a")
    history.received(["b"])
    acked(history, "b")
    history.received(["c"])
    acked(history, "c")
    assert history.judge().is_clean


def test_a_message_that_comes_before_an_earlier_one_is_acked_is_out_of_order() -> None:
    history = History()
    sent(history, "a", "b", message_group="g")
    history.received(["a"])
    history.received(["b"])
    acked(history, "a", "b")
    assert findings(history.judge()) == {"out_of_order": ["b"]}


def test_a_message_that_stands_before_an_earlier_one_in_its_answer_is_out_of_order() -> None:
    history = History()
    sent(history, "a", "b", message_group="g")
    history.received(["b", "a"])
    acked(history, "a", "b")
    assert findings(history.judge()) == {"out_of_order": ["b"]}


def test_a_message_that_comes_after_the_refused_ack_of_an_earlier_one_is_out_of_order() -> None:
    history = History()
    sent(history, "a", "b", message_group="g")
    history.received(["a"])
    acked(history, "a", outcome=Outcome.FAILED)
    history.received(["b"])
    acked(history, "a", "b")
    assert findings(history.judge()) == {"out_of_order": ["b"]}


def test_a_message_may_come_while_the_ack_of_an_earlier_one_is_under_way() -> None:
    history = History()
    sent(history, "a", "b", message_group="g")
    history.received(["a"])
    ack = history.ack("a")
    history.received(["b"])
    ack.ended(Outcome.OK)
    acked(history, "b")
    assert history.judge().is_clean


def test_a_message_that_returns_after_an_unanswered_ack_was_overtaken_by_later_ones() -> None:
    history = History()
    sent(history, "a", "b", message_group="g")
    history.received(["a"])
    acked(history, "a", outcome=Outcome.UNKNOWN)
    history.received(["b"])
    history.received(["a"])
    acked(history, "a", "b")
    assert findings(history.judge()) == {"out_of_order": ["b"]}


def test_nothing_waits_for_a_send_of_unknown_outcome() -> None:
    history = History()
    history.send("a", message_group="g")
    sent(history, "b", message_group="g")
    history.received(["b"])
    acked(history, "b")
    history.received(["a"])
    acked(history, "a")
    assert history.judge().is_clean


def test_message_groups_and_messages_without_one_do_not_wait_for_each_other() -> None:
    history = History()
    sent(history, "a", message_group="g")
    sent(history, "b", message_group="h")
    sent(history, "c", "d")
    history.received(["d", "c", "b", "a"])
    acked(history, "a", "b", "c", "d")
    assert history.judge().is_clean


def test_a_verdict_lists_its_findings() -> None:
    history = History()
    sent(history, "a")
    assert str(history.judge()).splitlines() == [
        "lost: 1",
        "  a was stored and never received",
        "duplicated: 0",
        "unexpected: 0",
        "out_of_order: 0",
    ]


def test_a_removed_message_is_not_lost() -> None:
    history = History()
    sent(history, "a", "b")
    history.remove(["a", "c"])
    assert findings(history.judge()) == {"lost": ["b"]}


def test_a_removed_message_may_still_come_but_not_after_its_ack() -> None:
    history = History()
    sent(history, "a")
    history.remove(["a"])
    history.received(["a"])
    assert history.judge().is_clean
    acked(history, "a")
    history.received(["a"])
    assert findings(history.judge()) == {"duplicated": ["a"]}


def test_a_removed_message_delays_the_later_ones_only_until_its_removal() -> None:
    history = History()
    sent(history, "a", "b", "c", message_group="g")
    history.received(["b"])
    history.remove(["a"])
    history.received(["b"])
    acked(history, "b")
    history.received(["c"])
    acked(history, "c")
    assert findings(history.judge()) == {"out_of_order": ["b"]}


def test_a_settled_message_may_come_again_after_each_replay_but_not_after_its_next_ack() -> None:
    history = History()
    sent(history, "a", "b")
    history.received(["a", "b"])
    acked(history, "a", "b")
    for _ in range(2):
        history.replay(["a"])
        history.received(["a"])
        acked(history, "a")
    assert history.judge().is_clean
    history.received(["a", "b"])
    assert findings(history.judge()) == {"duplicated": ["a", "b"]}


def test_each_message_of_a_successful_replay_must_come_again() -> None:
    history = History()
    sent(history, "a", "b", "c")
    history.received(["a", "b", "c"])
    acked(history, "a", "b", "c")
    replayed_at = history.replay(["a", "b"])
    assert history.judge().is_clean, "the outcome is unknown"
    history.expect_again(["a", "b"], replayed_at)
    history.remove(["b"])
    assert findings(history.judge()) == {"lost": ["a"]}
    history.received(["a"])
    acked(history, "a")
    assert history.judge().is_clean


def test_a_replay_does_not_undo_an_ack_of_unknown_outcome() -> None:
    history = History()
    sent(history, "a", "b", message_group="g")
    history.received(["a"])
    acked(history, "a", outcome=Outcome.UNKNOWN)
    history.received(["b"])
    acked(history, "b")
    history.replay(["a", "b"])
    history.received(["a"])
    assert history.judge().is_clean


def test_a_purged_message_may_only_come_in_an_earlier_receive_or_after_a_replay() -> None:
    history = History()
    sent(history, "a")
    before = history.now()
    history.remove(["a"])
    history.expect_no_more(["a"], "one")
    history.received(["a"], places=["one"], called_at=before)
    history.received(["a"], places=["two"], called_at=history.now())
    assert history.judge().is_clean
    history.received(["a"], places=["one"], called_at=history.now())
    assert findings(history.judge()) == {"unexpected": ["a"]}
    history.receives.pop()
    history.replay(["a"])
    history.received(["a"], places=["one"], called_at=history.now())
    assert history.judge().is_clean
