"""Latency and cost of long polls over several broker groups.

    latency   3 groups, one consumer that polls for 20 s, one message per second: time from send
              to receive, and wrong empty answers
    idle      one consumer without messages, 1 and 8 groups: requests to brokers per second
    many      5,000 long polls of 20 s on 50 connections, 3 groups, no messages: CPU of proxy and
              brokers in cores, and their additional memory

Clients are this process, with grpcio: `python -m tests.perf.bench_polling [latency|idle|many]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.perf.bench_end_to_end import cpu_seconds, pss_mib
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2.service_pb2_grpc import MessagingServiceStub

TOPIC, GROUP = "bench", "readers"
POLL_S = 20
CONNECTIONS, POLLS = 50, 5_000
METADATA = (("x-mq-client-id", "bench"), ("x-mq-client-version", "5.0.7"))


@contextlib.asynccontextmanager
async def stub(address: str) -> AsyncIterator[Any]:
    """Open a new connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield MessagingServiceStub(channel)


async def receive(client: Any, group: str = GROUP, *, poll_s: int = POLL_S) -> list[v2.Message]:
    """Poll once and return the messages."""
    request = service.ReceiveMessageRequest(
        group=v2.Resource(name=group),
        message_queue=v2.MessageQueue(topic=v2.Resource(name=TOPIC)),
        filter_expression=v2.FilterExpression(type=v2.TAG, expression="*"),
        batch_size=32,
    )
    request.invisible_duration.FromSeconds(60)
    request.long_polling_timeout.FromSeconds(poll_s)
    stream = client.ReceiveMessage(request, metadata=METADATA, timeout=poll_s + 5)
    return [item.message async for item in stream if item.HasField("message")]


async def ack(client: Any, messages: list[v2.Message]) -> None:
    """Ack the messages."""
    entries = [
        service.AckMessageEntry(
            message_id=one.system_properties.message_id,
            receipt_handle=one.system_properties.receipt_handle,
        )
        for one in messages
    ]
    request = service.AckMessageRequest(
        group=v2.Resource(name=GROUP), topic=v2.Resource(name=TOPIC), entries=entries
    )
    await client.AckMessage(request, metadata=METADATA)


async def send(client: Any, number: int) -> None:
    """Send one message with its send time."""
    system = v2.SystemProperties(message_id=f"bench-{number}", body_encoding=v2.IDENTITY)
    message = v2.Message(
        topic=v2.Resource(name=TOPIC),
        body=str(time.monotonic_ns()).encode(),
        system_properties=system,
    )
    answer = await client.SendMessage(
        service.SendMessageRequest(messages=[message]), metadata=METADATA
    )
    assert answer.status.code == v2.OK, answer.status


def scrape(running: Standalone, process: str = "proxy-0") -> dict[tuple[str, str, str], float]:
    """Return the samples of a process by name, request code and outcome."""
    with urllib.request.urlopen(running.processes[process].metrics, timeout=10) as response:
        text = response.read().decode()
    samples: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                continue
            key = (
                sample.name,
                sample.labels.get("request_code", ""),
                sample.labels.get("outcome", ""),
            )
            samples[key] = samples.get(key, 0) + sample.value
    return samples


def polls_of_brokers(running: Standalone) -> float:
    """Return the proxy's number of requests to brokers for messages or hints."""
    name = "rocketmq_proxy_backend_latency_count"
    return sum(
        value
        for key, value in scrape(running).items()
        if key[0] == name and key[1] in {"pop", "notification"}
    )


def prepare(running: Standalone) -> None:
    """Create topic and consumer groups, and wait until every broker has them."""
    running.put(f"topics/{TOPIC}", queues=4)
    for number in range(CONNECTIONS):
        running.put(f"groups/{GROUP}-{number}")
    running.put(f"groups/{GROUP}")
    time.sleep(2)


async def latency(count: int) -> None:
    """Measure the latency of messages."""
    with (
        tempfile.TemporaryDirectory() as folder,
        standalone(Path(folder) / "data", "--groups", "3") as running,
    ):
        prepare(running)
        took_ms: list[float] = []

        async def consume(client: Any) -> None:
            while len(took_ms) < count:
                messages = await receive(client)
                now_ns = time.monotonic_ns()
                took_ms.extend((now_ns - int(one.body)) / 1e6 for one in messages)
                if messages:
                    await ack(client, messages)

        async with stub(running.grpc) as sender, stub(running.grpc) as reader:
            consuming = asyncio.create_task(consume(reader))
            await asyncio.sleep(1)
            for number in range(count):
                await send(sender, number)
                await asyncio.sleep(1)
            await asyncio.wait_for(consuming, 2 * POLL_S)
        took_ms.sort()
        samples = scrape(running)
        print(
            f"latency: {count} messages, P50 {took_ms[count // 2]:.1f} ms,"
            f" P99 {took_ms[min(count * 99 // 100, count - 1)]:.1f} ms, most {took_ms[-1]:.1f} ms"
        )
        for name in (
            "rocketmq_proxy_false_empty_total",
            "rocketmq_proxy_receive_total",
            "rocketmq_proxy_notified_pop_total",
            "rocketmq_proxy_notification_total",
        ):
            for key, value in sorted(samples.items()):
                if key[0] == name:
                    print(f"  {name} {key[2]} {value:.0f}")


async def idle(groups: int) -> None:
    """Count an idle consumer's requests to brokers."""
    with (
        tempfile.TemporaryDirectory() as folder,
        standalone(Path(folder) / "data", "--groups", str(groups)) as running,
    ):
        prepare(running)
        async with stub(running.grpc) as reader:
            await receive(reader)
            before, began_s = polls_of_brokers(running), time.monotonic()
            for _ in range(2):
                await receive(reader)
            took_s = time.monotonic() - began_s
            calls = polls_of_brokers(running) - before
        print(
            f"idle: {groups} groups, {calls / took_s:.2f} calls a second,"
            f" {calls / took_s / groups:.3f} a group"
        )


async def many(groups: int, consumer_groups: int) -> None:
    """Measure the cost of idle polls."""
    with (
        tempfile.TemporaryDirectory() as folder,
        standalone(Path(folder) / "data", "--groups", str(groups)) as running,
    ):
        prepare(running)
        names = [name for name in running.processes if name != "admin"]
        pids = [running.processes[name].pid for name in names]
        memory_mib = sum(map(pss_mib, pids))
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(stub(running.grpc)) for _ in range(CONNECTIONS)
            ]
            is_over = False

            async def poll(number: int) -> None:
                client = clients[number % CONNECTIONS]
                # Spread over a second, like the restart of a fleet of clients.
                await asyncio.sleep(number / POLLS * POLL_S / 2)
                group = f"{GROUP}-{number % consumer_groups}"
                while not is_over:
                    await receive(client, group)

            polling = [asyncio.create_task(poll(number)) for number in range(POLLS)]
            await asyncio.sleep(POLL_S * 1.6)
            before, began_s = list(map(cpu_seconds, pids)), time.monotonic()
            await asyncio.sleep(2 * POLL_S)
            took_s = time.monotonic() - began_s
            parts = [
                (cpu_seconds(pid) - cpu_s) / took_s * 100
                for pid, cpu_s in zip(pids, before, strict=True)
            ]
            added_mib = sum(map(pss_mib, pids)) - memory_mib
            is_over = True
            for task in polling:
                task.cancel()
            await asyncio.gather(*polling, return_exceptions=True)
        samples = scrape(running)
        ends = {
            key[2]: value
            for key, value in samples.items()
            if key[0] == "rocketmq_proxy_receive_total"
        }
        print(
            f"many: {POLLS} polls of {consumer_groups} consumer groups at {groups} broker groups,"
            f" {sum(parts):.1f} % of a core, {added_mib:.0f} MiB added"
        )
        print(" ", {name: f"{part:.1f} %" for name, part in zip(names, parts, strict=True)}, ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["latency", "idle", "many"])
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--groups", type=int, nargs="*", default=[1, 8])
    arguments = parser.parse_args()
    if arguments.what in {None, "latency"}:
        asyncio.run(latency(arguments.messages))
    if arguments.what in {None, "idle"}:
        for groups in arguments.groups:
            asyncio.run(idle(groups))
    if arguments.what in {None, "many"}:
        for groups, consumer_groups in ((3, 50), (3, 1), (1, 50)):
            asyncio.run(many(groups, consumer_groups))


if __name__ == "__main__":
    main()
