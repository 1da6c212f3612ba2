"""Opening the engine on a folder, with the settings as its configuration."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import structlog

from tidemill.broker.engine import recovery
from tidemill.broker.engine.engine import Engine, EngineConfig
from tidemill.broker.engine.store.commit_log import CorruptStore
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.broker.engine.timer.config import OverloadPolicy, TimerConfig
from tidemill.broker.posix_disk import PosixDisk
from tidemill.broker.settings import BrokerSettings
from tidemill.common.lifecycle import StartRefused

ENTROPY_BYTES = 32  # for the key of receipt handles

log = structlog.get_logger()


@contextlib.contextmanager
def open_engine(settings: BrokerSettings, *, now_ms: int) -> Iterator[Engine]:
    """Recover the engine from the data directory; raise StartRefused where that cannot be."""
    began_ns = time.monotonic_ns()
    config = EngineConfig(
        segment_bytes=settings.segment_bytes,
        checkpoint_log_bytes=settings.checkpoint_log_bytes,
        retention_ms=settings.retention_ms,
        retention_bytes=settings.retention_bytes,
        disk_reserve_bytes=settings.disk_reserve_bytes,
        deliveries_max=settings.deliveries_max,
        auto_create=settings.auto_create,
        default_queues=settings.default_queues,
        broker_name=settings.name,
        timer=TimerConfig(
            max_delay_ms=settings.timer_max_delay_ms,
            load_horizon_ms=settings.timer_load_horizon_ms,
            load_chunk_records=settings.timer_load_chunk_records,
            flush_period_ms=settings.timer_flush_period_ms,
            max_rate=settings.timer_max_rate,
            soft_limit_per_second=settings.timer_soft_limit_per_second,
            overload_policy=OverloadPolicy(settings.timer_overload_policy),
            spread_ms=settings.timer_spread_ms,
            max_pending=settings.timer_max_pending,
            max_pinned_part=settings.timer_max_pinned_part,
            evacuation_lead_ms=settings.timer_evacuation_lead_ms,
            evacuation_rate_bytes=settings.timer_evacuation_rate_bytes,
            expire_backlog_after_ms=settings.timer_expire_backlog_after_ms,
        ),
    )
    disk = PosixDisk(settings.data_dir)
    try:
        engine, report = recovery.open_engine(
            disk, config, now_ms=now_ms, entropy=os.urandom(ENTROPY_BYTES)
        )
    except (CorruptStore, DiskFailed) as error:
        raise StartRefused(f"the store in {settings.data_dir} cannot be opened: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise StartRefused(
            f"the store in {settings.data_dir} cannot be opened: {error.filename}: {reason}"
        ) from error
    took_ms = (time.monotonic_ns() - began_ns) // 1_000_000
    engine.opened_in_ms = took_ms
    log.info("store recovered", **report.as_fields(), took_ms=took_ms)
    try:
        yield engine
    finally:
        engine.close()
