"""Whom to ask for what is damaged in the log, and when it is given up."""

from __future__ import annotations

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.damaged_ranges import (
    AGAIN_MS,
    GIVE_UP_MS,
    GIVEN_UP_MS,
    RANGES_MAX,
    DamagedRanges,
    MendOutcome,
    MendRequest,
)

OTHERS = (1, 2)


def places_of(*offsets: int) -> DamagedRanges:
    places = DamagedRanges()
    places.has_replicas = True
    for offset in offsets:
        assert places.request(offset)
    return places


def test_a_store_without_replicas_awaits_nothing() -> None:
    places = DamagedRanges()
    assert not places.request(100)
    assert not places.has_requests


def test_one_replica_after_the_other_is_asked_until_one_has_it() -> None:
    places = places_of(100)
    first = places.next_request(OTHERS, 0)
    assert first == MendRequest(1, LogOffset(100), LogOffset(101))
    places.handle_outcome(first, MendOutcome.NOTHING, 0)
    second = places.next_request(OTHERS, 0)
    assert second == MendRequest(2, LogOffset(100), LogOffset(101))
    places.handle_outcome(second, MendOutcome.MENDED, 0)
    assert places.take_ended()
    assert not places.take_ended()
    assert places.next_request(OTHERS, 0) is None
    assert (places.mended_count, places.given_up_count) == (1, 0)


def test_what_nobody_has_is_given_up_and_asked_for_again_later() -> None:
    places = places_of(100)
    for _ in OTHERS:
        question = places.next_request(OTHERS, 0)
        assert question is not None
        places.handle_outcome(question, MendOutcome.NOTHING, 0)
    assert places.request(100), "not before it was looked at once more"
    assert places.next_request(OTHERS, 0) is None
    assert places.take_ended()
    assert not places.request(100)
    places.next_request(OTHERS, GIVEN_UP_MS)
    assert places.request(100)


def test_who_is_silent_is_asked_again_and_others_meanwhile() -> None:
    places = places_of(100, 200)
    question = places.next_request(OTHERS, 0)
    assert question is not None
    places.handle_outcome(question, MendOutcome.SILENT, 0)
    other = places.next_request(OTHERS, 0)
    assert other is not None
    assert other.begin == 200, "the first place waits"
    again = places.next_request(OTHERS, AGAIN_MS)
    assert again == MendRequest(2, LogOffset(100), LogOffset(101))


def test_nothing_is_given_up_while_a_replica_cannot_be_asked_until_time_is_up() -> None:
    places = places_of(100)
    now_ms = 0
    while now_ms < GIVE_UP_MS:
        question = places.next_request(OTHERS, now_ms)
        assert question is not None
        answer = MendOutcome.NOTHING if question.replica_id == 1 else MendOutcome.SILENT
        places.handle_outcome(question, answer, now_ms)
        assert places.request(100)
        now_ms += AGAIN_MS
    assert places.next_request(OTHERS, now_ms) is None
    assert not places.request(100)


def test_nothing_is_given_up_before_anybody_knows_the_others() -> None:
    places = places_of(100)
    assert places.next_request(None, 0) is None
    assert places.request(100)
    assert places.next_request((), 0) is None
    assert not places.request(100), "there are none"


def test_what_was_sound_all_along_is_no_matter_of_the_log() -> None:
    places = places_of(100)
    question = places.next_request(OTHERS, 0)
    assert question is not None
    places.handle_outcome(question, MendOutcome.SOUND, 0)
    assert places.take_ended()
    assert not places.request(100)


def test_places_are_bounded_and_more_of_them_wait_all_the_same() -> None:
    places = places_of(*range(RANGES_MAX))
    assert places.request(RANGES_MAX)
    assert not places.is_requested(RANGES_MAX)


def test_what_retention_has_taken_is_forgotten() -> None:
    places = places_of(100, 200)
    places.forget_before(150)
    assert places.take_ended()
    assert not places.is_requested(100)
    assert places.is_requested(200)
