"""Opening the engine on a folder, with the settings as its configuration."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import structlog

from tidemill.broker.engine import recovery
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.store.commit_log import CorruptStore
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.broker.engine.timer.config import TimerConfig
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
        broker_name=settings.name,
        timer=TimerConfig(**_chosen(settings, TimerConfig, prefix="timer_")),
        **_chosen(settings, EngineConfig),
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


def _chosen(settings: BrokerSettings, config: type, *, prefix: str = "") -> dict[str, Any]:
    """Return the settings that are fields of `config` too, there without the prefix."""
    names = (one.name for one in fields(config))
    return {
        name: getattr(settings, prefix + name)
        for name in names
        if prefix + name in BrokerSettings.model_fields
    }
