"""A poll gets a message of any broker group, in any state of the groups when the poll begins.

The tests try every order of the changes: links come back, and a group joins.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Literal, TypeAlias

import pytest

from tests.support.worlds.proxy_world import eventually, receive_request
from tests.support.worlds.several_brokers import SeveralBrokers, run
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

POLL_MS = 15_000  # longer than a scenario; only the shortest poll ends in a test
SHORTEST_POLL_MS = 5_000

Standing: TypeAlias = Literal["up", "down", "absent"]
# The first state is that of the home broker, which is always a member.
BEGINNINGS: list[tuple[Standing, Standing]] = [
    ("up", "up"),
    ("up", "down"),
    ("up", "absent"),
    ("down", "up"),
    ("down", "down"),
    ("down", "absent"),
]
STORIES = [(beginning, POLL_MS) for beginning in BEGINNINGS]
# A receive without a wait is complete if any broker is up.
STORIES += [(beginning, 0) for beginning in BEGINNINGS if "up" not in beginning]


async def begin(world: SeveralBrokers, *, poll_ms: int = POLL_MS) -> asyncio.Task[list[str]]:
    """Begin a receive, and run it until it waits."""

    async def receiving() -> list[str]:
        items = await world.receive(receive_request(poll_ms=poll_ms))
        bodies = [item.message.body.decode() for item in items if item.HasField("message")]
        return bodies or [v2.Code.Name(items[0].status.code)]

    began = sum(world.polling.counts.long_polls.values())
    task = asyncio.create_task(receiving())
    if poll_ms:
        counts = world.polling.counts.long_polls
        await eventually(lambda: sum(counts.values()) > began)
    return task


async def let_go(world: SeveralBrokers, n: int) -> None:
    link = world.all_brokers[n].link
    world.brokers[n].go()
    await eventually(lambda: not link.is_connected)


async def let_come(world: SeveralBrokers, n: int) -> None:
    link = world.all_brokers[n].link
    world.brokers[n].is_up.set()
    await eventually(lambda: link.is_connected)


async def become(world: SeveralBrokers, n: int, standing: Standing) -> None:
    """Put a broker group into the initial state of a story."""
    if standing == "down":
        await let_go(world, n)
    elif standing == "absent":
        world.leave(n)


async def come_up(world: SeveralBrokers, n: int, standing: Standing) -> None:
    """Bring a broker group up from the initial state of a story."""
    if standing == "down":
        await let_come(world, n)
    elif standing == "absent":
        is_parked = world.all_brokers[0].link.is_connected
        if is_parked:
            await eventually(lambda: world.brokers[0].count_of("pops") > 0)
        world.join(n)
        if is_parked:
            # Messages of its lost pop would return after a second, but time stands still here.
            await world.brokers[0].wait_for_frame("cancelled_polls")


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(("beginning", "poll_ms"), STORIES)
@pytest.mark.parametrize("order", list(itertools.permutations((0, 1))), ids=["01", "10"])
def test_a_poll_gets_a_message_of_any_member(
    beginning: tuple[Standing, Standing], at: int, poll_ms: int, order: tuple[int, int]
) -> None:
    """The other broker group stays in its state, or changes first."""

    async def scenario(world: SeveralBrokers) -> None:
        for n, standing in enumerate(beginning):
            await become(world, n, standing)
        if not poll_ms:
            world.send(at, "a")
        waiting = await begin(world, poll_ms=poll_ms)
        for n in order[: order.index(at) + 1]:
            await come_up(world, n, beginning[n])
            if n != at and not poll_ms:
                # The receive has asked that broker and ended.
                assert await waiting == ["MESSAGE_NOT_FOUND"]
                return
        if poll_ms:
            world.send(at, "a")
        assert await waiting == ["a"]
        assert not any(world.polling.counts.inflight.values())

    run(scenario, count=2)


def test_polls_of_long_unreachable_brokers_are_rejected_at_once() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        for n in range(2):
            await let_go(world, n)
        for broker in world.all_brokers:
            broker.link.pending.closed_at_s -= 3_600
        assert await (await begin(world)) == ["INTERNAL_SERVER_ERROR"]
        assert world.polling.counts.receives["topic", "group", "notify", "error"] == 1

    run(scenario, count=2)


def test_a_poll_fails_if_all_brokers_stay_unreachable() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        for n in range(2):
            await let_go(world, n)
        waiting = await begin(world, poll_ms=SHORTEST_POLL_MS)
        assert await waiting == ["INTERNAL_SERVER_ERROR"]

    run(scenario, count=2)


def test_a_poll_that_continues_at_all_groups_is_counted_once_per_outcome() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        world.leave(1)
        waiting = await begin(world)
        await eventually(lambda: world.brokers[0].count_of("pops") == 1)
        world.join(1)
        world.send(1, "a")
        assert await waiting == ["a"]
        assert dict(world.polling.counts.receives) == {
            ("topic", "group", "direct", "joined"): 1,
            ("topic", "group", "notify", "notified"): 1,
        } or dict(world.polling.counts.receives) == {
            ("topic", "group", "direct", "joined"): 1,
            ("topic", "group", "notify", "first_pop"): 1,
        }

    run(scenario, count=2)
