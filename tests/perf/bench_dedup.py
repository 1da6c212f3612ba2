"""What does a dedup key cost a send, and what do 1,000,000 known keys cost?

engine  CPU of a send without and with deduplication, of a repeat, and of keys that are over
table   memory of known keys, the time to build their indexes at a start, and a sweep without work
server  CPU of proxy and broker for a send to a running standalone, and for its repeat: the load
        generator sends without waiting for answers, with the message id as the key

python -m tests.perf.bench_dedup [--messages 100000] [--keys 1000000] [--rounds 3]
    [--parts engine,table,server] [--sends 20000]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

from tests.perf.bench_end_to_end import Meter, build_load, run_load
from tests.support.processes.processes import Standalone, standalone
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
SERVER_WINDOW_S: Final = 3_600  # No key is over during the measurement.
EVERY: Final = "150us"  # between two sends


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


def measure_server(folder: Path, count: int, rounds: int) -> dict[str, float]:
    """Return the CPU time of each kind of send in all processes of a standalone."""
    load = build_load(folder)
    used_us: dict[str, list[float]] = {kind: [] for kind in ("plain", "message_id", "repeat")}
    with standalone(folder / "data") as server:
        pids = {name: process.pid for name, process in server.processes.items()}
        for number in range(-1, rounds):
            for kind, values in used_us.items():
                topic = f"{'plain' if kind == 'plain' else 'keyed'}{number}"
                if kind != "repeat":
                    window = "off" if kind == "plain" else f"{SERVER_WINDOW_S}s"
                    _create_topic(server, topic, window)
                meter = Meter(pids)
                # The ids of the messages are the same in each run.
                sent = run_load(
                    load, "offer", server.grpc, topic=topic, messages=count, every=EVERY
                )
                assert sent["answers"] == {"OK": count}, sent
                if number >= 0:  # The first round warms up.
                    values.append(sum(meter.per_million(count).values()))
    return {kind: statistics.median(values) for kind, values in used_us.items()}


def _create_topic(server: Standalone, topic: str, window: str) -> None:
    line = [sys.executable, "-m", "tidemill", "--admin", server.admin, "topic", "create", topic]
    subprocess.run([*line, f"--dedup-window={window}"], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="engine,table,server")
    parser.add_argument("--sends", type=int, default=20_000)
    options = parser.parse_args()
    parts, figures = options.parts.split(","), dict[str, dict[str, float]]()
    if "engine" in parts:
        runs = [measure_engine(options.messages) for _ in range(options.rounds)]
        figures["engine_us"] = {
            name: statistics.median([run[name] for run in runs]) for name in runs[0]
        }
    if "table" in parts:
        figures["table"] = measure_table(options.keys)
    if "server" in parts:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            path = Path(folder).resolve()
            figures["server_cpu_us"] = measure_server(path, options.sends, options.rounds)
    rounded = {
        part: {name: round(value, 2) for name, value in found.items()}
        for part, found in figures.items()
    }
    json.dump(rounded, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
