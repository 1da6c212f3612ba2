"""The order and the rate of deliveries of due timers."""

from __future__ import annotations

from dataclasses import replace

from tests.support.worlds.timer_world import HOUR_MS, SECOND_MS, TIMERS, TimerWorld

CHUNK = replace(TIMERS, load_chunk_records=5_000)


def scheduled(count: int, delay_ms: int, spread_ms: int = 1) -> TimerWorld:
    """Return a world with pending messages. Timers of one due time are ordered by id."""
    world = TimerWorld(timer=CHUNK)
    due_at_ms = (world.now_ms + delay_ms) // 1000 * 1000
    for n in range(count):
        world.schedule(f"m{n}", due_at_ms=due_at_ms + n * 7 % spread_ms, commit=n % 256 == 255)
    world.commit()
    return world


def order(world: TimerWorld) -> list[tuple[int, int]]:
    world.judge()
    return [(one.due_at_ms, one.timer_id) for one in world.delivered]


def test_messages_with_one_due_time_are_delivered_in_order_of_sending() -> None:
    for delay_ms in (5 * SECOND_MS, HOUR_MS):
        world = scheduled(1_500, delay_ms)
        world.sleep(delay_ms)
        assert len(order(world)) == 1_500
        assert order(world) == sorted(order(world))


def test_a_second_of_a_backlog_is_delivered_in_due_order() -> None:
    world = scheduled(3_000, HOUR_MS, spread_ms=1_000)
    world.now_ms += 3 * HOUR_MS
    world.restart()
    world.sleep(SECOND_MS)
    assert len(order(world)) == 3_000
    assert order(world) == sorted(order(world))


def test_a_timer_due_before_a_hand_ahead_of_the_clock_is_delivered_in_time() -> None:
    """The machine's clock was an hour ahead when the broker last ran."""
    world = TimerWorld()
    for n in range(3):
        world.schedule(f"then{n}", delay_ms=SECOND_MS)
        world.sleep(20 * SECOND_MS)
        world.background()
    assert world.engine.timers.index.links.hand_s >= world.now_ms // 1000 - 30
    world.now_ms -= HOUR_MS
    world.restart()
    scheduled_at_ms = world.now_ms
    world.schedule("now", delay_ms=60 * SECOND_MS)
    world.restart()
    world.sleep(61 * SECOND_MS)
    found = [one for one in world.delivered if one.text == "now"]
    assert [one.stored_at_ms - scheduled_at_ms for one in found] == [60 * SECOND_MS]


def test_messages_waiting_for_the_rate_limit_do_not_keep_the_owner_busy() -> None:
    world = TimerWorld(timer=replace(TIMERS, max_rate=10))
    for n in range(30):
        world.schedule(f"m{n}", delay_ms=SECOND_MS)
    world.sleep(2 * SECOND_MS)  # The world fails if its clock stands still too long.
    assert 10 <= len(order(world)) <= 21
    world.sleep(4 * SECOND_MS)
    assert len(order(world)) == 30


def test_a_full_near_wheel_does_not_keep_the_owner_busy() -> None:
    world = TimerWorld()
    begin_s = world.now_ms // 1000 + 4
    for n in range(8 * 64):
        world.schedule(f"m{n}", due_at_ms=(begin_s + n // 64) * 1000, commit=n % 64 == 63)
    world.sleep(20 * SECOND_MS)  # The world fails if its clock stands still too long.
    assert len(order(world)) == 8 * 64
    assert order(world) == sorted(order(world))


def test_gathered_timers_are_delivered_in_time_without_background_work() -> None:
    world = TimerWorld()
    for n in range(20):
        world.schedule(f"m{n}", delay_ms=(60 + n) * SECOND_MS)
    assert world.engine.timers.index.gathered_due_ms is not None
    world.sleep(59 * SECOND_MS)
    assert order(world) == []
    world.sleep(21 * SECOND_MS)
    assert len(order(world)) == 20
    assert all(one.stored_at_ms == one.due_at_ms for one in world.delivered)


def test_gathered_timers_are_linked_when_no_round_is_pending() -> None:
    world = TimerWorld()
    world.schedule("first", delay_ms=HOUR_MS)
    world.background()
    for n in range(3):
        world.schedule(f"m{n}", delay_ms=HOUR_MS, commit=False)
        world.engine.write(world.now_ms)
        world.engine.background.step(world.now_ms, firing_ms=world.now_ms)
        assert world.engine.timers.index.gathered_due_ms is not None, "its round is not committed"
    world.commit()
    world.engine.background.step(world.now_ms, firing_ms=world.now_ms)
    assert world.engine.timers.index.gathered_due_ms is None
    world.check()
