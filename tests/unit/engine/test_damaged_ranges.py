"""Requests to mend damaged ranges of the log, and when a range is given up."""

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


def test_a_store_without_replicas_requests_nothing() -> None:
    places = DamagedRanges()
    assert not places.request(100)
    assert not places.has_requests


def test_replicas_are_asked_in_turn_until_one_has_the_range() -> None:
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


def test_a_range_that_no_replica_has_is_given_up_and_requested_again_later() -> None:
    places = places_of(100)
    for _ in OTHERS:
        question = places.next_request(OTHERS, 0)
        assert question is not None
        places.handle_outcome(question, MendOutcome.NOTHING, 0)
    assert places.request(100), "not before a reader has tried again"
    assert places.next_request(OTHERS, 0) is None
    assert places.take_ended()
    assert not places.request(100)
    places.next_request(OTHERS, GIVEN_UP_MS)
    assert places.request(100)


def test_a_silent_replica_is_asked_again_and_others_meanwhile() -> None:
    places = places_of(100, 200)
    question = places.next_request(OTHERS, 0)
    assert question is not None
    places.handle_outcome(question, MendOutcome.SILENT, 0)
    other = places.next_request(OTHERS, 0)
    assert other is not None
    assert other.begin == 200, "the first range waits"
    again = places.next_request(OTHERS, AGAIN_MS)
    assert again == MendRequest(2, LogOffset(100), LogOffset(101))


def test_a_range_is_not_given_up_while_a_replica_is_unreachable_until_the_limit() -> None:
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


def test_a_range_is_not_given_up_before_the_replicas_are_known() -> None:
    places = places_of(100)
    assert places.next_request(None, 0) is None
    assert places.request(100)
    assert places.next_request((), 0) is None
    assert not places.request(100), "there are no other replicas"


def test_an_intact_range_is_not_requested_again() -> None:
    places = places_of(100)
    question = places.next_request(OTHERS, 0)
    assert question is not None
    places.handle_outcome(question, MendOutcome.SOUND, 0)
    assert places.take_ended()
    assert not places.request(100)


def test_requested_ranges_are_bounded_and_further_ones_wait_all_the_same() -> None:
    places = places_of(*range(RANGES_MAX))
    assert places.request(RANGES_MAX)
    assert not places.is_requested(RANGES_MAX)


def test_ranges_that_retention_has_removed_are_forgotten() -> None:
    places = places_of(100, 200)
    places.forget_before(150)
    assert places.take_ended()
    assert not places.is_requested(100)
    assert places.is_requested(200)
