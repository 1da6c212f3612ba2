"""The configuration of timers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DAY_MS = 24 * 3600 * 1000


class OverloadPolicy(Enum):
    """The policy for a delayed message in a full second."""

    ACCEPT = "accept"
    REJECT = "reject"
    SPREAD = "spread"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerConfig:
    """The configuration of timers, with the sizes of RocketMQ."""

    max_delay_ms: int = 400 * DAY_MS
    load_horizon_ms: int = 10_000
    load_chunk_records: int = 262_144  # loaded from one slot at a time: 10 MiB
    flush_period_ms: int = 10_000  # for wheel and table; the timer log is written every second
    flush_log_bytes: int = 64 << 20  # of commit log, after which a flush is due at once
    max_rate: int = 0  # deliveries per second; 0: no limit
    soft_limit_per_second: int = 20_000  # timers due in one second; 0: no limit
    overload_policy: OverloadPolicy = OverloadPolicy.ACCEPT
    spread_ms: int = 1_000  # the longest delay by SPREAD
    max_pending: int = 50_000_000
    max_pinned_part: float = 0.25  # of the volume
    evacuation_lead_ms: int = 6 * 3600 * 1000  # before retention would remove a segment
    evacuation_rate_bytes: int = 8 << 20  # per second
    expire_backlog_after_ms: int = 0  # 0: late messages are always delivered
    audit_period_ms: int = DAY_MS
    # Part of the disk format or the memory of a store. Only tests use other values.
    wheel_slots: int = 1_209_600  # seconds of one revolution: 14 days
    timer_log_file_bytes: int = 104_857_600
    table_file_entries: int = 65_536
    table_pages_max: int = 4_096  # 64 MiB
