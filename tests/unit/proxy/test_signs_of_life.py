"""What a link tells of the lives of clients, and how often."""

from __future__ import annotations

import asyncio

from tidemill.proxy.link.batching import Batching
from tidemill.proxy.link.commands import APPEND
from tidemill.proxy.link.signs_of_life import (
    HANDED_OVER_A_FRAME_MAX,
    HANDED_OVER_KEPT_MAX,
    HANDED_OVER_KEPT_MS,
    TOLD_A_FRAME_MAX,
    TOLD_EVERY_MS,
    Signs,
    SignsOfLife,
)
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


def test_hand_overs_of_the_last_minute_are_told_on_each_stream() -> None:
    signs = SignsOfLife(clients_max=10)
    signs.handed_over([(1, 100), (2, 200)], 0)
    assert signs.take().handed_over == [(1, 100), (2, 200)]
    assert not signs
    signs.handed_over([(3, 300)], HANDED_OVER_KEPT_MS)
    assert signs.take().handed_over == [(3, 300)]
    signs.lose()
    assert signs.take().handed_over == [(1, 100), (2, 200), (3, 300)]
    signs.handed_over([(4, 400)], HANDED_OVER_KEPT_MS + 1)
    signs.lose()
    assert signs.take().handed_over == [(3, 300), (4, 400)]
    signs.forget_deliveries()
    signs.lose()
    assert not signs


def test_who_stops_waits_until_all_is_told_and_answered() -> None:
    async def main() -> None:
        frames: list[pb.RequestFrame] = []
        signs = SignsOfLife(clients_max=10)
        batching = Batching(range(0), frames.append, signs)
        await batching.told()
        assert frames == [], "there is no stream"
        batching.open()
        await batching.told()
        assert frames == [], "there is nothing to tell"
        signs.handed_over([(1, 100)], 0)
        telling = asyncio.ensure_future(batching.told())
        for _ in range(3):
            await asyncio.sleep(0)
        assert [list(frame.handed_over.delivery_ids) for frame in frames] == [[100]]
        assert not telling.done()
        batching.answered(1)
        await telling

    asyncio.run(main())


def test_a_frame_tells_of_a_bounded_number_of_hand_overs() -> None:
    signs = SignsOfLife(clients_max=10)
    signs.handed_over([(n, n) for n in range(HANDED_OVER_KEPT_MAX + 1)], 0)
    told = []
    while signs:
        told += signs.take().handed_over
        assert len(told) % HANDED_OVER_A_FRAME_MAX == 0
    assert told == [(n, n) for n in range(1, HANDED_OVER_KEPT_MAX + 1)]
