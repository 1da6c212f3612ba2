"""When a frame leaves for the broker, and what it carries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from tidemill.proxy.link.batching import (
    FRAMES_MAX,
    FULL_FRAME_REQUESTS,
    NEXT_FRAME_REQUESTS,
    Batching,
)
from tidemill.proxy.link.commands import APPEND
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TURNS = 10  # of the loop: more than a busy link waits


class World:
    """A batching whose frames go to a list."""

    def __init__(self) -> None:
        self.frames: list[list[int]] = []
        self.under_way: list[int] = []
        self.batching = Batching(self.under_way, self._write)
        self.batching.open()

    def _write(self, frame: pb.RequestFrame) -> None:
        self.frames.append(list(frame.appends.request_ids))

    def send(self, count: int) -> None:
        for _ in range(count):
            self.under_way.append(len(self.under_way))
            self.batching.add(APPEND, (self.under_way[-1], 1, 0, 0, b"blob"))

    @property
    def sizes(self) -> list[int]:
        return [len(frame) for frame in self.frames]


def run(scenario: Callable[[World], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        world = World()
        await scenario(world)
        sent = [request_id for frame in world.frames for request_id in frame]
        assert sent == world.under_way[: len(sent)], "each leaves once, in its order"

    asyncio.run(main())


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def test_what_is_sent_in_one_turn_leaves_together() -> None:
    async def scenario(world: World) -> None:
        world.send(3)
        assert world.frames == []
        await turns()
        assert world.sizes == [3]

    run(scenario)


def test_a_full_frame_leaves_in_the_middle_of_a_turn() -> None:
    async def scenario(world: World) -> None:
        world.send(FULL_FRAME_REQUESTS + 10)
        assert world.sizes == [FULL_FRAME_REQUESTS]
        await turns()
        assert world.sizes == [FULL_FRAME_REQUESTS], "the ten wait for the answer"
        world.batching.answered(1)
        await turns()
        assert world.sizes == [FULL_FRAME_REQUESTS, 10]

    run(scenario)


def test_no_more_than_three_frames_are_unanswered() -> None:
    async def scenario(world: World) -> None:
        world.send(10 * FULL_FRAME_REQUESTS)
        await turns()
        assert world.sizes == [FULL_FRAME_REQUESTS] * FRAMES_MAX
        world.batching.answered(FRAMES_MAX)
        await turns()
        assert world.sizes[FRAMES_MAX:] == [(10 - FRAMES_MAX) * FULL_FRAME_REQUESTS]

    run(scenario)


def test_a_few_wait_for_the_answer_and_many_do_not() -> None:
    async def scenario(world: World) -> None:
        world.send(1)
        await turns()
        world.send(NEXT_FRAME_REQUESTS - 1)
        await turns()
        assert world.sizes == [1]
        world.send(1)
        await turns()
        assert world.sizes == [1, NEXT_FRAME_REQUESTS]

    run(scenario)
