"""What can be chosen about the engine. Defaults stand here and nowhere else.

The process's settings (`broker.settings`) show them with bounds and descriptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.broker.engine.timer.config import TimerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What can be chosen about the engine."""

    segment_bytes: int = 128 << 20
    checkpoint_log_bytes: int = 64 << 20  # log between two checkpoints: bounds the replay
    checkpoint_records: int = 150_000  # the same for small ones: a start applies 7 us each
    files_merged: int = 16  # queue or index files of about a size that become one
    retention_ms: int = 72 * 3600 * 1000
    retention_bytes: int = 0  # 0: no limit by size
    archive_gate_group: str = ""  # whose pull offsets retention waits for; "": nobody's
    disk_reserve_bytes: int = 512 << 20  # with less free space sends are refused
    deliveries_max: int = 4_000_000  # live pop checkpoints: 280 MB of memory
    auto_create: bool = False
    topics_max: int = 50_000  # retry and dead-letter topics count; those are made beyond it too
    groups_max: int = 20_000
    auto_create_per_s: int = 10  # topics and groups; a burst is free
    default_queues: int = 8
    broker_name: str = "broker-0"  # only used when the store is new
    timer: TimerConfig = field(default_factory=TimerConfig)
