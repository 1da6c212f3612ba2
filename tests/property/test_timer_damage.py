"""Timer files that are missing, cut, or have a flipped bit: no outcome changes (T-14, T-18, T-19).

All timer files are derived from the log. A damaged message in the log itself is different: its
timer is quarantined, stays pending, and delays no other timer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.timer_log_fold import DELIVERED
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import SMALL
from tests.support.worlds.timer_world import (
    HOUR_MS,
    SECOND_MS,
    TIMERS,
    TimerWorld,
    seeded_world,
    timer_files,
    without_timer_files,
)
from tidemill.broker.engine.layout.message import TimerReason
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.timer.status import TimerQuery, TimerState

TIMER = replace(TIMERS, flush_log_bytes=10 << 20)
NAMES = [
    "timer/checkpoint.a",
    "timer/checkpoint.b",
    "timer/wheel",
    "timer/timerlog/00000000000000000000",
    "timer/timerlog/00000000000000012800",
    "timer/timerlog/00000000000000025600",
    "timer/timerlog/00000000000000038400",
    "timer/state/00000000000000000000",
    "timer/state/00000000000000000512",
]


def history(seed: int) -> TimerWorld:
    """Return a world with timers of every kind, some of them flushed and some not."""
    random = Random(seed)
    world = seeded_world(seed, timer=TIMER)
    delays_s = (2, 30, 600, 3_000, 4_036, 9_000, 20_000)
    for turn in range(3):
        for n in range(210):
            delay_ms = random.choice(delays_s) * SECOND_MS + random.randrange(1_000)
            world.schedule(f"m{turn}-{n}", delay_ms=delay_ms, commit=n % 50 == 49)
        world.commit()
        world.sleep(4 * SECOND_MS)
        open_ids = sorted(world.timers.open)
        for timer_id in random.sample(open_ids, 20):
            world.cancel(timer_id)
        for timer_id in random.sample(sorted(world.timers.open), 20):
            world.reschedule(timer_id, world.now_ms + random.choice(delays_s) * SECOND_MS)
        if turn < 2:
            world.sleep(20 * SECOND_MS)
            world.background()
            world.checkpoint()
    world.sleep(SECOND_MS)
    world.judge()
    return world


@cache
def names_of_history() -> tuple[str, ...]:
    return tuple(timer_files(history(0).disk))


def start_on(world: TimerWorld, disk: FaultyDisk) -> TimerWorld:
    return TimerWorld(disk, config=SMALL, timer=TIMER, now_ms=world.now_ms, before=world)


def check_outcome(world: TimerWorld) -> None:
    """Let all timers fire, and compare the outcomes with the log."""
    world.check()
    world.background()
    world.check()
    for _ in range(8):
        world.advance(HOUR_MS)
        world.background()
    world.check()
    assert not world.timers.open, f"lost: {sorted(world.timers.open)[:9]}"
    assert len(world.delivered) == len(world.timers.ids(DELIVERED))


def test_the_history_writes_all_kinds_of_files() -> None:
    assert set(names_of_history()) >= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_changes_no_outcome(name: str) -> None:
    world = history(1)
    check_outcome(start_on(world, without_timer_files(world.disk.after_kill(), name)))


@pytest.mark.parametrize("what", ["", "checkpoint", "timerlog", "state", "wheel"])
def test_missing_kinds_of_files_change_no_outcome(what: str) -> None:
    world = history(2)
    disk = world.disk.after_kill()
    check_outcome(
        start_on(world, without_timer_files(disk, *[n for n in timer_files(disk) if what in n]))
    )


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_was_cut_changes_no_outcome(name: str, part: int) -> None:
    world = history(3)
    disk = world.disk.after_kill()
    size = len(disk.read(name) or b"")
    disk.cut(name, [0, size // 2, size - 1][part])
    check_outcome(start_on(world, disk))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_in_a_file_changes_no_outcome(name: str, seed: int) -> None:
    world = history(4)
    random = Random(f"{name} {seed}")
    disk = world.disk.after_kill()
    data = disk.read(name) or b""
    used = [at for at, byte in enumerate(data) if byte]
    places = used if seed % 2 else range(len(data))
    disk.damage(name, random.choice(places), bits=1 << random.randrange(8))
    check_outcome(start_on(world, disk))


@pytest.mark.parametrize("seed", seeds("damaged timers", 12))
def test_a_damaged_message_is_reported_and_delays_no_other(seed: int) -> None:
    """T-14. It stays pending and pinned. All others are delivered in time."""
    random = Random(seed)
    world = seeded_world(seed, timer=TIMER)
    for n in range(60):
        world.schedule(f"m{n}", delay_ms=(20 + n) * SECOND_MS, size=100)
    world.sleep(12 * SECOND_MS)
    world.checkpoint()
    world.sleep(SECOND_MS)
    victims = set(random.sample(range(60), 3))
    disk = world.disk.after_kill()
    for timer_id in victims:
        one = world.timers.timers[timer_id]
        at = one.log_offset + random.randrange(one.size)
        disk.damage("log/00000000000000000000.log", at, bits=1 << random.randrange(8))
    world = start_on(world, disk)
    assert world.report.replayed_from > max(
        one.log_offset for one in world.fold.timers.timers.values()
    ), "the damage is found at the due time, not by the start"
    world.fold.timers.quarantined = victims
    world._judged_to = world.report.replayed_from
    world.sleep(100 * SECOND_MS)
    assert set(world.fold.timers.open) == victims
    for delivered in world.delivered:
        assert delivered.stored_at_ms - delivered.due_at_ms <= 20
    for timer_id in victims:
        status = world.engine.timers.commands.status(TimerId(timer_id))
        assert (status.state, status.is_quarantined) == (TimerState.PENDING, True)
    assert world.engine.timers.index.pending_count == 3
    victim = min(victims)
    assert world.cancel(victim).state == TimerState.CANCELLED
    assert not world.engine.timers.commands.status(TimerId(victim)).is_quarantined
    assert world.engine.timers.index.links.hand_s > world.now_ms // 1000 - 5, "the hand moves on"


@pytest.mark.parametrize("seed", seeds("damage under a broker", 6))
def test_a_message_damaged_while_the_broker_runs_is_not_delivered(seed: int) -> None:
    random = Random(seed)
    world = seeded_world(seed, timer=TIMER)
    for n in range(10):
        world.schedule(f"m{n}", delay_ms=(5 + n) * SECOND_MS, size=100)
    one = world.timers.timers[4]
    at = one.log_offset + random.randrange(one.size)
    world.disk.damage("log/00000000000000000000.log", at, bits=1 << random.randrange(8))
    world._judged_to = world.engine.log.committed_offset
    world.fold.timers.quarantined = {4}
    world.sleep(30 * SECOND_MS)
    assert set(world.timers.open) == {4}
    assert world.engine.timers.commands.status(TimerId(4)).is_quarantined


@pytest.mark.parametrize("seed", seeds("evacuation", 10))
def test_evacuation_skips_a_damaged_record_and_copies_all_others(seed: int) -> None:
    """A damaged header must not stop the walk or hide the records after it."""
    random = Random(seed)
    world = seeded_world(
        seed, segment_bytes=32 << 10, retention_ms=72 * HOUR_MS, checkpoint_log_bytes=10_000
    )
    for n in range(300):
        world.schedule(f"m{n}", delay_ms=300 * HOUR_MS + n, keys=("k",), commit=n % 9 == 0)
    world.commit()
    world.sleep(12 * SECOND_MS)
    world.background()
    world.checkpoint()
    world.background()
    disk = world.disk.after_kill()
    victim = random.randrange(50)
    one = world.timers.timers[victim]
    # The first fields of the header, which the walk uses, and any other byte.
    place = random.randrange(16) if seed % 2 else random.randrange(one.size)
    disk.damage(
        "log/00000000000000000000.log", one.log_offset + place, bits=1 << random.randrange(8)
    )
    world = TimerWorld(
        disk, config=world.config, timer=world.config.timer, now_ms=world.now_ms, before=world
    )
    found = world.search(TimerQuery(page_size=1_000, key="k"))
    assert {status.timer_id for status in found} >= set(range(300)) - {victim}
    world.timers.quarantined = {victim}
    world.now_ms += 90 * HOUR_MS
    for _ in range(50):
        world.sleep(SECOND_MS)
    world.checkpoint()
    world.background()
    assert world.engine.log.min_offset > 0
    assert world.disk.read("log/00000000000000000000.held"), "its segment is held"
    world.advance(300 * HOUR_MS)
    assert {one.reason for one in world.delivered if one.timer_id == victim} == {
        TimerReason.DAMAGED
    }
    assert len({one.timer_id for one in world.delivered}) == 300
