"""How much memory does a broker hold, how long does it pause, how fast does it start again?

A broker process alone, driven over its own link with frames of 256 requests:

- anonymous memory with a million unread messages of 1 KiB
- after kill -9, with all of that in the log: seconds to ready
- what 100,000 messages in flight add, popped by 32 and popped one by one
- with a million in flight, the longest time a small append waited while the broker wrote
  checkpoints: an upper bound of the longest pause of its loop
- after kill -9, with all of that in flight: seconds to ready
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import grpc

from tests.support.processes.processes import command, environment
from tests.support.worlds.engine_world import blob
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

FRAME_REQUESTS = 256
HOUR_MS = 3_600_000


def start_broker(data_dir: Path) -> tuple[subprocess.Popen[str], str, float]:
    """Start a broker; return it, its address, and how long it took to be ready."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command(
            "broker",
            f"--data-dir={data_dir}",
            "--grpc-port=0",
            "--metrics-port=0",
            "--auto-create-topics",
            "--auto-create-groups",
        ),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "broker serves" in line:
            return process, json.loads(line)["grpc"], time.perf_counter() - began
        print(line, end="", file=sys.stderr)
    sys.exit("the broker did not start")


def anonymous_mib(pid: int) -> float:
    match = re.search(
        r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    assert match is not None
    return int(match[1]) / 1024


class LinkClient:
    """One link, frame by frame."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._sequence = 0
        self._request_id = 0

    async def exchange(self, frame: pb.RequestFrame) -> list[pb.ReplyFrame]:
        """Send a frame and return what answers it."""
        self._sequence += 1
        frame.sequence = self._sequence
        await self._call.write(frame)
        replies = []
        while True:
            reply = await self._call.read()
            replies.append(reply)
            if reply.answered_sequence == self._sequence:
                return replies

    def new_id(self) -> int:
        self._request_id += 1
        return self._request_id

    async def append(self, topic_id: int, count: int, data: bytes) -> None:
        frame = pb.RequestFrame()
        ids = [self.new_id() for _ in range(count)]
        frame.appends.request_ids.extend(ids)
        frame.appends.topic_ids.extend([topic_id] * count)
        frame.appends.queue_ids.extend([n % 8 for n in range(count)])
        frame.appends.crcs.extend([crc32(data)] * count)
        frame.appends.blobs.extend([data] * count)
        replies = await self.exchange(frame)
        assert sum(len(reply.appends.request_ids) for reply in replies) == count, replies

    async def pop(self, group_id: int, topic_id: int, requests: int, want: int) -> int:
        frame = pb.RequestFrame()
        for _ in range(requests):
            frame.pops.add(
                request_id=self.new_id(),
                group_id=group_id,
                topic_id=topic_id,
                max_messages=want,
                invisible_duration_ms=HOUR_MS,
            )
        replies = await self.exchange(frame)
        return sum(len(b.indexes) for r in replies for pop in r.pops for b in pop.batches)


@asynccontextmanager
async def linked(address: str) -> AsyncIterator[tuple[LinkClient, grpc.aio.Channel]]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = broker_pb2_grpc.BrokerLinkStub(channel).Exchange()
        await call.read()  # The configuration.
        yield LinkClient(call), channel
        call.cancel()


async def fill(
    link: LinkClient, topic_id: int, count: int, requests: int = FRAME_REQUESTS
) -> float:
    data = blob("x", message_id="01" * 17, size=1024)
    began = time.perf_counter()
    for _ in range(count // requests):
        await link.append(topic_id, requests, data)
    return count / (time.perf_counter() - began)


async def take(link: LinkClient, group_id: int, topic_id: int, count: int, want: int) -> int:
    got = 0
    while got < count:
        got += await link.pop(group_id, topic_id, max(FRAME_REQUESTS // want, 1), want)
    return got


async def probe(link: LinkClient, topic_id: int, stop: asyncio.Event) -> list[float]:
    """Append a small message every 2 ms; return how long each took, in ms."""
    data = blob("probe")
    spans = []
    while not stop.is_set():
        began = time.perf_counter()
        await link.append(topic_id, 1, data)
        spans.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.002)
    return spans


async def measure_backlog(address: str, pid: int, messages: int) -> dict[str, Any]:
    """Store the messages."""
    async with linked(address) as (link, channel):
        admin = broker_pb2_grpc.BrokerAdminStub(channel)
        topic = (await admin.PutTopic(pb.PutTopicRequest(name="bench", queues=8))).topic
        empty = anonymous_mib(pid)
        rate = await fill(link, topic.id, messages)
        return {
            "empty_anonymous_mib": round(empty, 1),
            "append_per_second": round(rate),
            "backlog_anonymous_mib": round(anonymous_mib(pid), 1),
        }


async def measure_in_flight(address: str, pid: int, messages: int) -> dict[str, Any]:
    """Pop the messages for three groups, and look what that costs."""
    results: dict[str, Any] = {}
    async with linked(address) as (link, channel), linked(address) as (other, _):
        admin = broker_pb2_grpc.BrokerAdminStub(channel)
        topic = (await admin.PutTopic(pb.PutTopicRequest(name="bench", queues=8))).topic
        small = (await admin.PutTopic(pb.PutTopicRequest(name="probe", queues=8))).topic
        by_32, by_1, everything = [
            (await admin.PutGroup(pb.PutGroupRequest(name=name))).group
            for name in ("by32", "by1", "all")
        ]
        # The first pops allocate buffers of gRPC once. The figures leave these out.
        await take(link, by_32.id, topic.id, 10_000, 32)
        await take(link, by_1.id, topic.id, 10_000, 1)
        count = min(100_000, messages // 4)
        before = anonymous_mib(pid)
        got = await take(link, by_32.id, topic.id, count, 32)
        after = anonymous_mib(pid)
        results["in_flight_by_32_mib_per_100k"] = round((after - before) / got * 100_000, 2)
        got = await take(link, by_1.id, topic.id, count, 1)
        added = anonymous_mib(pid) - after
        results["in_flight_by_1_mib_per_100k"] = round(added / got * 100_000, 2)
        began = time.perf_counter()
        got = await take(link, everything.id, topic.id, messages - FRAME_REQUESTS, 1)
        results["pop_1_per_second"] = round(got / (time.perf_counter() - began))
        results["all_in_flight_anonymous_mib"] = round(anonymous_mib(pid), 1)
        stop = asyncio.Event()
        probing = asyncio.create_task(probe(other, small.id, stop))
        # Enough for a checkpoint or more, in short rounds. A long span is then a pause.
        await fill(link, topic.id, 100 * 1024, requests=16)
        stop.set()
        spans = sorted(await probing)
        results["probe_ms"] = {
            "p50": round(statistics.median(spans), 2),
            "p99": round(spans[int(len(spans) * 0.99)], 2),
            "max": round(spans[-1], 2),
        }
    return results


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    messages = parser.parse_args().messages
    with tempfile.TemporaryDirectory(dir=".") as name:
        data_dir = Path(name).resolve() / "data"
        process, address, _ = start_broker(data_dir)
        try:
            results = asyncio.run(measure_backlog(address, process.pid, messages))
            kill(process)
            log_bytes = sum(file.stat().st_size for file in (data_dir / "log").iterdir())
            results["log_gib"] = round(log_bytes / 2**30, 2)
            process, address, seconds = start_broker(data_dir)
            results["start_after_kill_s"] = round(seconds, 2)
            results |= asyncio.run(measure_in_flight(address, process.pid, messages))
            kill(process)
            process, _, seconds = start_broker(data_dir)
            results["start_with_all_in_flight_s"] = round(seconds, 2)
        finally:
            kill(process)
    json.dump({"bench": "broker", "cpus": os.cpu_count(), **results}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
