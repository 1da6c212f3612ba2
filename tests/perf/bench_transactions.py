"""What does a transaction cost, and what do 1,000,000 open half messages cost?

engine     CPU of a half message with its commit, and of two plain sends, in one engine
processes  the same through a running standalone: CPU of the broker and of the proxy
table      memory of open half messages, and the time that a new master needs for their checks

python -m tests.perf.bench_transactions [--messages 20000] [--open 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.perf.bench_end_to_end import Meter
from tests.support.clients.api import Api, api, message
from tests.support.clients.transactions import end_transaction, half_message, send_half
from tests.support.processes.processes import Standalone, standalone
from tests.support.worlds.engine_world import blob
from tests.support.worlds.transaction_world import TransactionWorld
from tidemill.broker.engine.layout.message import HalfMessage
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.transaction.checks import HalfChecks
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.broker.engine.transaction.transactions import HalfSender
from tidemill.message import stored_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

BATCH = 64  # messages of a round
TASKS = 32  # concurrent calls of the client
SIZE = 200


def measure_engine(messages: int) -> dict[str, float]:
    """Return the CPU time of a transaction and of two plain sends."""
    used_us: dict[str, float] = {}
    for kind in ("sends", "transactions"):
        world = TransactionWorld(segment_bytes=64 << 20)
        topic_id = world.topic()
        data = blob("m", size=SIZE, kind=1 if kind == "sends" else stored_message.TYPE_TRANSACTION)
        crc, now_ms = crc32(data), world.now_ms
        send, commit = world.engine.commands.send, world.engine.transactions.commit
        sender, queue_id = HalfSender(), QueueId(0)
        gc.collect()
        began_s = time.process_time()
        for _ in range(0, messages, BATCH):
            if kind == "sends":
                for _ in range(2 * BATCH):
                    send(topic_id, queue_id, data, crc, now_ms=now_ms, firing_ms=now_ms)
            else:
                half_ids = [
                    send(
                        topic_id,
                        queue_id,
                        data,
                        crc,
                        sender=sender,
                        now_ms=now_ms,
                        firing_ms=now_ms,
                    )[0]
                    for _ in range(BATCH)
                ]
                for half_id in half_ids:
                    commit(HalfId(half_id), now_ms=now_ms, firing_ms=now_ms)
            world.commit()
        used_us[kind] = (time.process_time() - began_s) / messages * 1e6
    return {
        "two_sends_us": round(used_us["sends"], 2),
        "transaction_us": round(used_us["transactions"], 2),
        "ratio": round(used_us["transactions"] / used_us["sends"], 2),
    }


async def _repeat(
    running: Standalone, messages: int, one: Callable[[Api, int], Awaitable[None]]
) -> float:
    """Do `one` for each number, many at a time; return how many were done per second."""
    async with api(running.grpc, call_s=60) as client:

        async def work(first: int) -> None:
            for number in range(first, messages, TASKS):
                await one(client, number)

        began_s = time.perf_counter()
        await asyncio.gather(*map(work, range(TASKS)))
        return messages / (time.perf_counter() - began_s)


async def _plain(client: Api, number: int) -> None:
    for half in range(2):
        answer = await client.send(message("plain", b"x" * SIZE, message_id=f"{number}-{half}"))
        assert answer.status.code == v2.OK, answer.status


async def _transaction(client: Api, number: int) -> None:
    half = half_message("transacted", b"x" * SIZE)
    half.system_properties.message_id = str(number)
    transaction_id = await send_half(client, half)
    status = await end_transaction(client, half, transaction_id, v2.COMMIT)
    assert status.code == v2.OK, status


def measure_processes(messages: int) -> dict[str, Any]:
    """Measure both kinds of work in turn, with the same processes."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, standalone(Path(folder) / "data") as running:
        pids = {name: process.pid for name, process in running.processes.items()}
        for name, one in (("two_sends", _plain), ("transaction", _transaction)) * 2:
            asyncio.run(_repeat(running, 500, one))
            meter = Meter(pids)
            per_second = asyncio.run(_repeat(running, messages, one))
            found[name] = {"per_second": round(per_second)} | {
                f"{process}_us": round(used_us, 1)
                for process, used_us in meter.per_million(messages).items()
            }
    used = {
        name: found[name]["broker-0_us"] + found[name]["proxy-0_us"]
        for name in ("two_sends", "transaction")
    }
    return found | {"ratio": round(used["transaction"] / used["two_sends"], 2)}


def measure_table(count: int) -> dict[str, float]:
    """Measure a table with open half messages only."""
    tracemalloc.start()
    table = TransactionTable(TransactionConfig(open_max=count))
    half = HalfMessage(HalfId(0), TopicId(3), QueueId(0), 0, 6_000, 30_000, 15, 0, "client")
    for number in range(count):
        table.apply_half(HalfId(1_000 + 300 * number), half, LogOffset(1_000 + 300 * number))
    world = TransactionWorld()
    checks = HalfChecks(
        table,
        world.engine.half_checks._halves,
        world.engine.fold,
        world.engine.tally,
        world.engine.room,
    )
    began_s = time.process_time()
    checks.take_over(world.now_ms)
    took_s = time.process_time() - began_s
    gc.collect()
    size_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "open": count,
        "mib": round(size_bytes / 2**20, 1),
        "peak_mib": round(peak_bytes / 2**20, 1),
        "take_over_ms": round(took_s * 1_000, 1),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--open", type=int, default=1_000_000)
    arguments = parser.parse_args()
    found = {
        "bench": "transactions",
        "engine": measure_engine(arguments.messages),
        "processes": measure_processes(arguments.messages // 4),
        "table": measure_table(arguments.open),
    }
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
