"""Duration of an audit of a million messages, and a check of its findings.

    .venv/bin/python -m tests.perf.bench_audit [--messages 1000000] [--kills 5]

State machine: one standalone (one broker group, two proxies), a topic of 8 queues, messages of
100 bytes in batches of 128, consumers that receive 32 at a time and skip the ack of one message in
2,000. A broker or a proxy is killed from time to time. Producers and consumers are separate
processes and record the answers. Planted: invented sends with an ack.
Measured: the audit with Spark in local[2] and the memory of a job on a laptop, from its start to
its page. The benchmark compares the findings with the clients' records. The missing messages are
the planted ones. No message is early, late, an orphan or a duplicate. For each repeat, a client saw
the first delivery, or a kill lost its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import grpc
from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

from tests.support.clients.api import POLL_MS_MIN, api, message
from tests.support.processes.killing import kill
from tests.support.processes.processes import Standalone, standalone
from tidemill.common.clock import SystemClock
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.jobs.audit import AuditSettings, judge
from tidemill_pipeline.jobs.events import read_events
from tidemill_pipeline.jobs.group_progress import read_progress
from tidemill_pipeline.jobs.running import session

TOPIC, GROUP = "audited", "readers"
QUEUES = 8
BATCH = 128  # Messages per send.
TASKS = 4  # Calls in flight of producers, and the same number of consumers.
BACKLOG_MAX = 50_000  # Messages stored and not received: consumers keep up.
INVISIBLE_MS = 15_000
FORGOTTEN_SHARE = 2_000  # One of this many deliveries gets no ack at first.
PHANTOMS = [f"phantom-{n}" for n in range(5)]
PAUSE_S = 0.05
# Before a kill: until the answers to all pops arrived. After it: until the proxies notice the kill.
AROUND_KILL_MS = (3_000, POLL_MS_MIN + 5_000)


def main() -> None:
    """Run, audit and print one JSON document."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--messages", type=int, default=1_000_000)
    arguments.add_argument("--kills", type=int, default=5)
    given = arguments.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        standalone(Path(folder) / "data", "--proxies=2") as running,
    ):
        running.put(f"topics/{TOPIC}", queues=QUEUES)
        running.put(f"groups/{GROUP}", maxAttempts=1000)
        begin_s = time.perf_counter()
        kills = _run(running, Path(folder), given.messages, given.kills)
        ran_s = time.perf_counter() - begin_s
        figures = _audit(running, Path(folder), kills)
    print(
        json.dumps(
            {
                "messages": given.messages,
                "kills": len(kills),
                "run_s": round(ran_s),
                "load": os.getloadavg()[1],
                **figures,
            }
        )
    )


# ---------------------------------------------------------------- the run


def _run(running: Standalone, folder: Path, count: int, kill_count: int) -> list[int]:
    """Send and receive `count` messages during kills; return the times of the kills."""
    context = multiprocessing.get_context("spawn")
    stored, received = context.Value("q", 0), context.Value("q", 0)
    producer = context.Process(
        target=_produce, args=(running.grpc, str(folder), count, stored, received)
    )
    consumer = context.Process(
        target=_consume, args=(running.grpc, str(folder), count, stored, received)
    )
    producer.start()
    consumer.start()
    kills = []
    victims = ["broker-0", "proxy-0", "broker-0", "proxy-1"]
    for n in range(kill_count):
        while stored.value < count * (n + 1) // (kill_count + 1):
            time.sleep(0.2)
        kills.append(SystemClock().wall_ms())
        asyncio.run(kill(running, victims[n % len(victims)]))
    producer.join()
    consumer.join()
    assert (producer.exitcode, consumer.exitcode) == (0, 0)
    return kills


def _produce(endpoint: str, folder: str, count: int, stored: Any, received: Any) -> None:
    with Path(folder, "sends.jsonl").open("w") as lines:
        lines.writelines(map(_send_line, PHANTOMS))
        asyncio.run(_produce_all(endpoint, lines, count, stored, received))


def _send_line(message_id: str) -> str:
    return json.dumps({"message_id": message_id, "topic": TOPIC}) + "\n"


async def _produce_all(
    endpoint: str, lines: TextIO, count: int, stored: Any, received: Any
) -> None:
    async def produce(number: int) -> None:
        batch = 0
        async with api(endpoint) as client:
            while stored.value < count:
                if stored.value - received.value > BACKLOG_MAX:
                    await asyncio.sleep(PAUSE_S)
                    continue
                batch += 1
                # If an answer is lost, the producer does not repeat the send. It sends others.
                ids = [f"{number}-{batch}-{n}" for n in range(BATCH)]
                body = bytes(100)
                try:
                    answer = await client.send(
                        *(message(TOPIC, body, message_id=id_) for id_ in ids)
                    )
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(PAUSE_S)
                    continue
                if answer.status.code != v2.OK:
                    await asyncio.sleep(PAUSE_S)
                    continue
                stored.value += BATCH
                lines.writelines(map(_send_line, ids))

    await asyncio.gather(*(produce(number) for number in range(TASKS)))


def _consume(endpoint: str, folder: str, count: int, stored: Any, received: Any) -> None:
    with Path(folder, "receives.jsonl").open("w") as lines:
        asyncio.run(_consume_all(endpoint, lines, count, stored, received))


async def _consume_all(
    endpoint: str, lines: TextIO, count: int, stored: Any, received: Any
) -> None:
    """Receive until all sends have ended and no message comes for two invisible durations."""
    last_at = time.monotonic()

    async def consume() -> None:
        nonlocal last_at
        async with api(endpoint) as client:
            while stored.value < count or time.monotonic() - last_at < 2 * INVISIBLE_MS / 1000:
                try:
                    got = await client.receive(
                        TOPIC, GROUP, poll_ms=POLL_MS_MIN, invisible_ms=INVISIBLE_MS
                    )
                except (grpc.aio.AioRpcError, AssertionError):
                    await asyncio.sleep(PAUSE_S)
                    continue
                if not got:
                    continue
                last_at = time.monotonic()
                acked = []
                for one in got:
                    system = one.system_properties
                    attempt = system.delivery_attempt
                    lines.write(
                        json.dumps({"message_id": system.message_id, "attempt": attempt}) + "\n"
                    )
                    received.value += attempt == 1
                    is_forgotten = attempt == 1 and hash(system.message_id) % FORGOTTEN_SHARE == 0
                    if not is_forgotten:
                        acked.append(system.receipt_handle)
                try:
                    await client.ack(TOPIC, GROUP, acked)
                except (grpc.aio.AioRpcError, AssertionError):
                    await asyncio.sleep(PAUSE_S)  # Messages without an ack come again.

    await asyncio.gather(*(consume() for _ in range(TASKS)))


# ---------------------------------------------------------------- the audit


def _audit(running: Standalone, folder: Path, kills: list[int]) -> dict[str, Any]:
    begin_s = time.perf_counter()
    settings = AuditSettings(
        to=str(folder),
        given={"endpoints": running.grpc},
        grace_s=0,
        sends=str(folder / "sends.jsonl"),
    )
    # The memory of `tidemill pipeline audit`.
    with session("audit", "local[2]") as spark:
        progress = read_progress(spark, settings.given)
        events = read_events(spark, settings.given)
        verdict = judge(spark, events, settings, now_ms=SystemClock().wall_ms(), progress=progress)
        took_s = time.perf_counter() - begin_s
        return {
            "audit_s": round(took_s, 1),
            "events": events.count(),
            "findings": verdict.counts,
            "not_through": verdict.outstanding,
            "differences": _differences(spark, folder, events, kills),
        }


def _differences(spark: Any, folder: Path, events: Any, kills: list[int]) -> dict[str, int]:
    """Compare the findings with the clients' records; return the differences of each kind."""
    findings = spark.read.parquet(f"{folder}/audit/findings")
    delivered = events.where("event = 'delivered'").select(
        "message_id", "attempt", F.unix_millis("event_ts").alias("at")
    )
    seen = spark.read.schema("message_id string, attempt int").json(f"{folder}/receives.jsonl")
    missing = {row.message_id for row in findings.where("kind = 'missing'").collect()}
    # Delivered, but no client got the answer: only a kill may cause that.
    unseen = [
        row["at"] for row in delivered.join(seen, ["message_id", "attempt"], "left_anti").collect()
    ]
    before_ms, after_ms = AROUND_KILL_MS
    unexplained = [
        at for at in unseen if not any(-before_ms <= at - kill_ms <= after_ms for kill_ms in kills)
    ]
    # Each repeat of a delivery is a finding.
    repeats = delivered.groupBy("message_id").count().where("count > 1")
    found = (
        findings.where("kind in ('duplicate', 'redelivered')")
        .withColumn("times", F.split("detail", " ")[1].cast("long"))
        .groupBy("message_id")
        .agg(F.sum("times").alias("times"))
    )
    others = findings.where("kind in ('duplicate', 'early', 'late', 'orphan-ack')")
    return {
        "missing": len(missing ^ set(PHANTOMS)),
        "of_other_kinds": others.count(),
        "seen_and_not_told": seen.join(delivered, ["message_id", "attempt"], "left_anti").count(),
        "told_and_not_seen": len(unseen),
        "of_these_unexplained": len(unexplained),
        "repeats": repeats.join(found, "message_id", "full")
        .where("coalesce(count, 1) - 1 <> coalesce(times, 0)")
        .count(),
    }


if __name__ == "__main__":
    main()
