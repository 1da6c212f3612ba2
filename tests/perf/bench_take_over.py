"""The speed at which an engine applies another engine's log, and the duration of a takeover.

State machine: two engines on separate disks, bodies of 64 bytes. The first engine writes
--in-flight deliveries of one message each and --timers pending delayed messages. The second engine
applies the bytes of the log, including lists and wheel, and then takes over.

    python -m tests.perf.bench_take_over
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

from tests.support.worlds.engine_world import blob
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.engine.store.log_opening import DurabilityProofs, LogOpening
from tidemill.broker.posix_disk import PosixDisk
from tidemill.message import stored_message

ROUND = 256
HOUR_MS = 3_600_000
SECRET = bytes(range(32))
SPAN_MS = 10 * 24 * HOUR_MS  # The range of due times.
CONFIG = EngineConfig(disk_reserve_bytes=0)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write(folder: Path, in_flight: int, timers: int) -> None:
    """Write the log of the first engine."""
    engine, _ = open_engine(PosixDisk(folder), CONFIG, now_ms=now_ms(), entropy=SECRET)
    topic = engine.administration.put_topic("t", type_=TopicType.MIXED, queues=8, now_ms=now_ms())
    group = engine.administration.put_group("g", now_ms=now_ms())
    plain = blob("x", size=64)
    crc = crc32(plain)
    delayed = bytearray(blob("x", size=64, kind=stored_message.TYPE_DELAY))

    def end_round(n: int) -> None:
        if n % ROUND == 0:
            engine.write(now_ms())
            engine.log.note_synced(engine.log.begin_sync()[0])

    for n in range(in_flight):
        engine.commands.send(
            topic.id, QueueId(n & 7), plain, crc, now_ms=now_ms(), firing_ms=now_ms()
        )
        end_round(n)
    for n in range(in_flight):
        engine.commands.pop(
            group.id,
            topic.id,
            max_messages=1,
            attempt_id="",
            now_ms=now_ms(),
            invisible_duration_ms=HOUR_MS + n % HOUR_MS,
        )
        end_round(n)
    chance, at_ms = random.Random(0), now_ms()
    for n in range(timers):
        due_at_ms = at_ms + HOUR_MS + chance.randrange(SPAN_MS)
        struct.pack_into(">q", delayed, stored_message.DUE_AT, due_at_ms)
        data = bytes(delayed)
        engine.commands.send(
            topic.id, QueueId(n & 7), data, crc32(data), now_ms=at_ms, firing_ms=at_ms
        )
        end_round(n)
    engine.commit(now_ms())
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=1_000_000)
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        write(first, arguments.in_flight, arguments.timers)
        shutil.copytree(first / "log", second / "log")
        shutil.rmtree(first)
        os.sync()  # A replica's log is durable: a takeover does not depend on unsynced bytes.
        engine = Engine(PosixDisk(second), CONFIG)
        engine.timers.recovery.open_empty()
        engine.timers.index.is_following = True
        opening = LogOpening(engine.log, engine.disk, engine.mappings)
        opening.find_segments(durable_offset=0)
        records = 0

        def follow() -> None:
            nonlocal records
            for found in opening.scan(LogOffset(0)):
                engine.fold.apply(found)
                records += 1
            engine.timers.index.link_gathered()

        apply_s = timed(follow)
        gc.collect()
        gc.freeze()  # Like a process after its start.
        cut_s = timed(lambda: opening.finish(DurabilityProofs()))
        take_over_s = timed(lambda: engine.take_over(SECRET, now_ms()))
        first_round_s = timed(lambda: engine.run_due(now_ms(), firing_ms=now_ms()))
        assert engine.state.table.used_count == arguments.in_flight
        assert engine.timers.index.pending_count == arguments.timers
        engine.close()
    json.dump(
        {
            "bench": "take_over",
            "cpus": os.cpu_count(),
            "in_flight": arguments.in_flight,
            "timers": arguments.timers,
            "records": records,
            "apply_us_a_record": round(apply_s / records * 1e6, 2),
            "find_end_of_log_s": round(cut_s, 3),
            "take_over_s": round(take_over_s, 3),
            "first_turn_s": round(first_round_s, 3),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
