"""Bulk changes of timers: the time of an operation, and the latency of sends beside it.

State machine: one standalone whose store has --timers pending timers of 1 KiB, seeded by the
engine. A client sends one message of 1 KiB every 10 ms to another topic: alone, beside a dry
run and an operation on all timers, and alone again. Each kind runs on a store of its own.

    python -m tests.perf.bench_timer_changes [--timers 100000] [--kinds cancel,reschedule,fire]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import httpx

from tests.perf.bench_timers import advance, now_ms
from tests.support.clients.api import Api, api
from tests.support.processes.processes import standalone
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.posix_disk import PosixDisk
from tidemill.message import stored_message
from tidemill.message.encoding import encode_stored
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

ROUND: Final = 256  # messages per round while seeding
HOUR_MS: Final = 3_600_000
BODY_BYTES: Final = 1_024
ALONE_S: Final = 15.0  # before and after the operation
WINDOW: Final = 200  # sends
PERIOD_S: Final = 0.01
END_S_MAX: Final = 300.0
CHANGES: Final[dict[str, dict[str, Any]]] = {
    "cancel": {},
    "reschedule": {"shiftMs": 600_000, "spreadMs": 60_000},
    "fire": {},
}


def seed(folder: Path, count: int) -> None:
    """Fill a store with timers of the topic `seeded`, due within a day from an hour on."""
    at_ms = now_ms()
    config = EngineConfig(auto_create_topics=True, auto_create_groups=True)
    engine, _ = open_engine(PosixDisk(folder), config, now_ms=at_ms, entropy=os.urandom(32))
    topic = engine.administration.put_topic("seeded", type_=TopicType.DELAY, queues=8, now_ms=at_ms)
    engine.commit(at_ms)
    message = v2.Message(topic=v2.Resource(name="seeded"), body=bytes(BODY_BYTES))
    properties = message.system_properties
    properties.message_type = v2.DELAY
    for n in range(count):
        properties.message_id = f"{n:032X}"
        properties.delivery_timestamp.FromMilliseconds(
            at_ms + HOUR_MS + n * 2_654_435_761 % (24 * HOUR_MS)
        )
        data = encode_stored(message, message_type=stored_message.TYPE_DELAY, now_ms=at_ms)
        engine.commands.send(
            topic.id, QueueId(n & 7), data, crc32(data), now_ms=at_ms, firing_ms=at_ms
        )
        if n % ROUND == 0:
            advance(engine, at_ms)
    engine.commit(now_ms())
    engine.close()


class Sends:
    """Sends a message per period, and notes the latency of each."""

    def __init__(self, client: Api) -> None:
        self._client = client
        self.latencies_ms: list[float] = []
        self.failed = 0

    async def run(self) -> None:
        message = v2.Message(topic=v2.Resource(name="beside"), body=bytes(BODY_BYTES))
        message.system_properties.message_type = v2.NORMAL
        number = 0
        while True:
            number += 1
            message.system_properties.message_id = f"{number:032X}"
            began = time.perf_counter()
            answer = await self._client.send(message)
            self.latencies_ms.append((time.perf_counter() - began) * 1_000)
            self.failed += answer.entries[0].status.code != v2.OK
            await asyncio.sleep(max(PERIOD_S - (time.perf_counter() - began), 0))

    def take(self) -> list[float]:
        """Return the latencies since the last call."""
        found, self.latencies_ms = self.latencies_ms, []
        return found


def percentiles(latencies_ms: list[float]) -> dict[str, float]:
    """Return the percentiles, and the median of the P99 of short windows.

    The median is robust against other programs of the machine.
    """
    found = sorted(latencies_ms)
    windows = [latencies_ms[at : at + WINDOW] for at in range(0, len(found) - WINDOW + 1, WINDOW)]
    return {
        "sends": len(found),
        "p50_ms": round(statistics.median(found), 2),
        "p99_ms": round(_p99(found), 2),
        "window_p99_ms": round(statistics.median([_p99(window) for window in windows]), 2),
        "max_ms": round(found[-1], 2),
    }


def _p99(latencies_ms: list[float]) -> float:
    return sorted(latencies_ms)[len(latencies_ms) * 99 // 100]


async def run_operation(http: httpx.AsyncClient, kind: str) -> dict[str, Any]:
    """Count and change all timers of the topic; return the times."""
    body: dict[str, Any] = {"filter": {"topic": "seeded"}, **CHANGES[kind]}
    began = time.perf_counter()
    counted = await http.post(f"/timers:{kind}", json=body, params={"dryRun": "true"})
    assert counted.is_success, counted.text
    planned = counted.json()
    counted_s = time.perf_counter() - began
    body |= {"asOfMs": planned["asOfMs"], "maxCount": planned["count"]}
    began = time.perf_counter()
    answer = await http.post(f"/timers:{kind}", json=body)
    answer.raise_for_status()
    operation = answer.json()["operation"]
    looks = []
    while operation["state"] == "RUNNING" and time.perf_counter() - began < END_S_MAX:
        await asyncio.sleep(0.25)
        operation = (await http.get(f"/operations/{operation['id']}")).json()
        looks.append(operation["done"])
    taken_s = time.perf_counter() - began
    assert operation["state"] == "DONE", operation
    return {
        "timers": planned["count"],
        "dry_run_s": round(counted_s, 2),
        "operation_s": round(taken_s, 1),
        "done": operation["done"],
        "failed": operation["failed"],
        "progress_seen": len(set(looks)),
    }


async def measure(folder: Path, kind: str, timers: int) -> dict[str, Any]:
    seed(folder, timers)
    with standalone(folder) as server:
        server.put("topics/beside", queues=4)
        async with (
            api(server.grpc) as client,
            httpx.AsyncClient(
                base_url=f"{server.admin}/api/v1", timeout=60, trust_env=False
            ) as http,
        ):
            sends = Sends(client)
            task = asyncio.create_task(sends.run())
            await asyncio.sleep(3)  # Warm-up.
            sends.take()
            await asyncio.sleep(ALONE_S)
            before = sends.take()
            found = await run_operation(http, kind)
            beside = percentiles(sends.take())
            await asyncio.sleep(ALONE_S)
            alone = percentiles([*before, *sends.take()])
            task.cancel()
    ratio = round(beside["window_p99_ms"] / alone["window_p99_ms"], 2)
    return {
        **found,
        "alone": alone,
        "beside": beside,
        "p99_ratio": ratio,
        "sends_failed": sends.failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timers", type=int, default=100_000)
    parser.add_argument("--kinds", default=",".join(CHANGES))
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result: dict[str, Any] = {"bench": "timer_changes", "commit": commit, "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=".") as name:
        root = Path(name).resolve()
        for kind in arguments.kinds.split(","):
            result[kind] = asyncio.run(measure(root / kind, kind, arguments.timers))
            shutil.rmtree(root / kind, ignore_errors=True)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
