"""Concurrent reads and listings take turns by client address, not by call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from tests.support.worlds.proxied_broker import calls_of
from tests.support.worlds.proxy_world import ProxyWorld, run
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.server import broker_pages
from tidemill.proxy.server.pipeline_events import EventPageRelay
from tidemill.proxy.server.pipeline_table import ClusterQueues, ListingPages
from tidemill.proxy.server.pull_pages import PAGES_AT_ONCE, PullPages
from tidemill.proxy.server.range_reader import RangeReader
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.aio.call import RpcCall

READS = 12  # reads of the busy address
OTHER = READS  # number of the read of the other address

Read: TypeAlias = Callable[[int, str], Coroutine[None, None, None]]


class Pages:
    """A broker's pages: each is held until it is let go, and is an empty one, the last of a read.

    A read is known by its number: the queue of a pull, the position of events, the cursor of a
    listing, or the pattern of queues.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []  # reads in the order of their requests
        self.arrived = asyncio.Condition()
        self.may_go = asyncio.Semaphore(0)

    async def pull(self, _call: RpcCall, request: bytes) -> bytes:
        await self._hold(link_pb2.PullRequest.FromString(request).queue_id)
        return link_pb2.PullReply(next_offset=1, end_offset=1, is_at_end=True).SerializeToString()

    async def events(self, _call: RpcCall, request: bytes) -> bytes:
        number = pb.ReadEventsRequest.FromString(request).from_position
        await self._hold(number)
        return pb.ReadEventsReply(next_position=number, log_end=number).SerializeToString()

    async def progress(self, _call: RpcCall, request: bytes) -> bytes:
        await self._hold(int(pb.ListProgressRequest.FromString(request).cursor))
        return pb.ListProgressReply().SerializeToString()

    async def queues(self, _call: RpcCall, request: bytes) -> bytes:
        await self._hold(int(pb.GetQueuesRequest.FromString(request).topic_pattern))
        return pb.BrokerGroupQueues(broker="broker").SerializeToString()

    async def _hold(self, number: int) -> None:
        async with self.arrived:
            self.asked.append(number)
            self.arrived.notify_all()
        await self.may_go.acquire()

    async def until(self, count: int) -> None:
        """Wait until this many pages are requested."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.asked) >= count)


def calls_to(pages: Pages) -> AbstractAsyncContextManager[BrokerCalls]:
    """Return calls to a broker with `pages`."""
    return calls_of(
        Pull=pages.pull,
        ReadEvents=pages.events,
        ListProgress=pages.progress,
        GetQueues=pages.queues,
    )


async def check_turns(pages: Pages, read: Read, at_once: int) -> None:
    """Read many times from one address and once from another, which gets its turn soon."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(READS):
            tasks.create_task(read(number, "10.0.0.1"))
        await pages.until(at_once)
        tasks.create_task(read(OTHER, "10.0.0.2"))
        await asyncio.sleep(0)
        for count in range(at_once + 1, READS + 2):
            pages.may_go.release()
            await pages.until(count)
        for _ in range(at_once):
            pages.may_go.release()
    assert pages.asked.index(OTHER) <= at_once + 1
    assert sorted(pages.asked) == list(range(READS + 1))


def test_concurrent_ranges_of_an_address_share_one_turn() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic("wide", queues=READS + 1)
        pages = Pages()
        async with calls_to(pages) as calls:
            reader = RangeReader(world.cluster, PullPages(calls))

            async def read(number: int, address: str) -> None:
                request = pb.ReadMessagesRequest(topic="wide", queue_id=number, until_offset=1)
                async for _page in reader.read_messages(request, address):
                    pass

            await check_turns(pages, read, PAGES_AT_ONCE)

    run(scenario)


def test_concurrent_event_reads_of_an_address_share_one_turn() -> None:
    async def scenario(world: ProxyWorld) -> None:
        pages = Pages()
        async with calls_to(pages) as calls:
            events = EventPageRelay(world.cluster, calls)

            async def read(number: int, address: str) -> None:
                request = pb.ReadEventsRequest(from_position=number)
                async for _page in events.read_events(request, address):
                    pass

            await check_turns(pages, read, broker_pages.PAGES_AT_ONCE)

    run(scenario)


def test_concurrent_listings_of_an_address_share_one_turn() -> None:
    async def scenario(world: ProxyWorld) -> None:
        pages = Pages()
        async with calls_to(pages) as calls:
            answer = ListingPages(world.cluster, calls).method(
                "ListProgress", pb.ListProgressReply, "groups"
            )

            async def read(number: int, address: str) -> None:
                async for _page in answer(pb.ListProgressRequest(cursor=str(number)), address):
                    pass

            await check_turns(pages, read, broker_pages.PAGES_AT_ONCE)

    run(scenario)


def test_concurrent_queue_requests_of_an_address_share_one_turn() -> None:
    async def scenario(world: ProxyWorld) -> None:
        pages = Pages()
        async with calls_to(pages) as calls:
            queues = ClusterQueues(world.cluster, calls)

            async def read(number: int, address: str) -> None:
                request = pb.GetQueuesRequest(topic_pattern=str(number))
                async for page in queues.get_queues(request, address):
                    assert [group.broker for group in page.groups] == ["broker"]

            await check_turns(pages, read, broker_pages.PAGES_AT_ONCE)

    run(scenario)


def test_queue_requests_at_a_hanging_broker_fail_soon() -> None:
    async def scenario(world: ProxyWorld) -> None:
        pages = Pages()
        async with calls_to(pages) as calls:
            queues = ClusterQueues(world.cluster, calls, answer_ms=1)
            request = pb.GetQueuesRequest(topic_pattern="1")
            asked = [
                anext(queues.get_queues(request, "10.0.0.1"))
                for _ in range(broker_pages.PAGES_AT_ONCE + 1)
            ]
            for page in await asyncio.gather(*asked):
                assert [group.error for group in page.groups] == [
                    "BrokerTimeout: no turn in time, because other readers wait for this broker"
                ]

    run(scenario)
