"""What do packs cost a start and a receive, and how soon are 1,000 segments empty?

One engine on a real disk, without any process around it. Its log has SEGMENTS segments of 1 MiB;
two fifths of their messages of 1 KiB (--kept) belong to a topic that stays, the others to one that
goes.

    start    opening the store again, with segments and with packs
    receive  popping and acking every message of the topic that stays, from segments and from packs
    pack     from the deletion of the other topic until its space is back, without a limited rate
    empty    from the deletion of the topic that stays until its log has no segment but the last two
    derived  bytes of the queue and index files, with all messages and after that

    python -m tests.perf.bench_packs
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.support.worlds.engine_world import ENTROPY, blob
from tests.support.worlds.packed_worlds import derived_bytes
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import Topic, TopicType
from tidemill.broker.engine.pop.deliveries import Delivery
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.posix_disk import PosixDisk

MIB = 1 << 20
BODY_BYTES = 1_024
PARTS = 5
ROUND = 256
WANT = 32
LOOK_MS = 10_001  # between two looks of the background
SETTLE_LOOKS = 18
STEP_MS = 20
CONFIG = EngineConfig(segment_bytes=MIB, disk_reserve_bytes=0, retention_ms=400 * 86_400_000)


class Bench:
    """One engine, and a clock that runs faster than the machine's while the engine is idle."""

    def __init__(self, folder: Path, *, parts_kept: int) -> None:
        self._folder = folder
        self._parts_kept = parts_kept
        self._ahead_ms = 0
        self.engine: Engine
        self.open()
        self.engine.catalog.feature_level = 2
        self.topics = [self._topic("stays"), self._topic("goes")]

    def _topic(self, name: str) -> Topic:
        topic = self.engine.administration.put_topic(
            name, type_=TopicType.NORMAL, queues=1, now_ms=self.now_ms()
        )
        self.engine.commit(self.now_ms())
        return topic

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._ahead_ms

    def open(self) -> float:
        """Open the store; return the seconds that it took."""
        began = time.perf_counter()
        disk = PosixDisk(self._folder)
        self.engine, _ = open_engine(disk, CONFIG, now_ms=self.now_ms(), entropy=ENTROPY)
        return time.perf_counter() - began

    def reopen(self) -> float:
        self.engine.close()
        return self.open()

    def step(self) -> bool:
        """Do a round and a slice of the background; return whether it had work."""
        now = self.now_ms()
        self.engine.commit(now)
        files = self.engine.background.step(now, firing_ms=now, monotonic_ms=now)
        for file in files or ():
            file.sync()
        return files is not None

    def settle(self) -> None:
        """Run the background for three minutes of its clock: older messages are not recent."""
        for _ in range(SETTLE_LOOKS):
            self._ahead_ms += LOOK_MS
            while self.step():
                pass

    def fill(self, segments: int) -> None:
        data = blob("x", message_id="01" * 17, size=BODY_BYTES)
        crc, number = crc32(data), 0
        while len(self.engine.log.segments) <= segments:
            topic = self.topics[number % PARTS >= self._parts_kept]
            now = self.now_ms()
            self.engine.commands.send(topic.id, QueueId(0), data, crc, now_ms=now, firing_ms=now)
            number += 1
            if number % ROUND == 0:
                self.step()
        self.step()

    def receive(self, name: str) -> float:
        """Receive and ack all messages of the topic that stays; return messages a second."""
        engine, topic_id = self.engine, TopicId(self.topics[0].id)
        group = engine.administration.put_group(name, now_ms=self.now_ms())
        engine.commit(self.now_ms())
        queue = engine.catalog.queues[topic_id, QueueId(0)]
        count, got, began = queue.max_offset - queue.min_offset, 0, time.perf_counter()
        while got < count:
            now, popped = self.now_ms(), list[Delivery]()
            for _ in range(ROUND // WANT):
                for batch in engine.commands.pop(
                    group.id,
                    topic_id,
                    max_messages=WANT,
                    invisible_duration_ms=600_000,
                    attempt_id="",
                    now_ms=now,
                ):
                    engine.consumption.read_batch(batch)
                    got += len(batch.indexes)
                    slot, id_, visible = batch.slot, batch.delivery_id, batch.visible_at_ms
                    popped += [
                        Delivery(group.id, topic_id, slot, id_, index, visible)
                        for index in batch.indexes
                    ]
            self.engine.commit(now)
            for delivery in popped:
                engine.commands.ack(delivery, now)
            self.engine.commit(now)
        return count / (time.perf_counter() - began)

    def delete(self, name: str) -> float:
        """Delete a topic; return the seconds until the background has freed its space.

        The clock skips the pauses of packing.
        """
        began = ended = time.perf_counter()
        self.engine.administration.delete_topic(name, self.now_ms())
        files, idle_ms = self._log_files, 0
        while idle_ms < 2 * LOOK_MS:
            idle_ms += STEP_MS
            self._ahead_ms += STEP_MS
            while self.step():
                pass
            if files != self._log_files:
                files, idle_ms, ended = self._log_files, 0, time.perf_counter()
        return ended - began

    @property
    def _log_files(self) -> tuple[int, int]:
        return len(self.engine.log.segments), self.pack_count

    @property
    def pack_count(self) -> int:
        return sum(segment.pack is not None for segment in self.engine.log.segments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=1_000)
    parser.add_argument("--kept", type=int, default=2, help=f"of {PARTS} messages, 1 to {PARTS}")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(Path(folder), parts_kept=arguments.kept)
        bench.fill(arguments.segments)
        bench.settle()
        result["derived_bytes_full"] = list(derived_bytes(bench.engine))
        result["start_s_segments"] = bench.reopen()
        bench.settle()
        result["receive_per_s_segments"] = bench.receive("from segments")
        log_bytes = sum(one.file_size for one in bench.engine.log.segments)
        result["pack_s"] = bench.delete("goes")
        bench.settle()
        result["packs"] = bench.pack_count
        left_bytes = sum(one.file_size for one in bench.engine.log.segments)
        result["freed_mib_per_s"] = (log_bytes - left_bytes) / MIB / result["pack_s"]
        result["start_s_packs"] = bench.reopen()
        bench.settle()
        result["receive_per_s_packs"] = bench.receive("from packs")
        result["empty_s"] = bench.delete("stays")
        bench.settle()
        result["segments_left"] = len(bench.engine.log.segments)
        result["derived_bytes_empty"] = list(derived_bytes(bench.engine))
        bench.engine.close()
    rounded = {key: round(one, 2) if isinstance(one, float) else one for key, one in result.items()}
    json.dump({"bench": "packs", **rounded}, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
