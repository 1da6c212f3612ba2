"""How much CPU does the engine take a message, on a real disk, without any process around it?

Append, pop 32 and batch ack, pop and ack one by one; 1 KiB bodies, rounds of 64 requests, each
round written with one writev and synced with one fdatasync in the same process. CPU is that of this
process (user and system) a message; the rate includes the waits for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from zlib import crc32

from tests.support.worlds.engine_world import ENTROPY, blob
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.pop.deliveries import Delivery
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.posix_disk import PosixDisk

BODY_BYTES = 1024
ROUND = 64
QUEUES = 8


def measure(count: int, work: Callable[[], None]) -> dict[str, float]:
    """Run `work`, which handles `count` messages; return CPU us a message and messages a second."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_us": cpu / count * 1e6, "per_second": count / wall}


class Bench:
    """One engine on a real disk."""

    def __init__(self, folder: Path) -> None:
        self.engine: Engine
        config = EngineConfig(disk_reserve_bytes=0)
        self.engine, _ = open_engine(PosixDisk(folder), config, now_ms=now_ms(), entropy=ENTROPY)
        now = now_ms()
        self.topic = self.engine.administration.put_topic(
            "t", type_=TopicType.NORMAL, queues=QUEUES, now_ms=now
        )
        self.group = self.engine.administration.put_group("g", now_ms=now)
        self.engine.commit(now)

    def round_done(self) -> None:
        now = now_ms()
        self.engine.commit(now)
        files = self.engine.background.step(now, firing_ms=now)
        for file in files or ():
            file.sync()

    def append(self, count: int) -> None:
        data = blob("x", message_id="01" * 17, size=BODY_BYTES) + b""
        crc = crc32(data)
        topic_id, engine, now = self.topic.id, self.engine, now_ms()
        for n in range(count):
            engine.commands.send(
                topic_id, QueueId(n % QUEUES), data, crc, now_ms=now, firing_ms=now
            )
            if n % ROUND == ROUND - 1:
                self.round_done()
                now = now_ms()
        self.round_done()

    def pop_and_ack(self, count: int, want: int) -> None:
        """Pop in batches of `want`, ack what the round before popped; rounds of 64 requests."""
        engine, group_id, topic_id = self.engine, self.group.id, self.topic.id
        got = 0
        popped: list[Delivery] = []
        while got < count:
            now, acks, popped = now_ms(), popped, []
            for delivery in acks:
                engine.commands.ack(delivery, now)
            for _ in range(max(ROUND // want, 1) if want > 1 else ROUND):
                for batch in engine.commands.pop(
                    group_id,
                    topic_id,
                    max_messages=want,
                    invisible_duration_ms=60_000,
                    attempt_id="",
                    now_ms=now,
                ):
                    engine.consumption.read_batch(batch)
                    got += len(batch.indexes)
                    slot, id_, visible = batch.slot, batch.delivery_id, batch.visible_at_ms
                    popped += [
                        Delivery(group_id, topic_id, slot, id_, index, visible)
                        for index in batch.indexes
                    ]
            self.round_done()
        for delivery in popped:
            engine.commands.ack(delivery, now_ms())
        self.round_done()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    count = arguments.messages
    results: dict[str, list[dict[str, float]]] = {"append": [], "pop_32": [], "pop_1": []}
    write_bytes = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            bench = Bench(Path(folder))
            append, pop_and_ack = bench.append, bench.pop_and_ack
            begin = bench.engine.log.written_bytes
            results["append"].append(measure(count, partial(append, count)))
            results["pop_32"].append(measure(count, partial(pop_and_ack, count, 32)))
            write_bytes.append((bench.engine.log.written_bytes - begin) / count)
            bench.append(count // 4)
            results["pop_1"].append(measure(count // 4, partial(pop_and_ack, count // 4, 1)))
            bench.engine.close()
    summary = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for name, runs in results.items()
    }
    summary["log"] = {"bytes_a_message": round(statistics.median(write_bytes), 1)}
    json.dump({"bench": "engine", "cpus": os.cpu_count(), **summary}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
