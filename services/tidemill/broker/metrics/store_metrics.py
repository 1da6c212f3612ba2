"""Metrics of the store: volume, log, topic sizes and damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.store.log_times import first_stored_at_ms
from tidemill.broker.engine.upkeep.freed_bytes import Freeing
from tidemill.broker.metrics.metered_rounds import (
    MS_PER_S,
    STORAGE,
    STORAGE_LABELS,
    MeteredRounds,
    flag,
)
from tidemill.common.metrics import Labels, Registry, full_parts, histogram_family

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.catalog import Topic

SIZE_LABELS = (*STORAGE_LABELS, "topic", "is_system")
US_PER_S = 1_000_000


class TopicSizes:
    """The size of each topic in the log, as of the last scrape that read it."""

    def __init__(self) -> None:
        self.log_bytes: dict[TopicId, int] = {}
        self.oldest_at_ms: dict[TopicId, int] = {}  # when its oldest live message was stored


@final
class StoreMetrics:
    """Metrics of the store."""

    def __init__(self, registry: Registry, sizes: TopicSizes, rounds: MeteredRounds) -> None:
        self._sizes = sizes
        self._rounds = rounds
        self._size_sets = registry.label_sets("rocketmq_storage_topic_bytes", SIZE_LABELS)
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        yield from self._collect_volume()
        yield from self._collect_times()
        yield from self._collect_log()
        yield from self._collect_sizes(self._rounds.engine.catalog.topics)
        yield from self._collect_damage()

    def _collect_volume(self) -> Iterator[Metric]:
        engine = self._rounds.engine
        log = engine.log
        total_bytes = engine.disk.total_bytes()
        oldest_at_ms = first_stored_at_ms(log, 0) if log.committed_offset > log.min_offset else 0
        for name, help_, value in (
            ("size", "Bytes used on the volume.", total_bytes - engine.room.free_bytes),
            ("free_bytes", "Bytes that can still be written.", engine.room.free_bytes),
            (
                "disk_used_ratio",
                "Used part of the volume, without the space reserved for root.",
                (total_bytes - engine.room.free_bytes) / total_bytes if total_bytes else 0,
            ),
            (
                "full_in_seconds",
                "Seconds until the volume is full, at the rate of the last hour; +Inf: never.",
                self._rounds.disk_full_in_s,
            ),
            (
                "flush_behind_bytes",
                "Bytes of the log that are not synced.",
                log.log_end - log.durable_offset,
            ),
            (
                "dispatch_behind_bytes",
                "Bytes of the log that are not indexed; above 0 only at a replica.",
                log.log_end - log.folded_offset,
            ),
            (
                "message_reserve_time",
                "Ms since the oldest record was stored.",
                self._rounds.now_ms - oldest_at_ms if oldest_at_ms else 0,
            ),
        ):
            gauge = GaugeMetricFamily(f"rocketmq_storage_{name}", help_, labels=STORAGE_LABELS)
            gauge.add_metric(STORAGE, value)
            yield gauge

    def _collect_times(self) -> Iterator[Metric]:
        """Yield the times of writes, syncs and the last start, and the state of retention."""
        engine = self._rounds.engine
        for name, help_, times in (
            ("append", "Seconds of the writes of rounds.", self._rounds.append_times_us),
            ("fsync", "Seconds of the syncs of the log.", self._rounds.sync_times_us),
        ):
            yield histogram_family(
                f"rocketmq_storage_{name}_seconds",
                help_,
                STORAGE_LABELS,
                times,
                lambda _: STORAGE,
                divisor=US_PER_S,
            )
        recover = GaugeMetricFamily(
            "rocketmq_storage_recover_seconds", "Duration of the last start.", labels=STORAGE_LABELS
        )
        recover.add_metric(STORAGE, engine.recovery_ms / MS_PER_S)
        kept = GaugeMetricFamily(
            "rocketmq_storage_retention_seconds",
            "Age at which messages are deleted, unless their topic has its own.",
            labels=STORAGE_LABELS,
        )
        kept.add_metric(STORAGE, engine.retention.retention_ms / MS_PER_S)
        cut = CounterMetricFamily(
            "rocketmq_storage_truncated_bytes_total",
            "Bytes of an unfinished write that the last start cut from the end of the log.",
            labels=STORAGE_LABELS,
        )
        cut.add_metric(STORAGE, engine.recovery_cut_bytes)
        yield from (recover, kept, cut)
        audited = CounterMetricFamily(
            "rocketmq_audit_log_records", "Records of the audit log.", labels=("kind",)
        )
        audited.add_metric(("change",), engine.catalog.audit.recorded_count)
        yield audited
        gate = engine.retention.gate
        holding = GaugeMetricFamily(
            "rocketmq_storage_archive_gate_holding",
            "1 while messages are older than the retention and kept for the archive.",
            labels=STORAGE_LABELS,
        )
        holding.add_metric(STORAGE, int(gate.is_holding))
        passed = CounterMetricFamily(
            "rocketmq_storage_archive_gate_passed_total",
            "Segments deleted for lack of room, with messages that no archive has sealed.",
            labels=STORAGE_LABELS,
        )
        passed.add_metric(STORAGE, gate.passed_count)
        yield from (holding, passed)
        packing = engine.packing
        for name, help_, count in (
            ("packed", "Segments that became packs.", packing.packed_count),
            ("pack_copied_bytes", "Bytes copied into packs.", packing.copied_bytes),
        ):
            counter = CounterMetricFamily(
                f"rocketmq_storage_{name}_total", help_, labels=STORAGE_LABELS
            )
            counter.add_metric(STORAGE, count)
            yield counter

    def _collect_log(self) -> Iterator[Metric]:
        """Yield the bytes of the log by state, derived and freed bytes, and the state floor."""
        engine = self._rounds.engine
        states = GaugeMetricFamily(
            "rocketmq_storage_log_bytes",
            "Bytes of the log. live: messages that can still be read. dead: dead messages. stub:"
            " what packs keep of dead messages. control: all other records, messages of the last"
            " seconds, and messages that died before they were counted, until their segment is"
            " packed. pinned: pending delayed messages. Absent until the first count after a start"
            " is complete.",
            labels=(*STORAGE_LABELS, "state"),
        )
        counts = engine.log_space.find_bytes()
        if counts is not None:
            for state, size_bytes in counts._asdict().items():
                states.add_metric((*STORAGE, state), size_bytes)
        yield states
        derived = GaugeMetricFamily(
            "rocketmq_storage_derived_bytes",
            "Sizes of the files that are derived from the log. queues: about 20 bytes per message"
            " of a queue. index: about 16 bytes per key or message id.",
            labels=(*STORAGE_LABELS, "kind"),
        )
        sizes = engine.log_space.derived_bytes
        derived.add_metric((*STORAGE, "queues"), sizes.queues)
        derived.add_metric((*STORAGE, "index"), sizes.index)
        yield derived
        freed = CounterMetricFamily(
            "rocketmq_storage_freed_bytes_total",
            "Bytes of the log that returned to the disk. deleted: the oldest segments. packed: dead"
            " messages of segments with live messages. emptied: segments without live messages.",
            labels=(*STORAGE_LABELS, "how"),
        )
        for how in Freeing:
            freed.add_metric((*STORAGE, how), engine.live_bytes.freed.counts[how])
        yield freed
        floor = GaugeMetricFamily(
            "rocketmq_storage_floor_offset",
            "State floor: the log offset before which packs have only live messages.",
            labels=STORAGE_LABELS,
        )
        floor.add_metric(STORAGE, engine.log_space.floor_offset)
        age = GaugeMetricFamily(
            "rocketmq_storage_floor_age_seconds",
            "Age of the record at the state floor. Absent without a record.",
            labels=STORAGE_LABELS,
        )
        stored_at_ms = engine.log_space.floor_stored_at_ms()
        if stored_at_ms is not None:
            age.add_metric(STORAGE, max(self._rounds.now_ms - stored_at_ms, 0) / MS_PER_S)
        yield from (floor, age)

    def _collect_sizes(self, topics: dict[TopicId, Topic]) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "rocketmq_storage_topic_bytes",
            "Bytes of a topic's messages in the log. The size of a queue with more than 256"
            " messages is estimated from 256 of them.",
            labels=SIZE_LABELS,
        )
        overflows: Counter[Labels] = Counter()
        for topic_id, log_bytes in list(self._sizes.log_bytes.items()):
            topic = topics.get(topic_id)
            if topic is None:
                continue
            labels = (*STORAGE, topic.name, flag(topic.is_system))
            admitted = self._size_sets.admit(labels)
            if admitted == labels:
                gauge.add_metric(labels, log_bytes)
                yield from full_parts(gauge)
            else:
                overflows[admitted] += log_bytes
        for admitted, log_bytes in overflows.items():
            gauge.add_metric(admitted, log_bytes)
        yield gauge

    def _collect_damage(self) -> Iterator[Metric]:
        engine = self._rounds.engine
        corrupt = CounterMetricFamily(
            "rocketmq_storage_corrupt_records_total",
            "Detected damage: damaged records of the log, and damaged derived files.",
            labels=(*STORAGE_LABELS, "file"),
        )
        corrupt.add_metric((*STORAGE, "log"), engine.store.damaged_count)
        for folder, count in engine.rebuilds.counts.items():
            corrupt.add_metric((*STORAGE, folder), count)
        yield corrupt
        repaired = CounterMetricFamily(
            "rocketmq_storage_repaired_files_total",
            "Damaged files that were rebuilt from the log.",
            labels=("folder",),
        )
        for folder, count in self._rounds.engine.rebuilds.counts.items():
            repaired.add_metric((folder,), count)
        yield repaired
        mended = CounterMetricFamily(
            "rocketmq_storage_mended_places_total",
            "Damaged ranges of the log: mended from another replica, or given up.",
            labels=("result",),
        )
        damage = engine.log.damage
        mended.add_metric(("mended",), damage.mended_count)
        mended.add_metric(("given_up",), damage.given_up_count)
        yield mended
        failed_reads = CounterMetricFamily(
            "rocketmq_failed_reads_total",
            "Read-only requests that failed because of an unexpected error; see the log.",
        )
        failed_reads.add_metric((), self._rounds.failed_read_count)
        yield failed_reads
