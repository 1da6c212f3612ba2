"""The longest slice of work for which the engine's owner blocks all other work.

One engine per scenario, in its own process, on virtual time and on a folder. Rounds are written,
syncs are skipped. Measured: the CPU time of each turn of `run_due`, of each slice of background
work and of each command in one slice, including the garbage collector. The collector has the
settings of a started broker (`tune_garbage_collector`) before the scenario creates its objects.
The goal is at most 5 ms.

    python -m tests.perf.bench_slices --scenarios timers topics
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast
from zlib import crc32

from prometheus_client import exposition

from tests.support.worlds.engine_world import blob
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter, TagFilter
from tidemill.broker.engine.metadata.catalog import QUEUES_MAX, TopicType
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.pop.deliveries import Delivery
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.firing_clock import FiringClock
from tidemill.broker.metrics.lag import Lag, TopicLag
from tidemill.broker.metrics.message_metrics import MessageMetrics
from tidemill.broker.metrics.metered_rounds import MeteredRounds
from tidemill.broker.metrics.pop_metrics import PopMetrics
from tidemill.broker.metrics.store_metrics import StoreMetrics, TopicSizes
from tidemill.broker.metrics.timer_metrics import TimerMetrics
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.posix_disk import PosixDisk
from tidemill.broker.server.link.commands import SLICE_REQUESTS
from tidemill.broker.server.scrape.lag import PROGRESS_A_ROUND
from tidemill.broker.server.scrape.topic_sizes import QUEUES_A_ROUND
from tidemill.common.histogram import Histogram
from tidemill.common.lifecycle import tune_garbage_collector
from tidemill.common.metrics import Registry
from tidemill.message.resource_names import RETRY_TOPIC_PREFIX
from tidemill.message.stored_message import TYPE_DELAY

SECRET = bytes(range(32))
WANTED_MS = 5
ROUND = 256  # Messages or pops.
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
PLAIN = blob("m", size=64)
PLAIN_CRC = crc32(PLAIN)
DELAYED = blob("m", size=64, kind=TYPE_DELAY)
DELAYED_CRC = crc32(DELAYED)
NEVER = {"checkpoint_log_bytes": 1 << 50, "checkpoint_records": 1 << 50}  # No automatic checkpoint.

Figures: TypeAlias = dict[str, Any]
T = TypeVar("T")


class Watch:
    """CPU time of slices by kind, with the garbage collector's share."""

    def __init__(self) -> None:
        self._longest: dict[str, tuple[float, float]] = {}  # In ms, with the collector's share.
        self._counts: Counter[str] = Counter()
        self._over: Counter[str] = Counter()
        self._sum_ms: defaultdict[str, float] = defaultdict(float)
        self._collected_s = self._collecting_since_s = 0.0
        gc.callbacks.append(self._note_collection)

    def _note_collection(self, phase: str, _info: dict[str, int]) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._collecting_since_s = now_s
        else:
            self._collected_s += now_s - self._collecting_since_s

    def slice(self, kind: str, work: Callable[[], T]) -> T:
        """Run one slice and record its duration."""
        collected_s, began_s = self._collected_s, time.thread_time()
        result = work()
        took_ms = (time.thread_time() - began_s) * 1e3
        found = took_ms, (self._collected_s - collected_s) * 1e3
        self._longest[kind] = max(self._longest.get(kind, (0.0, 0.0)), found)
        self._counts[kind] += 1
        self._over[kind] += took_ms > WANTED_MS
        self._sum_ms[kind] += took_ms
        return result

    def figures(self) -> Figures:
        """Return the longest slice of all and of each kind."""
        kind = max(self._longest, key=lambda one: self._longest[one])
        return {
            "longest_ms_cpu": round(self._longest[kind][0], 2),
            "kind": kind,
            f"over_{WANTED_MS}_ms": sum(self._over.values()),
            "kinds": {
                name: {
                    "longest_ms_cpu": round(took_ms, 2),
                    "of_it_collector_ms": round(collected_ms, 2),
                    "slices": self._counts[name],
                    "sum_ms_cpu": round(self._sum_ms[name], 1),
                    f"over_{WANTED_MS}_ms": self._over[name],
                }
                for name, (took_ms, collected_ms) in self._longest.items()
            },
        }


def value_of_next(slices: Generator[None, None, T]) -> T | None:
    """Run a slice; return None if it was not the last one."""
    try:
        return next(slices)
    except StopIteration as ended:
        return cast("T", ended.value)


class Owner:
    """An engine and its owner's loop on virtual time."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.now_ms = time.time_ns() // 1_000_000
        self._monotonic_ms = 0
        self.watch = Watch()
        config = {"disk_reserve_bytes": 0, **config}
        self.engine, _ = open_engine(
            PosixDisk(folder), EngineConfig(**config), now_ms=self.now_ms, entropy=SECRET
        )
        tune_garbage_collector()

    # ------------------------------------------------------------ not measured

    def commit(self) -> None:
        """End a round as if the writes were synced at once."""
        self.engine.write(self.now_ms)
        self.engine.log.note_synced(self.engine.log.begin_sync()[0])

    def write(self) -> None:
        """End a round with measured slices, like the broker."""
        slices = self.engine.write_slices(self.now_ms)
        while self.watch.slice("write", lambda: next(slices, self) is not self):
            pass
        self.engine.log.note_synced(self.engine.log.begin_sync()[0])

    def advance(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self._monotonic_ms += duration_ms

    def topic(self, name: str, *, queues: int = 1, type_: TopicType = TopicType.MIXED) -> TopicId:
        put = self.engine.administration.put_topic
        return put(name, type_=type_, queues=queues, now_ms=self.now_ms).id

    def group(self, name: str, **options: Any) -> GroupId:
        return self.engine.administration.put_group(name, now_ms=self.now_ms, **options).id

    def send(
        self, topic_id: TopicId, queue_id: int = 0, data: bytes = PLAIN, crc: int = PLAIN_CRC
    ) -> None:
        now_ms = self.now_ms
        self.engine.commands.send(
            topic_id, QueueId(queue_id), data, crc, now_ms=now_ms, firing_ms=now_ms
        )

    def send_many(self, count: int, *topic_ids: TopicId, queues: int = 1, **options: Any) -> None:
        for n in range(count):
            self.send(topic_ids[n % len(topic_ids)], n // len(topic_ids) % queues, **options)
            if n % ROUND == 0:
                self.commit()
        self.commit()

    def schedule(self, topic_id: TopicId, delay_ms: int) -> None:
        now_ms = self.now_ms
        self.engine.commands.send(
            topic_id,
            QueueId(0),
            DELAYED,
            DELAYED_CRC,
            now_ms=now_ms,
            firing_ms=now_ms,
            delay_ms=delay_ms,
        )

    def pop(
        self,
        group_id: GroupId,
        topic_id: TopicId,
        want: int = 32,
        *,
        invisible_ms: int = 30_000,
        wanted: MessageFilter = EVERY_MESSAGE,
    ) -> list[Delivery]:
        batches = self.engine.commands.pop(
            group_id,
            topic_id,
            max_messages=want,
            invisible_duration_ms=invisible_ms,
            wanted=wanted,
            attempt_id="",
            now_ms=self.now_ms,
        )
        return [
            Delivery(group_id, topic_id, batch.slot, batch.delivery_id, index, batch.visible_at_ms)
            for batch in batches
            for index in batch.indexes
        ]

    # ------------------------------------------------------------ measured

    def measured_pop(self, group_id: GroupId, topic_id: TopicId) -> list[Delivery]:
        """Pop like a link: slices before the first pop create its state."""
        prepare = self.engine.consumption.prepare_pop
        while self.watch.slice("pop", lambda: prepare(group_id, topic_id)):
            pass
        return self.command("pop", lambda: self.pop(group_id, topic_id))

    def command(self, kind: str, work: Callable[[], T]) -> T:
        """Run a command in one slice."""
        result = self.watch.slice(kind, work)
        self.write()
        return result

    def turn(self) -> bool:
        slices = self.engine.due_slices(self.now_ms, firing_ms=self.now_ms)
        has_more: bool | None = None
        while has_more is None:
            has_more = self.watch.slice("run_due", partial(value_of_next, slices))
        self.engine.take_ready()
        self.engine.take_config_changes()
        self.write()
        return has_more

    def run_due(self, turns: int = 1_000_000) -> None:
        """Run due work. If a window is used up, wait for the next one."""
        for _ in range(turns):
            if self.turn():
                continue
            due_ms = self.engine.next_due_ms(self.now_ms, firing_ms=self.now_ms)
            if due_ms is None or due_ms > self.now_ms + 1_000:
                return
            self.advance(max(due_ms - self.now_ms, 1))

    def steps(self, kind: str, steps: Iterator[list[File]]) -> None:
        """Run one background job, with an idle turn between its slices."""
        while self.watch.slice(kind, lambda: next(steps, None)) is not None:
            self.commit()

    def background(self) -> None:
        """Run the pending background work."""
        background = self.engine.background
        while True:
            job = background._job
            name = getattr(job, "__name__", "choose")
            files = self.watch.slice(
                f"background {name}",
                lambda: background.step(
                    self.now_ms, firing_ms=self.now_ms, monotonic_ms=self._monotonic_ms
                ),
            )
            if files is None:
                return
            self.commit()

    def checkpoint(self) -> None:
        self.commit()
        self.steps("checkpoint", self.engine.checkpoints.write())

    def retire(self) -> None:
        """Delete the oldest segment: the engine first writes its unique states again."""
        self.engine.log._roll(self.engine.config.segment_bytes)
        self.checkpoint()
        self.steps("retention", self.engine.retention.retire_oldest(self.now_ms))

    def scrape(self) -> None:
        """Read all metrics, one call per round like the broker, and format them."""
        engine, inspection = self.engine, self.engine.inspection
        lag, sizes, traffic = Lag(), TopicSizes(), Traffic()
        keys = self.command("scrape lag", lambda: list(engine.state.progress))
        for first in range(0, len(keys), PROGRESS_A_ROUND):
            some = keys[first : first + PROGRESS_A_ROUND]
            self.command("scrape lag", partial(list, map(inspection.find_progress, some)))
        queues = list(engine.catalog.queues.values())
        for first in range(0, len(queues), QUEUES_A_ROUND):
            part = queues[first : first + QUEUES_A_ROUND]
            self.command("scrape sizes", partial(list, map(inspection.log_bytes, part)))
        sizes.log_bytes.update(dict.fromkeys(engine.catalog.topics, 1))
        for topic_id in engine.catalog.topics:
            traffic.appended(topic_id, PLAIN)
        for group_id, topic_id, queue_id in keys:
            if not queue_id:
                traffic.polled(topic_id, group_id)
                traffic.waits.observe((topic_id, group_id, 1), 5)
                lag.of_topics[group_id, topic_id, False] = TopicLag()
        rounds = SimpleNamespace(
            engine=engine,
            now_ms=self.now_ms,
            pending_count=0,
            failed_read_count=0,
            disk_full_in_s=1.0,
            revive_latencies=Histogram((1, 10)),
            append_times_us=Histogram(),
            sync_times_us=Histogram(),
            firing_clock=FiringClock(),
        )
        registry = Registry(cluster="c", node_type="broker", node_id="b")
        MessageMetrics(registry, traffic, lag, cast("MeteredRounds", rounds))
        PopMetrics(registry, traffic, lag, cast("MeteredRounds", rounds))
        StoreMetrics(registry, sizes, cast("MeteredRounds", rounds))
        TimerMetrics(registry, cast("MeteredRounds", rounds))
        text = registry.text(exposition.generate_latest)
        with contextlib.suppress(StopIteration):
            while True:
                self.watch.slice("scrape text", partial(next, text))


# ---------------------------------------------------------------- scenarios


def revive(folder: Path) -> Figures:
    """Measure 1,000 groups with 32 deliveries each that expire at the same time."""
    owner = Owner(folder, **NEVER)
    topic_id = owner.topic("t")
    owner.send_many(32, topic_id)
    groups = [owner.group(f"g{n}") for n in range(1_000)]
    for group_id in groups:
        owner.pop(group_id, topic_id)
        owner.commit()
    owner.advance(30_001)
    owner.run_due()
    return owner.watch.figures()


def large(folder: Path) -> Figures:
    """Measure 64 deliveries of 4 MiB that expire at the same time."""
    owner = Owner(folder, **NEVER)
    topic_id, group_id = owner.topic("t"), owner.group("g")
    data = blob("m", size=4 << 20)
    crc = crc32(data)  # The proxy computes it.
    for _ in range(64):
        owner.command("send", lambda: owner.send(topic_id, 0, data, crc))
    for _ in range(64):
        owner.command("pop", lambda: owner.pop(group_id, topic_id, 1))
    owner.advance(30_001)
    owner.run_due()
    owner.background()
    return owner.watch.figures()


def pairs(folder: Path) -> Figures:
    """Measure a scrape of 20 consumer groups that have read 200 topics."""
    owner = Owner(folder, **NEVER)
    groups = [owner.group(f"group-{n}") for n in range(20)]
    for n in range(200):
        topic = owner.topic(f"topic-{n}", type_=TopicType.NORMAL)
        owner.send_many(20, topic)
        for group in groups:
            owner.pop(group, topic)
    owner.scrape()
    return owner.watch.figures()


def topics(folder: Path) -> Figures:
    """Measure 20,000 topics: a checkpoint, the deletion of a segment, a scrape."""
    owner = Owner(folder, **NEVER)
    for n in range(20_000):
        owner.topic(f"topic-{n}", type_=TopicType.NORMAL)
        if n % ROUND == 0:
            owner.commit()
    owner.commit()
    owner.group("g")
    owner.send_many(20_000, *(owner.engine.catalog.open_queues))
    owner.checkpoint()
    owner.retire()
    owner.scrape()
    return owner.watch.figures()


def ordered(folder: Path) -> Figures:
    """Measure 10,000 queues of an ordered group, each with a message in flight."""
    owner = Owner(folder, **NEVER)
    group_id = owner.group("g", is_ordered=True)
    for first in range(0, 10_000, 1_000):
        topic_id = owner.topic(f"t{first}", queues=1_000, type_=TopicType.FIFO)
        owner.send_many(2_000, topic_id, queues=1_000)
        while owner.measured_pop(group_id, topic_id):
            pass
    owner.checkpoint()
    owner.retire()
    owner.scrape()
    owner.advance(30_001)
    owner.run_due()
    return owner.watch.figures()


def in_flight(folder: Path, count: int = 1_000_000) -> Figures:
    """Measure a million deliveries: a checkpoint, some acks, and the expiry of all others."""
    owner = Owner(folder, **NEVER)
    topic_ids = [owner.topic(f"t{n}", queues=8) for n in range(4)]
    groups = [owner.group(f"g{n}") for n in range(16)]
    owner.send_many(count // 16, *topic_ids, queues=8)
    # Plain tuples, which the garbage collector checks only once: they belong to the clients.
    deliveries: list[tuple[Any, ...]] = []
    for n in range(count):
        found = owner.pop(groups[n % 16], topic_ids[n // 16 % 4], 1, invisible_ms=HOUR_MS)
        if n % 10 == 0:
            deliveries += map(tuple, found)
        if n % ROUND == 0:
            owner.commit()
    owner.commit()
    in_use = owner.engine.state.table.used_count
    owner.checkpoint()
    owner.retire()

    def ack(part: list[tuple[Any, ...]]) -> None:
        for delivery in part:
            owner.engine.commands.ack(Delivery(*delivery), owner.now_ms)

    for first in range(0, len(deliveries), SLICE_REQUESTS):
        part = deliveries[first : first + SLICE_REQUESTS]
        owner.watch.slice("ack", partial(ack, part))
        if first // SLICE_REQUESTS % 64 == 0:  # A busy round: 4,096 acks.
            owner.write()
    owner.commit()
    owner.advance(HOUR_MS - 60_000)
    owner.run_due()
    owner.advance(60_001)
    owner.run_due(turns=8_000)
    return {"in_flight": in_use, **owner.watch.figures()}


def merges(folder: Path) -> Figures:
    """Measure the file merges of 1,000 queues, four of them with 100,000 entries."""
    owner = Owner(folder, files_merged=4, checkpoint_log_bytes=8 << 20)
    wide = owner.topic("wide", queues=996)
    deep = owner.topic("deep", queues=4)
    for _ in range(20):
        owner.send_many(20_000, deep, queues=4)
        owner.send_many(5_000, wide, queues=996)
        owner.background()
    return owner.watch.figures()


def look_up(folder: Path) -> Figures:
    """Measure look-ups by key: over 1,200 blocks, and of many large messages with one key."""
    owner = Owner(folder, files_merged=16, checkpoint_log_bytes=4 << 10)
    topic_id = owner.topic("t")
    rare = blob("m", keys=("rare",))
    for n in range(1_200):
        owner.send_many(32, topic_id)
        if n % 100 == 0:
            owner.send(topic_id, 0, rare, crc32(rare))
        owner.commit()
        owner.background()
    large = blob("m", keys=("large",), size=4 << 20)
    for _ in range(40):
        owner.send(topic_id, 0, large, crc32(large))
        owner.commit()
    topic = owner.engine.catalog.topics[topic_id]
    files = owner.engine.store.index.files
    block_count = sum(file.row_count for file in files)
    for key in ("rare", "nobody has it", "large"):
        search = owner.engine.inspection.search(topic, key=key)
        while owner.watch.slice(f"look-up {key}", search.step):
            search.take()
    return {"files": len(files), "blocks": block_count, **owner.watch.figures()}


def deletion(folder: Path) -> Figures:
    """Measure deletions: a topic of 1,000 groups, a group of 65,000 queues and 10,000 topics."""
    owner = Owner(folder, **NEVER)
    engine, administration = owner.engine, owner.engine.administration
    busy = owner.topic("busy", queues=8)
    owner.send_many(8, busy, queues=8)
    for n in range(1_000):
        owner.pop(owner.group(f"g{n}"), busy)
        owner.commit()
    owner.advance(30_001)
    owner.run_due()
    owner.command("delete topic", lambda: administration.delete_topic("busy", owner.now_ms))
    owner.run_due()
    owner.checkpoint()
    group_id = owner.group("wide")
    for n in range(64):
        topic_id = owner.topic(f"wide-{n}", queues=QUEUES_MAX)
        owner.measured_pop(group_id, topic_id)
    for n in range(10_000):
        topic_id = owner.topic(f"narrow-{n}")
        name = f"{RETRY_TOPIC_PREFIX}wide+narrow-{n}"
        ensure_system_topic(
            engine.catalog, engine.fold, name, owner.now_ms, retry_of=(group_id, topic_id)
        )
        owner.commit()
    owner.command("delete group", lambda: administration.delete_group("wide", owner.now_ms))
    owner.run_due()
    owner.checkpoint()
    return owner.watch.figures()


def filters(folder: Path) -> Figures:
    """Measure a pop with a filter that rejects half a million messages in 64 queues."""
    owner = Owner(folder, **NEVER)
    topic_id = owner.topic("t", queues=64)
    dull = blob("m", tag="dull")
    crc = crc32(dull)
    owner.send_many(500_000, topic_id, queues=64, data=dull, crc=crc)
    owner.checkpoint()
    for is_ordered in (False, True):
        group_id = owner.group(f"g{is_ordered}", is_ordered=is_ordered)
        for _ in range(600):
            owner.engine.take_ready()
            owner.command(
                f"pop {is_ordered=}",
                partial(owner.pop, group_id, topic_id, wanted=TagFilter(frozenset({"bright"}))),
            )
    return owner.watch.figures()


def timers(folder: Path) -> Figures:
    """Measure 100,000 timers due in one second, and a day of others: flush, audit, evacuation."""
    owner = Owner(
        folder,
        segment_bytes=32 << 20,
        **NEVER,
        timer=TimerConfig(soft_limit_per_second=0, flush_log_bytes=1 << 50),
        # The first segments hold delivered timers. Later segments also hold pending timers.
        retention_ms=2 * HOUR_MS,
    )
    engine = owner.engine
    topic_ids = [owner.topic(f"t{n}", queues=8) for n in range(16)]
    owner.run_due()
    for n in range(100_000):
        owner.schedule(topic_ids[n % 16], 60_000)
        if n % ROUND == 0:
            owner.turn()
    owner.commit()
    owner.background()
    for _ in range(70):
        owner.advance(1_000)
        owner.run_due()
    assert engine.timers.index.pending_count == 0
    for n in range(300_000):
        owner.schedule(topic_ids[n % 16], HOUR_MS + n * 7919 % DAY_MS)
        if n % ROUND == 0:
            owner.turn()
    owner.commit()
    owner.background()
    owner.steps("audit", engine.timers.janitor.audit.run(owner.now_ms))
    owner.checkpoint()  # Without a checkpoint the engine deletes no segment.
    evacuated = engine.timers.evacuation.evacuated
    for _ in range(40):
        owner.advance(HOUR_MS // 8)
        owner.run_due(turns=5_000)
        owner.background()
    assert evacuated.total() > 10_000, "the oldest segment had timers that wait"
    return {"evacuated": evacuated.total(), **owner.watch.figures()}


SCENARIOS: dict[str, Callable[[Path], Figures]] = {
    one.__name__: one
    for one in (
        revive,
        large,
        pairs,
        topics,
        ordered,
        in_flight,
        merges,
        look_up,
        deletion,
        filters,
        timers,
    )
}


def in_process(name: str, folder: Path) -> Figures:
    """Run a scenario in its own process, with its own memory."""
    began_s = time.perf_counter()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        figures = pool.submit(SCENARIOS[name], folder / name).result()
    figures["seconds"] = round(time.perf_counter() - began_s, 1)
    print(f"{name}: {figures['longest_ms_cpu']} ms {figures['kind']}", file=sys.stderr)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", nargs="*", choices=list(SCENARIOS), default=[*SCENARIOS])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = {name: in_process(name, Path(folder)) for name in arguments.scenarios}
    json.dump(
        {"bench": "slices", "cpus": os.cpu_count(), "wanted_ms": WANTED_MS, "scenarios": found},
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
