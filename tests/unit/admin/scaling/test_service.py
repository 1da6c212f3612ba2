"""The values that a stream sends to KEDA, and when it sends none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.clocks import ManualClock
from tidemill.admin.scaling.demand import Demand, TopicDemand
from tidemill.admin.scaling.demand_queries import DemandQueries
from tidemill.admin.scaling.metrics import REPORT_AGE_S_MAX, ScalerMetrics
from tidemill.admin.scaling.service import SERVICE, STREAMS_MAX, ExternalScaler
from tidemill.admin.scaling.trigger import DemandQuery
from tidemill.common.errors import BrokerGroupUnreachable, GroupNotFound
from tidemill.stubs.externalscaler import externalscaler_pb2 as keda
from tidemill.transport.aio.call import DisconnectError, RpcCall
from tidemill.transport.grpc.status import RpcCode, RpcError

REF = keda.ScaledObjectRef(
    name="consumer",
    namespace="default",
    scalerMetadata={"group": "billing", "topic": "orders", "messagesPerReplica": "10"},
)


class FakeDemands:
    """The demand of each poll. After the last one, the scaler drains."""

    scaler: ExternalScaler

    def __init__(self, results: Iterable[int | Exception]) -> None:
        self._results = iter(results)

    async def of(self, _query: DemandQuery) -> Demand:
        result = next(self._results, None)
        if result is None:
            self.scaler.drain()
            raise BrokerGroupUnreachable("unknown")
        if isinstance(result, Exception):
            raise result
        return Demand([TopicDemand("orders", result, 0, 0)])


class FakeCall:
    """A stream to KEDA."""

    def __init__(self, *, is_disconnected: bool = False) -> None:
        self.sent: list[bool] = []
        self._is_disconnected = is_disconnected

    async def send(self, message: bytes) -> None:
        if self._is_disconnected:
            raise DisconnectError
        self.sent.append(keda.IsActiveResponse.FromString(message).result)

    def peer(self) -> str:
        return "10.0.0.1:4711"


def sent_on_stream(
    *results: int | Exception, metrics: ScalerMetrics | None = None, call: FakeCall | None = None
) -> list[bool]:
    """Return the values on a stream until the drain."""
    call, metrics = call or FakeCall(), metrics or ScalerMetrics()

    async def main() -> None:
        demands = FakeDemands(results)
        scaler = ExternalScaler(cast(DemandQueries, demands), metrics, poll_period_s=0)
        demands.scaler = scaler
        stream = scaler.methods()[f"/{SERVICE}/StreamIsActive"].handle
        handle = cast(Callable[[RpcCall, bytes], Awaitable[Any]], stream)
        async with asyncio.timeout(20):
            await handle(cast(RpcCall, call), REF.SerializeToString())

    asyncio.run(main())
    return call.sent


def test_a_stream_sends_the_first_value_and_then_only_changes() -> None:
    assert sent_on_stream(0, 0, 3, 5, 1, 0, 0, 2) == [False, True, False, True]


def test_a_stream_sends_nothing_while_the_demand_is_unknown() -> None:
    error = BrokerGroupUnreachable("broker-1 cannot be reached")
    assert sent_on_stream(error, 3, error, error, 4, error, 0) == [True, False]


def test_a_stream_ends_with_the_error_of_a_wrong_trigger() -> None:
    with pytest.raises(RpcError) as refused:
        sent_on_stream(3, GroupNotFound("there is no consumer group 'billing'"))
    assert refused.value.code == RpcCode.NOT_FOUND


def test_the_number_of_streams_is_limited_and_ended_streams_do_not_count() -> None:
    metrics = ScalerMetrics()
    sent_on_stream(3, metrics=metrics)
    sent_on_stream(3, metrics=metrics, call=FakeCall(is_disconnected=True))
    assert metrics.stream_count == 0
    metrics.stream_count = STREAMS_MAX
    with pytest.raises(RpcError) as refused:
        sent_on_stream(3, metrics=metrics)
    assert refused.value.code == RpcCode.RESOURCE_EXHAUSTED
    assert metrics.stream_count == STREAMS_MAX
    assert metrics.requests == {
        ("StreamIsActive", "OK"): 2,
        ("StreamIsActive", "RESOURCE_EXHAUSTED"): 1,
    }


def test_reported_demands_are_metrics_for_two_minutes() -> None:
    clock = ManualClock()
    metrics = ScalerMetrics(now_s=lambda: clock.monotonic_ms() / 1000)
    registry = CollectorRegistry()
    registry.register(cast(Any, metrics))
    metrics.record(DemandQuery("billing", "orders", 60), Demand([TopicDemand("orders", 3, 2, 1)]))
    shown = generate_latest(registry).decode()
    labels = 'consumer_group="billing",horizon_seconds="60",signal="{}",topic="orders"'
    for signal, count in (("ready", 3), ("in_flight", 2), ("scheduled", 1)):
        assert f"rocketmq_scaler_metric{{{labels.format(signal)}}} {count}.0" in shown
    clock.advance(int(REPORT_AGE_S_MAX * 1000) + 1)
    assert "billing" not in generate_latest(registry).decode()
