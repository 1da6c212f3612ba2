"""The files of timers over several lives of the process."""

from __future__ import annotations

from tests.support.timer_world import SECOND_MS, TimerWorld, timer_files


def test_files_of_timers_that_no_snapshot_knows_are_made_anew() -> None:
    """The last checkpoint of the store is older than the first timer, whose files are newer."""
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


def test_a_timer_log_file_written_in_two_lives_stays_for_the_timers_of_the_first() -> None:
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
