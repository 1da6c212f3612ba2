"""The files of timers over several lives of the process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.timer_world import (
    SECOND_MS,
    TIMERS,
    TimerWorld,
    timer_files,
    without_timer_files,
)
from tidemill.broker.engine.store.mappings import FILES_MAX
from tidemill.broker.engine.timer import timer_log
from tidemill.common.errors import MessageNotFound


def test_timer_files_newer_than_the_snapshot_are_rebuilt() -> None:
    """The last checkpoint of the store is older than the first timer."""
    world = TimerWorld()
    world.send("x")
    world.checkpoint()
    world.schedule("a", delay_ms=100 * SECOND_MS)
    world.sleep(20 * SECOND_MS)
    assert len(timer_files(world.disk)) == 4
    world.restart()
    world.schedule("b", delay_ms=100 * SECOND_MS)
    world.sleep(200 * SECOND_MS)
    world.background()
    assert world.texts() == ["a", "b"]
    world.check()


def test_a_timer_log_file_stays_for_the_timers_of_an_earlier_process() -> None:
    world = TimerWorld()
    world.schedule("far", delay_ms=3_000 * SECOND_MS)
    world.sleep(12 * SECOND_MS)
    world.checkpoint()
    world.sleep(SECOND_MS)
    world.restart()
    for turn in range(30):
        for n in range(20):
            world.schedule(f"near-{turn}-{n}", delay_ms=3 * SECOND_MS)
        world.sleep(4 * SECOND_MS)
    world.background()
    world.advance(3_000 * SECOND_MS)
    assert world.texts()[-1] == "far"
    world.check()


def test_a_missing_wheel_is_rebuilt_with_a_timer_log_of_several_files() -> None:
    world = TimerWorld()
    for n in range(500):
        world.schedule(f"m{n}", delay_ms=(100 + n) * SECOND_MS)
    world.sleep(12 * SECOND_MS)
    world.checkpoint()
    world.sleep(SECOND_MS)
    assert len(world.disk.names("timer/timerlog")) == 3
    world.disk.remove("timer/wheel")
    end = world.engine.timers.index.links.timer_log.end
    for _ in range(3):
        world.restart()
        begin = world.engine.timers.index.links.timer_log.begin
        assert end <= begin < end + TIMERS.timer_log_file_bytes, "after all known positions"
    world.advance(700 * SECOND_MS)
    assert len(world.texts()) == 500
    world.check()


def test_a_replay_creates_table_files_without_entries() -> None:
    """Ids with expired records leave a gap, which a later start must accept."""
    world = TimerWorld(segment_bytes=32 << 10, retention_ms=3600 * SECOND_MS)
    world.schedule("far", delay_ms=100 * 3600 * SECOND_MS)
    for turn in range(16):
        for n in range(128):
            world.schedule(f"m{turn}-{n}", delay_ms=2 * SECOND_MS, commit=n == 127)
        world.advance(1000 * SECOND_MS)
        world.background()
        world.checkpoint()
    world.schedule("newest", delay_ms=3600 * SECOND_MS)
    assert world.engine.log.min_offset > 0
    for name in timer_files(world.disk):
        world.disk.remove(name)
    world.restart()
    assert world.report.replayed_from == world.engine.log.min_offset
    world.sleep(20 * SECOND_MS)
    world.background()
    assert len(world.disk.names("timer/state")) == 5
    world.restart()
    assert world.report.replayed_from > world.engine.log.min_offset, "the files are complete"
    world.check()


def test_ids_of_expired_timers_stay_used_after_a_start_without_files() -> None:
    """Retention has removed the schedules, because their topic was deleted."""
    world = TimerWorld()
    for n in range(4):
        world.schedule(f"m{n}", delay_ms=SECOND_MS)
    world.sleep(3 * SECOND_MS)
    for n in range(40):
        world.send(f"filler{n}", topic="filler", size=60_000)
    for topic in (TOPIC, "filler"):
        world.engine.administration.delete_topic(topic, world.now_ms)
    world.commit()
    world.background()
    assert world.engine.log.min_offset > 0
    world.disk = without_timer_files(world.disk.after_kill())
    world.open()
    assert world.engine.timers.index.next_id == 4
    with pytest.raises(MessageNotFound, match="final state has expired"):
        world.cancel(3)


def test_a_timer_log_opens_and_maps_few_of_its_files() -> None:
    """Chains lead through all files, over two starts. Then all files but the newest are deleted."""
    world = TimerWorld(timer=replace(TIMERS, timer_log_file_bytes=64 * 2))
    for turn in range(40):
        for n in range(20):
            world.schedule(f"m{turn}-{n}", delay_ms=600 * SECOND_MS, commit=n == 19)
        world.sleep(2 * SECOND_MS)
    assert len(world.disk.names(timer_log.FOLDER)) > 2 * FILES_MAX
    for _ in range(2):
        # The active segment, the next one, the wheel, and table files.
        assert world.disk.open_files <= 8
        audit(world)
        assert len(world.engine.mappings) <= FILES_MAX
        assert world.disk.open_files <= 8
        world.restart()
    world.advance(700 * SECOND_MS)
    assert len(world.texts()) == 800
    world.sleep(60 * SECOND_MS)
    assert len(world.disk.names(timer_log.FOLDER)) <= 2
    assert not [name for name in world.engine.mappings if name not in world.disk.all_names()]
    world.check()


def test_a_cut_timer_log_file_has_no_mapped_view() -> None:
    world = TimerWorld()
    world.schedule("far", delay_ms=600 * SECOND_MS)
    world.checkpoint()
    world.sleep(12 * SECOND_MS)
    world.restart()
    (name,) = world.disk.names(timer_log.FOLDER)
    assert f"resize {name} 64" in world.disk.operations
    assert name not in world.engine.mappings


def audit(world: TimerWorld) -> None:
    """Walk all chains."""
    for files in world.engine.timers.janitor.audit.run(world.now_ms):
        for file in files:
            file.sync()
    assert not world.engine.timers.index.links.is_damaged
