"""Changes that name the version that they expect: the broker compares it in the change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.metadata.catalog import group_item
from tidemill.broker.server.admin.consumer_groups import ConsumerGroupAdmin
from tidemill.broker.server.admin.topics import TopicAdmin
from tidemill.broker.server.round.rpc import ERROR_KEY
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

TOPIC, GROUP = "versioned", "readers"
HOME_ID, VERSION = 70, 5  # of a copy of the group at another broker group than the home


def purge(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.PurgeTopicRequest(name=TOPIC, expected=expected)
    return TopicAdmin(world.rounds).PurgeTopic(request)


def spread(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.SpreadTopicRequest(name=TOPIC, expected=expected)
    return TopicAdmin(world.rounds).SpreadTopic(request)


def reset(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.ResetOffsetRequest(group=GROUP, topic=TOPIC, latest=True, expected=expected)
    return ConsumerGroupAdmin(world.rounds).ResetOffset(request)


def reset_queue(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.ResetOffsetRequest(group=GROUP, topic=TOPIC, expected=expected)
    request.queues.queues.add(queue_id=1, offset=0)
    return ConsumerGroupAdmin(world.rounds).ResetOffset(request)


def forget(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.ForgetPullOffsetsRequest(group=GROUP, topic=TOPIC, expected=expected)
    return ConsumerGroupAdmin(world.rounds).ForgetPullOffsets(request)


def release(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.ReleaseLockRequest(group=GROUP, topic=TOPIC, expected=expected)
    return ConsumerGroupAdmin(world.rounds).ReleaseLock(request)


@pytest.mark.parametrize("change", [purge, spread, reset, reset_queue, forget, release])
def test_a_change_of_another_version_is_refused(
    change: Callable[[RoundWorld, pb.ExpectedVersion], Awaitable[object]],
) -> None:
    async def main() -> None:
        world = RoundWorld()
        administration, now_ms = world.world.engine.administration, world.clock.wall_ms()
        topic = administration.put_topic(TOPIC, type_=None, queues=2, now_ms=now_ms)
        group = administration.put_group(GROUP, now_ms=now_ms)
        found = topic if change in {purge, spread} else group
        async with asyncio.timeout(20), world.running():
            before = world.world.engine.log.log_end
            with pytest.raises(RpcError) as raised:
                await change(world, pb.ExpectedVersion(id=found.id, version=found.version + 1))
            assert dict(raised.value.trailers)[ERROR_KEY] == "PreconditionFailed"
            assert world.world.engine.log.log_end == before
            try:
                await change(world, pb.ExpectedVersion(id=found.id, version=found.version))
            except RpcError as other:
                # The topic has no deduplication, and the queue has no lock.
                assert dict(other.trailers)[ERROR_KEY] == "Conflict"  # noqa: PT017  # The others raise nothing.
                assert change in {spread, release}

    asyncio.run(main())


@pytest.mark.parametrize("change", [reset_queue, release])
@pytest.mark.parametrize(
    ("expected", "advice"),
    [
        (pb.ExpectedVersion(id=HOME_ID, version=VERSION - 1), "read it again"),
        (pb.ExpectedVersion(id=HOME_ID, version=VERSION + 1), "repeat the request"),
        (pb.ExpectedVersion(id=HOME_ID + 1, version=1), "repeat the request"),
    ],
)
def test_a_change_at_one_broker_group_is_compared_with_its_copy(
    change: Callable[[RoundWorld, pb.ExpectedVersion], Awaitable[object]],
    expected: pb.ExpectedVersion,
    advice: str,
) -> None:
    async def main() -> None:
        world = copied_group()
        async with asyncio.timeout(20), world.running():
            before = world.world.engine.log.log_end
            with pytest.raises(RpcError, match=advice) as raised:
                await change(world, expected)
            assert dict(raised.value.trailers)[ERROR_KEY] == "PreconditionFailed"
            assert world.world.engine.log.log_end == before

    asyncio.run(main())


def test_a_change_at_one_broker_group_passes_with_the_version_of_its_copy() -> None:
    async def main() -> None:
        world = copied_group()
        expected = pb.ExpectedVersion(id=HOME_ID, version=VERSION)
        async with asyncio.timeout(20), world.running():
            await reset_queue(world, expected)
            with pytest.raises(RpcError) as raised:
                await release(world, expected)
            assert dict(raised.value.trailers)[ERROR_KEY] == "Conflict", "no queue is locked"

    asyncio.run(main())


def copied_group() -> RoundWorld:
    """Return a broker with a topic and a copy of a consumer group of the home."""
    world = RoundWorld()
    engine, now_ms = world.world.engine, world.clock.wall_ms()
    engine.administration.put_topic(TOPIC, type_=None, queues=2, now_ms=now_ms)
    group = engine.administration.put_group(GROUP, is_ordered=True, now_ms=now_ms)
    copy = replace(group, home_id=HOME_ID, version=VERSION)
    engine.fold.append(ConfigItem(group_item(copy)), now_ms)
    return world
