"""The ranges of settled dead letters: their states, their order, and their bound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.settled_ranges import ranges_of
from tidemill.broker.engine.layout import dead_letter
from tidemill.broker.engine.layout.dead_letter import DeadLetterState, SettledRange
from tidemill.broker.engine.layout.numbers import LogOffset, TopicId
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.metadata import settled_letters
from tidemill.broker.engine.metadata.settled_letters import (
    RANGES_A_BLOCK,
    RANGES_MAX,
    SettledCounts,
    SettledLetters,
)

TOPIC = TopicId(7)
OPEN, REPLAYED, DISCARDED = DeadLetterState


def settle(
    letters: SettledLetters,
    state: int,
    begin: int,
    end: int | None = None,
    *,
    at_ms: int = 1_000,
    operation_id: int = 0,
    log_offset: int = 100,
) -> None:
    last = begin + 1 if end is None else end
    one = SettledRange(begin, last, at_ms, operation_id, state)
    letters.settle(TOPIC, [one], LogOffset(log_offset))


@pytest.mark.parametrize(("state", "event"), list(product(DeadLetterState, [REPLAYED, DISCARDED])))
def test_the_first_settlement_of_a_dead_letter_is_final(
    state: DeadLetterState, event: DeadLetterState
) -> None:
    letters = SettledLetters()
    if state is not OPEN:
        settle(letters, state, 4)
    settle(letters, event, 4)
    expected = event if state is OPEN else state
    assert letters.state_of(TOPIC, 4) is expected
    # A record that is applied again changes nothing.
    settle(letters, event, 4)
    assert letters.state_of(TOPIC, 4) is expected
    assert letters.state_of(TOPIC, 3) is letters.state_of(TOPIC, 5) is OPEN


def test_equal_neighbours_form_one_range() -> None:
    letters = SettledLetters()
    for offset in (1, 3, 2, 9):
        settle(letters, DISCARDED, offset)
    assert ranges_of(letters, TOPIC) == [
        SettledRange(1, 4, 1_000, 0, DISCARDED),
        SettledRange(9, 10, 1_000, 0, DISCARDED),
    ]


@pytest.mark.parametrize("change", ["state", "time", "operation"])
def test_neighbours_that_differ_stay_apart(change: str) -> None:
    letters = SettledLetters()
    settle(letters, DISCARDED, 1)
    settle(
        letters,
        REPLAYED if change == "state" else DISCARDED,
        2,
        at_ms=1_001 if change == "time" else 1_000,
        operation_id=5 if change == "operation" else 0,
    )
    assert [(one.begin, one.end) for one in ranges_of(letters, TOPIC)] == [(1, 2), (2, 3)]


def test_a_range_settles_only_what_is_open() -> None:
    letters = SettledLetters()
    settle(letters, REPLAYED, 5, 7)
    settle(letters, DISCARDED, 3, 10, at_ms=2_000)
    assert [letters.state_of(TOPIC, offset).name for offset in range(2, 11)] == [
        "OPEN",
        *["DISCARDED"] * 2,
        *["REPLAYED"] * 2,
        *["DISCARDED"] * 3,
        "OPEN",
    ]
    assert letters.counts_of(TOPIC) == SettledCounts(replayed=2, discarded=5)


@pytest.mark.parametrize("seed", seeds("settled letters", 6))
def test_the_ranges_agree_with_a_dictionary(seed: int) -> None:
    random = Random(seed)
    letters, known, low = SettledLetters(), dict[int, tuple[int, int]](), 0
    for step in range(300):
        if random.random() < 0.1:
            low += random.randrange(4)
            letters.trim(TOPIC, low)
        begin = low + random.randrange(60)
        end = begin + random.choice([1, 1, 1, 2, 9])
        state, at_ms = random.choice([REPLAYED, DISCARDED]), step // 3
        settle(letters, state, begin, end, at_ms=at_ms, log_offset=step)
        for offset in range(begin, end):
            known.setdefault(offset, (state, at_ms))
        shown = {
            offset: (one.state, one.settled_at_ms)
            for one in ranges_of(letters, TOPIC)
            for offset in range(one.begin, one.end)
        }
        assert shown == {offset: value for offset, value in known.items() if offset >= low}
        states = [state for offset, (state, _) in known.items() if offset >= low]
        counts = SettledCounts(states.count(REPLAYED), states.count(DISCARDED))
        assert letters.counts_of(TOPIC) == counts
        open_ = next(offset for offset in range(low, low + 200) if offset not in known)
        assert letters.first_open(TOPIC, low) == open_
        begins = [one.begin for one in ranges_of(letters, TOPIC)]
        assert begins == sorted(set(begins))


def test_beyond_the_exact_ranges_a_neighbour_joins_and_loses_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settled_letters, "EXACT_RANGES_MAX", 4)
    letters = SettledLetters()
    for offset in range(4):
        settle(letters, DISCARDED, offset, at_ms=offset)
    settle(letters, DISCARDED, 4, at_ms=4)
    assert ranges_of(letters, TOPIC)[-1] == SettledRange(3, 5, 0, 0, DISCARDED)
    settle(letters, REPLAYED, 5, at_ms=4)
    assert letters.state_of(TOPIC, 5) is REPLAYED


def test_a_topic_has_a_bound_until_retention_moves() -> None:
    letters = SettledLetters()
    rows = [SettledRange(2 * n, 2 * n + 1, 1, 0, DISCARDED) for n in range(RANGES_MAX)]
    letters.settle(TOPIC, rows, LogOffset(1))
    assert not letters.has_room(TOPIC, 1)
    letters.trim(TOPIC, 3)
    assert letters.has_room(TOPIC, 2)
    assert not letters.has_room(TOPIC, 3)
    assert letters.state_of(TOPIC, 0) is OPEN


def snapshots(letters: SettledLetters) -> Iterator[bytes]:
    count = letters.section_count
    sections = list(letters.freeze())
    assert len(sections) == count
    return iter(sections)


def test_a_snapshot_has_the_ranges_of_its_moment() -> None:
    letters = SettledLetters()
    rows = [SettledRange(2 * n, 2 * n + 1, n, n % 3, 1 + n % 2) for n in range(3_000)]
    letters.settle(TOPIC, rows, LogOffset(1))
    frozen = letters.freeze()
    settle(letters, DISCARDED, 1)
    copy = SettledLetters()
    for section in frozen:
        stated = dead_letter.decode_ranges(section)
        copy.settle(*stated, LogOffset(0))
    assert ranges_of(copy, TOPIC) == rows
    assert len(list(snapshots(letters))) == 3


def test_only_old_records_are_stated_again() -> None:
    letters = SettledLetters()
    settle(letters, DISCARDED, 1, log_offset=500)
    settle(letters, REPLAYED, 2, log_offset=900)
    end = LogOffset(2_000)
    assert list(letters.begin_restatement(TOPIC, before=500, log_end=end)) == []
    (stated,) = letters.begin_restatement(TOPIC, before=501, log_end=end)
    assert list(stated.ranges) == ranges_of(letters, TOPIC)
    assert list(letters.begin_restatement(TOPIC, before=2_000, log_end=end)) == []


def test_a_restatement_has_all_ranges_of_its_moment() -> None:
    letters = SettledLetters()
    rows = [SettledRange(2 * n, 2 * n + 1, n, 0, DISCARDED) for n in range(3_000)]
    letters.settle(TOPIC, rows, LogOffset(1))
    blocks = letters.begin_restatement(TOPIC, before=2, log_end=LogOffset(9))
    first = next(blocks)
    assert len(first.ranges) == RANGES_A_BLOCK
    settle(letters, REPLAYED, 4_001)
    letters.trim(TOPIC, 5_000)
    stated = [*first.ranges, *(row for block in blocks for row in block.ranges)]
    assert stated == rows


@pytest.mark.parametrize("size", [0, 3, 17])
def test_bodies_of_another_size_are_unknown(size: int) -> None:
    with pytest.raises(UnknownRecord):
        dead_letter.decode(bytes(size))
    with pytest.raises(UnknownRecord):
        dead_letter.decode_ranges(bytes(size))
