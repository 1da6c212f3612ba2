"""Configuration of the engine. Its defaults are defined here only.

The settings of the process (`broker.settings`) add bounds and descriptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tidemill.broker.engine.dedup.config import DedupConfig
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.common.feature_level import FEATURE_LEVEL

DiskFullPolicy: TypeAlias = Literal["reject", "trim_oldest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of one engine."""

    segment_bytes: int = 128 << 20
    checkpoint_log_bytes: int = 64 << 20  # log between two checkpoints; limits the replay
    checkpoint_records: int = 150_000  # the same in records: a start applies one in 7 us
    files_merged: int = 16  # queue or index files of similar size that are merged into one
    retention_ms: int = 72 * 3600 * 1000
    retention_bytes: int = 0  # 0: no limit by size
    # Lifecycle events are kept this long. 0: until all messages before them are dead, and at most
    # `retention_ms` (ADR 0069).
    event_retention_ms: int = 0
    pack_rate_bytes: int = 32 << 20  # per second, copied from segments into packs (ADR 0067)
    archive_gate_group: str = ""  # retention waits for its pull offsets; "": none
    # `trim_oldest`: if nothing else frees space on a full disk, the oldest messages die.
    disk_full_policy: DiskFullPolicy = "reject"
    disk_reserve_bytes: int = 512 << 20  # with less free space the broker rejects sends
    deliveries_max: int = 4_000_000  # in flight: 300 MB of memory, at most twice as much
    auto_create_topics: bool = False
    auto_create_groups: bool = False
    topics_max: int = 50_000  # includes retry and dead-letter topics, which may exceed it
    groups_max: int = 20_000
    auto_create_per_s: int = 10  # topics and consumer groups; a first burst is free
    # The first use does not create a topic or consumer group that was deleted less than this ago.
    recreate_block_ms: int = 600_000
    default_queues: int = 8
    broker_name: str = "broker-0"  # only used for a new store
    # Highest feature level that this broker raises its log to by itself (ADR 0065).
    feature_level: int = FEATURE_LEVEL
    timer: TimerConfig = field(default_factory=TimerConfig)
    transaction: TransactionConfig = field(default_factory=TransactionConfig)
    dedup: DedupConfig = field(default_factory=DedupConfig)
