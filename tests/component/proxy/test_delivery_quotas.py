"""Polls of a consumer group with a quota, at brokers in memory and a home that the test is."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.support.clocks import ManualClock
from tests.support.security_items import counts_of
from tests.support.worlds.proxied_broker import calls_of
from tests.support.worlds.proxy_world import HEADERS, ResponseCollector, eventually, receive_request
from tests.support.worlds.several_brokers import SeveralBrokers
from tidemill.common.clock import SystemClock
from tidemill.proxy.quotas import deliveries
from tidemill.proxy.quotas.deliveries import DeliveryQuotas
from tidemill.proxy.quotas.renewal import Leased
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.proxy.server.puller import Puller
from tidemill.proxy.settings import ProxySettings
from tidemill.security.permit_buckets import LeaseDemand
from tidemill.security.quotas import QUOTA, QuotaKind, QuotaLimit, QuotaTable, TrafficQuota
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.aio.call import RpcCall

MESSAGES, BYTES = QuotaLimit.DISPATCH_MESSAGES, QuotaLimit.DISPATCH_BYTES
POLL_MS = 20_000  # longer than a scenario


class Home:
    """Quotas over items in memory, and a home that grants what the test allows."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.table = QuotaTable(
            lambda _kind, name: self.items.get(name), lambda: counts_of(QUOTA, self.items)
        )
        self.available: Counter[QuotaLimit] = Counter()
        self.quotas = DeliveryQuotas(self.table, self.lease, ManualClock().monotonic_ms)

    async def lease(self, demands: Sequence[LeaseDemand]) -> Leased:
        granted = []
        for demand in demands:
            limit = demand.key.limit
            self.available[limit] += demand.returned
            permits = min(demand.wanted, self.available[limit])
            permits = permits if permits >= demand.first else 0
            self.available[limit] -= permits
            granted.append(permits)
        return Leased(granted, 1)

    def limit(self, **limits: int) -> None:
        named = {QuotaLimit(name): rate for name, rate in limits.items()}
        quota = TrafficQuota(kind=QuotaKind.GROUP, value="group", limits=named)
        self.items[quota.name] = json.dumps(quota.to_item()).encode()
        self.table.note_change()

    def unlimit(self) -> None:
        self.items.clear()
        self.table.note_change()

    def waiting(self) -> int:
        return self.quotas._waiting_count


Scenario = Callable[[SeveralBrokers, Home], Awaitable[None]]


def run(scenario: Scenario, *, count: int = 1, is_ordered: bool = False) -> None:
    async def main() -> None:
        home = Home()
        async with (
            asyncio.timeout(20),
            SeveralBrokers.several(
                count,
                is_ordered=is_ordered,
                quotas=home.quotas,
                grpc_client_consumer_min_long_polling_timeout_ms=50,
            ) as world,
            home.quotas.running(),
        ):
            await scenario(world, home)

    asyncio.run(main())


async def receive(world: SeveralBrokers, *, poll_ms: int = POLL_MS) -> list[str]:
    """Return the bodies, or the name of the status."""
    items = await world.receive(receive_request(poll_ms=poll_ms))
    bodies = [item.message.body.decode() for item in items if item.HasField("message")]
    return bodies or [v2.Code.Name(item.status.code) for item in items if item.HasField("status")]


def poll(world: SeveralBrokers, *, poll_ms: int = POLL_MS) -> asyncio.Task[list[str]]:
    return asyncio.create_task(receive(world, poll_ms=poll_ms))


def ready(world: SeveralBrokers) -> int:
    """Return the number of pops that all brokers have got."""
    return sum(broker.count_of("pops") for broker in world.brokers)


@pytest.mark.parametrize("count", [1, 3])
def test_a_poll_gets_at_most_the_permits_of_its_consumer_group(count: int) -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, *[f"m{n}" for n in range(9)])
        home.available[MESSAGES] = 3
        assert await receive(world) == ["m0", "m1", "m2"]
        waiting = poll(world)
        await eventually(lambda: home.waiting() == 1)
        popped = ready(world)
        home.available[MESSAGES] = 2
        assert await waiting == ["m3", "m4"], "as soon as there are permits"
        assert ready(world) > popped, "a poll without permits pops nothing"

    run(scenario, count=count)


def test_a_poll_without_permits_ends_empty_and_leaves_the_messages() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, "a")
        assert await receive(world, poll_ms=0) == ["MESSAGE_NOT_FOUND"]
        assert await receive(world, poll_ms=50) == ["MESSAGE_NOT_FOUND"]
        assert (home.waiting(), ready(world)) == (0, 0)
        home.available[MESSAGES] = 1
        assert await receive(world) == ["a"]

    run(scenario)


def test_a_poll_that_does_not_wait_gets_permits_that_the_home_has() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, "a", "b")
        home.available[MESSAGES] = 1
        assert await receive(world, poll_ms=0) == ["a"]
        assert await receive(world, poll_ms=0) == ["MESSAGE_NOT_FOUND"]
        home.available[MESSAGES] = 1
        # It has left its demand.
        await eventually(lambda: not home.available[MESSAGES])
        assert await receive(world, poll_ms=0) == ["b"]

    run(scenario)


@pytest.mark.parametrize("count", [1, 2])
def test_unused_permits_are_for_other_polls(count: int) -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        home.available[MESSAGES] = 2
        polls = [poll(world) for _ in range(3)]
        await eventually(lambda: ready(world) >= 3)
        await world.until_asked()
        world.send(0, "a")
        await eventually(lambda: sum(one.done() for one in polls) == 1)
        world.send(count - 1, "b")
        await eventually(lambda: sum(one.done() for one in polls) == 2)
        world.send(0, "c")
        await eventually(lambda: home.waiting() == 1)
        home.available[MESSAGES] = 1
        results = await asyncio.gather(*polls)
        assert sorted(results) == [["a"], ["b"], ["c"]]

    run(scenario, count=count)


def test_bytes_are_taken_after_the_pop_and_later_polls_wait_for_them() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchBytesPerS=1_000)
        home.available[BYTES] = 1
        world.send(0, "a" * 500, "b" * 500)
        assert len(await receive(world)) == 2, "the permits are negative now"
        world.send(0, "c")
        waiting = poll(world)
        await eventually(lambda: home.waiting() == 1)
        [lease] = home.quotas.renewal.book.leases.values()
        debt = -int(lease.permits)
        assert debt > 1_000
        for part in (debt - 100, 100):
            home.available[BYTES] = part
            await eventually(lambda: not home.available[BYTES])
        assert (lease.permits, waiting.done()) == (0, False), "the debt is paid in parts"
        home.available[BYTES] = 1
        assert await waiting == ["c"]

    run(scenario)


@pytest.mark.parametrize("count", [1, 3])
def test_a_parked_poll_needs_permits_from_a_new_quota_on(count: int) -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        waiting = poll(world)
        await eventually(lambda: ready(world) >= 1)
        home.limit(dispatchMessagesPerS=10)
        await world.until_asked()
        world.send(0, "a", "b")
        await eventually(lambda: home.waiting() == 1)
        home.available[MESSAGES] = 1
        assert await waiting == ["a"]

    run(scenario, count=count)


def test_a_deleted_quota_lets_waiting_polls_pass() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, "a", "b")
        waiting = poll(world)
        await eventually(lambda: home.waiting() == 1)
        home.unlimit()
        assert await waiting == ["a", "b"]

    run(scenario)


def test_an_ordered_consumer_group_keeps_its_order() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, *[f"m{n}" for n in range(6)])
        received: list[str] = []
        for permits in (2, 1, 3):
            home.available[MESSAGES] = permits
            received += await receive(world)
        assert received == [f"m{n}" for n in range(6)]

    run(scenario, is_ordered=True)


def test_a_stopping_process_answers_polls_that_wait_for_permits() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, "a")
        waiting = poll(world)
        await eventually(lambda: home.waiting() == 1)
        world.cluster.release_polls()
        assert await waiting == ["MESSAGE_NOT_FOUND"]
        assert await receive(world) == ["MESSAGE_NOT_FOUND"]

    run(scenario)


def test_a_disconnected_poll_leaves_the_queue_and_its_permits() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, "a")
        first, second = poll(world), poll(world)
        await eventually(lambda: home.waiting() == 2)
        first.cancel()
        await eventually(lambda: home.waiting() == 1)
        home.available[MESSAGES] = 1
        assert await second == ["a"]

    run(scenario)


def test_the_number_of_waiting_polls_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "WAITING_MAX", 4)

    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        waiting = [poll(world), poll(world)]
        await eventually(lambda: home.waiting() == 2)
        third = home.quotas.request("group", 1)
        assert await home.quotas.wait(third) is None
        assert home.waiting() == 2
        # The first poll of another consumer group finds a place.
        other = TrafficQuota(kind=QuotaKind.GROUP, value="other", limits={BYTES: 1_000})
        home.items[other.name] = json.dumps(other.to_item()).encode()
        home.table.note_change()
        home.available[BYTES] = 1_000
        assert await home.quotas.take("other", 1, timeout_ms=5_000) is not None
        for one in waiting:
            one.cancel()

    run(scenario)


def test_a_poll_that_ends_in_the_turn_of_its_permits_pops_nothing() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, "a")
        waiting = poll(world)
        await eventually(lambda: home.waiting() == 1)
        popped = ready(world)
        [lease] = home.quotas.renewal.book.leases.values()
        lease.permits = 1
        home.quotas.serve([lease])
        [client] = world.polling._open
        world.polling.end_client(client)
        assert await waiting == ["MESSAGE_NOT_FOUND"]
        assert (ready(world), lease.permits) == (popped, 1)

    run(scenario)


def test_a_poll_holds_no_memory_of_its_connection_while_it_waits_for_permits() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        world.send(0, "a")
        responses = ResponseCollector(None)
        responses.room_at_first_bytes = 0
        responses.room_later_bytes = free_bytes = 24 << 20
        request = receive_request(poll_ms=POLL_MS)
        waiting = asyncio.create_task(world.receive(request, responses=responses))
        await eventually(lambda: home.waiting() == 1)
        assert responses.room_bytes < free_bytes, "it waits with the memory for a short time"
        await eventually(lambda: responses.room_bytes == free_bytes)
        assert not waiting.done()
        home.available[MESSAGES] = 1
        await waiting
        bodies = [item.message.body for item in responses.items if item.HasField("message")]
        assert bodies == [b"a"]

    run(scenario)


def test_a_pull_holds_no_memory_of_its_connection_while_it_waits_for_permits() -> None:
    async def pull(_call: RpcCall, request: bytes) -> bytes:
        offset = link_pb2.PullRequest.FromString(request).offset
        return link_pb2.PullReply(next_offset=offset, is_at_end=True).SerializeToString()

    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        responses = ResponseCollector(None)
        responses.room_at_first_bytes = 0
        responses.room_later_bytes = free_bytes = 24 << 20
        request = service.PullMessageRequest(batch_size=32)
        request.group.name = "group"
        request.message_queue.topic.name = "topic"
        request.message_queue.broker.name = world.cluster.brokers[0].name
        call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=10)
        async with calls_of(Pull=pull) as calls:
            puller = Puller(
                world.cluster, calls, PullPages(calls), SystemClock(), ProxySettings(), home.quotas
            )
            pulling = puller.pull_message(call, request.SerializeToString(), responses)
            waiting = asyncio.create_task(pulling)
            await eventually(lambda: home.waiting() == 1)
            assert responses.room_bytes < free_bytes, "it waits with the memory for a short time"
            await eventually(lambda: responses.room_bytes == free_bytes)
            await eventually(lambda: home.waiting() == 1)
            home.available[MESSAGES] = 32
            await waiting
        assert responses.room_bytes == free_bytes
        assert home.available[MESSAGES] == 0

    run(scenario)


def test_another_consumer_group_has_no_limit() -> None:
    async def scenario(world: SeveralBrokers, home: Home) -> None:
        home.limit(dispatchMessagesPerS=10)
        assert not home.quotas.is_limited("other")
        assert await home.quotas.take("other", 32, timeout_ms=0) is not None
        assert await home.quotas.take("group", 32, timeout_ms=1) is None

    run(scenario)
