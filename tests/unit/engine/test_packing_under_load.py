"""The space of a deleted topic returns although messages are sent all the time."""

from __future__ import annotations

import pytest

from tests.support.worlds.packed_worlds import SEGMENT, small_world

STEP_MS = 20
WITHIN_MS = 30_000


@pytest.mark.parametrize("sent_bytes", [100, SEGMENT * 3 // 4])
def test_packing_gets_on_while_messages_are_sent_all_the_time(sent_bytes: int) -> None:
    """Between two messages the background has no job, or the log grows by most of a segment."""
    world = small_world()
    world.send("unread")
    for n in range(30):
        world.send(f"gone {n}", topic="gone", size=20_000)
    world.checkpoint()
    world.background()
    world.engine.administration.delete_topic("gone", world.now_ms)
    world.commit()
    end_ms = world.now_ms + WITHIN_MS
    freed = 0
    while world.now_ms < end_ms and freed < 8 * SEGMENT:
        world.now_ms += STEP_MS
        world.send("more", topic="other", size=sent_bytes)
        for _ in range(4):
            files = world.engine.background.step(
                world.now_ms, firing_ms=world.now_ms, monotonic_ms=world.monotonic_ms
            )
            for file in files or ():
                file.sync()
            if files is None:
                break
        freed = sum(one.end - one.start - one.file_size for one in world.engine.log.segments)
    assert freed >= 8 * SEGMENT
