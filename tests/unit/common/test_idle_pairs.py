"""A pair of topic and consumer group without change for an hour is idle."""

from __future__ import annotations

from tidemill.common.idle_pairs import IDLE_S, IdlePairs

PAIR, OTHER = ("orders", "billing"), ("orders", "audit")


def test_a_pair_without_change_for_an_hour_is_idle_until_a_count_changes() -> None:
    now_s = [0.0]
    pairs = IdlePairs(lambda: now_s[0])
    assert not pairs.note(PAIR, "sent", 1)
    now_s[0] = IDLE_S - 1
    assert not pairs.note(PAIR, "sent", 1)
    now_s[0] = IDLE_S
    assert pairs.note(PAIR, "sent", 1)
    assert (PAIR in pairs, len(pairs)) == (True, 1)
    assert not pairs.note(PAIR, "acks", 1)
    assert not pairs.note(PAIR, "sent", 1)
    assert len(pairs) == 0


def test_a_pair_with_messages_is_not_idle() -> None:
    now_s = [0.0]
    pairs = IdlePairs(lambda: now_s[0])
    pairs.note(PAIR, "sent", 1)
    now_s[0] = IDLE_S
    assert not pairs.note_messages(PAIR, 1)
    assert not pairs.note(PAIR, "sent", 1)
    now_s[0] = 2 * IDLE_S
    assert pairs.note_messages(PAIR, 0)


def test_deleted_pairs_are_forgotten() -> None:
    now_s = [0.0]
    pairs = IdlePairs(lambda: now_s[0])
    for pair in (PAIR, OTHER):
        pairs.note(pair, "sent", 1)
    now_s[0] = IDLE_S
    for pair in (PAIR, OTHER):
        pairs.note(pair, "sent", 1)
    pairs.forget_unless(lambda pair: pair == OTHER)
    assert (PAIR in pairs, OTHER in pairs, len(pairs)) == (False, True, 1)
