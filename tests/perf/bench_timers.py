"""Delayed messages: delay, rate, and the cost of schedules, recalls and pending timers.

State machine: standalones with one proxy. h2load replays sends; the Go program in tests/perf/load
does the other calls. Bodies have 1 KiB, or 64 bytes if the engine seeds the store.

    idle      300 messages due 3 s ahead, one every 20 ms, one consumer
    schedule  the same number of plain sends and of sends delayed by an hour, in turn
    burst     --burst messages due in the same second, 48 consumers; in parallel a second topic has
              20 messages per second, due 3 s ahead
    recall    with --recall-pending pending timers: sends, schedules and recalls one at a time
    pending   with --pending pending timers: memory of the broker and its start after kill -9

    python -m tests.perf.bench_timers [--parts idle,schedule,burst,recall,pending]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.perf.bench_end_to_end import build_load, h2load, run_load, send_request
from tests.support.processes.processes import broker, standalone
from tests.support.worlds.engine_world import blob
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.posix_disk import PosixDisk
from tidemill.message import stored_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2

PATH = "/apache.rocketmq.v2.MessagingService/SendMessage"
ROUND = 256  # Messages per round while seeding.
DAY_MS = 24 * 3600 * 1000
SEED_SPAN_MS = 300 * DAY_MS
PARTS = ("idle", "schedule", "burst", "recall", "pending")


def delayed_request(topic: str, due_at_ms: int) -> bytes:
    request = service_pb2.SendMessageRequest.FromString(send_request(topic))
    properties = request.messages[0].system_properties
    properties.message_type = v2.DELAY
    properties.delivery_timestamp.FromMilliseconds(due_at_ms)
    return request.SerializeToString()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def memory_mib(pid: int) -> dict[str, float]:
    """Return the resident memory and its part without file pages."""
    text = Path(f"/proc/{pid}/status").read_text("ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return {
        name: round(int(fields[field].split()[0]) / 1024, 1)
        for name, field in (("resident", "VmRSS"), ("anonymous", "RssAnon"))
    }


def measure_idle(folder: Path, load: Path) -> dict[str, Any]:
    with standalone(folder) as server:
        run_load(load, "lateness", server.grpc, topic="warm", group="warm", messages=20)
        return run_load(load, "lateness", server.grpc, topic="idle", group="idle", messages=300)


def measure_schedule(folder: Path, load: Path, messages: int, runs: int) -> dict[str, Any]:
    del load
    plain, delayed = [], []
    with standalone(folder) as server:
        scratch = folder.parent
        for topic in ("plain", "delayed"):
            h2load(server.grpc, PATH, send_request(topic), 5_000, scratch)
        for _ in range(runs):
            request = send_request("plain")
            plain.append(h2load(server.grpc, PATH, request, messages, scratch)["per_second"])
            request = delayed_request("delayed", now_ms() + 3_600_000)
            delayed.append(h2load(server.grpc, PATH, request, messages, scratch)["per_second"])
    ratios = [d / p for d, p in zip(delayed, plain, strict=True)]
    return {
        "plain_per_second": plain,
        "scheduled_per_second": delayed,
        "ratio": round(statistics.median(ratios), 3),
    }


def measure_burst(folder: Path, load: Path, messages: int) -> dict[str, Any]:
    with standalone(folder) as server:
        scratch = folder.parent
        for topic in ("burst", "canary"):
            h2load(server.grpc, PATH, send_request(topic), 100, scratch)
        run_load(
            load, "receive", server.grpc, topic="burst", group="burst", messages=100, consumers=1
        )
        run_load(
            load, "receive", server.grpc, topic="canary", group="canary", messages=100, consumers=1
        )
        # Enough time for the canary's start and for all schedules.
        due_at_ms = now_ms() + messages // 4 + 10_000
        request = delayed_request("burst", due_at_ms)
        sent = h2load(server.grpc, PATH, request, messages, scratch)
        left_s = (due_at_ms - now_ms()) / 1000
        assert left_s > 3, "the machine is too slow to schedule the burst in time"
        time.sleep(left_s - 3)
        canary: dict[str, Any] = {}

        def run_canary() -> None:
            canary.update(
                run_load(
                    load,
                    "lateness",
                    server.grpc,
                    topic="canary",
                    group="canary",
                    messages=300,
                    every="50ms",
                )
            )

        thread = threading.Thread(target=run_canary)
        thread.start()
        time.sleep(2)
        drained = run_load(
            load,
            "receive",
            server.grpc,
            topic="burst",
            group="burst",
            messages=messages,
            consumers=48,
            since_ms=due_at_ms,
        )
        thread.join()
    return {"messages": messages, "scheduled": sent, "drained": drained, "canary": canary}


def seed(folder: Path, count: int) -> float:
    """Fill a store with timers due within 300 days; return the CPU us of each."""
    engine, _ = open_engine(
        PosixDisk(folder),
        EngineConfig(auto_create_topics=True, auto_create_groups=True),
        now_ms=now_ms(),
        entropy=os.urandom(32),
    )
    topic = engine.administration.put_topic(
        "seeded", type_=TopicType.MIXED, queues=8, now_ms=now_ms()
    )
    engine.commit(now_ms())
    message = bytearray(blob("x", size=64))
    message[stored_message.MESSAGE_TYPE_AT] = v2.DELAY
    at_ms = now_ms()
    began = time.process_time()
    for n in range(count):
        # Spread over all days, like independent senders.
        due_at_ms = at_ms + 3_600_000 + n * 2_654_435_761 % SEED_SPAN_MS
        struct.pack_into(">q", message, stored_message.DUE_AT, due_at_ms)
        data = bytes(message)
        engine.commands.send(
            topic.id, QueueId(n & 7), data, crc32(data), now_ms=at_ms, firing_ms=at_ms
        )
        if n % ROUND == 0:
            advance(engine, at_ms)
    engine.commit(now_ms())
    used = (time.process_time() - began) / count * 1e6
    engine.close()
    return used


def advance(engine: Engine, at_ms: int) -> None:
    engine.write(at_ms)
    engine.log.note_synced(engine.log.begin_sync()[0])
    engine.room.measure()
    for _ in range(4):
        engine.background.step(at_ms, firing_ms=at_ms)


def measure_recall(folder: Path, load: Path, pending: int) -> dict[str, Any]:
    seeding_us = seed(folder, pending)
    with standalone(folder) as server:
        run_load(load, "recall", server.grpc, topic="recall", messages=200, delay="8760h")
        found = run_load(load, "recall", server.grpc, topic="recall", messages=3_000, delay="8760h")
    ratio = found["recall_ms"]["p99"] / found["send_ms"]["p99"]
    return {"pending": pending, "seeding_us": seeding_us, **found, "p99_ratio": round(ratio, 2)}


def measure_pending(folder: Path, load: Path, pending: int) -> dict[str, Any]:
    del load
    with broker(folder.with_name("empty")) as (process, _, _):
        empty = memory_mib(process.pid)
    seeding_us = seed(folder, pending)
    starts, full = [], empty
    for _ in range(3):
        began = time.perf_counter()
        with broker(folder) as (process, _, _):
            starts.append(round(time.perf_counter() - began, 2))
            time.sleep(20)  # For the first flush and census.
            full = memory_mib(process.pid)
            process.kill()
            process.wait()
    return {
        "pending": pending,
        "seeding_us": round(seeding_us, 1),
        "start_after_kill_s": starts,
        "memory_mib": full,
        "added_mib": {kind: round(full[kind] - empty[kind], 1) for kind in full},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--burst", type=int, default=100_000)
    parser.add_argument("--recall-pending", type=int, default=1_000_000)
    parser.add_argument("--pending", type=int, default=10_000_000)
    arguments = parser.parse_args()
    for tool in ("h2load", "go"):
        if shutil.which(tool) is None:
            sys.exit(f"this bench needs {tool} (Debian: nghttp2-client, golang)")
    parts: dict[str, Callable[[Path, Path], Any]] = {
        "idle": measure_idle,
        "schedule": lambda folder, load: measure_schedule(
            folder, load, arguments.messages, arguments.runs
        ),
        "burst": lambda folder, load: measure_burst(folder, load, arguments.burst),
        "recall": lambda folder, load: measure_recall(folder, load, arguments.recall_pending),
        "pending": lambda folder, load: measure_pending(folder, load, arguments.pending),
    }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result: dict[str, Any] = {"bench": "timers", "commit": commit, "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=".") as name:
        root = Path(name).resolve()
        load = build_load(root)
        for part in arguments.parts.split(","):
            result[part] = parts[part](root / part, load)
            shutil.rmtree(root / part, ignore_errors=True)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
