"""The deadlines of checks."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.support.seeds import seeds
from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.engine.transaction.schedule import BUCKET_MS, ENTRIES_KEPT, CheckSchedule


@pytest.mark.parametrize("seed", seeds("check schedule", 5))
def test_a_deadline_is_never_early_and_at_most_a_bucket_late(seed: int) -> None:
    random = Random(seed)
    schedule, waiting, now_ms, taken = CheckSchedule(), {}, -1, 0
    for half_id in range(2_000):
        waiting[half_id] = random.randrange(60_000)
        schedule.add(HalfId(half_id), waiting[half_id])
    if random.random() < 0.5:
        ids = np.array(list(waiting))
        schedule.rebuild(ids, np.array([waiting[one] for one in ids]))
    while (next_ms := schedule.next_ms()) is not None:
        assert next_ms > now_ms or taken == 7
        now_ms = max(now_ms, next_ms)
        due = schedule.take_due(now_ms, 7)
        taken = len(due)
        for half_id in due:
            assert waiting.pop(half_id) <= now_ms
        if taken < 7:
            assert all(at_ms > now_ms - BUCKET_MS for at_ms in waiting.values())
    assert not waiting
    assert schedule.entry_count == 0


def test_entries_of_ended_half_messages_are_swept() -> None:
    schedule = CheckSchedule()
    for half_id in range(3 * ENTRIES_KEPT):
        schedule.add(HalfId(half_id), 1_000 + half_id)
    steps = 0
    while schedule.sweep(1, lambda half_id: half_id == 7):
        steps += 1
    assert schedule.entry_count <= ENTRIES_KEPT + 2
    assert steps > 30, "one slice looks at few entries"
    assert 7 in schedule.take_due(10_000_000, 10_000_000)


def test_without_half_messages_there_is_no_deadline() -> None:
    schedule = CheckSchedule()
    assert schedule.next_ms() is None
    schedule.add(HalfId(1), 500)
    schedule.take_due(500, 10)
    assert schedule.next_ms() is None
