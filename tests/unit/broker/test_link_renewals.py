"""The renewals of deliveries, by the frames of links about their clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.worlds.round_world import Proxy, RoundWorld, idle
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RENEWS
from tidemill.broker.engine.pop.renewals import SILENT_GRACE_MS, SILENT_MS
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

CLIENT = "client-1"
HIDDEN_MS = 30_000  # the invisible duration of `pop_frame`


def in_world(scenario: Callable[[RoundWorld, Proxy], Awaitable[None]]) -> None:
    async def main() -> None:
        world = RoundWorld()
        async with asyncio.timeout(20), world.running(), world.proxy() as proxy:
            await scenario(world, proxy)

    asyncio.run(main())


async def pop_for_client(
    world: RoundWorld, proxy: Proxy, request_id: int = 2
) -> pb.ReceivedDeliveries:
    """Send a message, and let a push consumer have it."""
    await proxy.send(world.append_frame("m"))
    await proxy.reply()
    await proxy.send(world.pop_frame(request_id, renews_for=CLIENT))
    (batch,) = (await proxy.reply()).pops[0].batches
    return pb.ReceivedDeliveries(slots=[batch.slot], delivery_ids=[batch.delivery_id])


async def pass_time(world: RoundWorld, duration_ms: int, proxy: Proxy | None = None) -> None:
    """Let time pass, with heartbeats over `proxy`."""
    for _ in range(duration_ms // 10_000):
        if proxy is not None:
            await proxy.send(pb.RequestFrame(alive_clients=[CLIENT]))
            await idle()
        world.advance(10_000)
        await idle()


def renewing(world: RoundWorld) -> int:
    table = world.world.engine.state.table
    return sum(
        bool(table.flags[slot] & FLAG_RENEWS and table.live[slot])
        for slot in table.in_use(0, len(table.ids)).tolist()
    )


def in_flight(world: RoundWorld) -> int:
    return sum(one.in_flight for one in world.world.engine.state.progress.values())


def test_heartbeats_over_any_link_renew_deliveries() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        async with world.proxy() as ended:
            popped = await pop_for_client(world, ended)
            await ended.send(pb.RequestFrame(handed_over=popped))
            await idle()
        await pass_time(world, 600_000, proxy)
        assert (in_flight(world), renewing(world)) == (1, 1)
        await pass_time(world, SILENT_MS)
        world.advance(SILENT_GRACE_MS)
        await idle()
        world.advance(SILENT_GRACE_MS)
        await idle()
        assert in_flight(world) == 0

    in_world(scenario)


@pytest.mark.parametrize("link_ends", [False, True])
def test_a_delivery_without_a_receipt_is_not_renewed(link_ends: bool) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        async with world.proxy() as other:
            await pop_for_client(world, other if link_ends else proxy)
        await idle()
        await pass_time(world, HIDDEN_MS - 10_000, proxy)
        assert in_flight(world) == 1
        await pass_time(world, 10_000, proxy)
        assert in_flight(world) == 0, "the client is alive, but may not have received it"

    in_world(scenario)


def test_a_receipt_may_come_on_a_later_stream() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        async with world.proxy() as ended:
            popped = await pop_for_client(world, ended)
        await proxy.send(pb.RequestFrame(handed_over=popped))
        await pass_time(world, 2 * HIDDEN_MS, proxy)
        assert (in_flight(world), renewing(world)) == (1, 1)

    in_world(scenario)


def test_an_ack_in_the_frame_that_ends_its_client_counts() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("m", "n"))
        await proxy.reply()
        await proxy.send(world.pop_frame(3, renews_for=CLIENT))
        (batch,) = (await proxy.reply()).pops[0].batches
        frame = pb.RequestFrame(ended_clients=[CLIENT])
        frame.acks.request_ids.append(4)
        frame.acks.group_ids.append(world.group_id)
        frame.acks.topic_ids.append(world.topic_id)
        frame.acks.slots.append(batch.slot)
        frame.acks.delivery_ids.append(batch.delivery_id)
        frame.acks.indexes.append(0)
        frame.acks.visible_at_ms.append(batch.visible_at_ms)
        await proxy.send(frame)
        while not (results := (await proxy.reply()).acks.results):
            pass  # The first frame is about the retry topic.
        assert list(results) == [pb.ACK_RESULT_APPLIED]
        await idle()
        state = world.world.engine.state
        counts = {name: count for (name, *_), count in state.counts.items()}
        assert (counts["given_back_ended"], counts["revived"]) == (1, 1)

    in_world(scenario)


@pytest.mark.parametrize(("topic", "remaining"), [("", 0), ("another", 1)])
def test_a_revoked_client_loses_a_delivery_that_is_not_renewed(topic: str, remaining: int) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("m"))
        await proxy.reply()
        await proxy.send(world.pop_frame(3, client_id=CLIENT))
        assert (await proxy.reply()).pops[0].batches
        frame = pb.RequestFrame()
        frame.revoked.add(client_id=CLIENT, topic=topic)
        await proxy.send(frame)
        await idle()
        assert in_flight(world) == remaining

    in_world(scenario)
