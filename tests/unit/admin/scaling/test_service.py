"""What a stream tells, and when it says nothing."""

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
    """What there is to do, look by look; with the last one the scaler drains."""

    scaler: ExternalScaler

    def __init__(self, looks: Iterable[int | Exception]) -> None:
        self._looks = iter(looks)

    async def of(self, _question: DemandQuery) -> Demand:
        look = next(self._looks, None)
        if look is None:
            self.scaler.drain()
            raise BrokerGroupUnreachable("nobody knows any more")
        if isinstance(look, Exception):
            raise look
        return Demand([TopicDemand("orders", look, 0, 0)])


class FakeCall:
    """A stream to KEDA."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.sent: list[bool] = []
        self._is_gone = is_gone

    async def send(self, message: bytes) -> None:
        if self._is_gone:
            raise DisconnectError
        self.sent.append(keda.IsActiveResponse.FromString(message).result)

    def peer(self) -> str:
        return "10.0.0.1:4711"


def told(
    *looks: int | Exception, metrics: ScalerMetrics | None = None, call: FakeCall | None = None
) -> list[bool]:
    """Return what a stream is sent until the drain, which comes with the last look."""
    call, metrics = call or FakeCall(), metrics or ScalerMetrics()

    async def main() -> None:
        demands = FakeDemands(looks)
        scaler = ExternalScaler(cast(DemandQueries, demands), metrics, look_period_s=0)
        demands.scaler = scaler
        stream = scaler.methods()[f"/{SERVICE}/StreamIsActive"].handle
        handle = cast(Callable[[RpcCall, bytes], Awaitable[Any]], stream)
        async with asyncio.timeout(20):
            await handle(cast(RpcCall, call), REF.SerializeToString())

    asyncio.run(main())
    return call.sent


def test_a_stream_begins_with_what_is_and_tells_changes_alone() -> None:
    assert told(0, 0, 3, 5, 1, 0, 0, 2) == [False, True, False, True]


def test_a_stream_is_silent_while_nobody_knows() -> None:
    away = BrokerGroupUnreachable("broker-1 cannot be asked")
    assert told(away, 3, away, away, 4, away, 0) == [True, False]


def test_a_stream_ends_with_what_is_the_triggers_to_mend() -> None:
    with pytest.raises(RpcError) as refused:
        told(3, GroupNotFound("there is no consumer group 'billing'"))
    assert refused.value.code == RpcCode.NOT_FOUND


def test_streams_are_few_and_given_back() -> None:
    metrics = ScalerMetrics()
    told(3, metrics=metrics)
    told(3, metrics=metrics, call=FakeCall(is_gone=True))
    assert metrics.stream_count == 0
    metrics.stream_count = STREAMS_MAX
    with pytest.raises(RpcError) as refused:
        told(3, metrics=metrics)
    assert refused.value.code == RpcCode.RESOURCE_EXHAUSTED
    assert metrics.stream_count == STREAMS_MAX
    assert metrics.requests == {
        ("StreamIsActive", "OK"): 2,
        ("StreamIsActive", "RESOURCE_EXHAUSTED"): 1,
    }


def test_what_was_told_is_shown_for_a_while() -> None:
    clock = ManualClock()
    metrics = ScalerMetrics(now_s=lambda: clock.monotonic_ms() / 1000)
    registry = CollectorRegistry()
    registry.register(cast(Any, metrics))
    metrics.told(DemandQuery("billing", "orders", 60), Demand([TopicDemand("orders", 3, 2, 1)]))
    shown = generate_latest(registry).decode()
    labels = 'consumer_group="billing",horizon_seconds="60",signal="{}",topic="orders"'
    for signal, count in (("ready", 3), ("in_flight", 2), ("scheduled", 1)):
        assert f"rocketmq_scaler_metric{{{labels.format(signal)}}} {count}.0" in shown
    clock.advance(int(REPORT_AGE_S_MAX * 1000) + 1)
    assert "billing" not in generate_latest(registry).decode()
