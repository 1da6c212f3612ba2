"""How soon does the space of a deleted topic return, and what does the packing cost the sends?

State machine: a standalone with one proxy process. An unread topic of 200 small messages is older
than a topic of MIB mebibytes, which is deleted:

    quiet    nothing else happens
    busy     h2load sends to a third topic at full rate meanwhile
    packing  between the messages of the deleted topic are those of a topic that stays, with two
             thirds of their bytes: a pack must free more than it keeps. One client sends a message
             every 5 ms: its P99 before the deletion, and during the packing

    python -m tests.perf.bench_freeing --mib 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.perf.bench_end_to_end import CONNECTIONS, STREAMS, framed, send_request
from tests.support.clients.api import Api, api, message
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

MIB = 1 << 20
BODY = b"x" * 200_000
KEPT_BODY = b"x" * 133_000
UNREAD = 200
SEGMENT_BYTES = 16 * MIB
FREED_PART = 0.9  # of the deleted bytes; the two newest segments are not packed
GIVE_UP_S = 300.0
LOOK_S = 0.1
PROBE_PERIOD_S = 0.005
PROBE_S = 20.0  # before the deletion
SEND_PATH = "/apache.rocketmq.v2.MessagingService/SendMessage"


async def send(client: Api, topic: str, key: str, body: bytes) -> None:
    answer = await client.send(message(topic, body, message_id=key))
    assert answer.status.code == v2.OK, answer


async def fill(client: Api, name: str, size_bytes: int, *, kept: str = "") -> None:
    """Send messages to a topic, and smaller ones to the topic `kept` between them."""
    for number in range(size_bytes // len(BODY)):
        await send(client, name, f"{name} {number}", BODY)
        if kept:
            await send(client, kept, f"{kept} {number}", KEPT_BODY)


async def freed_bytes(running: Standalone) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(running.processes["broker-0"].metrics)).text
    found = re.findall(r"^rocketmq_storage_freed_bytes_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


async def delete(running: Standalone, name: str, size_bytes: int) -> list[tuple[float, float]]:
    """Delete a topic; return the times in seconds at which space returned, with all freed bytes."""
    before = await freed_bytes(running)
    began = time.monotonic()
    await asyncio.to_thread(running.delete, f"topics/{name}")
    steps: list[tuple[float, float]] = []
    async with asyncio.timeout(GIVE_UP_S):
        while not steps or steps[-1][1] < FREED_PART * size_bytes:
            await asyncio.sleep(LOOK_S)
            freed = await freed_bytes(running) - before
            if freed > (steps[-1][1] if steps else 0):
                steps.append((time.monotonic() - began, freed))
    return steps


class Probe:
    """A client that sends a message every few milliseconds, and measures each answer."""

    def __init__(self, client: Api) -> None:
        self._client = client
        self._number = 0
        self.latencies_ms: list[float] = []

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            self._number += 1
            await send(self._client, "probe", f"probe {self._number}", b"x" * 100)
            took_s = time.perf_counter() - began
            self.latencies_ms.append(1000 * took_s)
            await asyncio.sleep(max(PROBE_PERIOD_S - took_s, 0))

    def take_p99_ms(self) -> float:
        found = sorted(self.latencies_ms)
        self.latencies_ms.clear()
        return round(found[len(found) * 99 // 100], 2)


async def measure_quiet(running: Standalone, client: Api, size_bytes: int) -> dict[str, float]:
    await fill(client, "quiet", size_bytes)
    steps = await delete(running, "quiet", size_bytes)
    return {"freed_after_s": round(steps[-1][0], 1)}


async def measure_busy(
    running: Standalone, client: Api, size_bytes: int, folder: Path
) -> dict[str, float]:
    await fill(client, "busy", size_bytes)
    data = folder / "body.bin"
    data.write_bytes(framed(send_request("load")))
    line = ["h2load", "-D600", f"-c{CONNECTIONS}", f"-m{STREAMS}", "-d", str(data)]
    for header in ("content-type: application/grpc", "te: trailers", "x-mq-client-id: bench"):
        line += ["-H", header]
    load = await asyncio.create_subprocess_exec(
        *line, f"http://{running.grpc}{SEND_PATH}", stdout=subprocess.DEVNULL
    )
    try:
        await asyncio.sleep(5)
        steps = await delete(running, "busy", size_bytes)
    finally:
        load.terminate()
        await load.wait()
    return {"freed_after_s": round(steps[-1][0], 1)}


async def measure_packing(running: Standalone, client: Api, size_bytes: int) -> dict[str, float]:
    await fill(client, "dropped", size_bytes, kept="kept")
    probe = Probe(client)
    probing = asyncio.create_task(probe.run())
    await asyncio.sleep(PROBE_S)
    before_ms = probe.take_p99_ms()
    steps = await delete(running, "dropped", size_bytes)
    beside_ms = probe.take_p99_ms()
    probing.cancel()
    (first_s, first), (last_s, last) = steps[0], steps[-1]
    kept_bytes = (last - first) * len(KEPT_BODY) / len(BODY)
    kept_mib = kept_bytes / (last_s - first_s) / MIB if last_s > first_s else 0.0
    return {
        "freed_after_s": round(last_s, 1),
        "kept_mib_per_s": round(kept_mib, 1),
        "p99_before_ms": before_ms,
        "p99_beside_ms": beside_ms,
    }


async def measure(running: Standalone, size_bytes: int, folder: Path) -> dict[str, Any]:
    async with api(running.grpc, call_s=30) as client:
        for number in range(UNREAD):
            await send(client, "unread", f"unread {number}", b"x" * 100)
        result: dict[str, Any] = {}
        result["quiet"] = await measure_quiet(running, client, size_bytes)
        sys.stderr.write(f"{result}\n")
        result["busy"] = await measure_busy(running, client, size_bytes, folder)
        sys.stderr.write(f"{result}\n")
        result["packing"] = await measure_packing(running, client, size_bytes)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=600, help="size of each deleted topic")
    parser.add_argument("--data", type=Path, help="parent of the data directory")
    arguments = parser.parse_args()
    if shutil.which("h2load") is None:
        sys.exit("h2load is missing: install the package nghttp2-client")
    with tempfile.TemporaryDirectory(dir=arguments.data) as name:
        settings = Path(name) / "settings.yaml"
        settings.write_text(f"segment_bytes: {SEGMENT_BYTES}\n")
        with standalone(Path(name) / "data", f"--config={settings}") as running:
            result = asyncio.run(measure(running, arguments.mib * MIB, Path(name)))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
