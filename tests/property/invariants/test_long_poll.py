"""Invariants 39, 40 and 42 of pop.md section 10, as far as the broker keeps them: long polls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from zlib import crc32

from tests.support.worlds.engine_world import GROUP, blob
from tests.support.worlds.round_world import Proxy, RoundWorld
from tidemill.broker.engine.layout.message import MessageEntry
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


async def idle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def run(scenario: Callable[[RoundWorld, Proxy], Awaitable[None]], *, ordered: bool = False) -> None:
    async def main() -> None:
        world = RoundWorld()
        if ordered:
            world.group_id = world.world.group("fifo", is_ordered=True)
            world.world.engine.take_config_changes()
        async with world.running(), world.proxy() as proxy:
            await scenario(world, proxy)

    asyncio.run(main())


def answers(proxy: Proxy) -> dict[int, list[int]]:
    """Return the numbers of messages in the replies to each pop."""
    found: dict[int, list[int]] = {}
    while not proxy.replies.empty():
        for pop in proxy.replies.get_nowait().pops:
            count = sum(len(batch.indexes) for batch in pop.batches)
            found.setdefault(pop.request_id, []).append(count)
    return found


def test_invariant_39_a_sparse_filter_finds_a_message_however_far_it_is() -> None:
    """No arrival and no deadline triggers it. Each round scans a part."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        engine = world.world.engine
        data = blob("x", tag="a")
        for _ in range(20_000):
            engine.commands.send(
                TopicId(world.topic_id),
                QueueId(0),
                data,
                crc32(data),
                now_ms=world.world.now_ms,
                firing_ms=world.world.now_ms,
            )
        world.world.send("wanted", tag="b")
        world.world.background()
        await proxy.send(world.pop_frame(1, poll_ms=20_000, tags=("b",)))
        async with asyncio.timeout(5):
            reply = await proxy.reply()
        assert [list(batch.queue_offsets) for batch in reply.pops[0].batches] == [[20_000]]

    run(scenario)


def test_invariant_39_a_dead_lettered_batch_does_not_hide_later_messages() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        inner = world.world
        inner.send(*[f"m{n}" for n in range(32)])
        for duration in (1_000, 1_000):
            inner.drain(invisible_ms=duration)
            inner.advance(1_000)
        inner.engine.administration.put_group(GROUP, max_attempts=2, now_ms=inner.now_ms)
        inner.commit()
        inner.background()
        inner.engine.take_ready()
        inner.engine.take_config_changes()
        retry_id = inner.engine.catalog.retry_topic_ids[world.group_id, world.topic_id]
        data = blob("good")
        end = inner.engine.catalog.queue(retry_id, QueueId(0)).max_offset
        again = MessageEntry(retry_id, QueueId(0), 1, end, 0, None, data, crc32(data))
        inner.engine.fold.append(again, inner.now_ms)
        inner.commit()
        await proxy.send(world.pop_frame(1, poll_ms=20_000))
        reply = await proxy.reply()
        assert [list(batch.queue_offsets) for batch in reply.pops[0].batches] == [[64]]

    run(scenario)


def test_invariant_40_every_receive_is_answered_once_and_by_its_deadline() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        for n in range(6):
            await proxy.send(world.pop_frame(n, poll_ms=1_000 * (n + 1), want=1))
        await idle()
        assert answers(proxy) == {}
        await proxy.send(world.append_frame("m0", "m1", first_id=100))
        await idle()
        assert answers(proxy) == {0: [1], 1: [1]}
        for n in range(2, 6):
            world.advance(3_000 if n == 2 else 1_000)
            await idle()
            assert answers(proxy) == {n: [0]}
        world.advance(100_000)
        await idle()
        assert answers(proxy) == {}

    run(scenario)


def test_invariant_40_a_cancelled_receive_takes_nothing() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(1, poll_ms=10_000))
        await idle()
        await proxy.send(pb.RequestFrame(cancelled_polls=[1]))
        await proxy.send(world.append_frame("m0", first_id=100))
        await idle()
        await proxy.send(world.pop_frame(2))
        await idle()
        assert answers(proxy) == {2: [1]}

    run(scenario)


def test_invariant_40_a_receive_cancelled_too_late_is_answered_and_can_be_given_back() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        frame = world.append_frame("m0", first_id=100)
        frame.pops.append(world.pop_frame(1, poll_ms=10_000).pops[0])
        frame.cancelled_polls.append(1)
        await proxy.send(frame)
        reply = await proxy.reply()
        (batch,) = reply.pops[0].batches
        change = pb.ChangeInvisibleRequest(
            request_id=2,
            group_id=world.group_id,
            topic_id=world.topic_id,
            slot=batch.slot,
            delivery_id=batch.delivery_id,
            index=0,
            visible_at_ms=batch.visible_at_ms,
            invisible_duration_ms=1_000,
        )
        await proxy.send(pb.RequestFrame(changes=[change]))
        await proxy.send(world.pop_frame(3, poll_ms=10_000))
        await idle()
        assert answers(proxy) == {}
        world.advance(1_000)
        await idle()
        assert answers(proxy) == {3: [1]}

    run(scenario)


def test_invariant_42_a_blocked_queue_wakes_no_poll_until_it_is_free() -> None:
    """With a long backlog and many polls, only arrivals cause pops."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.world.send(*[f"m{n}" for n in range(100)])
        await proxy.send(world.pop_frame(1, poll_ms=60_000, want=2))
        await proxy.reply()
        for n in range(2, 12):
            await proxy.send(world.pop_frame(n, poll_ms=25_000))
        await idle()
        subscription = world.world.engine.state.subscriptions[world.group_id, world.topic_id]
        pops = subscription.turn
        for _ in range(20):
            world.advance(1_000)
            await idle()
        assert subscription.turn == pops
        for n in range(5):
            await proxy.send(world.append_frame(f"late{n}", first_id=100 + n))
            await idle()
        assert subscription.turn <= pops + 5
        world.advance(5_000)
        await idle()
        assert sorted(set(answers(proxy)) - {1}) == list(range(2, 12))
        assert subscription.turn <= pops + 5

    run(scenario, ordered=True)
