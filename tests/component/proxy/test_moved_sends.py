"""Sends to two broker groups if one fails: their targets and their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import ProxyWorld, eventually, message
from tidemill.broker.engine.metadata.membership import BrokerGroup, Home
from tidemill.proxy.link.commands import APPEND
from tidemill.proxy.settings import ProxySettings
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

NAMES = ("broker-0", "broker-1")


def run(
    scenario: Callable[[ProxyWorld, MemoryBroker, MemoryBroker], Awaitable[None]],
    *,
    kind: int = pb.TOPIC_TYPE_MIXED,
) -> None:
    """Run `scenario` with a home broker, a follower, and a proxy that knows both.

    `kind` is the type of their topic.
    """

    async def main() -> None:
        async with asyncio.timeout(20), AsyncExitStack() as stack:
            brokers = [await stack.enter_async_context(MemoryBroker().serving()) for _ in NAMES]
            join(brokers, kind=kind)
            settings = ProxySettings(brokers=[broker.address for broker in brokers])
            world = ProxyWorld(brokers[0], settings)
            await stack.enter_async_context(world.cluster.running())
            await world.cluster.configured()
            await eventually(lambda: len(world.cluster.brokers) == len(brokers))
            await scenario(world, *brokers)

    asyncio.run(main())


def join(brokers: list[MemoryBroker], *, kind: int) -> None:
    """Make the first broker the home. All brokers have one topic, each under its own id."""
    home = Home(cluster_id="c", name=NAMES[0], address=brokers[0].address)
    placements = tuple([(name, 8) for name in NAMES])
    brokers[1].engine.put_group("so that ids differ")
    of_home = brokers[0].engine.put_topic("topic", kind=kind)
    for name, broker in zip(NAMES, brokers, strict=True):
        catalog = broker.engine.catalog
        catalog.broker_name, catalog.membership.home = name, home
        is_home = broker is brokers[0]
        own = of_home if is_home else broker.engine.put_topic("topic", kind=kind)
        own = replace(own, home_id=0 if is_home else of_home.id, placements=placements)
        catalog.topics["topic"] = own
        broker.engine.take_config_changes()  # The first configuration includes them.
    members = brokers[0].engine.catalog.membership.groups
    for name, broker in zip(NAMES, brokers, strict=True):
        members[name] = BrokerGroup(name=name, address=broker.address)


def stored(broker: MemoryBroker) -> int:
    return len(broker.engine.log)


async def send_some(world: ProxyWorld, count: int = 6, *, deadline_s: float = 10) -> list[int]:
    """Send messages concurrently; return the codes of their answers."""
    answers = await asyncio.gather(
        *(world.send(message(message_id=f"m{n}"), deadline_s=deadline_s) for n in range(count))
    )
    return [answer.status.code for answer in answers]


def test_sends_spread_over_broker_groups() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        assert await send_some(world) == [v2.OK] * 6
        assert (stored(home), stored(follower)) == (3, 3)

    run(scenario)


def test_a_send_rejected_by_one_broker_group_goes_to_another() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.failures["append"] = pb.Failure(error="DiskFull", message="full")
        assert await send_some(world) == [v2.OK] * 6
        assert (stored(home), stored(follower)) == (6, 0)

    run(scenario)


def test_an_invalid_message_is_not_sent_to_another_broker_group() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.failures["append"] = pb.Failure(error="MessageCorrupted", message="damaged")
        assert sorted(await send_some(world)) == [v2.OK] * 3 + [v2.MESSAGE_CORRUPTED] * 3
        assert stored(home) == 3

    run(scenario)


def test_sends_of_a_lost_stream_go_to_another_broker_group_at_once() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.is_reading.clear()
        link = world.cluster.brokers[1].link
        # Half of this deadline is longer than the test.
        sent = asyncio.create_task(send_some(world, deadline_s=60))
        await eventually(lambda: link.batching.unanswered > 0)
        gathered = asyncio.create_task(send_some(world, deadline_s=60))
        await eventually(lambda: bool(link.batching.rows_of(APPEND)))
        follower.go()
        assert await sent == await gathered == [v2.OK] * 6
        assert stored(home) == 12

    run(scenario)


def test_a_hanging_broker_takes_half_of_the_deadline_of_a_send() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.holds.add("append")
        answers = [await world.send(message(message_id=f"m{n}"), deadline_s=1) for n in range(2)]
        assert [answer.status.code for answer in answers] == [v2.OK] * 2
        assert stored(home) == 2

    run(scenario)


def test_each_message_of_a_request_moves_independently() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.failures["append"] = pb.Failure(error="DiskFull", message="full")
        answer = await world.send(*(message(message_id=f"m{n}") for n in range(4)))
        assert [entry.status.code for entry in answer.entries] == [v2.OK] * 4
        assert stored(home) == 4

    run(scenario)


def test_a_message_group_never_moves() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.failures["append"] = pb.Failure(error="DiskFull", message="full")
        codes = [
            (await world.send(message(message_id=f"m{n}", message_group=f"group {n}"))).status.code
            for n in range(20)
        ]
        assert set(codes) == {v2.OK, v2.INTERNAL_SERVER_ERROR}
        assert stored(home) == codes.count(v2.OK)

    run(scenario)


def test_a_delayed_message_that_may_be_stored_twice_has_no_recall_handle() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.holds.add("append")
        handles = []
        for n in range(2):
            one = message(message_id=f"m{n}", message_type=v2.DELAY)
            one.system_properties.delivery_timestamp.FromMilliseconds(
                time.time_ns() // 1_000_000 + 3_600_000
            )
            answer = await world.send(one, deadline_s=1)
            assert answer.status.code == v2.OK
            handles.append(answer.entries[0].recall_handle)
        assert sorted(map(bool, handles)) == [False, True]

    run(scenario)


def test_a_rejection_does_not_hide_an_unknown_outcome() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.holds.add("append")
        home.failures["append"] = pb.Failure(error="Overloaded", message="full")
        while world.cluster.choose_target(topic(world), "").broker is not world.cluster.home:
            pass  # The next target is the follower.
        answer = await world.send(message(), deadline_s=1)
        assert answer.status.code == v2.PROXY_TIMEOUT

    def topic(world: ProxyWorld) -> pb.TopicConfig:
        return world.cluster.find_topic("topic")

    run(scenario)


def test_messages_of_all_levels_rotate_over_the_broker_groups() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        for number in range(8):
            answer = await world.send(message(message_id=f"m{number}", priority=number // 2))
            assert answer.status.code == v2.OK
        for broker in (home, follower):
            assert [each.queue_id for each in broker.engine.log] == [0, 1, 2, 3]

    run(scenario, kind=pb.TOPIC_TYPE_PRIORITY)


def test_a_moved_message_keeps_its_level() -> None:
    async def scenario(world: ProxyWorld, home: MemoryBroker, follower: MemoryBroker) -> None:
        follower.failures["append"] = pb.Failure(error="DiskFull", message="full")
        for number in range(4):
            answer = await world.send(message(message_id=f"m{number}", priority=5))
            assert answer.status.code == v2.OK
        assert [each.queue_id for each in home.engine.log] == [5] * 4

    run(scenario, kind=pb.TOPIC_TYPE_PRIORITY)
