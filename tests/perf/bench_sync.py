"""How long does a sync take beside a busy event loop: inline, in a thread, in the sync process?

Per run, rounds follow each other: append ROUND_BYTES to a zero-filled file, sync it, give way.
Another task keeps the loop BUSY of the time. Reported: rounds a second, the latency of a round, and
how late the other task was woken at most.

    python tests/perf/bench_sync.py
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import IO

from tidemill.broker.sync_process import SyncProcess

ROUND_BYTES = 16 << 10
FILE_BYTES = 64 << 20
RUN_S = 3.0
BUSY_SHARES = (0.0, 0.5, 0.9, 1.0)
BUSY_SLICE_S = 0.001

Sync = Callable[[IO[bytes]], Awaitable[None]]


def spin(seconds: float) -> None:
    """Keep the interpreter busy, as handlers do."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def keep_busy(share: float, stalls: list[float]) -> None:
    while True:
        spin(BUSY_SLICE_S * share)
        began = time.perf_counter()
        await asyncio.sleep(BUSY_SLICE_S * (1 - share))
        stalls.append(time.perf_counter() - began - BUSY_SLICE_S * (1 - share))


async def measure(sync: Sync, share: float) -> dict[str, float]:
    latencies: list[float] = []
    stalls: list[float] = []
    with tempfile.NamedTemporaryFile(dir=".", buffering=0) as file:
        for _ in range(FILE_BYTES >> 20):
            file.write(bytes(1 << 20))
        os.fsync(file.fileno())
        async with asyncio.TaskGroup() as tasks:
            busy = [tasks.create_task(keep_busy(share, stalls))] if share else []
            end = time.perf_counter() + RUN_S
            offset, block = 0, os.urandom(ROUND_BYTES)
            # Two at least, however long they take, or there are no quantiles.
            while (began := time.perf_counter()) < end or len(latencies) < 2:
                os.pwrite(file.fileno(), block, offset)
                offset = (offset + ROUND_BYTES) % FILE_BYTES
                await sync(file)
                latencies.append(time.perf_counter() - began)
                await asyncio.sleep(0)
            for task in busy:
                task.cancel()
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "rounds_per_s": round(len(latencies) / RUN_S),
        "p50_us": round(statistics.median(latencies) * 1e6),
        "p99_us": round(cuts[98] * 1e6),
        "loop_stall_max_ms": round(max(stalls, default=0) * 1e3, 1),
    }


async def main(helper: SyncProcess) -> None:
    async def inline(file: IO[bytes]) -> None:
        os.fdatasync(file.fileno())

    async def thread(file: IO[bytes]) -> None:
        await asyncio.to_thread(os.fdatasync, file.fileno())

    async def process(file: IO[bytes]) -> None:
        await helper.sync([file])

    async with helper.attached():
        for share in BUSY_SHARES:
            for name, sync in (("inline", inline), ("thread", thread), ("process", process)):
                result = {"sync": name, "busy": share, **await measure(sync, share)}
                sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    import uvloop

    forked = SyncProcess.fork("bench")
    uvloop.run(main(forked))
