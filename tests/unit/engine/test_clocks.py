"""Wrong wall clocks: for a second, for an hour, or until a restart."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import PoppedMessage, World
from tests.support.worlds.timer_world import SECOND_MS, TimerWorld
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.pop.stated_rows import DELIVERIES_A_STATE_RECORD
from tidemill.broker.engine.store.log_times import first_stored_at_ms
from tidemill.broker.engine.upkeep.log_ages import SETTLE_MS
from tidemill.common.errors import InvalidReceiptHandle

HOUR_MS = 3600 * 1000
DAY_MS = 24 * HOUR_MS
RETENTION_MS = 3 * DAY_MS


class TwoClocks(World):
    """A world with a wall clock (`now_ms`) that may be wrong and a correct monotonic clock."""

    monotonic_ms: int

    def __init__(self) -> None:
        self.monotonic_ms = 5_000
        super().__init__(FaultyDisk(Random(0)), retention_ms=RETENTION_MS)

    def elapse(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.monotonic_ms += duration_ms

    def fill(self, count: int) -> None:
        for n in range(count):
            self.send(f"filler{n}", size=100_000)
        self.background()

    @property
    def has_retired(self) -> bool:
        return self.engine.log.min_offset > 0


def test_a_clock_days_ahead_for_a_second_loses_no_message() -> None:
    world = TwoClocks()
    world.group()
    world.fill(40)
    world.elapse(HOUR_MS)
    world.now_ms += 4 * DAY_MS
    world.background()
    assert not world.has_retired
    world.now_ms -= 4 * DAY_MS
    world.elapse(SECOND_MS)
    world.background()
    assert not world.has_retired
    assert len(world.drain()) == 40


def test_a_segment_that_is_old_by_both_clocks_is_removed() -> None:
    world = TwoClocks()
    world.fill(40)
    world.elapse(RETENTION_MS - HOUR_MS)
    world.background()
    assert not world.has_retired
    world.elapse(2 * HOUR_MS)
    world.background()
    assert world.has_retired


def test_a_record_stored_a_year_ahead_does_not_stop_retention() -> None:
    world = World(retention_ms=3 * DAY_MS, now_ms=1_700_000_000_000)
    world.monotonic_ms = 1_000

    def tick(duration_ms: int) -> None:
        world.now_ms += duration_ms
        world.monotonic_ms = (world.monotonic_ms or 0) + duration_ms
        world.background()

    tick(0)
    tick(2 * SETTLE_MS)
    while len(world.engine.log.segments) < 2:
        room = world.engine.log._active_end - world.engine.log.log_end
        is_last = 0 < room < 25_000
        world.now_ms += 365 * DAY_MS * is_last
        world.send("m", size=20_000)
        world.now_ms -= 365 * DAY_MS * is_last
    assert first_stored_at_ms(world.engine.log, 1) > world.now_ms + 300 * DAY_MS
    second = world.engine.log.segments[1].start
    world.send(*["m"] * 60, size=20_000)
    world.checkpoint()
    for _ in range(4):
        tick(DAY_MS)
    assert world.engine.log.min_offset >= second
    while len(world.engine.log.segments) < 3:
        world.send("m", size=20_000)
    world.checkpoint()
    world.restart()
    world.monotonic_ms = 5
    tick(0)
    tick(2 * SETTLE_MS)
    low = world.engine.log.min_offset
    for _ in range(4):
        tick(DAY_MS)
    assert world.engine.log.min_offset > low


def test_retention_counts_the_time_before_a_start() -> None:
    world = TwoClocks()
    world.fill(40)
    world.elapse(RETENTION_MS - HOUR_MS)
    world.restart()
    world.monotonic_ms = 7_000  # The machine was rebooted.
    world.background()
    assert not world.has_retired
    world.elapse(2 * HOUR_MS)
    world.background()
    assert world.has_retired


def test_a_clock_far_behind_at_the_start_does_not_stop_retention() -> None:
    world = TwoClocks()
    world.fill(40)
    true_ms, world.now_ms = world.now_ms, 1_000_000
    world.restart()
    world.background()
    world.now_ms = true_ms
    world.elapse(RETENTION_MS + HOUR_MS)
    world.background()
    assert world.has_retired


@pytest.mark.parametrize("flushed", [False, True])
def test_a_message_popped_by_a_clock_ahead_is_revived_in_time(flushed: bool) -> None:
    world = World()
    world.group()
    world.send("m0", "m1")
    world.now_ms += HOUR_MS
    (first, _) = world.pop(2, invisible_ms=30 * SECOND_MS)
    if flushed:
        world.checkpoint()
    world.now_ms -= HOUR_MS
    world.restart()
    assert world.bodies() == []
    world.advance(29 * SECOND_MS)
    assert world.bodies() == []
    world.advance(2 * SECOND_MS)
    assert sorted(world.bodies()) == ["m0", "m1"]
    assert world.ack(first) == [AckResult.GONE], "its handle is valid for another hour"


def test_a_handle_from_a_clock_ahead_acks_its_live_delivery() -> None:
    world = World()
    world.group()
    world.send("m0")
    world.now_ms += HOUR_MS
    (popped,) = world.pop(1, invisible_ms=30 * SECOND_MS)
    world.now_ms -= HOUR_MS
    world.restart()
    assert world.ack(popped) == [AckResult.APPLIED]
    world.advance(2 * HOUR_MS)
    assert world.bodies() == []


def test_timers_are_delivered_in_time_after_a_clock_was_ahead() -> None:
    """More timers than are loaded at once are in the slot after the hand."""

    def restart() -> None:
        world.checkpoint()
        world.engine.finish(world.now_ms)
        world.restart()

    world = TimerWorld()
    for n in range(3):
        world.schedule(f"then{n}", delay_ms=SECOND_MS)
        world.sleep(20 * SECOND_MS)
        world.background()
    world.now_ms -= HOUR_MS
    restart()
    assert world.engine.timers.index.links.hand_s > world.now_ms // 1000 + 3_000
    for n in range(600):
        world.schedule(f"m{n}", delay_ms=20 * SECOND_MS, commit=n % 50 == 49)
    restart()
    world.sleep(25 * SECOND_MS)
    late = [one.stored_at_ms - one.due_at_ms for one in world.delivered if one.text[0] == "m"]
    assert len(late) == 600
    assert max(late) <= 2 * SECOND_MS


def test_a_clock_days_ahead_at_the_start_loses_no_message() -> None:
    world = TwoClocks()
    world.group()
    world.fill(40)
    world.now_ms += 4 * DAY_MS
    world.restart()
    for _ in range(5):
        world.elapse(2 * SECOND_MS)
        world.background()
    assert not world.has_retired
    world.now_ms -= 4 * DAY_MS
    for _ in range(12):
        world.elapse(10 * SECOND_MS)
        world.background()
    assert not world.has_retired
    assert len(world.drain()) == 40


def hold_ahead(world: World, count: int = 2) -> list[PoppedMessage]:
    """Pop messages for a group while the clock is an hour ahead."""
    world.group()
    world.send(*[f"m{n}" for n in range(count)])
    world.now_ms += HOUR_MS
    held = [one for _ in range(count) for one in world.pop(1, invisible_ms=30 * SECOND_MS)]
    world.now_ms -= HOUR_MS
    return held


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_a_second_start_hides_no_message_for_longer(before: bool, between: bool) -> None:
    world = World(is_followed=True)
    held = hold_ahead(world)
    if before:
        world.checkpoint()
    world.restart(power_cut=True)
    world.advance(20 * SECOND_MS)
    if between:
        world.checkpoint()
    world.restart(power_cut=True)
    world.send("later")
    assert world.bodies() == ["later"]
    world.advance(11 * SECOND_MS)
    assert sorted(world.bodies()) == ["m0", "m1"]
    world.checkpoint()
    world.restart()
    assert world.ack(*held) == [AckResult.GONE] * 2, "it was delivered again"


def test_a_restarted_delivery_survives_the_removal_of_its_segment() -> None:
    world = World(is_followed=True, retention_bytes=1 << 20)
    held = hold_ahead(world)
    world.restart()
    while len(world.engine.log.segments) < 4:
        world.send("filler", topic="other", size=100_000)
    world.run_due()
    for _ in range(2):
        world.checkpoint()
        world.retire()
    for folder in ("queues", "index", "snapshots"):
        for name in world.disk.names(folder):
            world.disk.remove(name)
    world.restart()
    assert world.ack(held[0]) == [AckResult.APPLIED], "it is still in flight"
    world.advance(31 * SECOND_MS)
    assert world.engine.state.table.used_count == 0
    assert world.ack(held[1]) == [AckResult.GONE]


def test_a_follower_restarts_deliveries_that_are_due_by_its_own_clock() -> None:
    """Its clock was right, or ahead for longer. It has removed the deliveries from their lists."""
    world = World(is_followed=True)
    hold_ahead(world, 4)
    assert world.follower is not None
    follower = world.follower.engine
    follower.consumption.reviver.remove_due(world.now_ms + 2 * HOUR_MS)
    assert len(follower.state.table.due_slots()) == 4
    world.restart()
    world.follow()
    assert follower.state.table.due_slots() == []
    world.advance(20 * SECOND_MS)
    world.fail_over()
    assert world.bodies() == []
    world.advance(11 * SECOND_MS)
    assert sorted(world.bodies()) == ["m0", "m1", "m2", "m3"]


def test_an_engine_that_takes_over_restarts_future_deliveries() -> None:
    world = World(is_followed=True)
    hold_ahead(world)
    world.fail_over()
    world.advance(20 * SECOND_MS)
    world.fail_over()
    world.advance(11 * SECOND_MS)
    assert sorted(world.bodies()) == ["m0", "m1"]


def test_a_start_that_is_cut_while_it_restarts_deliveries_is_completed_by_the_next_one() -> None:
    """At every operation of the start, with more deliveries than one record contains."""
    count = DELIVERIES_A_STATE_RECORD + 100
    origin = World()
    held = hold_ahead(origin, count)
    operations = len(restarted(origin.disk, origin.now_ms, None)[0].operations)
    for cut_at in range(operations):
        disk, world = restarted(origin.disk, origin.now_ms, cut_at)
        assert world is None, "the power was cut"
        world = World(disk.after_power_cut(), now_ms=origin.now_ms + 20 * SECOND_MS)
        world.now_ms += 31 * SECOND_MS
        world.run_due()
        assert world.engine.state.table.used_count == 0
        assert world.ack(held[0], held[-1]) == [AckResult.GONE] * 2


def restarted(disk: FaultyDisk, now_ms: int, cut_at: int | None) -> tuple[FaultyDisk, World | None]:
    """Start on a copy of a disk, and cut the power at one operation."""
    disk = disk.after_kill()
    disk.random = Random(cut_at or 0)
    disk.cut_at = cut_at
    try:
        return disk, World(disk, now_ms=now_ms)
    except PowerCut:
        return disk, None


@pytest.mark.parametrize("seed", seeds("clocks", 12))
def test_a_follower_agrees_after_clock_jumps_between_processes(seed: int) -> None:
    """Plain and ordered groups, acks, changes, checkpoints, retirements, starts and failovers."""
    random = Random(seed)
    world = World(FaultyDisk(random), is_followed=True, retention_bytes=1 << 20)
    groups = {
        world.group("plain", max_attempts=1000): "plain",
        world.group("ordered", is_ordered=True, max_attempts=1000): "ordered",
    }
    settled: dict[str, set[str]] = {"plain": set(), "ordered": set()}
    held: list[PoppedMessage] = []
    skew_ms, starts = 0, 0
    for turn in range(120):
        world.send(f"m{turn}", size=random.choice((10, 60_000)))
        group = random.choice(("plain", "ordered"))
        popped = world.pop(random.randint(1, 5), group=group, invisible_ms=30 * SECOND_MS)
        assert not settled[group] & {one.body for one in popped}, "an ack answered OK was forgotten"
        held = [*held, *popped][-20:]
        for one in random.sample(held, min(len(held), 2)):
            if world.ack(one) != [AckResult.GONE]:
                settled[groups[one.delivery.group_id]].add(one.body)
        for one in random.sample(held, min(len(held), 1)):
            with suppress(InvalidReceiptHandle):
                held.append(world.change(one, random.choice((0, 20 * SECOND_MS))))
        if turn % 9 == 5:
            world.checkpoint()
        if turn % 17 == 11 and len(world.engine.log.segments) > 2:
            world.checkpoint()
            world.retire()
        if turn % 13 == 7:
            world.now_ms -= skew_ms
            skew_ms = random.choice((0, HOUR_MS))
            world.now_ms += skew_ms
            if skew_ms == 0 or starts * 26 < turn or random.random() < 0.5:
                starts += 1
                if random.random() < 0.3:
                    world.fail_over()
                else:
                    world.restart(power_cut=random.random() < 0.5)
                assert len(world.engine.state.table.popped_ahead_of(world.now_ms)) == 0
        world.advance(random.randint(0, 10 * SECOND_MS))
    assert starts > 2
    world.now_ms -= skew_ms
    world.restart()
    world.advance(31 * SECOND_MS)
    for group in ("plain", "ordered"):
        for _ in range(200):
            world.ack(*world.pop(group=group, invisible_ms=SECOND_MS))
        world.advance(2 * SECOND_MS)
        assert world.bodies(group=group) == []


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_late_ack_is_rejected_after_a_start_with_the_clock_behind(*, is_ordered: bool) -> None:
    """Also if the start is cut at any of its operations, and another one follows."""
    origin, late = replaced(is_ordered=is_ordered)
    origin.now_ms -= HOUR_MS
    operations = len(restarted(origin.disk, origin.now_ms, None)[0].operations)
    for cut_at in range(operations + 1):
        disk, world = restarted(origin.disk, origin.now_ms, cut_at)
        if world is None:
            world = World(disk.after_power_cut(), now_ms=origin.now_ms + SECOND_MS)
        assert world.ack(*late) == [AckResult.GONE] * len(late)
        world.restart()
        assert world.ack(*late) == [AckResult.GONE] * len(late)


def replaced(*, is_ordered: bool) -> tuple[World, list[PoppedMessage]]:
    """Return a world and handles that ran out: of messages that wait, or are in a new batch."""
    world = World(now_ms=1_000_000_000)
    world.group(is_ordered=is_ordered)
    world.send("m0", "m1", "m2")
    late = world.pop(3, invisible_ms=60 * SECOND_MS)
    world.advance(60 * SECOND_MS)
    if is_ordered:
        world.give_back(late[0])
        assert len(world.pop(3, invisible_ms=60 * SECOND_MS)) == 3
    return world, late


def test_an_ack_is_repeated_after_a_start_with_a_correct_clock() -> None:
    world = World(now_ms=1_000_000_000)
    world.group()
    world.send("m0", "m1")
    popped = world.pop(2, invisible_ms=60 * SECOND_MS)
    world.ack(popped[0])
    world.restart()
    assert world.ack(popped[0]) == [AckResult.ALREADY]
    world.now_ms -= HOUR_MS
    world.restart()
    assert world.ack(popped[0]) == [AckResult.GONE], "it is unknown whether it ran out"
    assert world.ack(popped[1]) == [AckResult.APPLIED]


def test_a_start_after_one_that_recorded_nothing_notes_that_the_clock_was_set_back() -> None:
    world = World(now_ms=1_000_000_000)
    world.group()
    world.send("m0")
    world.now_ms += HOUR_MS
    world.checkpoint()
    world.restart()
    world.now_ms -= HOUR_MS // 2
    world.restart()
    assert len(world.engine.catalog.clock_falls) == 1


def test_a_late_ack_is_rejected_after_a_start_that_reads_no_record() -> None:
    """A checkpoint covers the whole log, so the time of the last record is unknown."""
    world = World(now_ms=1_000_000_000)
    world.group()
    world.send("m0")
    world.advance(HOUR_MS)
    (late,) = world.pop(1, invisible_ms=30 * SECOND_MS)
    world.advance(30 * SECOND_MS)
    world.checkpoint()
    world.now_ms -= 20 * SECOND_MS
    world.restart()
    assert world.ack(late) == [AckResult.GONE]
    world.restart()
    assert world.ack(late) == [AckResult.GONE]
    assert world.bodies() == ["m0"]
