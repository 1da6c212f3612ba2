"""Ages of messages by the marks of a process."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.seeds import seeds
from tidemill.broker.engine.upkeep.log_ages import MARK_PERIOD_MS, MARKS_MAX, LogAges

DAY_MS = 86_400_000


@pytest.mark.parametrize("seed", seeds("log-ages", 4))
def test_ages_are_never_too_high_and_nearly_exact_after_a_year(seed: int) -> None:
    """The log grows by a byte per ms, so that an offset is a time."""
    random = Random(seed)
    ages, now_ms, most = LogAges(), 0, 0
    while now_ms < 400 * DAY_MS:
        now_ms += random.choice([MARK_PERIOD_MS, MARK_PERIOD_MS, 17_000, 600_000, 7_200_000])
        ages.note(now_ms, now_ms, now_ms)
        most = max(most, len(ages._offsets))
    assert most < MARKS_MAX
    for age_ms in (60_000, 3_600_000, DAY_MS, 30 * DAY_MS, 300 * DAY_MS):
        offset = ages.surely_older(age_ms)
        assert now_ms - offset >= age_ms, "a younger message counts as older"
        # Two marks are at least as far apart as the notes.
        assert now_ms - offset <= age_ms * 257 / 256 + 3 * 7_200_000
    for offset in (random.randrange(int(now_ms)) for _ in range(100)):
        if offset >= ages.inherited_end:
            assert ages.earliest_ms(offset) <= offset


def test_dense_marks_keep_a_part_of_each_age() -> None:
    ages = LogAges()
    for now_ms in range(0, 30 * DAY_MS, MARK_PERIOD_MS):
        ages.note(now_ms, now_ms, now_ms + 1)
    for age_ms in (60_000, 600_000, 3_600_000, DAY_MS, 20 * DAY_MS):
        behind_ms = now_ms - ages.surely_older(age_ms) - age_ms
        assert -1 <= behind_ms <= age_ms // 256 + 2 * MARK_PERIOD_MS


def test_the_age_of_a_copied_record_is_that_of_its_wall_time() -> None:
    """The replica copies 50 minutes of a log; the log grows by a byte per ms."""
    minute_ms = 60_000
    ages = LogAges()
    ages.note(50 * minute_ms, 7, 0)
    ages.note_copy(50 * minute_ms)
    for second in range(1, 120):
        now_ms = 50 * minute_ms + 1_000 * second
        copied = min(25 * minute_ms * second // 10, now_ms)
        ages.note(now_ms, 1_000 * second + 7, copied)
    stored_ms = 10 * minute_ms
    assert stored_ms < ages.inherited_end == 50 * minute_ms
    since_ms = ages.inherited_ms(stored_ms)
    assert since_ms is not None
    assert ages.monotonic_ms is not None
    assert ages.monotonic_ms - since_ms == now_ms - stored_ms
    later = 51 * minute_ms
    assert later - 2 * MARK_PERIOD_MS <= ages.earliest_ms(later) + 50 * minute_ms - 7 <= later
