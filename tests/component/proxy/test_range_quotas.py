"""Ranges of a queue that name a consumer group with a dispatch quota."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from tests.support.clocks import ManualClock
from tests.support.security_items import counts_of
from tests.support.worlds.proxy_world import ProxyWorld, eventually, run
from tidemill.common.errors import GroupNotFound, Overloaded
from tidemill.message.encoding import encode_stored
from tidemill.proxy.quotas import deliveries
from tidemill.proxy.quotas.deliveries import DeliveryQuotas
from tidemill.proxy.quotas.renewal import Leased
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.proxy.server.range_reader import PAGE_BYTES, RangeReader
from tidemill.security.permit_buckets import BURST_S, LEASE_MS, LeaseDemand, QuotaBuckets
from tidemill.security.quotas import (
    QUOTA,
    LimitKey,
    QuotaKind,
    QuotaLimit,
    QuotaTable,
    TrafficQuota,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from tidemill.proxy.cluster.linked_group import LinkedGroup

MESSAGES, BYTES = QuotaLimit.DISPATCH_MESSAGES, QuotaLimit.DISPATCH_BYTES
HELD_REPLY_MS = 5
LONG_MS = 60_000  # longer than a test
STEP_MS = 20
BODY = b"b" * 1_000
REQUEST = pb.ReadMessagesRequest(topic="t", quota_group="group")
STORED = encode_stored(
    v2.Message(
        topic=v2.Resource(name="t"),
        body=BODY,
        system_properties=v2.SystemProperties(message_id="id"),
    ),
    message_type=v2.NORMAL,
    now_ms=0,
)


class Queue:
    """A queue of a broker, which counts the messages that it sends."""

    def __init__(self, end: int) -> None:
        self._end = end
        self.sent: list[int] = []  # messages of each page
        self.asked_count = 0
        self.answers = asyncio.Event()  # Without it, pulls wait.
        self.answers.set()

    async def call(
        self, _group: LinkedGroup, _method: str, request: bytes, *, timeout_ms: int
    ) -> bytes:
        """Answer a pull, in place of the calls to the broker."""
        assert timeout_ms
        self.asked_count += 1
        await self.answers.wait()
        await asyncio.sleep(0)
        asked = link_pb2.PullRequest.FromString(request)
        count = min(asked.max_messages, asked.max_bytes // len(STORED), self._end - asked.offset)
        found = range(asked.offset, asked.offset + count)
        self.sent.append(count)
        return link_pb2.PullReply(
            queue_offsets=found,
            log_offsets=found,
            stored_at_ms=[0] * count,
            delivery_attempts=[1] * count,
            blobs=[STORED] * count,
            next_offset=found.stop,
            is_at_end=found.stop == self._end,
            end_offset=self._end,
        ).SerializeToString()


class World:
    """A proxy with one queue and a limited consumer group, in the time of the test."""

    def __init__(self, proxy: ProxyWorld, queue: Queue, limits: dict[QuotaLimit, int]) -> None:
        self._limits = limits
        self._items: dict[str, bytes] = {}
        self.table = QuotaTable(
            lambda _kind, name: self._items.get(name), lambda: counts_of(QUOTA, self._items)
        )
        quota = TrafficQuota(kind=QuotaKind.GROUP, value="group", limits=limits)
        self._items[quota.name] = json.dumps(quota.to_item()).encode()
        self.table.note_change()
        rates = {LimitKey(quota.name, limit): rate for limit, rate in limits.items()}
        self._buckets = QuotaBuckets(rates.get)
        self.clock = ManualClock()
        self.quotas = DeliveryQuotas(self.table, self._lease, self.clock.monotonic_ms)
        self.proxy = proxy
        self.queue = queue
        self.reader: RangeReader
        self.received: list[int] = []
        self.held_count = 0

    async def _lease(self, demands: Sequence[LeaseDemand]) -> Leased:
        now_ms = self.clock.monotonic_ms()
        return Leased([self._buckets.lease(b"one", each, now_ms) for each in demands], 1)

    def unlimit(self) -> None:
        self._items.clear()
        self.table.note_change()

    async def read(self, request: pb.ReadMessagesRequest = REQUEST) -> None:
        """Read the range to its end."""
        at = request.from_offset
        async for page in self.reader.read_messages(request, "10.0.0.1"):
            reply = pb.ReadMessagesReply.FromString(page)
            if reply.is_held:
                assert (reply.next_offset, len(reply.messages)) == (at, 0)
                self.held_count += 1
            at = reply.next_offset
            self.received += [each.system_properties.queue_offset for each in reply.messages]

    async def advance(self, seconds: float, *, readers: int = 1) -> None:
        """Let the time pass, with a renewal in each step, until all readers wait for permits."""
        for _ in range(round(seconds * 1_000 / STEP_MS)):
            self.clock.advance(STEP_MS)
            await self.quotas.renewal.renew()
            while self.quotas._waiting_count < readers:  # noqa: ASYNC110  # Pages take some turns.
                await asyncio.sleep(0)


Scenario = Callable[[World], Awaitable[None]]


def in_world(
    scenario: Scenario, *, end: int, held_reply_ms: int = HELD_REPLY_MS, **limits: int
) -> None:
    """Run a scenario with a queue of `end` messages."""

    async def main(proxy: ProxyWorld) -> None:
        await proxy.put_topic("t", queues=1)
        await proxy.put_group()
        queue = Queue(end)
        named = {QuotaLimit(name): rate for name, rate in limits.items()}
        world = World(proxy, queue, named)
        pages = PullPages(queue)  # type: ignore[arg-type]  # It has the method that pages call.
        world.reader = RangeReader(proxy.cluster, pages, world.quotas, held_reply_ms=held_reply_ms)
        await scenario(world)

    run(main)


@contextlib.asynccontextmanager
async def reading(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(world.read())
    try:
        yield
        assert not task.done(), "the range is longer"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("rate", [10, 500])
def test_a_limit_of_messages_holds_over_ten_seconds(rate: int) -> None:
    async def scenario(world: World) -> None:
        async with reading(world):
            await world.advance(10)
            count = len(world.received)
        assert count <= 1.05 * rate * (10 + BURST_S + LEASE_MS / 1_000)
        assert count >= 0.95 * rate * 10
        assert world.received == list(range(count)), "in order, each once"
        assert world.held_count

    in_world(scenario, end=10**6, held_reply_ms=LONG_MS, dispatchMessagesPerS=rate)


def test_a_limit_of_bytes_holds_over_ten_seconds() -> None:
    rate = 400_000

    async def scenario(world: World) -> None:
        async with reading(world):
            await world.advance(10)
            size_bytes = len(world.received) * len(BODY)
        assert size_bytes <= 1.05 * rate * (10 + BURST_S + LEASE_MS / 1_000) + PAGE_BYTES
        assert size_bytes >= 0.75 * rate * 10, "headers count, too"

    in_world(scenario, end=10**6, held_reply_ms=LONG_MS, dispatchBytesPerS=rate)


def test_ranges_of_one_consumer_group_share_its_limit() -> None:
    rate = 100

    async def scenario(world: World) -> None:
        async with reading(world), reading(world), reading(world):
            await world.advance(10, readers=3)
            count = len(world.received)
        assert 0.95 * rate * 10 <= count <= 1.05 * rate * (10 + BURST_S + LEASE_MS / 1_000)

    in_world(scenario, end=10**6, held_reply_ms=LONG_MS, dispatchMessagesPerS=rate)


def test_a_range_without_a_consumer_group_has_no_limit() -> None:
    async def scenario(world: World) -> None:
        await world.read(pb.ReadMessagesRequest(topic="t"))
        assert (world.received, world.held_count) == (list(range(3_000)), 0)

    in_world(scenario, end=3_000, dispatchMessagesPerS=1)


def test_a_range_passes_when_its_quota_is_deleted() -> None:
    async def scenario(world: World) -> None:
        task = asyncio.create_task(world.read())
        await eventually(lambda: world.held_count > 2)
        assert world.received == []
        world.unlimit()
        await world.quotas.renewal.renew()
        await task
        assert world.received == list(range(500))

    in_world(scenario, end=500, dispatchMessagesPerS=1)


def test_a_page_that_the_client_does_not_get_returns_its_permits() -> None:
    async def scenario(world: World) -> None:
        reading = world.reader.read_messages(REQUEST, "10.0.0.1")
        page = pb.ReadMessagesReply.FromString(await anext(reading))
        assert page.is_held
        while not page.messages:
            world.clock.advance(1_000)
            await world.quotas.renewal.renew()
            page = pb.ReadMessagesReply.FromString(await anext(reading))
        [lease] = world.quotas.renewal.book.leases.values()
        before = lease.permits
        await eventually(
            lambda: len(world.queue.sent) == 2 and lease.permits == before - world.queue.sent[1]
        )
        await reading.aclose()
        assert lease.permits == before, "the page that was read ahead"

    in_world(scenario, end=10**6, dispatchMessagesPerS=10_000)


def test_a_read_that_is_cancelled_before_its_page_returns_its_permits() -> None:
    async def scenario(world: World) -> None:
        task = asyncio.create_task(world.read())
        await eventually(lambda: world.held_count > 0)
        world.queue.answers.clear()
        world.clock.advance(1_000)
        await world.quotas.renewal.renew()
        await eventually(lambda: world.queue.asked_count == 1)
        [lease] = world.quotas.renewal.book.leases.values()
        assert lease.permits == 0
        task.cancel()
        await eventually(lambda: lease.permits > 0)

    in_world(scenario, end=10**6, dispatchMessagesPerS=1_000)


def test_a_read_that_finds_no_place_to_wait_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "WAITING_MAX", 0)

    async def scenario(world: World) -> None:
        began_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(world.read())
        await eventually(lambda: world.held_count >= 10)
        took_s = asyncio.get_running_loop().time() - began_s
        task.cancel()
        assert took_s >= 9 * HELD_REPLY_MS / 1_000

    in_world(scenario, end=10, dispatchMessagesPerS=1)


def test_a_held_read_ends_when_the_process_stops() -> None:
    async def scenario(world: World) -> None:
        task = asyncio.create_task(world.read())
        await eventually(lambda: world.held_count > 0)
        world.proxy.cluster.polls_released.set()
        world.quotas.release()
        with pytest.raises(Overloaded, match="this proxy stops"):
            await task

    in_world(scenario, end=10, dispatchMessagesPerS=1)


def test_an_unknown_consumer_group_is_refused() -> None:
    async def scenario(world: World) -> None:
        request = pb.ReadMessagesRequest(topic="t", quota_group="other")
        with pytest.raises(GroupNotFound):
            await world.read(request)

    in_world(scenario, end=10, dispatchMessagesPerS=1)
