"""Listings: missing names are rejected, or omitted and reported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.layout.numbers import GroupId
from tidemill.broker.server.reader.listings import NAMES_A_SLICE, BrokerReader
from tidemill.message import limits
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


def test_a_listing_with_a_missing_name_is_rejected() -> None:
    async def scenario(reader: BrokerReader) -> None:
        with pytest.raises(RpcError, match="there is no consumer group 'h'"):
            await reader.ListInFlight(pb.ListInFlightRequest(groups=["g", "h"]))
        with pytest.raises(RpcError, match="there is no consumer group 'h'"):
            await reader.ListProgress(pb.ListProgressRequest(groups=["g", "h"]))
        with pytest.raises(RpcError, match="there is no topic 'gone'"):
            await reader.ListPending(pb.ListPendingRequest(topics=["orders", "gone"]))

    run(scenario)


def test_missing_names_are_omitted_and_reported_on_request() -> None:
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
        # A listing without existing names is empty; it does not list everything.
        out = await reader.ListInFlight(pb.ListInFlightRequest(groups=["h"], skips_missing=True))
        assert not out.items
        far = await reader.ListProgress(pb.ListProgressRequest(groups=["h"], skips_missing=True))
        assert not far.items

    run(scenario)


def test_group_names_are_returned_on_request() -> None:
    async def scenario(reader: BrokerReader) -> None:
        assert (await reader.GetQueues(pb.GetQueuesRequest(topics=["orders"]))).groups == []
        asked = pb.GetQueuesRequest(without_queues=True, with_groups=True)
        assert (await reader.GetQueues(asked)).groups == ["billing", "g"]

    run(scenario)


def test_too_many_names_are_rejected() -> None:
    many = ["g"] * (limits.NAMES.limit + 1)

    async def scenario(reader: BrokerReader) -> None:
        for asked in (
            reader.ListInFlight(pb.ListInFlightRequest(groups=many)),
            reader.ListProgress(pb.ListProgressRequest(groups=many, skips_missing=True)),
            reader.ListPending(pb.ListPendingRequest(topics=many, skips_missing=True)),
            reader.GetQueues(pb.GetQueuesRequest(topics=many)),
        ):
            with pytest.raises(RpcError, match="at most 4096 entries"):
                await asked

    run(scenario)


def test_a_repeated_name_is_looked_up_once() -> None:
    async def scenario(reader: BrokerReader) -> None:
        out = await reader.ListInFlight(
            pb.ListInFlightRequest(groups=["h", "g"] * 2_048, skips_missing=True)
        )
        assert len(out.items) == 1
        assert out.missing == ["h"]
        far = await reader.ListProgress(
            pb.ListProgressRequest(groups=["h"] * 4_096, skips_missing=True)
        )
        assert far.missing == ["h"]

    run(scenario)


def test_a_round_looks_up_a_limited_number_of_names() -> None:
    async def main() -> None:
        world = RoundWorld()
        known = WatchedNames(world)
        async with asyncio.timeout(30), world.running():
            names = [f"gone-{n}" for n in range(limits.NAMES.limit)]
            request = pb.ListProgressRequest(groups=names, skips_missing=True)
            assert (await BrokerReader(world.rounds).ListProgress(request)).missing == names
        assert sum(known.by_round.values()) == limits.NAMES.limit
        assert max(known.by_round.values()) == NAMES_A_SLICE

    asyncio.run(main())


def test_a_round_does_a_slice_of_one_listing() -> None:
    async def main() -> None:
        world = RoundWorld()
        known = WatchedNames(world)
        async with asyncio.timeout(30), world.running():
            reader, callers = BrokerReader(world.rounds), 8
            request = pb.ListProgressRequest(groups=["g"], skips_missing=True)
            await asyncio.gather(*[reader.ListProgress(request) for _ in range(callers)])
        assert list(known.by_round.values()) == [1] * callers

    asyncio.run(main())


class WatchedNames(dict[str, GroupId]):
    """The names of a broker's groups, with the number of look-ups in each round."""

    def __init__(self, world: RoundWorld) -> None:
        catalog = world.world.engine.catalog
        super().__init__(catalog.group_ids)
        catalog.group_ids = self
        self._rounds = world.rounds
        self.by_round: Counter[int] = Counter()

    def get(self, name: str, default: Any = None) -> Any:
        self.by_round[self._rounds.count] += 1
        return super().get(name, default)
