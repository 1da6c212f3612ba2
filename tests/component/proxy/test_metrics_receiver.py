"""Exports of clients' metrics on the public port, as grpcio sends them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as collector
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp

from tests.support.clients.exports import empty_points
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import HEADERS, ProxyWorld
from tidemill.common.metrics import Registry
from tidemill.message import limits
from tidemill.proxy.clients.metrics import ClientMetrics
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.grpc_server import GrpcServer
from tidemill.proxy.server.metrics_receiver import EXPORT, EXPORTS_MAX, MetricsReceiver
from tidemill.proxy.settings import ProxySettings
from tidemill.transport.grpc.status import RpcCode, RpcError

Export = Callable[..., Awaitable[bytes]]


def run(scenario: Callable[[ProxyWorld, Export], Awaitable[None]], *, is_on: bool = True) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(20),
            MemoryBroker().serving() as broker,
            ProxyWorld.open(broker) as world,
        ):
            metrics = ClientMetrics(
                Registry(cluster="c", node_type="proxy", node_id="p"),
                lambda: 0,
                knows_topic=world.cluster.knows_topic,
                knows=world.cluster.knows,
            )
            receiver = MetricsReceiver(metrics) if is_on else None
            server = GrpcServer(
                world.methods, world.boundary, receiver, on_lost=world.client_life.forget_connection
            )
            async with (
                server.serving(ProxySettings(grpc_port=0)),
                grpc.aio.insecure_channel(server.address) as channel,
            ):
                await scenario(world, channel.unary_unary(EXPORT))

    asyncio.run(main())


def request(topic: str = "topic") -> bytes:
    attributes = [
        KeyValue(key="topic", value=AnyValue(string_value=topic)),
        KeyValue(key="consumer_group", value=AnyValue(string_value="group")),
    ]
    point = otlp.NumberDataPoint(attributes=attributes, as_int=1)
    metric = otlp.Metric(
        name="rocketmq_consumer_cached_bytes", gauge=otlp.Gauge(data_points=[point])
    )
    scope = otlp.ScopeMetrics(metrics=[metric])
    return collector.ExportMetricsServiceRequest(
        resource_metrics=[otlp.ResourceMetrics(scope_metrics=[scope])]
    ).SerializeToString()


def answer(encoded: bytes) -> Any:
    return collector.ExportMetricsServiceResponse.FromString(encoded).partial_success


def test_rejected_points_are_counted_in_the_answer() -> None:
    async def scenario(world: ProxyWorld, export: Export) -> None:
        await world.put_topic()
        await world.put_group()
        metadata = tuple(HEADERS.items())
        assert answer(await export(request(), metadata=metadata)).rejected_data_points == 0
        refused = answer(await export(request("none"), metadata=metadata))
        assert refused.rejected_data_points == 1
        assert "is unknown" in refused.error_message

    run(scenario)


@pytest.mark.parametrize(
    ("encoded", "metadata", "code"),
    [
        (b"\xff", HEADERS, grpc.StatusCode.INVALID_ARGUMENT),
        (b"", {}, grpc.StatusCode.INVALID_ARGUMENT),
        (b"", {"x-mq-client-id": "x" * 256}, grpc.StatusCode.INVALID_ARGUMENT),
        (bytes(limits.OTHER_REQUESTS_BYTES + 1), HEADERS, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_an_invalid_export_ends_with_a_status(
    encoded: bytes, metadata: dict[str, str], code: grpc.StatusCode
) -> None:
    async def scenario(_world: ProxyWorld, export: Export) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await export(encoded, metadata=tuple(metadata.items()))
        assert refused.value.code() is code

    run(scenario)


def test_client_metrics_can_be_turned_off() -> None:
    async def scenario(_world: ProxyWorld, export: Export) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await export(b"", metadata=tuple(HEADERS.items()))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(scenario, is_on=False)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def call_from(address: str, client_id: str = "c") -> Call:
    metadata = {**HEADERS, "x-mq-client-id": client_id}
    return Call(metadata, peer=lambda: f"{address}:5", connection=address, time_remaining_s=None)


def receiver() -> MetricsReceiver:
    metrics = ClientMetrics(
        Registry(cluster="c", node_type="proxy", node_id="p"),
        lambda: 0,
        knows_topic=lambda _: True,
        knows=lambda _topic, _group: True,
    )
    return MetricsReceiver(metrics)


EMPTY_POINTS = empty_points(9, "rocketmq_send_cost_time")


def test_concurrent_exports_hold_only_their_bytes() -> None:
    """Empty points once took eight megabytes of memory for each accepted export."""

    async def main() -> None:
        receives = receiver()
        before_bytes = resident_bytes()
        async with asyncio.TaskGroup() as exports:
            for n in range(EXPORTS_MAX // 2):
                exports.create_task(
                    receives.export(call_from("ipv4:10.0.0.1", f"c{n}"), EMPTY_POINTS)
                )
            await asyncio.sleep(0)
            assert resident_bytes() - before_bytes < 64 << 20

    asyncio.run(main())


def test_an_address_gets_at_most_the_free_exports() -> None:
    async def main() -> None:
        receives = receiver()

        def start(address: str) -> asyncio.Task[bytes]:
            return asyncio.create_task(receives.export(call_from(address), EMPTY_POINTS))

        strangers = [start("ipv4:10.0.0.1") for _ in range(EXPORTS_MAX)]
        honest = start("ipv4:10.0.0.2")
        outcomes = await asyncio.gather(*strangers, honest, return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, RpcError)]
        assert len(refused) == EXPORTS_MAX // 2
        assert all(each.code is RpcCode.RESOURCE_EXHAUSTED for each in refused)
        assert isinstance(outcomes[-1], bytes)
        # All exports have ended, so there is room again.
        assert isinstance(await start("ipv4:10.0.0.1"), bytes)

    asyncio.run(main())
