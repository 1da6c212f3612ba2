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
from tidemill.broker.engine.store.posix_disk import PosixDisk
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
    log.info("store recovered", **report.as_fields(), took_ms=took_ms)
    try:
        yield engine
    finally:
        engine.close()
