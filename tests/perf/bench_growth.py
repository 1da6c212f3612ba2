"""Cost of a large store: its growth, and a start after a kill.

One engine on virtual time writes a checkpoint per minute for --days. Each checkpoint has a message
in each of --queues queues and its own segment, mostly a hole. Then the engine adds segments up to
--segments. All of the store is read once. A second store gets --log-gib of log and --in-flight
deliveries of one message each. Its process does not stop cleanly. Three starts follow.

    python -m tests.perf.bench_growth
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import blob
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.posix_disk import PosixDisk

SECRET = bytes(range(32))
SEGMENT_BYTES = 128 << 20
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
QUEUES_A_TOPIC = 100
ROUND = 96  # Commands per round: a full frame of a link.
Figures: TypeAlias = dict[str, Any]


def held() -> Figures:
    """Return this process's use of system resources."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    anonymous = next(line for line in rollup.splitlines() if line.startswith("Anonymous:"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings_of_the_store": sum(
            "/log/" in m or "/queues/" in m or "/index/" in m for m in maps
        ),
        "mappings": len(maps),
        "anonymous_mib": round(int(anonymous.split()[1]) / 1024, 1),
    }


class Store:
    """An engine on virtual time."""

    def __init__(self, folder: Path, *, retention_bytes: int = 0, queues: int = 0) -> None:
        config = EngineConfig(disk_reserve_bytes=0, retention_bytes=retention_bytes)
        self.now_ms = time.time_ns() // 1_000_000
        self.engine, self.report = open_engine(
            PosixDisk(folder), config, now_ms=self.now_ms, entropy=SECRET
        )
        put = self.engine.administration.put_topic
        self.topics: list[TopicId] = []
        for n in range(-(-queues // QUEUES_A_TOPIC)):
            count = min(QUEUES_A_TOPIC, queues - n * QUEUES_A_TOPIC)
            topic = put(f"t{n}", type_=TopicType.NORMAL, queues=count, now_ms=self.now_ms)
            self.topics.append(topic.id)
        self.queues = [
            (topic_id, QueueId(n))
            for topic_id in self.topics
            for n in range(len(self.engine.catalog.open_queues[topic_id]))
        ]
        self.slowest_ms = 0.0
        self.commit()

    def send(self, n: int) -> None:
        """Send one message to one of the queues."""
        data = blob(f"m{n}", size=64)
        self.engine.commands.send(
            *self.queues[n % len(self.queues)],
            data,
            crc32(data),
            now_ms=self.now_ms,
            firing_ms=self.now_ms,
        )

    def commit(self) -> None:
        """End a round without a sync, as syncs are not measured."""
        self.engine.write(self.now_ms)
        self.engine.log.note_synced(self.engine.log.begin_sync()[0])

    def background(self) -> None:
        """Run background work and record the CPU time of the longest slice."""
        while True:
            began = time.thread_time()
            files = self.engine.background.step(self.now_ms, firing_ms=self.now_ms)
            self.slowest_ms = max(self.slowest_ms, (time.thread_time() - began) * 1e3)
            if files is None:
                return
            if has_pending(self.engine):
                self.commit()

    def roll(self) -> None:
        """Start a new segment. The rest of the current segment becomes a hole."""
        self.engine.log._roll(SEGMENT_BYTES)
        self.engine.room.measure()  # A hole uses no disk space.

    def checkpoint(self) -> None:
        """Write a checkpoint after few records."""
        self.engine.checkpoints._records_then = -(1 << 60)
        self.background()


def grow(folder: Path, queues: int, checkpoints: int, segments: int) -> Figures:
    """Grow a store, read all of it and return the cost."""
    store = Store(folder, queues=queues)
    figures: list[Figures] = []
    began = time.perf_counter()
    gc.collect()
    gc.freeze()
    number = 0
    for n in range(checkpoints):
        for _ in range(queues):
            store.send(number)
            number += 1
        store.commit()
        store.checkpoint()
        store.now_ms += MINUTE_MS
        if len(store.engine.log.segments) < segments:
            store.roll()
        if n * 4 // checkpoints != (n + 1) * 4 // checkpoints:
            figures.append({"checkpoints": n + 1, **held()})
            print(f"{figures[-1]} {time.perf_counter() - began:.0f} s", file=sys.stderr)
    while len(store.engine.log.segments) < segments:
        store.send(number)
        number += 1
        store.commit()
        store.roll()
    store.checkpoint()
    for segment in store.engine.log.segments[:-1]:
        store.engine.store.record(LogOffset(segment.start))
    for queue in store.engine.catalog.queues.values():
        for _ in queue.walk(queue.min_offset):
            pass
    runs = max(len(queue._firsts) for queue in store.engine.catalog.queues.values())
    return {
        "while_it_grew": figures,
        "segments": len(store.engine.log.segments),
        "queue_files": len(store.engine.store.queue_files),
        "runs_of_a_queue": runs,
        "all_read": held(),
        "longest_background_slice_ms_cpu": round(store.slowest_ms, 2),
        "seconds": round(time.perf_counter() - began),
    }


def fill(folder: Path, queues: int, segments: int, in_flight: int) -> None:
    """Write a log of `segments` segments with deliveries in flight, and exit uncleanly."""
    store = Store(folder, queues=queues)
    engine = store.engine
    group = GroupId(engine.administration.put_group("g", now_ms=store.now_ms).id)
    number = 0
    while len(engine.log.segments) < segments - 4:
        for _ in range(queues):
            store.send(number)
            number += 1
        store.commit()
        if len(engine.log.segments) % 2:
            store.checkpoint()
        store.roll()
    popped = 0
    while popped < in_flight:
        for _ in range(ROUND):
            topic_id = store.topics[popped % len(store.topics)]
            popped += sum(
                len(batch.indexes)
                for batch in engine.commands.pop(
                    group,
                    topic_id,
                    max_messages=1,
                    attempt_id="",
                    now_ms=store.now_ms,
                    invisible_duration_ms=HOUR_MS,
                )
            )
            store.send(number)
            number += 1
        store.commit()
        engine.background.step(store.now_ms, firing_ms=store.now_ms)
    store.commit()
    os.sync()
    os._exit(0)


def start(folder: Path) -> Figures:
    """Start on the store of a killed process."""
    began, cpu = time.perf_counter(), time.process_time()
    config = EngineConfig(disk_reserve_bytes=0)
    engine, report = open_engine(
        PosixDisk(folder), config, now_ms=time.time_ns() // 1_000_000, entropy=SECRET
    )
    elapsed, used = time.perf_counter() - began, time.process_time() - cpu
    return {
        "seconds": round(elapsed, 2),
        "cpu_seconds": round(used, 2),
        "report": report.as_fields(),
        "log_gib": round((engine.log.log_end - engine.log.min_offset) / (1 << 30), 1),
        "queues": len(engine.catalog.queues),
        "in_flight": engine.state.table.used_count,
        **held(),
    }


def in_process(work: Callable[..., Figures], *arguments: object) -> Figures:
    """Run in a separate process with its own memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", default=["growth", "start"])
    parser.add_argument("--queues", type=int, default=1_000)
    parser.add_argument("--days", type=float, default=3)
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--log-gib", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    found: Figures = {"bench": "growth", "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if "growth" in arguments.parts:
            checkpoints = round(arguments.days * 24 * 60)
            found["growth"] = in_process(
                grow, Path(name, "growth"), arguments.queues, checkpoints, arguments.segments
            )
        if "start" in arguments.parts:
            folder = Path(name, "start")
            segments = (arguments.log_gib << 30) // SEGMENT_BYTES
            context = multiprocessing.get_context("spawn")
            process = context.Process(
                target=fill, args=(folder, arguments.queues, segments, arguments.in_flight)
            )
            process.start()
            process.join()
            found["starts"] = [in_process(start, folder) for _ in range(3)]
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
