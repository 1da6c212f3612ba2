"""The audit walks every chain, links the timers that no chain has, and changes no others."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.counted_work import Meter
from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, SECOND_MS, TimerWorld
from tidemill.broker.engine.layout import timer_slot
from tidemill.broker.engine.timer.audit import RECORDS_A_SLICE, TimerAudit
from tidemill.broker.engine.timer.table import PAGE_ENTRIES

IN_ONE_SECOND = 7


def audit_of(world: TimerWorld) -> TimerAudit:
    return world.engine.timers.janitor.audit


def run_audit(world: TimerWorld) -> int:
    """Run an audit, and return its number of corrections."""
    audit = audit_of(world)
    before = sum(audit.drift.values())
    for _ in audit.run(world.now_ms):
        pass
    found = sum(audit.drift.values()) - before
    audit.drift.clear()  # The test expects a correction.
    return found


def waiting_world() -> tuple[TimerWorld, int]:
    """Return a world with some timers in one second, and this second."""
    world = TimerWorld()
    begin_ms = (world.now_ms + HOUR_MS) // 1000 * 1000
    for n in range(IN_ONE_SECOND):
        world.schedule(f"t{n}", delay_ms=begin_ms + n - world.now_ms)
    world.schedule("beside", delay_ms=begin_ms + 5 * SECOND_MS - world.now_ms)
    return world, begin_ms // 1000


def relast(world: TimerWorld, slot_s: int, position: int) -> None:
    """Move the newest position of a second's chain."""
    wheel = world.engine.timers.index.links.wheel
    at = slot_s % wheel.slot_count * timer_slot.SIZE
    slot = timer_slot.read(wheel._slots, at)
    timer_slot.pack_into(
        wheel._slots, at, slot.time_ms, slot.first, position, slot.num, timer_slot.UNSEALED
    )


@pytest.mark.parametrize("kept", range(IN_ONE_SECOND))
def test_an_audit_links_timers_that_are_missing_in_a_chain(kept: int) -> None:
    world, slot_s = waiting_world()
    index = world.engine.timers.index
    index.link_gathered()
    records = list(index.links.chain(slot_s))
    assert len(records) == IN_ONE_SECOND
    oldest_kept = records[IN_ONE_SECOND - kept :]
    relast(world, slot_s, records[IN_ONE_SECOND - kept - 1].previous if kept else -1)
    assert len(list(index.links.chain(slot_s))) == len(oldest_kept)
    assert run_audit(world) == IN_ONE_SECOND - kept
    assert run_audit(world) == 0
    world.sleep(2 * HOUR_MS)
    assert sorted(world.texts()) == ["beside", *(f"t{n}" for n in range(IN_ONE_SECOND))]
    world.check()


def test_an_audit_ignores_links_with_a_former_due_time() -> None:
    world, slot_s = waiting_world()
    index = world.engine.timers.index
    due_at_ms = (slot_s + 90) * 1000
    world.reschedule(3, due_at_ms)
    index.link_gathered()
    relast(world, slot_s + 90, -1)
    assert run_audit(world) == 1
    world.sleep(2 * HOUR_MS)
    assert len(world.texts()) == IN_ONE_SECOND + 1
    world.check()


def test_an_audit_links_timers_due_beyond_the_ring_in_parking_slots() -> None:
    world = TimerWorld()
    world.schedule("far", delay_ms=30 * DAY_MS)
    world.schedule("farther", delay_ms=60 * DAY_MS)
    world.reschedule(1, world.now_ms + 90 * DAY_MS)
    assert run_audit(world) == 0
    index = world.engine.timers.index
    for slot_s in index.links.wheel.filled(
        index.links.hand_s + 1, index.links.hand_s + index.links.wheel.slot_count
    ):
        relast(world, slot_s, -1)
    assert run_audit(world) == 2
    assert run_audit(world) == 0


def test_changes_during_an_audit_are_not_corrected() -> None:
    for seed in range(30):
        random, world = Random(seed), TimerWorld()
        for n in range(3 * PAGE_ENTRIES // 8):
            world.schedule(f"t{n}", delay_ms=random.randrange(1, 3 * DAY_MS))
        count = 3 * PAGE_ENTRIES // 8
        for _ in audit_of(world).run(world.now_ms):
            for _ in range(random.randrange(4)):
                match random.randrange(5):
                    case 0:
                        world.schedule(f"t{count}", delay_ms=random.randrange(1, 60 * DAY_MS))
                        count += 1
                    case 1:
                        world.cancel(random.randrange(count))
                    case 2:
                        due_at_ms = world.now_ms + random.randrange(1, 20 * DAY_MS)
                        world.reschedule(random.randrange(count), due_at_ms)
                    case 3:
                        world.engine.timers.index.link_gathered()
                    case _:
                        world.advance(random.randrange(20 * SECOND_MS))
        assert not +audit_of(world).drift, f"seed {seed}"
        assert run_audit(world) == 0
        world.judge()


def test_a_damaged_record_of_a_chain_rebuilds_all_links() -> None:
    world, slot_s = waiting_world()
    index = world.engine.timers.index
    index.link_gathered()
    relast(world, slot_s, index.links.timer_log.end + 64)
    for _ in audit_of(world).run(world.now_ms):
        pass
    assert index.links.is_damaged
    world.background()
    assert run_audit(world) == 0
    world.sleep(2 * HOUR_MS)
    assert len(world.texts()) == IN_ONE_SECOND + 1


def test_slices_of_an_audit_are_bounded() -> None:
    world = TimerWorld()
    for n in range(4 * RECORDS_A_SLICE):
        world.schedule(f"t{n}", delay_ms=HOUR_MS + n % 3)
    world.engine.timers.index.link_gathered()
    meter = Meter(world.engine)
    for _ in audit_of(world).run(world.now_ms):
        assert meter.take().items <= max(RECORDS_A_SLICE, PAGE_ENTRIES) + 1
