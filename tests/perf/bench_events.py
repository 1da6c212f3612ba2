"""How many lifecycle events a second a client reads at the proxy's port, and what they cost.

    python -m tests.perf.bench_events [--messages 40000]

Messages of 1 KiB are sent, popped by 32 and acked; then all events of the log are read by a client
that keeps the replies as bytes, three times. CPU is of broker and proxy, per event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import grpc

from tests.support.clients.api import Api, api, message
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

TOPIC, GROUP = "orders", "billing"
BATCH = 32
RUNS = 3
READ_EVENTS = "/tidemill.pipeline.v1.PipelineSource/ReadEvents"


async def fill(client: Api, count: int) -> None:
    """Send, pop and ack `count` messages."""
    body = b"x" * 1024
    for first in range(0, count, BATCH):
        await client.send(
            *[message(TOPIC, body, message_id=f"{first + n:032d}") for n in range(BATCH)]
        )
        got = await client.receive(TOPIC, GROUP, poll_ms=5_000)
        await client.ack(TOPIC, GROUP, [one.system_properties.receipt_handle for one in got])


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def read_all(running: Standalone) -> tuple[int, float]:
    """Return how many replies there were, and how long they took."""
    with grpc.insecure_channel(running.grpc) as channel:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(READ_EVENTS)
        began_s, replies = time.monotonic(), []
        position = 0
        while True:
            request = pb.ReadEventsRequest(broker="broker-0", from_position=position)
            got = list(call(request.SerializeToString()))
            replies += got
            end = pb.ReadEventsReply.FromString(got[-1])
            position = end.next_position
            if position >= end.log_end:
                break
        took_s = time.monotonic() - began_s
    return sum(len(pb.ReadEventsReply.FromString(reply).events) for reply in replies), took_s


def main() -> None:
    """Measure, and print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=40_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, standalone(Path(folder)) as running:
        running.put(f"topics/{TOPIC}", queues=4)
        pids = {name: one.pid for name, one in running.processes.items()}

        async def run() -> None:
            async with api(running.grpc) as client:
                await fill(client, given.messages)

        asyncio.run(run())
        rates, costs = [], []
        for _ in range(RUNS):
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            count, took_s = read_all(running)
            rates.append(round(count / took_s))
            costs.append(
                {
                    name: round((cpu_s(pid) - before[name]) / count * 1e6, 2)
                    for name, pid in pids.items()
                }
            )
    print(
        json.dumps(
            {
                "events": count,
                "events_per_s": rates,
                "median": statistics.median(rates),
                "cpu_us_per_event": costs[-1],
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
