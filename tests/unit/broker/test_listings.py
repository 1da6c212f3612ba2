"""Listings beside consumers: what they name and is not there is refused, or left out and told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.round_world import RoundWorld
from tidemill.broker.server.reader import BrokerReader
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.grpc.status import RpcError


def run(scenario: Callable[[BrokerReader], Awaitable[None]]) -> None:
    """Run `scenario` over a topic of which group `g`, of two, has one message in flight."""

    async def main() -> None:
        world = RoundWorld()
        world.world.send("m0", topic="orders")
        world.world.pop(1, topic="orders", group="g", invisible_ms=60_000)
        async with asyncio.timeout(30), world.running():
            await scenario(BrokerReader(world.rounds))

    asyncio.run(main())


def test_a_listing_that_names_what_is_not_there_is_refused() -> None:
    async def scenario(reader: BrokerReader) -> None:
        with pytest.raises(RpcError, match="there is no consumer group 'h'"):
            await reader.ListInFlight(pb.ListInFlightRequest(groups=["g", "h"]))
        with pytest.raises(RpcError, match="there is no consumer group 'h'"):
            await reader.ListProgress(pb.ListProgressRequest(groups=["g", "h"]))
        with pytest.raises(RpcError, match="there is no topic 'gone'"):
            await reader.ListPending(pb.ListPendingRequest(topics=["orders", "gone"]))

    run(scenario)


def test_what_is_not_there_is_left_out_and_told_where_that_is_asked_for() -> None:
    async def scenario(reader: BrokerReader) -> None:
        out = await reader.ListInFlight(
            pb.ListInFlightRequest(groups=["g", "h"], skips_missing=True)
        )
        assert [item.consumer_group for item in out.items] == ["g"]
        assert out.missing == ["h"]
        far = await reader.ListProgress(
            pb.ListProgressRequest(groups=["h", "g"], skips_missing=True)
        )
        assert {item.consumer_group for item in far.items} == {"g"}
        assert far.missing == ["h"]
        waiting = await reader.ListPending(
            pb.ListPendingRequest(topics=["orders", "gone"], skips_missing=True)
        )
        assert waiting.missing == ["gone"]
        # None of those that were named is not all.
        out = await reader.ListInFlight(pb.ListInFlightRequest(groups=["h"], skips_missing=True))
        assert not out.items
        far = await reader.ListProgress(pb.ListProgressRequest(groups=["h"], skips_missing=True))
        assert not far.items

    run(scenario)


def test_groups_are_told_by_name_where_they_are_asked_for() -> None:
    async def scenario(reader: BrokerReader) -> None:
        assert (await reader.GetQueues(pb.GetQueuesRequest(topics=["orders"]))).groups == []
        asked = pb.GetQueuesRequest(without_queues=True, with_groups=True)
        assert (await reader.GetQueues(asked)).groups == ["billing", "g"]

    run(scenario)
