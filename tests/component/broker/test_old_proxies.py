"""A broker refuses proxies that check no rights, unless the security mode is off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from tests.support.security_items import MODE_OFF, MODE_ON
from tests.support.worlds.proxy_world import eventually
from tests.support.worlds.round_world import Proxy, RoundWorld
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.link.link_service import BrokerLinkService
from tidemill.common.feature_level import FEATURE_LEVEL, FIRST_LEVEL
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

SECURITY_LEVEL = 3
POLL_MS = 20_000


def introduction(level: int) -> pb.RequestFrame:
    return pb.RequestFrame(process_id=b"proxy", stream_number=1, feature_level=level)


class Stream(Proxy):
    """The stream of a proxy, as the service serves it."""

    def __init__(self, world: RoundWorld, level: int | None) -> None:
        """Begin with the level of the proxy; with None, wait for the frames of the test."""
        super().__init__(world.rounds, {})
        if level is not None:
            self.requests.put_nowait(introduction(level))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.frames()


async def set_mode(world: RoundWorld, item: dict[str, Any]) -> None:
    await world.rounds.call_slices(
        lambda engine, turn: engine.security.change(
            [item], expected_version=engine.catalog.security.version, now_ms=turn.now_ms
        )
    )


def run(scenario: Callable[[RoundWorld], Awaitable[None]]) -> None:
    async def main() -> None:
        world = RoundWorld()
        async with asyncio.timeout(20), world.running():
            await scenario(world)

    asyncio.run(main())


def serve(world: RoundWorld, stream: Stream) -> asyncio.Task[None]:
    service = BrokerLinkService(world.rounds, Traffic())
    return asyncio.create_task(service.exchange(cast("Any", stream)))


async def refused(serving: asyncio.Task[None]) -> None:
    with pytest.raises(RpcError) as refusal:
        await serving
    assert refusal.value.code is RpcCode.FAILED_PRECONDITION
    assert "upgrade the proxy" in str(refusal.value)


@pytest.mark.parametrize("level", [0, FIRST_LEVEL, SECURITY_LEVEL - 1])
def test_an_old_proxy_is_refused_when_it_connects(level: int) -> None:
    async def scenario(world: RoundWorld) -> None:
        await set_mode(world, MODE_ON)
        await refused(serve(world, Stream(world, level)))

    run(scenario)


def test_the_mode_ends_the_link_and_the_polls_of_an_old_proxy() -> None:
    async def scenario(world: RoundWorld) -> None:
        stream = Stream(world, FIRST_LEVEL)
        serving = serve(world, stream)
        await stream.reply()
        await stream.send(world.pop_frame(1, poll_ms=POLL_MS))
        await eventually(lambda: world.polls.count == 1)
        await set_mode(world, MODE_ON)
        assert not world.polls.count
        await refused(serving)

    run(scenario)


def test_a_link_without_an_introduction_is_refused() -> None:
    async def scenario(world: RoundWorld) -> None:
        await set_mode(world, MODE_ON)
        stream = Stream(world, None)
        serving = serve(world, stream)
        await stream.reply()
        end = world.world.engine.log.log_end
        await stream.send(world.append_frame("m"))
        await refused(serving)
        assert world.world.engine.log.log_end == end

    run(scenario)


def test_the_mode_ends_a_link_that_never_introduced_itself() -> None:
    async def scenario(world: RoundWorld) -> None:
        stream = Stream(world, None)
        serving = serve(world, stream)
        await stream.reply()
        await stream.send(world.pop_frame(1, poll_ms=POLL_MS))
        await eventually(lambda: world.polls.count == 1)
        await set_mode(world, MODE_ON)
        assert not world.polls.count
        await refused(serving)

    run(scenario)


def test_a_present_proxy_may_introduce_itself_after_a_change_of_the_mode() -> None:
    async def scenario(world: RoundWorld) -> None:
        stream = Stream(world, None)
        serving = serve(world, stream)
        await stream.reply()
        await set_mode(world, MODE_ON)
        await stream.send(introduction(FEATURE_LEVEL))
        await stream.send(world.append_frame("m"))
        while not (await stream.reply()).appends.request_ids:
            pass
        await stream.requests.put(None)
        await serving

    run(scenario)


def test_a_present_proxy_and_the_mode_off_refuse_nobody() -> None:
    async def scenario(world: RoundWorld) -> None:
        old = Stream(world, FIRST_LEVEL)
        serving_old = serve(world, old)
        await old.reply()
        await set_mode(world, MODE_OFF)
        await old.send(world.append_frame("m"))
        while not (await old.reply()).appends.request_ids:
            pass
        present = Stream(world, FEATURE_LEVEL)
        serving = serve(world, present)
        await present.reply()
        await set_mode(world, MODE_ON)
        await present.send(world.append_frame("n"))
        while not (await present.reply()).appends.request_ids:
            pass
        await refused(serving_old)
        await present.requests.put(None)
        await serving

    run(scenario)
