"""What a link tells of the lives of clients, and how often."""

from __future__ import annotations

import asyncio

from tidemill.proxy.link.batching import Batching
from tidemill.proxy.link.commands import APPEND
from tidemill.proxy.link.signs_of_life import TOLD_A_FRAME_MAX, TOLD_EVERY_MS, Signs, SignsOfLife
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def test_a_client_is_told_of_once_in_a_period() -> None:
    signs = SignsOfLife(clients_max=10)
    assert signs.alive("a", 0)
    assert signs.take() == Signs(["a"], [], [])
    assert not signs.alive("a", TOLD_EVERY_MS - 1)
    assert not signs
    assert signs.alive("a", TOLD_EVERY_MS)
    assert signs.take() == Signs(["a"], [], [])


def test_an_end_takes_the_place_of_what_was_to_be_told() -> None:
    signs = SignsOfLife(clients_max=10)
    signs.alive("a", 0)
    signs.ended("a")
    assert signs.take() == Signs([], ["a"], [])
    assert signs.alive("a", 1), "its next life is news"


def test_a_new_stream_hears_of_everybody_again() -> None:
    signs = SignsOfLife(clients_max=10)
    signs.alive("a", 0)
    signs.take()
    signs.lose()
    assert signs.alive("a", 1)


def test_what_waits_and_what_is_remembered_is_bounded() -> None:
    signs = SignsOfLife(clients_max=3)
    for n in range(10):
        signs.alive(f"alive-{n}", n)
        signs.ended(f"ended-{n}")
    assert signs.take() == Signs(
        ["alive-7", "alive-8", "alive-9"], ["ended-7", "ended-8", "ended-9"], []
    )
    assert signs.alive("alive-6", 11), "it was forgotten"
    assert not signs.alive("alive-8", 11)


def test_a_frame_tells_of_a_bounded_number() -> None:
    signs = SignsOfLife(clients_max=10_000)
    for n in range(TOLD_A_FRAME_MAX + 1):
        signs.alive(f"client-{n}", 0)
    assert len(signs.take().alive) == TOLD_A_FRAME_MAX
    assert signs.take() == Signs([f"client-{TOLD_A_FRAME_MAX}"], [], [])


def test_signs_travel_with_a_request_and_ends_travel_alone() -> None:
    async def main() -> None:
        frames: list[pb.RequestFrame] = []
        signs = SignsOfLife(clients_max=10)
        batching = Batching(range(0), frames.append, signs)
        signs.alive("a", 0)
        batching.tell_signs()
        batching.open()
        await asyncio.sleep(0)
        assert [list(frame.alive_clients) for frame in frames] == [["a"]], "they had waited"
        batching.answered(1)
        signs.alive("b", 0)
        batching.tell_signs()
        await asyncio.sleep(0)
        assert len(frames) == 1
        batching.add(APPEND, (1, 1, 0, 0, b"blob"))
        await asyncio.sleep(0)
        assert list(frames[1].alive_clients) == ["b"]
        batching.answered(2)
        signs.ended("b")
        batching.tell_signs()
        await asyncio.sleep(0)
        assert list(frames[2].ended_clients) == ["b"]

    asyncio.run(main())
