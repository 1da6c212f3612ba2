"""The demand is the sum over all brokers, and an error if a part is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, cast

import pytest

from tests.support.clocks import ManualClock
from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerAnswers, Brokers
from tidemill.admin.scaling.demand import Demand, TopicDemand, is_active, replicas_of, value_of
from tidemill.admin.scaling.demand_queries import QUERIES_MAX, QUERY_IDLE_S, DemandQueries
from tidemill.admin.scaling.shared_answer import ANSWER_AGE_S_MAX
from tidemill.admin.scaling.trigger import DemandQuery, Trigger
from tidemill.common.errors import (
    BrokerGroupUnreachable,
    BrokerUnreachable,
    Conflict,
    GroupNotFound,
    Overloaded,
    ServiceError,
    TopicNotFound,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

BILLING = DemandQuery("billing", "orders", 60)
ALL = DemandQuery("billing", "", 60)


class FakeBroker(CallsByRequest):
    """A broker group: progress of the group, lag in other topics, and due times of timers."""

    def __init__(
        self,
        *progress: pb.QueueProgress,
        stored: dict[str, int] | None = None,
        due_in_s: dict[str, Sequence[int]] | None = None,
        knows_group: bool = True,
    ) -> None:
        self.progress = progress
        self.stored = stored or {}
        self.due_in_s = due_in_s or {}
        self.knows_group = knows_group
        self.delivered: dict[str, int] = {}  # delayed messages, by topic
        self.is_down = False
        self.asked: list[str] = []
        self.is_asked = asyncio.Event()
        self.gate: asyncio.Event | None = None  # delays the answers

    async def get_group_progress(self, request: pb.GetGroupProgressRequest) -> pb.GroupProgress:
        await self._ask("progress")
        if not self.knows_group:
            raise GroupNotFound("there is no such group")
        read = {each.topic for each in self.progress}
        named = [topic for topic in request.topics if topic in self.stored and topic not in read]
        group = pb.GroupConfig(name=request.name)
        return pb.GroupProgress(
            group=group,
            queues=[*self.progress, *(queue(topic, self.stored[topic]) for topic in named)],
            delivered_timers=self.delivered,
        )

    async def count_timers(self, request: pb.CountTimersRequest) -> pb.CountTimersReply:
        await self._ask("timers")
        return pb.CountTimersReply(
            topics=[
                pb.TimerCount(
                    topic=topic,
                    counts=[
                        sum(s * 1000 <= within for s in due_in_s) for within in request.within_ms
                    ],
                    delivered=self.delivered.get(topic, 0),
                )
                for topic, due_in_s in self.due_in_s.items()
            ]
        )

    async def _ask(self, what: str) -> None:
        self.asked.append(what)
        self.is_asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.is_down:
            raise BrokerUnreachable("it is down")


class FakeMember(NamedTuple):
    """A broker group with its name."""

    name: str
    client: FakeBroker


class FakeBrokers:
    """All broker groups."""

    def __init__(self, *brokers: FakeBroker) -> None:
        self._members = [FakeMember(f"broker-{n}", each) for n, each in enumerate(brokers)]

    async def members(self) -> Sequence[FakeMember]:
        return self._members

    async def call_all(self, call: object, request: object) -> BrokerAnswers[Any]:
        return await self.ask_all(lambda member: member.client.call(call, request))

    async def ask_all(self, ask: Callable[[FakeMember], Awaitable[Any]]) -> BrokerAnswers[Any]:
        answers, unreachable, refusal = [], [], None
        for member in self._members:
            try:
                answers.append(BrokerAnswer(member.name, await ask(member)))
            except BrokerUnreachable:
                unreachable.append(member.name)
            except ServiceError as error:
                refusal = error
        if not answers:
            raise refusal or BrokerGroupUnreachable("no broker can be reached")
        return BrokerAnswers(answers, unreachable)


def queue(
    topic: str, ready: int, in_flight: int = 0, *, is_retry: bool = False
) -> pb.QueueProgress:
    return pb.QueueProgress(
        topic=topic, ready_count=ready, in_flight_count=in_flight, is_retry=is_retry
    )


def with_demands(
    scenario: Callable[[DemandQueries, ManualClock], Awaitable[None]], *brokers: FakeBroker
) -> None:
    async def main() -> None:
        clock = ManualClock()
        demands = DemandQueries(
            cast(Brokers, FakeBrokers(*brokers)), now_s=lambda: clock.monotonic_ms() / 1000
        )
        async with asyncio.timeout(20), demands.running():
            await scenario(demands, clock)

    asyncio.run(main())


def measured(query: DemandQuery, *brokers: FakeBroker) -> Demand:
    """Return the demand of one query."""
    found: list[Demand] = []

    async def scenario(demands: DemandQueries, _clock: ManualClock) -> None:
        found.append(await demands.of(query))

    with_demands(scenario, *brokers)
    return found[0]


def test_the_demand_sums_ready_in_flight_and_scheduled_messages_of_all_brokers() -> None:
    demand = measured(
        BILLING,
        FakeBroker(
            queue("orders", 3, 1),
            queue("orders", 4),
            queue("orders", 5, 2, is_retry=True),
            queue("others", 100, 100),
            due_in_s={"orders": [10, 60, 61], "others": [1]},
        ),
        FakeBroker(queue("orders", 20, 10), due_in_s={"orders": [0, 3600]}),
    )
    assert demand.topics == [TopicDemand("orders", 32, 13, 3)]


def test_without_a_topic_all_topics_of_the_group_count() -> None:
    demand = measured(
        ALL,
        FakeBroker(queue("orders", 3), due_in_s={"orders": [1], "unrelated": [1]}),
        FakeBroker(queue("orders", 10), queue("others", 4), due_in_s={"others": [1, 2]}),
    )
    assert demand.topics == [TopicDemand("orders", 13, 0, 1), TopicDemand("others", 4, 0, 2)]


def test_a_topic_of_the_trigger_counts_before_the_group_has_read_it() -> None:
    unread = FakeBroker(stored={"orders": 10}, due_in_s={"orders": [1]})
    assert measured(BILLING, unread).topics == [TopicDemand("orders", 10, 0, 1)]
    # A broker that does not know the group yet learns of it within seconds.
    other = FakeBroker(stored={"orders": 5}, knows_group=False)
    assert measured(BILLING, FakeBroker(queue("orders", 3)), other).ready == 3


def test_an_unreachable_broker_makes_the_demand_an_error() -> None:
    up, down = FakeBroker(queue("orders", 3)), FakeBroker(queue("orders", 4))
    down.is_down = True
    with pytest.raises(ExceptionGroup) as failed:
        measured(BILLING, up, down)
    assert failed.group_contains(BrokerGroupUnreachable, match="broker-1")


@pytest.mark.parametrize(
    ("query", "broker", "error"),
    [
        (BILLING, FakeBroker(), TopicNotFound),
        (BILLING, FakeBroker(stored={"orders": 1}, knows_group=False), GroupNotFound),
        (ALL, FakeBroker(stored={"orders": 1}), Conflict),
    ],
)
def test_a_demand_that_would_stay_0_forever_is_an_error(
    query: DemandQuery, broker: FakeBroker, error: type[ServiceError]
) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        measured(query, broker)
    assert failed.group_contains(error)


def test_concurrent_queries_share_one_measurement() -> None:
    broker = FakeBroker(queue("orders", 3))

    async def scenario(demands: DemandQueries, clock: ManualClock) -> None:
        broker.gate = asyncio.Event()
        waiting = [asyncio.create_task(demands.of(BILLING)) for _ in range(10)]
        await broker.is_asked.wait()
        waiting.pop(0).cancel()  # The others still get the answer.
        broker.gate.set()
        assert {(await each).ready for each in waiting} == {3}
        await demands.of(BILLING)
        assert broker.asked == ["timers", "progress"]
        clock.advance(int(ANSWER_AGE_S_MAX * 1000) + 1)
        await demands.of(BILLING)
        assert broker.asked == ["timers", "progress"] * 2

    with_demands(scenario, broker)


def test_different_queries_share_one_count_of_timers() -> None:
    broker = FakeBroker(queue("orders", 3), due_in_s={"orders": [10, 100]})

    async def scenario(demands: DemandQueries, _clock: ManualClock) -> None:
        queries = [DemandQuery("billing", "orders", horizon_s) for horizon_s in (5, 60, 3600)]
        found = await asyncio.gather(*map(demands.of, queries))
        assert [demand.scheduled for demand in found] == [0, 1, 2]
        assert broker.asked.count("timers") == 1
        # A new horizon needs one more count, of all horizons.
        assert (await demands.of(BILLING._replace(horizon_s=30))).scheduled == 1
        assert broker.asked.count("timers") == 2

    with_demands(scenario, broker)


def test_a_wave_counts_once_when_it_becomes_due() -> None:
    """The count of timers is some seconds old, and the ready messages are not."""
    wave: dict[str, Sequence[int]] = {"orders": [5] * 500 + [40] * 7}
    broker = FakeBroker(queue("orders", 0), due_in_s=wave)
    broker.delivered = {"orders": 1_000}

    async def scenario(demands: DemandQueries, clock: ManualClock) -> None:
        async def values() -> tuple[int, int]:
            demand = await demands.of(BILLING)
            return demand.ready, demand.scheduled

        broker.gate = asyncio.Event()
        first = asyncio.create_task(values())
        await broker.is_asked.wait()
        clock.advance(500)  # A count of this duration is used for ten seconds.
        broker.gate.set()
        assert await first == (0, 507)
        clock.advance(5_000)
        broker.progress, broker.delivered = (queue("orders", 300),), {"orders": 1_300}
        assert await values() == (300, 207)
        clock.advance(2_500)
        # Messages with a short delay were sent and delivered since the count.
        broker.progress, broker.delivered = (queue("orders", 650),), {"orders": 1_650}
        assert await values() == (650, 7)
        clock.advance(2_001)
        broker.due_in_s = {"orders": [32] * 7}
        assert await values() == (650, 7), "a new count"

    with_demands(scenario, broker)


def test_deliveries_of_later_messages_do_not_hide_a_wave() -> None:
    """Messages with a short delay are sent and delivered after the count, before the wave."""
    wave: dict[str, Sequence[int]] = {"orders": [16] * 500}
    broker = FakeBroker(queue("orders", 0), due_in_s=wave)

    async def scenario(demands: DemandQueries, clock: ManualClock) -> None:
        broker.gate = asyncio.Event()
        first = asyncio.create_task(demands.of(BILLING))
        await broker.is_asked.wait()
        clock.advance(1_000)  # A count of this duration is used for twenty seconds.
        broker.gate.set()
        assert (await first).scheduled == 500
        clock.advance(14_500)
        broker.delivered = {"orders": 10_000}
        assert (await demands.of(BILLING)).scheduled == 500
        clock.advance(2_500)
        assert (await demands.of(BILLING)).scheduled == 0

    with_demands(scenario, broker)


def test_an_error_is_not_cached() -> None:
    broker = FakeBroker(queue("orders", 3))

    async def scenario(demands: DemandQueries, _clock: ManualClock) -> None:
        broker.is_down = True
        with pytest.raises(BrokerGroupUnreachable):
            await demands.of(BILLING)
        broker.is_down = False
        assert (await demands.of(BILLING)).ready == 3

    with_demands(scenario, broker)


def test_the_number_of_queries_is_limited_and_unused_ones_are_dropped() -> None:
    async def scenario(demands: DemandQueries, clock: ManualClock) -> None:
        for n in range(QUERIES_MAX):
            await demands.of(BILLING._replace(group=f"group{n}"))
        with pytest.raises(Overloaded):
            await demands.of(BILLING)
        clock.advance(int(QUERY_IDLE_S * 1000) + 1)
        await demands.of(BILLING)

    with_demands(scenario, FakeBroker(queue("orders", 3)))


def test_queries_of_unknown_groups_and_topics_use_no_place() -> None:
    broker = FakeBroker(queue("orders", 3))

    async def scenario(demands: DemandQueries, _clock: ManualClock) -> None:
        broker.knows_group = False
        for n in range(QUERIES_MAX):
            with pytest.raises(GroupNotFound):
                await demands.of(BILLING._replace(group=f"group{n}"))
        broker.knows_group = True
        with pytest.raises(TopicNotFound):
            await demands.of(BILLING._replace(topic="unknown"))
        assert (await demands.of(BILLING)).ready == 3

    with_demands(scenario, broker)


@pytest.mark.parametrize(
    ("counts_in_flight", "activation", "value", "active"),
    [(True, 0, 35, True), (True, 35, 35, False), (False, 0, 25, True), (False, 24, 25, True)],
)
def test_a_trigger_decides_whether_messages_in_flight_count(
    *, counts_in_flight: bool, activation: int, value: int, active: bool
) -> None:
    demand = Demand([TopicDemand("a", 1, 10, 4), TopicDemand("b", 20, 0, 0)])
    trigger = Trigger(
        query=BILLING,
        messages_per_replica=10,
        activation_messages=activation,
        counts_in_flight=counts_in_flight,
    )
    assert (value_of(demand, trigger), is_active(demand, trigger)) == (value, active)


@pytest.mark.parametrize(("value", "replicas"), [(0, 0), (1, 1), (10, 1), (11, 2)])
def test_the_number_of_replicas_is_rounded_up(value: int, replicas: int) -> None:
    assert replicas_of(value, 10) == replicas
