"""The levels and the factor of pops of a PRIORITY topic, through the link of a broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.metadata.catalog import TopicType

MESSAGES = {"oldest": 2, "highest": 7, "middle": 4}  # with their levels, the oldest first


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({}, ["highest"]),
        ({"level_min": 7}, ["highest"]),
        # A factor of 0 takes the oldest message of the lower levels.
        ({"priority_factor": 0}, ["oldest"]),
        ({"priority_factor": 100}, ["highest"]),
        ({"level_below": 7}, ["middle"]),
        ({"level_below": 4, "priority_factor": 100}, ["oldest"]),
        ({"level_below": 2}, []),
    ],
)
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_pop_takes_the_message_that_its_request_wants(
    fields: dict[str, Any], texts: list[str], *, is_ordered: bool
) -> None:
    async def main() -> None:
        world = RoundWorld()
        engine, now_ms = world.world.engine, world.world.now_ms
        topic = engine.administration.put_topic(
            "urgent", type_=TopicType.PRIORITY, queues=8, now_ms=now_ms
        )
        world.world.group("reader", is_ordered=is_ordered)
        for text, level in MESSAGES.items():
            world.world.send(text, topic="urgent", queue_id=level)
        async with world.running(), world.proxy() as proxy:
            frame = world.pop_frame(1, topic_id=topic.id, want=1)
            [pop] = frame.pops
            pop.group_id = engine.catalog.group_ids["reader"]
            for name, value in fields.items():
                setattr(pop, name, value)
            await proxy.send(frame)
            reply = await proxy.reply()
            found = [blob for one in reply.pops for batch in one.batches for blob in batch.blobs]
            assert [text for text in MESSAGES for blob in found if text.encode() in blob] == texts

    asyncio.run(main())
