"""Invariants of timers, T-1 to T-26, as far as one broker can show them.

The model, the power cuts and the damage tests show T-3 to T-10 and T-12. The tests here are about
time, fairness, size and replies.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.disk.timer_log_fold import CANCELLED, DELIVERED
from tests.support.seeds import seeds
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
from tidemill.broker.engine.layout.numbers import TimerId, TopicId
from tidemill.broker.engine.layout.timer_record import SIZE
from tidemill.broker.engine.timer import body
from tidemill.broker.engine.timer.deliver import DELIVERIES_A_SLICE
from tidemill.broker.engine.timer.firing_clock import HOLD_MS, JUMP_MS, FiringClock
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import MessageNotFound


@pytest.mark.parametrize("seed", seeds("order of timers", 4))
def test_t_1_and_t_2_timers_are_delivered_at_their_millisecond_in_order(seed: int) -> None:
    """An owner that wakes on request has no lateness at all, in slots of every fill."""
    random = Random(seed)
    world = TimerWorld()
    for n in range(400):
        delay_ms = random.choice([random.randint(1, 50_000), 20_000 + random.randrange(300)])
        world.schedule(f"m{n}", delay_ms=delay_ms, commit=False)
    world.commit()
    world.sleep(60 * SECOND_MS)
    assert len(world.delivered) == 400
    lates = [one.stored_at_ms - one.due_at_ms for one in world.delivered]
    assert min(lates) == 0
    # The last timers of a second with more timers than are loaded at once come after that second.
    crowded = (START_MS + 20_000) // 1000
    for one, late in zip(world.delivered, lates, strict=True):
        assert late == 0 or (one.due_at_ms // 1000 == crowded and late < 1_100), one
    calm = [one.due_at_ms for one in world.delivered if one.due_at_ms // 1000 != crowded]
    assert calm == sorted(calm)


def test_t_11_a_confirmed_cancel_survives_every_restart() -> None:
    world = TimerWorld()
    ids = [world.schedule(f"m{n}", delay_ms=10_000 + n).queue_offset for n in range(10)]
    far = world.schedule("far", delay_ms=100 * DAY_MS).queue_offset
    for timer_id in (ids[3], far):
        world.cancel(timer_id)
        world.restart(power_cut=True)
        assert world.cancel(timer_id).state == TimerState.CANCELLED, "and again"
    world.advance(200 * DAY_MS // 50)
    assert len(world.texts()) == 9
    for timer_id in ids[:3]:
        with pytest.raises(MessageNotFound, match="delivered already"):
            world.cancel(timer_id)
    with pytest.raises(MessageNotFound):
        world.cancel(99)
    with pytest.raises(MessageNotFound):
        world.engine.timers.commands.cancel(
            TimerId(ids[5]), topic_id=TopicId(777), now_ms=world.now_ms
        )
    assert world.timers.ids(CANCELLED) == {ids[3], far}


@pytest.mark.parametrize("delay_ms", [3_000, 50_000, 3_000_000, 10 * DAY_MS])
def test_t_13_a_rescheduled_timer_fires_at_its_new_time_only(delay_ms: int) -> None:
    world = TimerWorld()
    timer_id = world.schedule("m", delay_ms=delay_ms).queue_offset
    world.sleep(SECOND_MS)
    due_at_ms = world.now_ms + 1_234
    world.reschedule(timer_id, due_at_ms)
    world.sleep(1_233)
    assert world.texts() == []
    world.sleep(1)
    assert [one.stored_at_ms for one in world.delivered] == [due_at_ms]
    world.advance(delay_ms + HOUR_MS if delay_ms < DAY_MS else HOUR_MS)
    assert world.texts() == ["m"]


def test_t_15_a_burst_delays_another_topic_by_one_round_only() -> None:
    """In virtual slices: another topic waits for a few quanta of the burst, never for all of it."""
    world = TimerWorld(timer=replace(TIMERS, load_chunk_records=10_000))
    for n in range(3_000):
        world.schedule(f"burst-{n}", delay_ms=20_000, topic="burst", commit=False)
    for n in range(20):
        world.schedule(f"canary-{n}", delay_ms=20_000 + n, topic="canary", commit=False)
    world.commit()
    world.sleep(19_999)
    slices = 0
    while len(world.texts("canary")) < 20:
        world.now_ms += 1
        slices += 1
        world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
        world.commit()
    assert slices <= 22, (
        "each canary was delivered in the slice in which it was due, or the next one"
    )
    assert len(world.texts("burst")) <= slices * DELIVERIES_A_SLICE
    assert len(world.texts("burst")) < 3_000, "the burst was not finished"


def test_t_15_timers_due_now_are_delivered_before_the_end_of_a_backlog() -> None:
    world = TimerWorld(timer=replace(TIMERS, load_chunk_records=10_000))
    for n in range(3_000):
        world.schedule(f"late-{n}", delay_ms=10_000 + n, topic="backlog", commit=False)
    world.commit()
    world.now_ms += 100_000
    world.restart()
    world.schedule("now", delay_ms=5, topic="canary")
    world.now_ms += 5
    for _ in range(6):
        world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
        world.commit()
    assert world.texts("canary") == ["now"]
    assert len(world.texts("backlog")) < 3_000


@pytest.mark.parametrize(
    "outage_ms",
    [SECOND_MS, MINUTE_MS, 30 * MINUTE_MS, HOUR_MS, DAY_MS, 30 * DAY_MS, 3 * 365 * DAY_MS],
)
@pytest.mark.parametrize("flushed", [False, True])
def test_t_16_an_outage_of_any_length_only_makes_timers_late(outage_ms: int, flushed: bool) -> None:
    world = TimerWorld()
    delays = [500, 5_000, 40_000, 20 * MINUTE_MS, 50 * MINUTE_MS, 3 * HOUR_MS, 20 * DAY_MS]
    for n, delay_ms in enumerate(delays * 20):
        world.schedule(f"m{n}", delay_ms=delay_ms + n, commit=False)
    world.commit()
    world.sleep(11 * SECOND_MS)
    if flushed:
        world.checkpoint()
        world.background()
    world.now_ms += outage_ms
    world.restart()
    world.run_due()
    world.sleep(2 * SECOND_MS)
    assert {one.text for one in world.delivered} >= {
        f"m{n}" for n, delay_ms in enumerate(delays * 20) if delay_ms + n <= 11_000 + outage_ms
    }
    world.check()
    world.advance(21 * DAY_MS // 40 if outage_ms >= 30 * DAY_MS else 4 * HOUR_MS)
    world.check()


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_t_17_a_step_of_the_wall_clock_fires_nothing_early_and_nothing_twice(step_ms: int) -> None:
    """The firing time holds. The owner's time, which stamps the copies, never goes back."""
    world = TimerWorld()
    clock = FiringClock()
    for n in range(120):
        world.schedule(f"m{n}", delay_ms=n * SECOND_MS + 1, commit=False)
    world.commit()
    true_ms, begin_ms, owner_ms = world.now_ms, world.now_ms, world.now_ms
    early: list[int] = []
    for tick in range(0, 240 * SECOND_MS, 100):
        true_ms = begin_ms + tick
        # The clock is wrong from the thirtieth second until the thirty-fifth.
        wrong_ms = step_ms if 30_000 <= tick < 35_000 else 0
        wall_ms = true_ms + wrong_ms
        owner_ms = max(owner_ms, wall_ms)
        firing_ms = min(clock.read(wall_ms, tick), owner_ms)
        before = len(world.delivered)
        while world.engine.run_due(owner_ms, firing_ms=firing_ms):
            world.commit()
        world.commit()
        world.judge()
        early += [
            one.due_at_ms - true_ms for one in world.delivered[before:] if one.due_at_ms > true_ms
        ]
    assert not early
    assert sorted(world.texts()) == sorted(f"m{n}" for n in range(120))


def holds(clock: FiringClock) -> bool:
    """Return whether the clock is holding now. A hold ends."""
    return clock.is_holding


def test_t_17_firing_time_keeps_its_pace_through_jumps_and_adopts_lasting_ones() -> None:
    clock = FiringClock()
    assert clock.read(1_000_000, 0) == 1_000_000
    assert clock.read(1_000_100 + JUMP_MS, 100) == 1_000_100 + JUMP_MS, "a small jump is followed"
    base_ms = 1_000_100 + JUMP_MS
    assert clock.read(base_ms + HOUR_MS, 200) == base_ms + 100
    assert holds(clock)
    assert clock.read(base_ms + HOUR_MS + HOLD_MS - 1, 199 + HOLD_MS) == base_ms + HOLD_MS + 99
    assert clock.read(base_ms + HOUR_MS + HOLD_MS, 200 + HOLD_MS) == base_ms + HOUR_MS + HOLD_MS
    assert not holds(clock)
    now_ms = base_ms + HOUR_MS + HOLD_MS
    assert clock.read(now_ms - HOUR_MS, 300 + HOLD_MS) == now_ms + 100
    assert clock.last_step_ms == -HOUR_MS - 100
    after_ms = clock.read(now_ms - HOUR_MS + HOLD_MS, 300 + 2 * HOLD_MS)
    assert after_ms == now_ms - HOUR_MS + HOLD_MS, "after the hold it follows, also backwards"
    assert clock.read(now_ms - HOUR_MS + HOLD_MS - 1, 301 + 2 * HOLD_MS) == after_ms


def test_t_21_the_timer_log_stays_in_proportion_to_pending_timers() -> None:
    world = TimerWorld()
    largest = 0
    for turn in range(60):
        for n in range(100):
            delay_ms = 3_500 * SECOND_MS if n == 0 else 3 * SECOND_MS + n
            world.schedule(f"m{turn}-{n}", delay_ms=delay_ms, commit=n == 99)
        world.sleep(15 * SECOND_MS)
        world.background()
        index = world.engine.timers.index
        bound = 3 * SIZE * index.pending_count + 4 * TIMERS.timer_log_file_bytes
        assert index.links.timer_log.size_bytes <= bound
        files = world.disk.names("timer/timerlog")
        assert len(files) * TIMERS.timer_log_file_bytes <= bound
        largest = max(largest, len(files))
    assert largest > 1, "files were filled and dropped"
    world.advance(2 * HOUR_MS)
    assert len(world.texts()) == 6_000
    world.check()


def test_t_22_at_most_a_chunk_and_a_slice_of_a_huge_second_is_loaded() -> None:
    chunk = 256
    world = TimerWorld(timer=replace(TIMERS, load_chunk_records=chunk))
    for n in range(5_000):
        world.schedule(f"m{n}", delay_ms=30_000 + n % 700, commit=False)
    world.commit()
    near, most = world.engine.timers.near, 0
    for _ in range(6_000):
        world.now_ms += 20
        world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
        world.commit()
        most = max(most, near.outstanding_count)
        if world.engine.timers.index.pending_count == 0:
            break
    assert 0 < most <= chunk + 512
    assert sorted(world.texts()) == sorted(f"m{n}" for n in range(5_000))
    world.check()


def test_t_23_clustered_messages_are_read_ahead_in_few_large_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = TimerWorld(timer=replace(TIMERS, load_chunk_records=100_000), segment_bytes=4 << 20)
    for n in range(2_000):
        world.schedule(f"m{n}", delay_ms=60_000, size=500, commit=False)
    world.commit()
    # Set to a smaller value, so that the test needs less log.
    monkeypatch.setattr(body, "WARM_BYTES", 0)
    world.sleep(59_000)
    size_bytes = sum(one.size for one in world.timers.open.values())
    reads = len(world.disk.advised)
    assert 0 < reads <= 2_000 / 50 + size_bytes / (1 << 20) + 100
    covered = sum(size for _, _, size in world.disk.advised)
    assert covered >= 0.95 * size_bytes
    world.sleep(2_000)
    assert len(world.texts()) == 2_000


def test_t_25_no_wake_up_is_lost_for_a_timer_due_in_a_tick() -> None:
    world = TimerWorld()
    for n in range(300):
        world.schedule(f"m{n}", delay_ms=1 + n % 3)
        world.sleep(n % 40)
    world.sleep(5)
    assert all(one.stored_at_ms == one.due_at_ms for one in world.delivered)
    assert len(world.delivered) == 300


def test_t_26_an_evacuated_timer_is_the_same_timer() -> None:
    world = TimerWorld(segment_bytes=32 << 10, retention_ms=DAY_MS, checkpoint_log_bytes=8_000)
    for n in range(300):
        world.schedule(f"m{n}", due_at_ms=world.now_ms + 9 * DAY_MS + n, keys=(f"k{n}",))
    before = {n: world.engine.timers.commands.status(TimerId(n)) for n in range(300)}
    for _ in range(12):
        world.advance(8 * HOUR_MS)
        world.background()
    assert world.engine.log.min_offset > 0
    copies = [one.copies for one in world.timers.timers.values()]
    assert min(copies) >= 1
    for n, old in before.items():
        new = world.engine.timers.commands.status(TimerId(n))
        assert (new.due_at_ms, new.topic, new.queue_id, new.head) == (
            old.due_at_ms,
            old.topic,
            old.queue_id,
            old.head,
        )
    world.cancel(7)
    world.reschedule(8, world.now_ms + 5_000)
    world.advance(10 * DAY_MS)
    assert sorted(world.texts(TOPIC)) == sorted(f"m{n}" for n in range(300) if n != 7)
    assert len(world.timers.ids(DELIVERED)) == 299
    world.check()
