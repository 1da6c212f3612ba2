"""Held segments: a damaged delayed message keeps its own segment on the disk, and no later one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.offline_world import finish
from tests.support.worlds.engine_world import SMALL
from tests.support.worlds.timer_world import (
    DAY_MS,
    HOUR_MS,
    SECOND_MS,
    TIMERS,
    TimerWorld,
    seeded_world,
    without_timer_files,
)
from tidemill.broker.engine.layout.message import TimerReason
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.layout.timer_entry import TimerEntry
from tidemill.broker.engine.timer.held_segments import LOOK_PERIOD_MS
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.offline.check import check
from tidemill.broker.offline.copy import copy
from tidemill.broker.offline.findings import Damage
from tidemill.broker.offline.mend import mend

SEGMENT = 32 << 10
TIMER = replace(TIMERS, flush_log_bytes=10 << 20, evacuation_lead_ms=0)
RETAINING = replace(
    SMALL, segment_bytes=SEGMENT, retention_ms=DAY_MS, checkpoint_log_bytes=8_000, timer=TIMER
)
OLDEST = "log/00000000000000000000"
BROKEN, NEIGHBOUR = 0, 1
DEAD = "%DLQ%TIMER"


def damaged_world(
    delay_ms: int = 10 * DAY_MS, *, seed: int = 0, at: int = -1, backup: FaultyDisk | None = None
) -> TimerWorld:
    """Make a world with a damaged and an intact timer in its oldest segment.

    `backup` is an empty disk. It gets a copy of the world's disk before the damage.
    """
    world = seeded_world(seed, config=RETAINING, timer=TIMER)
    world.schedule("broken", delay_ms=delay_ms, size=400)
    world.schedule("neighbour", delay_ms=delay_ms)
    if backup is not None:
        finish(copy(world.disk, backup))
    damage(world, at)
    fill(world)
    world.checkpoint()
    return world


def damage(world: TimerWorld, at: int = -1) -> None:
    """Flip a bit of the message. The log checker reads the log before."""
    one = world.timers.timers[BROKEN]
    world.timers.quarantined.add(BROKEN)
    world.disk.damage(f"{OLDEST}.log", one.log_offset + (at if at >= 0 else one.size + at))


def fill(world: TimerWorld, segments: int = 3) -> None:
    end = len(world.engine.log.segments) + segments
    while len(world.engine.log.segments) < end:
        world.send("filler", size=8_000, topic="other")


def retire(world: TimerWorld) -> None:
    """Let retention remove what it may."""
    world.background()  # Notes the time of the messages.
    world.now_ms += DAY_MS + HOUR_MS
    for _ in range(8):
        world.sleep(2 * SECOND_MS)
        world.checkpoint()
        world.background()


def held(world: TimerWorld) -> list[str]:
    return [name for name in world.disk.names("log") if name.endswith(".held")]


def outcomes(world: TimerWorld) -> dict[int, tuple[str, TimerReason, str]]:
    world.judge()
    return {one.timer_id: (one.text, one.reason, one.topic) for one in world.delivered}


WHOLE = {NEIGHBOUR: ("neighbour", TimerReason.DELIVERED, "orders")}
DAMAGED = WHOLE | {BROKEN: ("", TimerReason.DAMAGED, DEAD)}
REPAIRED = WHOLE | {BROKEN: ("broken", TimerReason.DELIVERED, "orders")}


@pytest.mark.parametrize("at", [0, 9, 20, 30, 50, 60, 70, 90, 110, -1])
def test_retention_keeps_only_the_segment_of_the_damaged_timer(at: int) -> None:
    world = damaged_world(at=at)
    for _ in range(3):
        retire(world)
        fill(world)
    assert world.engine.log.min_offset >= 3 * SEGMENT
    assert held(world) == [f"{OLDEST}.held"]
    for is_power_cut in (False, True):
        world.restart(power_cut=is_power_cut)
        world.background()
        assert held(world) == [f"{OLDEST}.held"]
        status = world.engine.timers.commands.status(TimerId(BROKEN))
        assert (status.state, status.is_quarantined) == (TimerState.PENDING, True)
        world.check()
    world.advance(10 * DAY_MS)
    assert outcomes(world) == DAMAGED
    world.now_ms += LOOK_PERIOD_MS
    world.background()
    assert held(world) == []
    world.check()


def test_a_replay_of_the_log_alone_finds_the_damaged_timer() -> None:
    world = damaged_world()
    retire(world)
    world.disk = without_timer_files(world.disk.after_kill())
    world.open()
    world.check()
    assert world.engine.timers.commands.status(TimerId(BROKEN)).state == TimerState.PENDING
    world.advance(10 * DAY_MS)
    assert outcomes(world) == DAMAGED


def test_remains_are_evacuated_with_the_names_of_their_message() -> None:
    world = damaged_world(30 * DAY_MS)
    for _ in range(8):
        retire(world)
        fill(world, 4)
    assert world.timers.timers[BROKEN].copies > 2
    assert held(world) == [f"{OLDEST}.held"]
    world.advance(30 * DAY_MS)
    assert outcomes(world) == DAMAGED
    topic = world.engine.catalog.find_topic(DEAD)
    assert topic is not None
    (found,) = world.find(topic, message_id="id-broken")
    assert (found.reason, found.origin_topic) == ("damaged", "orders")


def test_a_cancel_of_a_salvaged_timer_deletes_its_held_segment() -> None:
    world = damaged_world()
    retire(world)
    assert world.cancel(BROKEN).state == TimerState.CANCELLED
    assert not world.engine.timers.commands.status(TimerId(BROKEN)).is_quarantined
    world.now_ms += LOOK_PERIOD_MS
    world.background()
    assert held(world) == []
    world.advance(10 * DAY_MS)
    assert outcomes(world) == WHOLE


def test_a_held_segment_stays_until_the_settlement_of_its_timer_is_durable() -> None:
    world = damaged_world()
    retire(world)
    world.now_ms += LOOK_PERIOD_MS
    world.engine.timers.commands.cancel(TimerId(BROKEN), now_ms=world.now_ms)
    steps = world.engine.timers.held_segments.find_work(
        world.now_ms, world.engine.background._quiet
    )
    assert steps is not None
    for _ in range(100):
        next(steps)
    assert held(world) == [f"{OLDEST}.held"]
    world.commit()
    for files in steps:
        for file in files:
            file.sync()
    assert held(world) == []


def test_a_rescheduled_damaged_timer_is_delivered_at_its_new_time() -> None:
    world = damaged_world()
    retire(world)
    world.reschedule(BROKEN, world.now_ms + HOUR_MS)
    world.restart()
    world.advance(HOUR_MS + SECOND_MS)
    assert outcomes(world)[BROKEN] == DAMAGED[BROKEN]


@pytest.mark.parametrize("is_evacuated", [False, True])
def test_a_message_mended_while_the_broker_is_stopped_is_delivered(*, is_evacuated: bool) -> None:
    world = damaged_world()
    retire(world)
    world.disk = world.disk.after_kill()
    # Flip the same bit back: the file is intact again.
    world.disk.damage(f"{OLDEST}.held", damaged_byte(world))
    world.open()
    if is_evacuated:
        for _ in range(3):
            fill(world)
            retire(world)
        assert held(world) == [], "there is a real copy"
    world.advance(10 * DAY_MS)
    assert outcomes(world) == REPAIRED


def damaged_byte(world: TimerWorld) -> int:
    """Return the damaged byte of the held segment: the last one of the message."""
    view = world.engine.mappings[world.engine.log.held[0].name]
    original = world.timers.timers[BROKEN].original
    assert original is not None
    return original + int.from_bytes(view[original + 8 : original + 12], "big") - 1


def test_an_overdue_damaged_timer_waits_to_be_mended_until_retention() -> None:
    world = damaged_world(delay_ms=HOUR_MS)
    world.sleep(2 * HOUR_MS)
    assert outcomes(world) == WHOLE
    assert world.engine.timers.commands.status(TimerId(BROKEN)).is_quarantined
    retire(world)
    world.sleep(2 * SECOND_MS)
    assert outcomes(world) == DAMAGED
    world.now_ms += LOOK_PERIOD_MS
    world.background()
    assert held(world) == []
    assert not world.engine.timers.quarantined


def test_a_message_too_large_for_a_copy_is_held_until_segments_are_larger() -> None:
    world = TimerWorld(config=replace(RETAINING, segment_bytes=1 << 20), timer=TIMER)
    world.schedule("broken", delay_ms=10 * DAY_MS, size=100_000)
    world.schedule("neighbour", delay_ms=10 * DAY_MS)
    world.timers.quarantined.add(BROKEN)
    while len(world.engine.log.segments) < 2:
        world.send("filler", size=100_000, topic="other")
    world.checkpoint()
    disk = world.disk.after_kill()
    world = TimerWorld(disk, config=RETAINING, timer=TIMER, now_ms=world.now_ms, before=world)
    while len(world.engine.log.segments) < 4:
        world.send("filler", size=8_000, topic="other")
    for _ in range(2):
        retire(world)
        fill(world)
    assert held(world) == [f"{OLDEST}.held"]
    world.advance(10 * DAY_MS)
    assert outcomes(world) == WHOLE
    disk = world.disk.after_kill()
    world = TimerWorld(
        disk,
        config=replace(RETAINING, segment_bytes=1 << 20),
        timer=TIMER,
        now_ms=world.now_ms,
        before=world,
    )
    while len(world.engine.log.segments) < 4:
        world.send("filler", size=8_000, topic="other")
    world.sleep(2 * SECOND_MS)
    assert outcomes(world) == REPAIRED


def test_damaged_remains_keep_all_held_segments() -> None:
    world = damaged_world()
    retire(world)
    one = world.timers.timers[BROKEN]
    start = world.engine.log.segment_start(one.log_offset)  # type: ignore[arg-type]  # a log offset
    world.disk.damage(f"log/{start:020d}.log", one.log_offset - start + one.size - 1)
    world.now_ms += LOOK_PERIOD_MS
    world.background()
    assert held(world) == [f"{OLDEST}.held"]
    fill(world)
    retire(world)
    assert f"{OLDEST}.held" in held(world)
    world.advance(10 * DAY_MS)
    assert outcomes(world) == DAMAGED


LARGE = replace(RETAINING, segment_bytes=1 << 20)


def world_with_a_message_too_large(delay_ms: int) -> TimerWorld:
    """Make a world with an intact message in a held segment. It is too large for new segments."""
    world = TimerWorld(config=LARGE, timer=TIMER)
    world.schedule("broken", delay_ms=delay_ms, size=100_000)
    world.schedule("neighbour", delay_ms=delay_ms)
    world.timers.quarantined.add(BROKEN)
    while len(world.engine.log.segments) < 2:
        world.send("filler", size=100_000, topic="other")
    world.checkpoint()
    disk = world.disk.after_kill()
    world = TimerWorld(disk, config=RETAINING, timer=TIMER, now_ms=world.now_ms, before=world)
    while len(world.engine.log.segments) < 4:
        world.send("filler", size=8_000, topic="other")
    for _ in range(2):
        retire(world)
        fill(world)
    assert held(world) == [f"{OLDEST}.held"]
    return world


def damage_remains(world: TimerWorld, at: int, *, name: str = "") -> None:
    """Flip a bit of the timer's newest remains, or of its message in a held segment."""
    one = world.timers.timers[BROKEN]
    place = one.original if name else one.log_offset
    assert place is not None
    start = 0 if name else world.engine.log.segment_start(place)  # type: ignore[arg-type]  # a log offset
    world.disk.damage(name or f"log/{start:020d}.log", place - start + at)


def grow(world: TimerWorld, turns: int) -> None:
    for _ in range(turns):
        fill(world)
        retire(world)
        world.now_ms += LOOK_PERIOD_MS
        world.background()


def entry_of(world: TimerWorld) -> TimerEntry:
    return world.engine.timers.index.get(TimerId(BROKEN))


def delivered_by_larger_segments(world: TimerWorld) -> list[str]:
    """Restart with segments that are large enough, and return the delivered message."""
    disk = world.disk.after_kill()
    world = UncheckedWorld(disk, config=LARGE, timer=TIMER, now_ms=world.now_ms)
    while len(world.engine.log.segments) < 2:
        world.send("filler", size=8_000, topic="other")
    world.now_ms += 21 * DAY_MS
    for _ in range(10):
        world.sleep(2 * SECOND_MS)
        world.background()
        world.now_ms += HOUR_MS
    world.group()
    return [body.rstrip("\0")[:9] for body in world.drain()]


@pytest.mark.parametrize("turns", [0, 5])
@pytest.mark.parametrize("at", [9, 30, 60, 70])
def test_an_intact_message_is_found_whatever_happens_to_its_remains(at: int, turns: int) -> None:
    world = world_with_a_message_too_large(20 * DAY_MS)
    damage_remains(world, at)
    world = copied(world, world.disk.after_kill())
    grow(world, turns)
    assert held(world) == [f"{OLDEST}.held"]
    assert sorted(delivered_by_larger_segments(world)) == ["broken", "neighbour"]


def test_a_due_timer_waits_for_the_search_for_its_message() -> None:
    world = world_with_a_message_too_large(20 * DAY_MS)
    one = world.timers.timers[BROKEN]
    log = world.engine.log
    while log.segments[log.floor_number].end <= one.log_offset:
        fill(world, 1)
        retire(world)
    world.background()  # Notes the time of the segments.
    remains = one.log_offset
    damage_remains(world, 60)
    world.judge = lambda: None  # type: ignore[method-assign]  # The log was checked before.
    world.now_ms += DAY_MS + HOUR_MS
    # The search is not due yet: it would find the message before the remains are evacuated.
    world.engine.timers.held_segments._looked_at_ms = world.now_ms
    world.sleep(2 * SECOND_MS)
    assert entry_of(world).log_offset > remains, "the remains were evacuated"
    world = UncheckedWorld(world.disk.after_kill(), config=LARGE, timer=TIMER, now_ms=world.now_ms)
    while len(world.engine.log.segments) < 2:
        world.send("filler", size=8_000, topic="other")
    world.now_ms += 21 * DAY_MS
    world.run_due()
    assert world.state(BROKEN) == TimerState.PENDING
    world.background()
    world.sleep(2 * SECOND_MS)
    assert world.state(BROKEN) == TimerState.DELIVERED


def test_damaged_message_and_remains_keep_only_their_own_segments() -> None:
    world = world_with_a_message_too_large(90 * DAY_MS)
    damage_remains(world, 60)
    damage_remains(world, 30, name=f"{OLDEST}.held")
    original = world.timers.timers[BROKEN].original
    assert original is not None
    world = copied(world, world.disk.after_kill())
    grow(world, 12)
    names = world.disk.names("log")
    assert f"{OLDEST}.held" in names
    assert len(names) < 12, "retention removes later records"
    world = copied(world, world.disk.after_kill())
    # Flip the same bit back: the file is intact again.
    world.disk.damage(f"{OLDEST}.held", original + 30)
    world = copied(world, world.disk.after_kill())
    world.now_ms += 60 * DAY_MS
    assert sorted(delivered_by_larger_segments(world)) == ["broken", "neighbour"]


def test_damaged_remains_of_a_settled_timer_hold_no_segment() -> None:
    config = replace(RETAINING, retention_ms=400 * DAY_MS, retention_bytes=6 * SEGMENT)
    world = seeded_world(0, config=config, timer=TIMER)
    world.schedule("broken", delay_ms=300 * DAY_MS, size=400)
    damage(world)
    for _ in range(4):
        fill(world)
        world.now_ms += LOOK_PERIOD_MS
        world.sleep(2 * SECOND_MS)
        world.checkpoint()
        world.background()
    assert held(world) == [f"{OLDEST}.held"]
    one = world.timers.timers[BROKEN]
    start = world.engine.log.segment_start(one.log_offset)  # type: ignore[arg-type]  # a log offset
    world.cancel(BROKEN)
    world = UncheckedWorld(world.disk.after_kill(), config=config, timer=TIMER, now_ms=world.now_ms)
    world.disk.damage(f"log/{start:020d}.log", one.log_offset - start + one.size - 1)
    world.engine.mappings.forget(f"log/{start:020d}.log")
    for _ in range(2):
        fill(world, 1)
        world.now_ms += LOOK_PERIOD_MS
        world.checkpoint()
        world.background()
        assert world.engine.log.min_offset <= start, "the record is there"
        assert not held(world), "no pending timer needs it"


@pytest.mark.parametrize("is_power_cut", [False, True])
def test_a_crash_at_any_operation_of_holding_a_segment_loses_nothing(*, is_power_cut: bool) -> None:
    before = damaged_world()
    before.now_ms += DAY_MS + HOUR_MS
    before.sleep(2 * SECOND_MS)
    at, is_over = 0, False
    while not is_over:
        disk = before.disk.after_kill()
        disk.random = Random(at)
        world = copied(before, disk)
        world.disk.cut_at = len(world.disk.operations) + at
        try:
            retire(world)
            is_over = True
        except PowerCut:
            pass
        disk = world.disk.after_power_cut() if is_power_cut else world.disk.after_kill()
        world = copied(before, disk, now_ms=world.now_ms)
        retire(world)
        assert held(world) == [f"{OLDEST}.held"], f"operation {at}"
        assert world.engine.log.min_offset > 0
        assert world.engine.timers.commands.status(TimerId(BROKEN)).state == TimerState.PENDING
        at += 5
    assert at > 50


def copied(before: TimerWorld, disk: FaultyDisk, *, now_ms: int = 0) -> TimerWorld:
    """Open a separate world on `disk`, which no log checker follows."""
    return UncheckedWorld(disk, config=RETAINING, timer=TIMER, now_ms=now_ms or before.now_ms)


class UncheckedWorld(TimerWorld):
    """A world with a damaged record in a log that was checked before."""

    def judge(self) -> None:
        """Check nothing."""


def test_a_follower_finds_the_damaged_timer_too() -> None:
    world = TimerWorld(config=RETAINING, timer=TIMER, is_followed=True)
    world.schedule("broken", delay_ms=5 * DAY_MS, size=400)
    world.schedule("neighbour", delay_ms=5 * DAY_MS)
    damage(world)
    fill(world)
    world.checkpoint()
    retire(world)
    assert held(world) == [f"{OLDEST}.held"]
    world.send("a round", topic="other")
    world.fail_over()
    assert world.engine.timers.commands.status(TimerId(BROKEN)).state == TimerState.PENDING


def test_the_offline_tools_recognize_a_held_segment() -> None:
    world = damaged_world()
    retire(world)
    target = FaultyDisk(Random(1))
    finish(copy(world.disk, target))
    assert target.read(f"{OLDEST}.held") == world.disk.read(f"{OLDEST}.held")
    copied_world = copied(world, target)
    copied_world.advance(10 * DAY_MS)
    copied_world.background()
    assert copied_world.state(BROKEN) == TimerState.DROPPED
    assert copied_world.state(NEIGHBOUR) == TimerState.DELIVERED


def test_a_copy_of_the_store_has_the_intact_message_of_a_held_segment() -> None:
    world = world_with_a_message_too_large(20 * DAY_MS)
    target = FaultyDisk(Random(1))
    report = finish(copy(world.disk, target))
    assert not report.damaged
    assert finish(check(target)).is_sound
    world.disk = target.after_power_cut()
    assert sorted(delivered_by_larger_segments(world)) == ["broken", "neighbour"]


def test_a_copy_of_the_store_omits_unneeded_and_deleted_held_segments() -> None:
    world = damaged_world()
    retire(world)
    name = "log/00000000000000000000.held"
    steps = copy(world.disk, target := FaultyDisk(Random(1)), slice_bytes=4096)
    next(steps)
    world.cancel(BROKEN)
    world.now_ms += LOOK_PERIOD_MS
    world.background()
    assert name not in world.disk.names("log")
    finish(steps)
    assert name not in target.names("log")
    assert copied(world, target).state(BROKEN) == TimerState.CANCELLED
    disk = TimerWorld().disk.after_kill()
    disk.open(name.replace("0.", "1."), create=True).resize(SEGMENT)
    finish(copy(disk, target := FaultyDisk(Random(1))))
    assert not [one for one in target.names("log") if one.endswith(".held")]


@pytest.mark.parametrize("at", [0, 9, 60, 110, -1])
def test_a_check_reports_the_timer_of_a_held_segment(at: int) -> None:
    world = damaged_world(at=at)
    retire(world)
    report = finish(check(world.disk, TIMER))
    (finding,) = report.findings
    assert (finding.damage, finding.file) == (Damage.HELD, f"{OLDEST}.held")
    assert not finding.stops_start
    (affected,) = finding.affected
    assert affected.timer is not None
    assert (affected.timer.timer_id, affected.timer.state) == (BROKEN, "PENDING")
    world.advance(10 * DAY_MS)
    world.now_ms += LOOK_PERIOD_MS
    world.background()
    assert finish(check(world.disk, TIMER)).is_sound, "the file was deleted"


@pytest.mark.parametrize("how", ["missing", "empty", "cut"])
def test_a_mend_copies_a_missing_held_segment_from_a_backup(how: str) -> None:
    backup = FaultyDisk(Random(1))
    world = damaged_world(backup=backup)
    retire(world)
    name, disk = f"{OLDEST}.held", world.disk.after_kill()
    if how == "missing":
        disk.remove(name)
    else:
        disk.cut(name, {"empty": 0, "cut": 100}[how])
    findings = finish(check(disk, TIMER)).findings
    (finding,) = [one for one in findings if one.damage is Damage.HELD_MISSING]
    assert finding.file == ("log" if how == "missing" else name)
    assert not finding.stops_start
    (affected,) = finding.affected
    assert affected.message_id == "id-broken"
    assert affected.timer is not None
    assert (affected.timer.timer_id, affected.timer.state) == (BROKEN, "PENDING")
    found = disk.names("log")
    assert finish(mend(disk, backup, TIMER, is_dry=True)).is_whole
    assert disk.names("log") == found
    report = finish(mend(disk, backup, TIMER, is_dry=False))
    assert report.is_whole, report.left
    world.disk = disk.after_power_cut()
    assert finish(check(world.disk, TIMER)).is_sound
    world.open()
    world.advance(10 * DAY_MS)
    assert outcomes(world) == REPAIRED


@pytest.mark.parametrize("end", ["cancelled", "delivered", "copied"])
def test_a_check_misses_no_segment_of_a_timer_that_needs_none(end: str) -> None:
    world = damaged_world()
    retire(world)
    if end == "cancelled":
        world.cancel(BROKEN)
    elif end == "delivered":
        world.advance(10 * DAY_MS)
    else:
        world.disk = world.disk.after_kill()
        world.disk.damage(f"{OLDEST}.held", damaged_byte(world))
        world.open()
        for _ in range(3):
            fill(world)
            retire(world)
    world.now_ms += LOOK_PERIOD_MS
    world.background()
    assert held(world) == []
    assert finish(check(without_timer_files(world.disk), TIMER)).findings == []


@pytest.mark.parametrize("at", [0, 9, 60, 110, -1])
def test_a_mend_takes_the_message_from_a_backup(at: int) -> None:
    backup = FaultyDisk(Random(1))
    world = damaged_world(at=at, backup=backup)
    whole = backup.read(f"{OLDEST}.log")
    retire(world)
    disk = world.disk.after_kill()
    found = disk.read(f"{OLDEST}.held")
    for is_dry in (True, False):
        assert disk.read(f"{OLDEST}.held") == found
        report = finish(mend(disk, backup, TIMER, is_dry=is_dry))
        assert report.is_whole, report.left
        assert len(report.mended) == 1
    world.disk = disk.after_power_cut()
    assert finish(check(world.disk, TIMER)).is_sound
    mended = world.disk.read(f"{OLDEST}.held")
    assert whole is not None
    assert mended is not None
    end = world.timers.timers[NEIGHBOUR].size
    assert mended[:end] == whole[:end]
    world.open()
    world.advance(10 * DAY_MS)
    assert outcomes(world) == REPAIRED


def test_a_mend_without_the_message_in_the_backup_leaves_the_held_segment() -> None:
    world, other = damaged_world(), damaged_world(seed=1, at=60)
    retire(world)
    retire(other)
    lived_on = TimerWorld(config=RETAINING, timer=TIMER)
    lived_on.schedule("brOken", delay_ms=10 * DAY_MS, size=400)
    lived_on.schedule("neighbOur", delay_ms=10 * DAY_MS)
    for source in (other.disk.after_kill(), lived_on.disk.after_kill()):
        disk = world.disk.after_kill()
        before = disk.read(f"{OLDEST}.held")
        report = finish(mend(disk, source, TIMER, is_dry=False))
        assert not report.is_whole
        assert len(report.left) == 1
        assert disk.read(f"{OLDEST}.held") == before


def test_a_mend_leaves_a_cut_held_segment_that_is_longer_than_the_backup() -> None:
    backup = FaultyDisk(Random(1))
    world = damaged_world(backup=backup)
    retire(world)
    disk = world.disk.after_kill()
    disk.cut(f"{OLDEST}.held", 20_001)
    assert {one.damage for one in finish(check(disk, TIMER)).findings} == {Damage.HELD}
    report = finish(mend(disk, backup, TIMER, is_dry=False))
    assert all("damaged behind the end of the backup" in one for one in report.left)
    assert not report.is_whole
