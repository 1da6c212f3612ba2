"""Pages of progress: their size is limited, and reading them changes nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.server.reader.listings import BrokerReader
from tidemill.broker.server.reader.progress_pages import (
    QUEUES_A_PAGE,
    QUEUES_A_SLICE,
    QUEUES_A_TOPIC,
)
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.grpc.status import RpcError

TOPICS = 5
WIDE = 1_000  # queues of each topic: together more than a page
PULLED = 3  # pulled queues of one more topic


def run(scenario: Callable[[RoundWorld, BrokerReader], Awaitable[None]]) -> None:
    """Run `scenario` with groups that pop wide topics and pull some queues of one more topic."""

    async def main() -> None:
        world = RoundWorld()
        inner, put = world.world, world.world.engine.administration
        for number in range(TOPICS):
            put.put_topic(f"wide-{number}", type_=None, queues=WIDE, now_ms=inner.now_ms)
        put.put_topic("pulled", type_=None, queues=10, now_ms=inner.now_ms)
        for group, number in itertools.product(("first", "second"), range(TOPICS)):
            inner.send("m0", topic=f"wide-{number}", queue_id=WIDE - 1)
            inner.pop(1, group=group, topic=f"wide-{number}")
        puller = inner.group("first")
        for number in range(PULLED):
            place = inner.topic("pulled"), QueueId(2 * number)
            put.update_pull_offset(puller, *place, 0, inner.now_ms)
        inner.commit()
        async with asyncio.timeout(30), world.running():
            await scenario(world, BrokerReader(world.rounds))

    asyncio.run(main())


async def pages(reader: BrokerReader, **fields: object) -> list[pb.ListProgressReply]:
    request = pb.ListProgressRequest(**fields)  # type: ignore[arg-type]  # as the message
    found: list[pb.ListProgressReply] = []
    while not found or request.cursor:
        found.append(await reader.ListProgress(request))
        request.cursor = found[-1].cursor
    return found


def test_a_page_continues_within_a_group() -> None:
    async def scenario(_world: RoundWorld, reader: BrokerReader) -> None:
        found = await pages(reader)
        assert all(len(page.items) <= QUEUES_A_PAGE for page in found)
        places = [
            (item.consumer_group, item.topic, item.queue_id)
            for page in found
            for item in page.items
        ]
        wide = [(f"wide-{n}", number) for n in range(TOPICS) for number in range(WIDE)]
        expected = [("billing", "orders", 0)]
        expected += [("first", *place) for place in wide]
        expected += [("first", "pulled", 2 * number) for number in range(PULLED)]
        expected += [("second", *place) for place in wide]
        assert places == expected
        one = await pages(reader, groups=["second"])
        assert [len(page.items) for page in one] == [QUEUES_A_PAGE, len(wide) - QUEUES_A_PAGE]

    run(scenario)


def test_reading_pages_creates_no_progress() -> None:
    async def scenario(world: RoundWorld, reader: BrokerReader) -> None:
        state = world.rounds.engine.state
        known = set(state.progress)
        await pages(reader)
        assert set(state.progress) == known

    run(scenario)


def test_all_messages_of_an_unread_queue_are_ready() -> None:
    async def scenario(world: RoundWorld, reader: BrokerReader) -> None:
        world.world.topic("some", queues=2)
        world.world.group("late")
        world.world.pop(1, group="late", topic="some")
        state, ids = world.rounds.engine.state, world.rounds.engine.catalog.topic_ids
        world.rounds.engine.administration.put_topic(
            "some", type_=None, queues=3, now_ms=world.world.now_ms
        )
        world.world.send("m0", "m1", topic="some", queue_id=2)
        (page,) = await pages(reader, groups=["late"])
        assert (world.world.group("late"), ids["some"], 2) not in state.progress
        item = page.items[2]
        assert (item.queue_id, item.max_offset, item.ready_count) == (2, 2, 2)
        assert (item.pop_offset, item.commit_offset, item.pull_offset) == (0, 0, -1)

    run(scenario)


@pytest.mark.parametrize("cursor", ["x", "1.2", "1.2.3.4", "1..2", "9" * 19 + ".0.0"])
def test_an_invalid_cursor_is_rejected(cursor: str) -> None:
    async def scenario(_world: RoundWorld, reader: BrokerReader) -> None:
        with pytest.raises(RpcError):
            await reader.ListProgress(pb.ListProgressRequest(cursor=cursor))

    run(scenario)


def test_many_groups_of_few_queues_share_a_slice() -> None:
    groups = 100

    async def scenario(world: RoundWorld, reader: BrokerReader) -> None:
        for number in range(groups):
            world.world.pop(1, group=f"small-{number}", topic="pulled")
        world.world.commit()
        before = world.rounds.count
        names = [f"small-{number}" for number in range(groups)]
        (page,) = await pages(reader, groups=names)
        assert len(page.items) == groups * 10
        slices = -(-groups * (10 + 3 * QUEUES_A_TOPIC) // QUEUES_A_SLICE)
        # And one round for the names, one for the begin, and perhaps one that finds the end.
        assert world.rounds.count - before <= slices + 3

    run(scenario)
