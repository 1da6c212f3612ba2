"""Effect of a reading pipeline on its neighbours, and precision of a replay's spacing.

    .venv/bin/python -m tests.perf.bench_pipeline_beside [--rounds 3] [--priority idle]

State machine: one standalone (one broker group, one proxy), all on this machine with Spark in
local[2]. A producer sends 500 messages of 1 KiB per second without waiting for answers, and a
consumer receives them. Both run in a separate process. Measured in turn: alone, and during a stream
that reads another topic with at most 5,000 rows per second and one trigger per two seconds. The
stream uses the limits of `tidemill pipeline`: a priority, and a rate per task (--rate 0: in
bursts). Results: P50 and P99 in ms per round, from the planned send time to the answer and to the
message's receipt.

Then 2,000 messages with random spacing between 0 and 20 ms are archived and replayed with their
original timing into another topic. Result: the difference in ms between the new store time and the
original store time plus a constant. The constant is the median, as a replay has its own start time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.perf.bench_pipeline import BODY_SIZE, QUEUES, archive
from tests.pipeline.conftest import SETTINGS
from tests.support.clients.api import POLL_MS_MIN, Api, api, message
from tests.support.clients.pipeline_load import send_some
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.common.clock import SystemClock
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.jobs.replay import send
from tidemill_pipeline.jobs.replay_plan import ReplaySettings
from tidemill_pipeline.priority import Priority, lower_priority
from tidemill_pipeline.session import build_spark

TOPIC, GROUP = "neighbour", "neighbours"
SENDS_PER_S = 500
ROUND_S = 20.0
ROWS_PER_S = 5_000  # Rate of the stream.
TRIGGER_S = 2
TASK_ROWS_PER_S = 5_000  # For each of two tasks: a trigger has time left for Spark's own work.
BACKLOG = 200_000  # Rows for the stream.
CONSUMERS = 2
REPLAYED, SPACING_MAX_S = 2_000, 0.02


def main() -> None:
    """Measure, and print one JSON document."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--priority", type=Priority, choices=list(Priority), default="idle")
    arguments.add_argument("--rate", type=int, default=TASK_ROWS_PER_S)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder, standalone(Path(folder) / "data") as broker:
        for topic in ("bench", TOPIC):
            broker.put(f"topics/{topic}", queues=QUEUES)
        broker.put(f"groups/{GROUP}")
        send_some(broker.grpc, "bench", BACKLOG, body_size=BODY_SIZE)
        neighbours = _start_neighbours(broker.grpc)
        lower_priority(given.priority)  # After the start of brokers and neighbours.
        spark = build_spark("bench", master="local[2]", settings=SETTINGS)
        spark.sparkContext.setLogLevel("ERROR")
        figures: dict[str, list[Any]] = {"alone": [], "beside": []}
        for _ in range(given.rounds):
            figures["alone"].append(neighbours())
            figures["beside"].append(_beside(spark, broker, folder, neighbours, given.rate))
        spacing = _spacing(spark, broker, folder)
        spark.stop()
    print(json.dumps({"load": os.getloadavg()[1], **figures, "replay": spacing}))


def _beside(
    spark: Any, broker: Standalone, folder: str, neighbours: Neighbours, task_rate: int
) -> dict[str, Any]:
    """Measure neighbours of a stream that starts from the beginning."""
    options = {
        "endpoints": broker.grpc,
        "topic": "bench",
        "startingOffsets": "earliest",
        "maxRowsPerTrigger": str(ROWS_PER_S * TRIGGER_S),
        **({"maxRatePerTask": str(task_rate)} if task_rate else {}),
    }
    query = (
        spark.readStream.format("rocketmq")
        .options(**options)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", tempfile.mkdtemp(dir=folder))
        .trigger(processingTime=f"{TRIGGER_S} seconds")
        .start()
    )
    try:
        eventually(lambda: rows_of(query) > 0, within_ms=60_000)
        before, begin_s = rows_of(query), time.perf_counter()
        figures = neighbours()
        rate = (rows_of(query) - before) / (time.perf_counter() - begin_s)
    finally:
        query.stop()
    return {**figures, "rows_per_s": round(rate)}


def rows_of(query: Any) -> int:
    return sum(each["numInputRows"] for each in query.recentProgress)


Neighbours = Callable[[], dict[str, Any]]


def _start_neighbours(endpoint: str) -> Neighbours:
    """Start a process for producer and consumer; return a function that runs a round."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_work, args=(endpoint, theirs), daemon=True).start()

    def round_of_work() -> dict[str, Any]:
        ours.send("go")
        figures: dict[str, Any] = ours.recv()
        return figures

    return round_of_work


def _work(endpoint: str, pipe: Any) -> None:
    with contextlib.suppress(EOFError):  # After the last round.
        while pipe.recv():
            pipe.send(asyncio.run(_clients(endpoint)))


async def _clients(endpoint: str) -> dict[str, Any]:
    sent_ms: list[float] = []
    received_ms: list[float] = []
    meant_s: dict[str, float] = {}  # Send times of messages that are not received yet.

    async def produce(client: Api, name: str) -> None:
        answer = await client.send(message(TOPIC, bytes(BODY_SIZE), message_id=name))
        assert answer.status.code == v2.OK, answer.status
        sent_ms.append((time.perf_counter() - begin_s - int(name) / SENDS_PER_S) * 1000)

    async def consume(client: Api) -> None:
        while not is_sent.is_set() or meant_s:
            got = await client.receive(TOPIC, GROUP, poll_ms=POLL_MS_MIN)
            now_s = time.perf_counter()
            received_ms.extend(
                (now_s - meant_s.pop(one.system_properties.message_id)) * 1000 for one in got
            )
            if got:
                await client.ack(
                    TOPIC, GROUP, [one.system_properties.receipt_handle for one in got]
                )

    is_sent = asyncio.Event()
    async with api(endpoint) as producer, api(endpoint) as consumer, asyncio.TaskGroup() as tasks:
        begin_s = time.perf_counter()
        for _ in range(CONSUMERS):
            tasks.create_task(consume(consumer))
        for number in range(int(ROUND_S * SENDS_PER_S)):
            at_s = begin_s + number / SENDS_PER_S
            if (wait_s := at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            meant_s[str(number)] = at_s
            tasks.create_task(produce(producer, str(number)))
        is_sent.set()
    return {"send": _quantiles(sent_ms), "receive": _quantiles(received_ms)}


def _quantiles(took_ms: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(took_ms, n=100)
    return {"p50_ms": round(cuts[49], 1), "p99_ms": round(cuts[98], 1)}


# ---------------------------------------------------------------- replay


def _spacing(spark: Any, broker: Standalone, folder: str) -> dict[str, Any]:
    """Replay messages with random spacing and compare the store times."""
    broker.put("topics/spaced", queues=1)
    broker.put("topics/again", queues=1)
    asyncio.run(_send_spaced(broker.grpc))
    archive(spark, broker, "spaced", f"{folder}/spaced")
    settings = ReplaySettings(
        archive=f"{folder}/spaced",
        given={"endpoints": broker.grpc, "topics": "spaced"},
        sink={"endpoints": broker.grpc, "topic": "again"},
        state=f"{folder}/replay",
        timing="original",
    )
    send(spark, settings, now_ms=SystemClock().wall_ms)
    eventually(lambda: len(_stored(spark, broker, "again")) == REPLAYED, within_ms=120_000)
    before, after = (_stored(spark, broker, topic) for topic in ("spaced", "again"))
    moved_ms = [after[key] - at_ms for key, at_ms in before.items()]
    middle_ms = statistics.median(moved_ms)
    off_ms = sorted(abs(each - middle_ms) for each in moved_ms)
    return {
        "messages": REPLAYED,
        "p50_ms": off_ms[REPLAYED // 2],
        "p99_ms": off_ms[REPLAYED * 99 // 100],
        "max_ms": off_ms[-1],
    }


async def _send_spaced(endpoint: str) -> None:
    spacing = random.Random(1)
    async with api(endpoint) as client:
        for number in range(REPLAYED):
            answer = await client.send(message("spaced", b"%d" % number))
            assert answer.status.code == v2.OK, answer.status
            await asyncio.sleep(spacing.uniform(0, SPACING_MAX_S))


def _stored(spark: Any, broker: Standalone, topic: str) -> dict[bytes, float]:
    """Return the store time of each message in milliseconds, by body."""
    options = {"endpoints": broker.grpc, "topic": topic}
    rows = spark.read.format("rocketmq").options(**options).load()
    return {
        bytes(row.body): (row.fired_timestamp or row.store_timestamp).timestamp() * 1000
        for row in rows.select("body", "store_timestamp", "fired_timestamp").collect()
    }


if __name__ == "__main__":
    main()
