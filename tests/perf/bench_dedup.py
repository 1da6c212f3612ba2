"""What does a dedup key cost a send, and what do 1,000,000 known keys cost?

engine  CPU of a send without and with deduplication, of a repeat, and of keys that are over
table   memory of known keys, the time to build their indexes at a start, and a sweep without work

python -m tests.perf.bench_dedup [--messages 100000] [--keys 1000000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from tests.support.worlds.dedup_world import DedupWorld
from tests.support.worlds.engine_world import blob
from tidemill.broker.engine.dedup.key_table import KeyTable
from tidemill.broker.engine.layout.dedup import HASH_SIZE, NO_PIN, KeyRow
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TopicId
from tidemill.message.dedup_key import DEDUP_PROPERTY

BATCH: Final = 64  # messages of a round
SIZE: Final = 1_024
WINDOW_MS: Final = 120_000
KINDS: Final = ("plain", "message_id", "property")


def _messages(kind: str, count: int, first: int = 0) -> list[tuple[bytes, int]]:
    made = []
    for n in range(first, first + count):
        properties = {DEDUP_PROPERTY: f"key-{n}"} if kind == "property" else {}
        data = blob("m", message_id=f"{n:032x}", properties=properties, size=SIZE)
        made.append((data, crc32(data)))
    return made


def _send(world: DedupWorld, topic_id: TopicId, messages: Sequence[tuple[bytes, int]]) -> float:
    """Send messages in rounds; return the CPU time of a message in microseconds."""
    send, now_ms = world.engine.commands.send_unless_repeated, world.now_ms
    queue_id = QueueId(0)
    gc.collect()
    world.note_round()
    began_s = time.process_time()
    for begin in range(0, len(messages), BATCH):
        for data, crc in messages[begin : begin + BATCH]:
            send(topic_id, queue_id, data, crc, now_ms=now_ms, firing_ms=now_ms)
        world.commit()
    return (time.process_time() - began_s) / len(messages) * 1e6


def measure_engine(count: int) -> dict[str, float]:
    """Return the CPU time of each kind of send in one engine."""
    used_us: dict[str, float] = {}
    for kind in KINDS:
        world = DedupWorld(segment_bytes=64 << 20)
        topic_id = world.topic()
        if kind != "plain":
            world.turn_on(window_ms=WINDOW_MS)
        messages = _messages(kind, count)
        _send(world, topic_id, _messages(kind, 1_000, count))
        used_us[kind] = _send(world, topic_id, messages)
        if kind == "plain":
            continue
        used_us[f"repeat_{kind}"] = _send(world, topic_id, messages[-10_000:])
        world.now_ms += WINDOW_MS + 1
        world.note_round()
        began_s = time.process_time()
        while world.engine.key_tables.key_count:
            world.engine.deduplication.sweep()
        used_us[f"over_{kind}"] = (time.process_time() - began_s) / count * 1e6
    return used_us


def measure_table(count: int) -> dict[str, float]:
    """Return what known keys cost."""
    table = KeyTable(TopicId(1))
    for n in range(count):
        table.put(KeyRow(os.urandom(HASH_SIZE), LogOffset(n), 1_000_000 + n, 0, NO_PIN))
    frozen = table.freeze()
    loaded = KeyTable(TopicId(1))
    began_s = time.perf_counter()
    for rows in frozen:
        loaded.load(memoryview(rows))
    loaded.end_load()
    load_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    loaded.sweep(over_ms=0, limit=count)
    return {
        "bytes_per_key": table.memory_bytes / count,
        "load_s": load_s,
        "idle_sweep_ms": (time.perf_counter() - began_s) * 1e3,
    }


def main() -> int:
    """Print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs = [measure_engine(options.messages) for _ in range(options.rounds)]
    engine = {name: round(statistics.median([run[name] for run in runs]), 2) for name in runs[0]}
    table = {name: round(value, 2) for name, value in measure_table(options.keys).items()}
    json.dump({"engine_us": engine, "table": table}, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
