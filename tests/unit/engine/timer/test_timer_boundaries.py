"""Due times, sizes, ids and limits at their edges."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from random import Random

import pytest

from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.timer_world import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    SECOND_MS,
    START_MS,
    TIMERS,
    TimerWorld,
)
from tidemill.broker.engine.layout.message import TimerReason
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.timer.config import OverloadPolicy
from tidemill.broker.engine.timer.pages import DirtyPages
from tidemill.broker.engine.timer.status import TimerQuery
from tidemill.common.errors import IllegalDeliveryTime, Overloaded
from tidemill.message.resource_names import TIMER_DEAD_LETTER_TOPIC

MAX_MS = TIMERS.max_delay_ms
LEAP_DAY_MS = int(datetime(2024, 2, 29, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize("unit_ms", [20, SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS])
@pytest.mark.parametrize("off_ms", [-1, 0, 1])
def test_a_timer_due_at_a_boundary_of_time_is_delivered_then(unit_ms: int, off_ms: int) -> None:
    world = TimerWorld()
    due_at_ms = (world.now_ms // unit_ms + 2) * unit_ms + off_ms
    world.schedule("m", due_at_ms=due_at_ms)
    world.advance(due_at_ms - world.now_ms - 1)
    assert world.texts() == []
    world.sleep(1)
    assert [one.stored_at_ms for one in world.delivered] == [due_at_ms]


def test_a_delay_over_a_leap_day_has_the_right_length() -> None:
    world = TimerWorld(now_ms=LEAP_DAY_MS - 1)
    world.schedule("leap", due_at_ms=LEAP_DAY_MS)
    world.schedule("march", due_at_ms=LEAP_DAY_MS + DAY_MS)
    world.sleep(1)
    assert world.texts() == ["leap"]
    world.advance(DAY_MS)
    assert world.texts() == ["leap", "march"]


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_delay_above_the_maximum_is_rejected(is_relative: bool) -> None:
    world = TimerWorld()

    def schedule(delay_ms: int) -> int:
        if is_relative:
            return world.schedule("m", delay_ms=delay_ms).due_at_ms
        return world.schedule("m", due_at_ms=START_MS + delay_ms).due_at_ms

    assert schedule(MAX_MS) == START_MS + MAX_MS
    with pytest.raises(IllegalDeliveryTime, match="400 days"):
        schedule(MAX_MS + 1)
    assert schedule(0) == 0, "stored at once"
    assert len(world.timers.open) == 1


@pytest.mark.parametrize("value", [-1, -(1 << 62), (1 << 53) + 1, (1 << 63) - 1])
def test_invalid_delivery_times_are_rejected(value: int) -> None:
    world = TimerWorld()
    timer_id = world.schedule("m", delay_ms=5).queue_offset
    with pytest.raises(IllegalDeliveryTime):
        world.schedule("m", due_at_ms=value)
    with pytest.raises(IllegalDeliveryTime):
        world.schedule("m", delay_ms=value)
    with pytest.raises(IllegalDeliveryTime):
        world.reschedule(timer_id, value)
    world.check()
    assert len(world.timers.timers) == 1


@pytest.mark.parametrize("off_s", [-2, -1, 0, 1])
@pytest.mark.parametrize("restart", [False, True])
def test_timers_at_the_end_of_the_ring_are_delivered_in_time(off_s: int, restart: bool) -> None:
    world = TimerWorld()
    world.schedule("first", delay_ms=10 * DAY_MS)
    ring_end_s = world.engine.timers.index.links.ring_end_s
    for second in (ring_end_s + off_s, ring_end_s + off_s + TIMERS.wheel_slots):
        world.schedule(str(second), due_at_ms=second * 1000 + 999)
    if restart:
        world.sleep(SECOND_MS)
        world.background()
        world.restart()
    world.advance(DAY_MS)
    assert world.texts() == [str(ring_end_s + off_s + n) for n in (0, TIMERS.wheel_slots)]
    world.check()


def test_ids_continue_over_pages_and_files_of_the_table() -> None:
    world = TimerWorld()
    for n in range(1_537):
        done = world.schedule(f"m{n}", delay_ms=5_000 + n, commit=n % 100 == 0)
        assert done.queue_offset == n
    world.commit()
    world.sleep(3_000)
    world.background()
    for edge in (0, 511, 512, 1_023, 1_024, 1_535, 1_536):
        world.cancel(edge)
    world.restart()
    world.check()
    world.sleep(10_000)
    assert len(world.texts()) == 1_530


def test_the_largest_and_an_empty_message_are_delivered_unchanged() -> None:
    world = TimerWorld(segment_bytes=8 << 20)
    keys = tuple(f"key-{n}-{'x' * 200}" for n in range(250))
    done = world.schedule("", keys=keys, size=4 << 20, delay_ms=2_000)
    world.schedule("", delay_ms=2_000)
    assert world.engine.timers.commands.status(TimerId(done.queue_offset)).size > 4 << 20
    assert len(world.search(TimerQuery(page_size=9, key=keys[-1]))) == 1
    world.sleep(3_000)
    # The log checker compares the bytes.
    assert len(world.delivered) == 2
    assert {len(one) for one in world.bodies()} == {0}


def test_a_timer_of_a_deleted_topic_is_dropped_even_if_the_name_exists_again() -> None:
    world = TimerWorld()
    world.schedule("gone", delay_ms=5_000)
    world.engine.administration.delete_topic(TOPIC, world.now_ms)
    world.schedule("new", delay_ms=5_000)
    world.sleep(6_000)
    assert world.texts() == ["new"]
    assert world.texts(TIMER_DEAD_LETTER_TOPIC) == ["gone"]
    assert world.delivered[0].reason == TimerReason.TOPIC_DELETED


def test_a_backlog_above_the_configured_age_is_dropped() -> None:
    world = TimerWorld(timer=replace(TIMERS, expire_backlog_after_ms=MINUTE_MS))
    world.schedule("old", delay_ms=SECOND_MS)
    world.schedule("young", delay_ms=30 * SECOND_MS)
    world.now_ms += MINUTE_MS + SECOND_MS + 1
    world.restart()
    world.run_due()
    assert world.texts() == ["young"]
    assert world.texts(TIMER_DEAD_LETTER_TOPIC) == ["old"]
    assert {one.reason for one in world.delivered} == {TimerReason.EXPIRED, TimerReason.DELIVERED}


# -------------------------------------------------------------------- flow control


@pytest.mark.parametrize("policy", list(OverloadPolicy))
def test_a_full_second_rejects_spreads_or_accepts_by_the_formula(policy: OverloadPolicy) -> None:
    """Between C and 2 C timers, (s - C) / C of the messages are rejected; from 2 C on, all."""
    limit = 500
    world = TimerWorld(
        timer=replace(TIMERS, soft_limit_per_second=limit, overload_policy=policy, spread_ms=300)
    )
    due_at_ms = (world.now_ms // 1000 + 50) * 1000
    random = Random(5)
    taken, expected, dues = 0, 0.0, set()
    for n in range(3_000):
        count = world.engine.timers.index.links.wheel.count(due_at_ms // 1000)
        expected += 1 - min(max((count - limit) / limit, 0), 1)
        try:
            text = f"m{n}-{random.getrandbits(53)}"
            dues.add(world.schedule(text, due_at_ms=due_at_ms, commit=False).due_at_ms)
        except Overloaded:
            assert count > limit
        else:
            taken += 1
    world.commit()
    world.check()
    if policy is OverloadPolicy.REJECT:
        assert abs(taken - expected) < 60
        assert limit < taken <= 2 * limit + 1
        assert dues == {due_at_ms}
        return
    assert taken == 3_000
    if policy is OverloadPolicy.ACCEPT:
        assert dues == {due_at_ms}
    else:
        assert min(dues) == due_at_ms
        assert due_at_ms + 295 < max(dues) <= due_at_ms + 300
        assert len(dues) > 290


def test_the_limits_of_the_store_bound_pending_timers() -> None:
    world = TimerWorld(timer=replace(TIMERS, max_pending=3))
    for n in range(3):
        world.schedule(f"m{n}", delay_ms=5_000)
    with pytest.raises(Overloaded, match="timer_max_pending"):
        world.schedule("more", delay_ms=5_000)
    world.cancel(1)
    world.schedule("again", delay_ms=5_000)
    world.check()
    part = 1_000 / (1 << 40)
    world = TimerWorld(timer=replace(TIMERS, max_pinned_part=part))
    world.schedule("m", delay_ms=5_000, size=500)
    with pytest.raises(Overloaded, match="timer_max_pinned_part"):
        world.schedule("more", delay_ms=5_000, size=500)


def test_a_topic_with_many_pending_timers_leaves_room_for_others() -> None:
    world = TimerWorld(timer=replace(TIMERS, max_pending=256))
    for n in range(224):
        world.schedule(f"m{n}", delay_ms=5_000)
    world.engine.timers.index.link_gathered()
    with pytest.raises(Overloaded, match="last eighth"):
        world.schedule("more", delay_ms=5_000)
    for n in range(2):
        world.schedule(f"other{n}", delay_ms=5_000, topic="other")
    world.cancel(1)
    with pytest.raises(Overloaded, match="last eighth"):
        world.schedule("more", delay_ms=5_000)
    world.check()


# -------------------------------------------------------------------- pages of a flush


def test_a_flush_writes_a_page_as_of_its_begin() -> None:
    pages = {0: b"a", 1: b"b", 2: b"c"}
    dirty = DirtyPages(lambda page: pages[page])
    for page in (0, 1, 2):
        dirty.touch(page)
    dirty.freeze()
    written = []
    for page, data in dirty.frozen():
        written.append((page, data))
        for later in (0, 1, 2):
            dirty.touch(later)
            pages[later] = pages[later].upper() + b"!"
    assert written == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert dirty.dirty == {0, 1, 2}, "the next flush writes the change"
    assert all(map(dirty.is_unwritten, (0, 1, 2)))
