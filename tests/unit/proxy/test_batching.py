"""Frames to the broker: when they are sent, and their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from tidemill.proxy.link.batching import (
    FRAMES_MAX,
    FULL_FRAME_REQUESTS,
    NEXT_FRAME_REQUESTS,
    FrameBatcher,
)
from tidemill.proxy.link.commands import APPEND, FRAME_BYTES, POP
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TURNS = 10  # of the loop: more than a busy link waits


class World:
    """A batcher that writes its frames to a list."""

    def __init__(self) -> None:
        self.frames: list[list[int]] = []
        self.in_flight: list[int] = []
        self.batching = FrameBatcher(self.in_flight, self._write)
        self.batching.open()

    def _write(self, frame: pb.RequestFrame) -> None:
        self.frames.append(list(frame.appends.request_ids))

    def send(self, count: int) -> None:
        for _ in range(count):
            self.in_flight.append(len(self.in_flight))
            self.batching.add(APPEND, (self.in_flight[-1], 1, 0, 0, b"blob", 0))

    @property
    def sizes(self) -> list[int]:
        return [len(frame) for frame in self.frames]


def run(scenario: Callable[[World], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        world = World()
        await scenario(world)
        sent = [request_id for frame in world.frames for request_id in frame]
        assert sent == world.in_flight[: len(sent)], "each is sent once, in order"

    asyncio.run(main())


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def test_requests_of_one_turn_share_a_frame() -> None:
    async def scenario(world: World) -> None:
        world.send(3)
        assert world.frames == []
        await turns()
        assert world.sizes == [3]

    run(scenario)


def test_a_full_frame_is_sent_in_the_middle_of_a_turn() -> None:
    async def scenario(world: World) -> None:
        world.send(FULL_FRAME_REQUESTS + 10)
        assert world.sizes == [FULL_FRAME_REQUESTS]
        await turns()
        assert world.sizes == [FULL_FRAME_REQUESTS], "the ten wait for the answer"
        world.batching.mark_answered(1)
        await turns()
        assert world.sizes == [FULL_FRAME_REQUESTS, 10]

    run(scenario)


def test_no_more_than_three_frames_are_unanswered() -> None:
    async def scenario(world: World) -> None:
        world.send(10 * FULL_FRAME_REQUESTS)
        await turns()
        assert world.sizes == [FULL_FRAME_REQUESTS] * FRAMES_MAX
        world.batching.mark_answered(FRAMES_MAX)
        await turns()
        assert world.sizes[FRAMES_MAX:] == [(10 - FRAMES_MAX) * FULL_FRAME_REQUESTS]

    run(scenario)


def test_few_requests_wait_for_the_answer_and_many_do_not() -> None:
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


def test_the_bytes_of_a_frame_are_limited_over_all_commands() -> None:
    """Twenty polls with an attempt id of 8 MB once made a frame that broke the link."""

    async def main() -> None:
        frames: list[pb.RequestFrame] = []
        batching = FrameBatcher(range(0), frames.append)
        batching.open()
        for n in range(40):
            batching.add(POP, (n, pb.PopRequest(request_id=n, attempt_id="a" * 1_000_000)))
            batching.add(APPEND, (100 + n, 1, 0, 0, bytes(1_000_000), 0))
        for sequence in range(1, 30):
            await turns()
            batching.mark_answered(sequence)
        assert max(frame.ByteSize() for frame in frames) <= FRAME_BYTES
        assert len(frames) == 10
        assert [pop.request_id for frame in frames for pop in frame.pops] == list(range(40))
        appended = [one for frame in frames for one in frame.appends.request_ids]
        assert appended == list(range(100, 140))
        # Remaining rows come first: no command waits until the other one has no rows.
        assert all(frame.pops or frame.appends.request_ids for frame in frames)
        assert frames[1].appends.request_ids, "the appends had no room in the first frame"

    asyncio.run(main())
