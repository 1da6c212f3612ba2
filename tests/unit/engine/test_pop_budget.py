"""The size limit of one pop: a large message travels alone."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import World
from tidemill.broker.engine.pop.budget import ALONE_BYTES

SMALL, LARGE = 100, ALONE_BYTES + 1


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("queues", [1, 3])
def test_a_large_message_is_the_only_one_of_its_pop(is_ordered: bool, queues: int) -> None:
    world = World(segment_bytes=64 << 20)
    world.topic(queues=queues)
    world.group(is_ordered=is_ordered)
    for queue_id in range(queues):
        for n, size in enumerate((SMALL, SMALL, LARGE, LARGE, SMALL)):
            world.send(
                f"{'large' if size == LARGE else 'small'}-{queue_id}-{n}",
                queue_id=queue_id,
                size=size,
            )
    received: list[str] = []
    while popped := world.pop(32):
        kinds = [one.body.partition("-")[0] for one in popped]
        assert kinds == ["large"] or set(kinds) == {"small"}
        received += [one.body for one in popped]
        world.ack(*popped)
    assert len(received) == 5 * queues
    if is_ordered:
        for queue_id in range(queues):
            of_queue = [name for name in received if name.split("-")[1] == str(queue_id)]
            assert of_queue == sorted(of_queue, key=lambda name: int(name.split("-")[2]))
