"""The sampler: pages, runs of brokers, unreachable broker groups, and consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
import pytest

from tests.support.clocks import ManualClock
from tests.support.worlds.fake_calls import CallsByRequest
from tests.support.worlds.round_world import idle
from tidemill.admin.activity import disks
from tidemill.admin.activity.history import HistoryKey
from tidemill.admin.activity.numbers import ClusterNumbers, GroupState
from tidemill.admin.activity.sampler import CLIENTS_MAX, NO_SAMPLE, STALE_MS, ActivitySampler
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerAnswers, BrokerGroupClient, Brokers
from tidemill.common.errors import BrokerTimeout, BrokerUnreachable
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

PERIOD_MS = 5_000


class FakeBroker(CallsByRequest):
    """A broker group with one topic and one group, each on its own page, and one proxy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.run = "1"
        self.read_ms = 0
        self.stored = 0
        self.error: Exception | None = None
        self.clients: list[pb.ClientState] = []
        self.has_more_clients = False
        self.has_proxy = True
        self.changes_run = False  # before the second page
        self.calls = 0

    async def get_activity(self, request: pb.GetActivityRequest) -> pb.ActivityPage:
        self.calls += 1
        if self.error is not None:
            raise self.error
        if request.after_topic_id and self.changes_run:
            self.run, self.changes_run, self.stored = "2", False, 1
        page = pb.ActivityPage(run=self.run, read_ms=self.read_ms)
        if request.after_topic_id:
            page.groups.add(id=1, name="g", has_progress=True).topics.add(
                topic="orders", ready=3, has_progress=True
            )
        else:
            page.topics.add(id=1, name="orders", stored=self.stored, messages=self.stored)
            page.next_page.after_topic_id = 1
        return page

    async def get_storage(self, _request: pb.GetStorageRequest) -> pb.GetStorageReply:
        if self.error is not None:
            raise self.error
        free_bytes = 1_000 - self.stored
        return pb.GetStorageReply(total_bytes=1_000, free_bytes=free_bytes, reserve_bytes=100)

    async def list_proxies(self, _request: pb.ListProxiesRequest) -> pb.ProxyList:
        names = [pb.ProxyName(process_id=b"p", name="proxy")] if self.has_proxy else []
        return pb.ProxyList(proxies=names)

    async def ask_proxy(self, request: pb.AskProxyRequest) -> pb.ProxyAnswer:
        assert request.question.list_clients.clients_max == CLIENTS_MAX
        clients = pb.ClientList(clients=self.clients, has_more=self.has_more_clients)
        return pb.ProxyAnswer(clients=clients)


class FakeBrokers:
    """The broker groups of a cluster."""

    def __init__(self, *brokers: FakeBroker) -> None:
        self.brokers = brokers
        self.error: Exception | None = None

    async def members(self) -> Sequence[BrokerGroupClient]:
        if self.error is not None:
            raise self.error
        return [
            BrokerGroupClient(each.name, each.name, False, False, cast("Any", each))
            for each in self.brokers
        ]

    async def member(self, name: str) -> BrokerGroupClient:
        return next(each for each in await self.members() if each.name == name)

    async def call_all(self, call: object, request: Any) -> BrokerAnswers[Any]:
        answers = [BrokerAnswer(each.name, await each.call(call, request)) for each in self.brokers]
        return BrokerAnswers(answers, [])


class Cluster:
    """Two broker groups and their sampler."""

    def __init__(self) -> None:
        self.brokers = FakeBroker("broker-0"), FakeBroker("broker-1")
        self.all = FakeBrokers(*self.brokers)
        self.clock = ManualClock(1_700_000_000_000)
        self.sampler = ActivitySampler(cast("Brokers", self.all), self.clock)

    async def sample(self) -> None:
        self.clock.advance(PERIOD_MS)
        for broker in self.brokers:
            broker.read_ms += PERIOD_MS
        await self.sampler.sample()

    @property
    def numbers(self) -> ClusterNumbers:
        reading = self.sampler.read()
        assert reading.numbers is not None, reading.reason
        return reading.numbers

    def in_rate(self) -> float | None:
        return self.numbers.topics["orders"].in_per_second


def test_two_samples_of_all_pages_give_sums_and_rates() -> None:
    async def main() -> None:
        cluster = Cluster()
        assert cluster.sampler.read().reason == NO_SAMPLE
        await cluster.sample()
        assert cluster.in_rate() is None
        for broker in cluster.brokers:
            broker.stored = 10
        await cluster.sample()
        topic, group = cluster.numbers.topics["orders"], cluster.numbers.groups["g"]
        assert (topic.messages, topic.in_per_second) == (20, 4)
        assert (group.lag, group.in_per_second, group.state) == (6, 4, GroupState.IDLE)
        assert cluster.numbers.sampled_at_ms == cluster.clock.wall_ms()
        assert [broker.calls for broker in cluster.brokers] == [4, 4]
        now_ms = cluster.clock.wall_ms()
        series = cluster.sampler.history.find(HistoryKey("topic", "orders"), 0, now_ms)
        assert series is not None
        hour = cluster.sampler.history.find(HistoryKey("group", "g"), now_ms - PERIOD_MS, now_ms)
        assert hour is not None
        assert hour.points["in"] == [None, 4]
        assert hour.points["lag"] == [6, 6]

    asyncio.run(main())


def test_the_time_until_a_disk_is_full_is_that_of_its_growth() -> None:
    async def main() -> None:
        cluster = Cluster()
        broker, other = cluster.brokers
        for minute in range(11):
            broker.stored = 20 * minute
            await cluster.sampler.sample_disks()
            cluster.clock.advance(disks.PERIOD_MS)
        # 700 bytes remain above the reserve after the last point, which is a minute old.
        forecast = cluster.sampler.disk_forecast("broker-0")
        assert forecast.full_in_ms == 34 * disks.PERIOD_MS
        assert cluster.sampler.disk_forecast("broker-1").unknown == disks.NO_GROWTH
        for error in (BrokerTimeout("slow"), ZeroDivisionError()):
            other.error = error
            await cluster.sampler.sample_disks()  # Neither ends the sampler nor adds a point.
        cluster.clock.advance(disks.STALE_MS)
        assert cluster.sampler.disk_forecast("broker-0").unknown == disks.NO_ANSWER

    asyncio.run(main())


NOTHING = grpc.aio.Metadata()
BROKEN = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, NOTHING, NOTHING, details="broken")


@pytest.mark.parametrize("error", [BrokerTimeout("slow"), BROKEN])
def test_an_unreachable_broker_group_is_named_and_missing_from_the_sums(error: Exception) -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.sample()
        cluster.brokers[1].error = error
        cluster.brokers[0].stored = 5
        await cluster.sample()
        assert list(cluster.numbers.unreachable) == ["broker-1"]
        assert cluster.numbers.topics["orders"].messages == 5
        assert cluster.in_rate() == 1
        cluster.brokers[1].error = None
        await cluster.sample()
        assert cluster.in_rate() is None, "its older sample is missing"
        await cluster.sample()
        assert cluster.in_rate() == 0

    asyncio.run(main())


def test_a_restarted_broker_has_no_rates_until_its_second_sample() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.sample()
        cluster.brokers[0].run = "2"
        await cluster.sample()
        assert cluster.in_rate() is None
        await cluster.sample()
        assert cluster.in_rate() == 0

    asyncio.run(main())


def test_pages_of_two_runs_are_not_mixed() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.brokers[0].changes_run = True
        await cluster.sample()
        assert cluster.brokers[0].calls == 4
        assert cluster.numbers.topics["orders"].messages == 1
        assert cluster.numbers.groups["g"].lag == 6

    asyncio.run(main())


def test_without_any_answer_the_numbers_are_unknown() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.sample()
        cluster.all.error = BrokerUnreachable("it refuses")
        await cluster.sample()
        reading = cluster.sampler.read()
        assert reading.numbers is None
        assert "it refuses" in reading.reason

    asyncio.run(main())


def test_a_defect_gives_unknown_numbers_and_no_end_of_the_sampler() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.brokers[0].error = KeyError("a defect")
        await cluster.sample()
        assert "log" in cluster.sampler.read().reason
        cluster.brokers[0].error = None
        await cluster.sample()
        assert cluster.numbers.topics["orders"].messages == 0

    asyncio.run(main())


def test_old_numbers_are_unknown() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.sample()
        cluster.clock.advance(STALE_MS)
        assert cluster.sampler.read().numbers is not None
        cluster.clock.advance(1)
        assert cluster.sampler.read().numbers is None
        assert "20 s old" in cluster.sampler.read().reason

    asyncio.run(main())


def test_an_outage_keeps_the_history() -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.sample()
        for broker in cluster.brokers:
            broker.error = BrokerTimeout("slow")
        await cluster.sample()
        now_ms = cluster.clock.wall_ms()
        assert cluster.sampler.history.find(HistoryKey("topic", "orders"), 0, now_ms) is not None

    asyncio.run(main())


def test_consumers_are_counted_by_group_while_they_are_few() -> None:
    async def main() -> None:
        cluster = Cluster()
        names = ("a", "g"), ("b", "g"), ("c", "")
        for broker in cluster.brokers:  # Both brokers know the same proxy.
            broker.clients = [pb.ClientState(client_id=id_, group=group) for id_, group in names]
        await cluster.sample()
        group = cluster.numbers.groups["g"]
        assert (group.consumers, group.state) == (2, GroupState.ACTIVE)
        cluster.brokers[0].has_more_clients = True
        await cluster.sample()
        group = cluster.numbers.groups["g"]
        assert group.consumers is None
        assert "1,000" in group.unknown
        for broker in cluster.brokers:
            broker.has_proxy = False
        await cluster.sample()
        assert "all proxies" in cluster.numbers.groups["g"].unknown

    asyncio.run(main())


def test_the_sampler_ends_with_its_block() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with asyncio.timeout(10), cluster.sampler.running():
            await idle()
            assert cluster.numbers.topics
        assert cluster.brokers[0].calls == 2

    asyncio.run(main())
