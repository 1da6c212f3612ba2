"""A load that uses every feature once, so that every metric has a value."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import grpc
import httpx
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp

from tests.support.clients.api import CALL_S, METADATA, Api, api, message, receive_request
from tests.support.clients.transactions import (
    checking_producer,
    end_transaction,
    half_message,
    send_half,
)
from tests.support.processes.processes import ADMIN_S, Standalone
from tidemill.proxy.clients.points import HISTOGRAMS
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "first_message.py"
EXAMPLE_S = 60.0
EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
POLL_MS = 10_000  # longer than every wait below
SHORT_MS = 1_000  # the shortest invisible duration
LONG_MS = 60_000
DELAY_MS = 1_500
MESSAGES = 16
URGENT = 16  # messages of two levels, spread over two broker groups
EXPORT_NS = 60_000_000_000  # period of a client's exports


def measuring(folder: Path) -> Path:
    """Return a settings file that makes proxies accept the metrics of clients."""
    path = folder / "tidemill.yaml"
    path.write_text("client_metrics: true\n", "utf-8")
    return path


def quick_start(running: Standalone, home: Path) -> None:
    """Run the first steps of the README. The official client logs below `home`."""
    running.put("topics/orders", messageType="NORMAL", queues=4)
    running.put("groups/billing")
    subprocess.run(
        [sys.executable, str(EXAMPLE), running.grpc],
        env={**os.environ, "HOME": str(home)},
        check=True,
        capture_output=True,
        timeout=EXAMPLE_S,
    )


class ServerAddresses(Protocol):
    """The server: a standalone or a release."""

    @property
    def grpc(self) -> str:
        """The address for clients: host:port."""
        ...

    @property
    def admin(self) -> str:
        """The URL of the REST API."""
        ...

    def put(self, path: str, **body: object) -> None:
        """Send a PUT to the REST API."""
        ...


async def touch_everything(running: ServerAddresses) -> None:
    """Use every feature of the public service and of the REST API once."""
    running.put("topics/parcels", messageType="NORMAL", queues=4)
    running.put("topics/steps", messageType="FIFO", queues=1)
    running.put("topics/reminders", messageType="DELAY", queues=2)
    running.put("topics/news", messageType="NORMAL", queues=4)
    running.put("topics/payments", messageType="TRANSACTION", queues=1)
    running.put("topics/once", messageType="NORMAL", queues=1, dedup={})
    running.put("topics/urgent", messageType="PRIORITY", queues=2)
    running.put("topics/refunds", messageType="NORMAL", queues=1, dedup={})
    running.put("groups/depot")
    running.put("groups/ambulance", priorityFactor=50)
    running.put("groups/strict", maxAttempts=1)
    running.put("groups/orderly", deliveryOrder="FIFO")
    running.put("groups/patient")
    running.put("groups/hasty")
    async with api(running.grpc) as client:
        await _live(client)
        await _deliver(client)
        await asyncio.gather(
            _come_back(client),
            _die(client),
            _keep_order(client),
            _delay(client),
            _repeat(client),
            _wait(client),
            _hurry(client),
            _mismatch(client),
        )
        await _decide(client)
        await _measure(client)
    await asyncio.to_thread(_administer, running)


async def _live(client: Api) -> None:
    """Register a producer and a consumer. They count as alive for two minutes."""
    for kind in (v2.PRODUCER, v2.SIMPLE_CONSUMER):
        request = service.HeartbeatRequest(client_type=kind, group=v2.Resource(name="depot"))
        metadata = (("x-mq-client-id", f"client-{kind}"), *METADATA[1:])
        await client.stub.Heartbeat(request, metadata=metadata, timeout=CALL_S)


async def _deliver(client: Api) -> None:
    for n in range(MESSAGES):
        await client.send(message("parcels", b"parcel %d" % n))
    received: list[v2.Message] = []
    while len(received) < MESSAGES:
        received += await client.receive("parcels", "depot", poll_ms=POLL_MS)
    await client.ack("parcels", "depot", [_handle(each) for each in received])


async def _hurry(client: Api) -> None:
    """Send two levels, and let both wait: one delivery of each level is in a slot of its own."""
    for n in range(URGENT):
        await client.send(message("urgent", b"urgent %d" % n, priority=n // 2 % 2))
    received: list[v2.Message] = []
    while len(received) < URGENT:
        received += await client.receive("urgent", "ambulance", poll_ms=POLL_MS)
    await client.ack("urgent", "ambulance", [_handle(each) for each in received])
    # It waits for a consumer at the scrape.
    await client.send(message("urgent", b"waiting", priority=1))


async def _repeat(client: Api) -> None:
    """Send one dedup key twice."""
    for message_id in ("once-1", "once-2"):
        sent = message("once", b"b", message_id=message_id, properties={"dedup-key": "k"})
        assert (await client.send(sent)).entries[0].message_id == "once-1"


async def _come_back(client: Api) -> None:
    """Let one delivery expire, and give the next one back."""
    await client.send(message("parcels", b"forgotten"))
    await client.receive("parcels", "depot", poll_ms=POLL_MS, invisible_ms=SHORT_MS)
    [again] = await client.receive("parcels", "depot", poll_ms=POLL_MS, invisible_ms=LONG_MS)
    await client.change_invisible("parcels", "depot", _handle(again), SHORT_MS)
    [third] = await client.receive("parcels", "depot", poll_ms=POLL_MS, invisible_ms=LONG_MS)
    await client.ack("parcels", "depot", [_handle(third)])


async def _die(client: Api) -> None:
    """Create a dead letter in a consumer group with one attempt, and receive it."""
    dead = asyncio.create_task(client.receive("%DLQ%strict", "undertaker", poll_ms=POLL_MS))
    while not await client.receive("parcels", "strict", poll_ms=POLL_MS, invisible_ms=SHORT_MS):
        pass
    while not await dead:
        dead = asyncio.create_task(client.receive("%DLQ%strict", "undertaker", poll_ms=POLL_MS))


async def _decide(client: Api) -> None:
    """Commit a half message, and roll another one back. A third one gets a check."""
    for resolution in (v2.COMMIT, v2.ROLLBACK):
        half = half_message("payments", b"decided")
        transaction_id = await send_half(client, half)
        await end_transaction(client, half, transaction_id, resolution)
    async with checking_producer(client, ["payments"]) as producer:
        await send_half(client, half_message("payments", b"open", first_check_ms=SHORT_MS))
        await producer.next_check()


async def _mismatch(client: Api) -> None:
    """Send two messages with one dedup key and different bodies."""
    for body in (b"one", b"two"):
        await client.send(message("refunds", body, properties={"dedup-key": "refund"}))


async def _keep_order(client: Api) -> None:
    """Receive two ordered batches, with another receive that finds the first one's lock."""
    for body in (b"one", b"two"):
        await client.send(message("steps", body, message_group="steps"))
    [held] = await client.receive("steps", "orderly", poll_ms=POLL_MS, batch_size=1)
    assert not await client.receive("steps", "orderly", batch_size=1)
    await client.ack("steps", "orderly", [_handle(held)])
    [held] = await client.receive("steps", "orderly", poll_ms=POLL_MS, batch_size=1)
    await client.ack("steps", "orderly", [_handle(held)])
    await _lose_order(client)


async def _lose_order(client: Api) -> None:
    """Read the FIFO topic with two consumers of a CONCURRENT group that have different filters."""
    for tag in ("red", "blue"):
        request = receive_request("steps", "hasty")
        request.filter_expression.expression = tag
        metadata = (("x-mq-client-id", f"client-{tag}"), *METADATA[1:])
        call = client.stub.ReceiveMessage(request, metadata=metadata, timeout=CALL_S)
        assert [item async for item in call]


async def _delay(client: Api) -> None:
    """Delay two messages, recall one, and receive the other."""
    due_at_ms = int(time.time() * 1000) + DELAY_MS
    await client.send(message("reminders", b"call back", due_at_ms=due_at_ms))
    sent = await client.send(message("reminders", b"never", due_at_ms=due_at_ms + LONG_MS))
    await client.recall("reminders", sent.entries[0].recall_handle)
    [received] = await client.receive("reminders", "patient", poll_ms=POLL_MS)
    await client.ack("reminders", "patient", [_handle(received)])


async def _wait(client: Api) -> None:
    """Receive once with a message and once without."""
    assert not await client.receive("news", "patient")
    waiting = asyncio.create_task(client.receive("news", "patient", poll_ms=POLL_MS))
    await client.send(message("news", b"one more"))
    [received] = await waiting
    await client.ack("news", "patient", [_handle(received)])


async def _measure(client: Api) -> None:
    """Export the metrics of an official client, if the server asks for them."""
    known = {"topic": "parcels", "consumer_group": "depot", "invocation_status": "success"}
    attributes = [KeyValue(key=k, value=AnyValue(string_value=v)) for k, v in known.items()]
    metrics = []
    now_ns = time.time_ns()
    for name, histogram in HISTOGRAMS.items():
        counts = [1, *[0] * len(histogram.bounds)]
        point = otlp.HistogramDataPoint(
            attributes=attributes,
            bucket_counts=counts,
            count=1,
            sum=0.5,
            explicit_bounds=histogram.bounds,
            start_time_unix_nano=now_ns - EXPORT_NS,
            time_unix_nano=now_ns,
        )
        data = otlp.Histogram(
            data_points=[point], aggregation_temporality=otlp.AGGREGATION_TEMPORALITY_CUMULATIVE
        )
        metrics.append(otlp.Metric(name=name, histogram=data))
    for name in ("messages", "bytes"):
        value = otlp.NumberDataPoint(attributes=attributes, as_int=1)
        cached = otlp.Gauge(data_points=[value])
        metrics.append(otlp.Metric(name=f"rocketmq_consumer_cached_{name}", gauge=cached))
    scope = otlp.ScopeMetrics(metrics=metrics)
    request = ExportMetricsServiceRequest(
        resource_metrics=[otlp.ResourceMetrics(scope_metrics=[scope])]
    )
    export = client.channel.unary_unary(
        EXPORT,
        request_serializer=ExportMetricsServiceRequest.SerializeToString,
        response_deserializer=ExportMetricsServiceResponse.FromString,
    )
    try:
        answer = await export(request, metadata=METADATA, timeout=CALL_S)
    except grpc.aio.AioRpcError as refusal:
        if refusal.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return  # The proxies do not accept clients' metrics.
    assert not answer.partial_success.rejected_data_points, answer


def _administer(running: ServerAddresses) -> None:
    with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=ADMIN_S) as rest:
        for path in ("/topics", "/groups", "/groups/depot/progress", "/broker-groups", "/timers"):
            rest.get(path).raise_for_status()
        assert rest.get("/topics/nowhere").status_code == httpx.codes.NOT_FOUND


def _handle(received: v2.Message) -> str:
    return received.system_properties.receipt_handle
