"""Changes that name the version that they expect: the home compares it in the change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.server.admin.consumer_groups import ConsumerGroupAdmin
from tidemill.broker.server.admin.topics import TopicAdmin
from tidemill.broker.server.round.rpc import ERROR_KEY
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

TOPIC, GROUP = "versioned", "readers"


def purge(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.PurgeTopicRequest(name=TOPIC, expected=expected)
    return TopicAdmin(world.rounds).PurgeTopic(request)


def spread(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.SpreadTopicRequest(name=TOPIC, expected=expected)
    return TopicAdmin(world.rounds).SpreadTopic(request)


def reset(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.ResetOffsetRequest(group=GROUP, topic=TOPIC, latest=True, expected=expected)
    return ConsumerGroupAdmin(world.rounds).ResetOffset(request)


def forget(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.ForgetPullOffsetsRequest(group=GROUP, topic=TOPIC, expected=expected)
    return ConsumerGroupAdmin(world.rounds).ForgetPullOffsets(request)


def release(world: RoundWorld, expected: pb.ExpectedVersion) -> Awaitable[object]:
    request = pb.ReleaseLockRequest(group=GROUP, topic=TOPIC, expected=expected)
    return ConsumerGroupAdmin(world.rounds).ReleaseLock(request)


@pytest.mark.parametrize("change", [purge, spread, reset, forget, release])
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
