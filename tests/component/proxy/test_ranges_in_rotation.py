"""Ranges that are read at once: turns are given by address, and not by call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.support.proxy_world import ProxyWorld, run
from tidemill.proxy.broker_calls import BrokerCalls
from tidemill.proxy.server.pull_pages import PAGES_AT_ONCE, PullPages
from tidemill.proxy.server.queues import READER
from tidemill.proxy.server.ranges import RangeReader
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.aio.call import RpcCall, unary
from tidemill.transport.aio.channel import connected
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.server import RpcServer
from tidemill.transport.http2.limits import Limits

RANGES = 12  # of the address that reads much
OTHER = RANGES  # queue of the address that reads one


class Queues:
    """A broker's pulls: each is held until it is let go, and gives an empty page of a queue."""

    def __init__(self) -> None:
        self.pulled: list[int] = []  # queues, in the order in which they were pulled
        self.arrived = asyncio.Condition()
        self.may_go = asyncio.Semaphore(0)

    async def pull(self, _call: RpcCall, request: bytes) -> bytes:
        async with self.arrived:
            self.pulled.append(link_pb2.PullRequest.FromString(request).queue_id)
            self.arrived.notify_all()
        await self.may_go.acquire()
        return link_pb2.PullReply(next_offset=1, end_offset=1, is_at_end=True).SerializeToString()

    async def until(self, count: int) -> None:
        """Wait until so many were pulled."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.pulled) >= count)


@contextlib.asynccontextmanager
async def calls_to(queues: Queues) -> AsyncIterator[BrokerCalls]:
    """Yield calls whose broker is `queues`, whatever address they are made to."""
    server = RpcServer(
        {READER + "Pull": unary(queues.pull)},
        Limits(),
        ListenSettings(host="127.0.0.1", port=0),
        message_bytes_max=1 << 20,
    )
    async with server.serving():
        calls = BrokerCalls(
            lambda _address, *rest, **named: connected(server.address, *rest, **named)
        )
        async with calls.running():
            yield calls


async def read(reader: RangeReader, queue_id: int, address: str) -> None:
    request = pb.ReadMessagesRequest(topic="wide", queue_id=queue_id, until_offset=1)
    async for _page in reader.read_messages(request, address):
        pass


def test_who_reads_many_ranges_at_once_has_the_turns_of_one_reader() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic("wide", queues=RANGES + 1)
        queues = Queues()
        async with calls_to(queues) as calls, asyncio.TaskGroup() as tasks:
            reader = RangeReader(world.cluster, PullPages(calls))
            for number in range(RANGES):
                tasks.create_task(read(reader, number, "10.0.0.1"))
            await queues.until(PAGES_AT_ONCE)
            tasks.create_task(read(reader, OTHER, "10.0.0.2"))
            await asyncio.sleep(0)
            for count in range(PAGES_AT_ONCE + 1, RANGES + 2):
                queues.may_go.release()
                await queues.until(count)
            for _ in range(PAGES_AT_ONCE):
                queues.may_go.release()
        assert queues.pulled.index(OTHER) <= PAGES_AT_ONCE + 1
        assert sorted(queues.pulled) == list(range(RANGES + 1))

    run(scenario)
