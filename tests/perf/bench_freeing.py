"""How soon does the space of a deleted topic return, and what does the packing cost the sends?

State machine: a standalone with one proxy process. An unread topic of 200 small messages is older
than a topic of MIB mebibytes, which is deleted:

    quiet    nothing else happens
    busy     h2load sends to a third topic at full rate meanwhile
    packing  between the messages of the deleted topics are those of a topic that stays, with two
             thirds of their bytes: a pack must free more than it keeps. A client process sends a
             message every 5 ms: its P99 before the deletions, and during the packing

    python -m tests.perf.bench_freeing --mib 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

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
LOOK_S = 0.5  # reading metrics costs the broker time
PROBE_PERIOD_S = 0.005
WARM_UP_S = 3.0
PARTS = 4  # topics, deleted one after the other
PROBE_S = 5.0  # before each deletion
Window: TypeAlias = tuple[float, float]  # monotonic begin and end, seconds
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


async def freed_bytes(http: httpx.AsyncClient, running: Standalone) -> float:
    text = (await http.get(running.processes["broker-0"].metrics)).text
    found = re.findall(r"^rocketmq_storage_freed_bytes_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


async def delete(running: Standalone, name: str, size_bytes: int) -> list[tuple[float, float]]:
    """Delete a topic; return (seconds since then, freed bytes) after each return of space."""
    async with httpx.AsyncClient(trust_env=False) as http:
        before = await freed_bytes(http, running)
        began = time.monotonic()
        await asyncio.to_thread(running.delete, f"topics/{name}")
        steps: list[tuple[float, float]] = []
        async with asyncio.timeout(GIVE_UP_S):
            while not steps or steps[-1][1] < FREED_PART * size_bytes:
                await asyncio.sleep(LOOK_S)
                freed = await freed_bytes(http, running) - before
                if freed > (steps[-1][1] if steps else 0):
                    steps.append((time.monotonic() - began, freed))
        return steps


async def look_without_deletion(running: Standalone, duration_s: float) -> None:
    """Read the metrics as `delete` does, which costs the broker and this machine time."""
    async with httpx.AsyncClient(trust_env=False) as http:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
            await freed_bytes(http, running)


async def send_probes(address: str, pipe: Connection) -> None:
    """Send a message every few milliseconds until the other end of `pipe` closes or writes.

    Then write (begin, seconds until the answer) of each message.
    """
    measured: list[tuple[float, float]] = []
    async with api(address, call_s=30) as client:
        while not pipe.poll():
            began = time.monotonic()
            await send(client, "probe", f"probe {len(measured)}", b"x" * 100)
            took_s = time.monotonic() - began
            measured.append((began, took_s))
            await asyncio.sleep(max(PROBE_PERIOD_S - took_s, 0))
    pipe.send(measured)


def run_probe(address: str, pipe: Connection) -> None:
    asyncio.run(send_probes(address, pipe))


def percentiles(measured: list[tuple[float, float]], windows: list[Window]) -> dict[str, float]:
    """Return the number of the messages sent in time windows, and P50 and P99 in milliseconds."""
    found = sorted(
        1000 * took_s
        for began, took_s in measured
        if any(begin <= began < end for begin, end in windows)
    )
    parts = {f"p{part}_ms": round(found[len(found) * part // 100], 2) for part in (50, 99)}
    return {"count": len(found), **parts}


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


async def measure_packing(running: Standalone, client: Api, size_bytes: int) -> dict[str, Any]:
    part_bytes = size_bytes // PARTS
    for part in range(PARTS):
        await fill(client, f"dropped-{part}", part_bytes, kept="kept")
    # The probe is a process, because reading metrics blocks this one and would add to a latency.
    context = multiprocessing.get_context("spawn")
    pipe, probe_pipe = context.Pipe()
    probe = context.Process(target=run_probe, args=(running.grpc, probe_pipe), daemon=True)
    probe.start()
    await asyncio.sleep(WARM_UP_S)
    before: list[Window] = []
    beside: list[Window] = []
    kept_bytes = packing_s = 0.0
    # In turns, because the load of the machine changes.
    for part in range(PARTS):
        began = time.monotonic()
        await look_without_deletion(running, PROBE_S)
        deleted = time.monotonic()
        before.append((began, deleted))
        steps = await delete(running, f"dropped-{part}", part_bytes)
        beside.append((deleted, time.monotonic()))
        (first_s, first), (last_s, last) = steps[0], steps[-1]
        kept_bytes += (last - first) * len(KEPT_BODY) / len(BODY)
        packing_s += last_s - first_s
    pipe.send("end")
    measured = await asyncio.to_thread(pipe.recv)
    probe.join()
    return {
        "kept_mib_per_s": round(kept_bytes / packing_s / MIB, 1),
        "before": percentiles(measured, before),
        "beside": percentiles(measured, beside),
    }


async def measure(
    running: Standalone, size_bytes: int, folder: Path, only: list[str]
) -> dict[str, Any]:
    async with api(running.grpc, call_s=30) as client:
        for number in range(UNREAD):
            await send(client, "unread", f"unread {number}", b"x" * 100)
        result: dict[str, Any] = {}
        states: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "quiet": lambda: measure_quiet(running, client, size_bytes),
            "busy": lambda: measure_busy(running, client, size_bytes, folder),
            "packing": lambda: measure_packing(running, client, size_bytes),
        }
        for name in only or states:
            result[name] = await states[name]()
            sys.stderr.write(f"{result}\n")
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=600, help="size of each deleted topic")
    parser.add_argument("--only", nargs="+", choices=("quiet", "busy", "packing"), default=[])
    parser.add_argument("--data", type=Path, help="parent of the data directory")
    arguments = parser.parse_args()
    if shutil.which("h2load") is None:
        sys.exit("h2load is missing: install the package nghttp2-client")
    with tempfile.TemporaryDirectory(dir=arguments.data) as name:
        settings = Path(name) / "settings.yaml"
        settings.write_text(f"segment_bytes: {SEGMENT_BYTES}\n")
        with standalone(Path(name) / "data", f"--config={settings}") as running:
            result = asyncio.run(measure(running, arguments.mib * MIB, Path(name), arguments.only))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
