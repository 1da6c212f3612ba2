"""Damage to the timer files: each kind is found and mended."""

from __future__ import annotations

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, SECOND_MS, TIMERS, TimerWorld
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import Conflict
from tidemill.message.resource_names import TIMER_TOPIC

OLDEST_TABLE_FILE = "timer/state/00000000000000000000"
PAGE_BYTES = 4096
TABLE_PAGE_BYTES = 512 * 32


def blank(disk: FaultyDisk, name: str, begin: int, size: int) -> None:
    """Overwrite a range of a file with zeros, as after a lost write."""
    content = disk.read(name)
    assert content is not None
    for at in range(begin, begin + size):
        if content[at]:
            disk.damage(name, at, bits=content[at])


def settled_world(delay_ms: int) -> TimerWorld:
    """Return a world with one pending timer and everything flushed to files."""
    world = TimerWorld()
    world.schedule("far", delay_ms=delay_ms)
    world.sleep(12 * SECOND_MS)
    world.background()
    return world


def delivered_in_the_end(world: TimerWorld, delay_ms: int) -> list[str]:
    world.restart()
    world.sleep(delay_ms)
    world.check()
    return world.texts()


def test_a_missing_old_table_file_with_a_pending_timer_is_found() -> None:
    """The checkpoint names old files with pending timers. Old final files may be missing."""
    world = TimerWorld()
    world.schedule("far", delay_ms=HOUR_MS)
    for turn in range(35):
        for n in range(512):
            world.schedule(f"m{turn}-{n}", delay_ms=SECOND_MS, commit=n == 511)
        world.sleep(2 * SECOND_MS)
    world.sleep(12 * SECOND_MS)
    world.background()
    world.disk.remove(OLDEST_TABLE_FILE)
    assert "far" in delivered_in_the_end(world, HOUR_MS)


def test_a_lost_page_of_the_table_is_found() -> None:
    world = settled_world(HOUR_MS)
    blank(world.disk, OLDEST_TABLE_FILE, 0, TABLE_PAGE_BYTES)
    assert delivered_in_the_end(world, HOUR_MS) == ["far"]


def test_a_lost_page_of_the_wheel_is_found() -> None:
    world = settled_world(HOUR_MS)
    second = (world.now_ms + HOUR_MS - 12 * SECOND_MS) // 1000
    page = second % TIMERS.wheel_slots * 32 // PAGE_BYTES
    for each in {page - 1, page, page + 1}:
        blank(world.disk, "timer/wheel", each * PAGE_BYTES, PAGE_BYTES)
    assert delivered_in_the_end(world, HOUR_MS) == ["far"]


def test_forgotten_ids_do_not_count_as_damage() -> None:
    """A table rebuilt from a log without its first segments has no entries of zeros."""
    world = TimerWorld(retention_ms=DAY_MS)
    for n in range(100):
        world.schedule(f"m{n}", delay_ms=SECOND_MS, size=12_000)
    world.schedule("far", delay_ms=30 * DAY_MS)
    world.sleep(20 * SECOND_MS)
    for n in range(200):
        world.send(f"plain{n}", size=12_000)
    world.checkpoint()
    world.sleep(2 * DAY_MS)
    world.background()
    assert world.engine.log.min_offset > 0
    for name in [OLDEST_TABLE_FILE, "timer/wheel"]:
        world.disk.remove(name)
    world.restart()
    assert world.report.replayed_from == world.engine.log.min_offset
    world.sleep(20 * SECOND_MS)
    world.background()
    world.restart()
    assert world.report.replayed_from > world.engine.log.min_offset
    world.advance(28 * DAY_MS)
    assert world.texts()[-1] == "far"


def test_a_restart_quarantines_a_damaged_timer_again() -> None:
    world = TimerWorld()
    timer_id = world.schedule("broken", delay_ms=SECOND_MS, size=500).queue_offset
    world.schedule("whole", delay_ms=SECOND_MS)
    world.timers.quarantined.add(timer_id)  # For the log checker: the hand will move past it.
    body_at = world.timers.timers[timer_id].log_offset + 400
    world.sleep(500)
    world.background()
    world.restart()
    world.disk.damage("log/00000000000000000000.log", body_at)
    world.sleep(SECOND_MS)
    for _ in range(2):
        status = world.engine.timers.commands.status(TimerId(timer_id))
        assert (status.state, status.is_quarantined) == (TimerState.PENDING, True)
        world.sleep(30 * SECOND_MS)
        world.background()
        world.checkpoint()
        world.disk = world.disk.after_kill()
        world.open()
        world.sleep(SECOND_MS)
    assert world.texts() == ["whole"]


def test_the_audit_does_not_link_a_quarantined_timer() -> None:
    world = TimerWorld()
    world.schedule("broken", delay_ms=SECOND_MS)
    world.engine.timers.deliverer.quarantined[0] = world.topic()
    world.engine.timers.near.outstanding.clear()
    drift = world.engine.timers.janitor.audit.drift
    world.now_ms += 3 * DAY_MS
    world.engine.timers.index.links.hand_s = world.now_ms // 1000 - 1
    world.engine.room.measure()
    for _ in world.engine.timers.janitor.audit.run(world.now_ms):
        pass
    assert not +drift


def test_the_audit_links_a_timer_that_the_wheel_has_lost() -> None:
    world = settled_world(HOUR_MS)
    timers = world.engine.timers
    world.timers.quarantined.add(0)  # For the log checker: the hand will move past it.
    timers.index.links.wheel.clear()
    world.sleep(2 * HOUR_MS)
    assert not world.texts()
    for _ in timers.janitor.audit.run(world.now_ms):
        pass
    assert sum(timers.janitor.audit.drift.values()) == 1
    world.sleep(SECOND_MS)
    assert world.texts() == ["far"]


def test_the_hidden_topic_of_timers_cannot_be_deleted() -> None:
    world = TimerWorld()
    world.schedule("a", delay_ms=SECOND_MS)
    with pytest.raises(Conflict):
        world.engine.administration.delete_topic(TIMER_TOPIC, world.now_ms)
