"""What does an application see of a broker that is killed and comes back?

Five standalones with one proxy each; 32 producers and 32 consumers on one connection, 100 bytes a
message, each call tried once and with a deadline of 3 s, as official clients set it. Each broker is
killed once, with SIGKILL: the supervisor waits longer with each death that soon follows another.
Errors that are wanted: none.

    python -m tests.perf.bench_restart
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import grpc

from tests.support.clients.steady_load import GROUP, TOPIC, SteadyLoad
from tests.support.processes.killing import kill, until
from tests.support.processes.processes import Standalone, standalone

PRODUCERS = CONSUMERS = 32
DEADLINE_S = 3.0
KILLS = 5
CALLS = 1_000  # that end well, before the kill and behind it


async def kill_under_load(running: Standalone) -> SteadyLoad:
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        load = SteadyLoad(channel, deadline_s=DEADLINE_S, poll_ms=5_000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(producers=PRODUCERS, consumers=CONSUMERS))
            await until(lambda: load.ended.total() >= CALLS)
            await kill(running, "broker-0")
            await until(lambda: load.ended.total() >= 2 * CALLS)
            load.stop()
    return load


def one_kill() -> SteadyLoad:
    with tempfile.TemporaryDirectory() as folder, standalone(Path(folder, "data")) as running:
        running.put(f"topics/{TOPIC}", messageType="NORMAL", queues=4)
        running.put(f"groups/{GROUP}", maxAttempts=100)
        return asyncio.run(kill_under_load(running))


def main() -> None:
    loads = [one_kill() for _ in range(KILLS)]
    found = {
        "bench": "restart",
        "cpus": os.cpu_count(),
        "kills": KILLS,
        "calls": sum((load.ended for load in loads), Counter()),
        "errors": sum((load.errors for load in loads), Counter()),
        "longest_call_s": [round(load.longest_s, 2) for load in loads],
    }
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
