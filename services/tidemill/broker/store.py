"""Opening of the engine on a data directory, with the settings as its configuration."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import structlog

from tidemill.broker.data_dir import boot_id, empty_store, is_half_emptied
from tidemill.broker.engine import recovery
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.dedup.config import DedupConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.store_identity import UUID_SIZE
from tidemill.broker.engine.recovery import RecoveryReport
from tidemill.broker.engine.replica.opening import FreshIdentity, mark_doubtful, open_replica_engine
from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
from tidemill.broker.engine.replica.replica_files import FOLDER, find_epoch_seen
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.broker.engine.store.segment import CorruptStore, LogDamaged
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.broker.posix_disk import PosixDisk
from tidemill.broker.settings import BrokerSettings
from tidemill.common.feature_level import FEATURE_LEVEL, FIRST_LEVEL, cap_level
from tidemill.common.lifecycle import StartError

ENTROPY_BYTES = 32  # for the key of receipt handles

log = structlog.get_logger()


class LogRejected(StartError):
    """A store cannot be opened because its log is damaged; another replica may mend it."""

    def __init__(self, reason: str, damage: LogDamaged) -> None:
        super().__init__(reason)
        self.damage = damage


@contextlib.contextmanager
def open_engine(settings: BrokerSettings, *, now_ms: int) -> Iterator[Engine]:
    """Recover the engine from the data directory. Raises StartError."""

    def open_alone(
        disk: PosixDisk, config: EngineConfig, now_ms: int
    ) -> tuple[Engine, RecoveryReport]:
        _reject_replica(disk, settings)
        return recovery.open_engine(disk, config, now_ms=now_ms, entropy=os.urandom(ENTROPY_BYTES))

    with _opened(settings, open_alone, now_ms=now_ms) as engine:
        yield engine


def _reject_replica(disk: PosixDisk, settings: BrokerSettings) -> None:
    """Refuse to open a replica's store alone: it would begin an epoch unknown to its group.

    The controllers take such an epoch for a sign that their record was restored from a backup, and
    then decide nothing.
    """
    epoch = find_epoch_seen(disk)
    if epoch:
        folder = f"{settings.data_dir}/{FOLDER}"
        raise StartError(
            f"the store in {settings.data_dir} belongs to a replica of a broker group, which has"
            f" reached epoch {epoch}; other replicas may have newer messages. Start it with"
            f" --controllers and --replica-id, as before. To inspect it, start on a copy (`tidemill"
            f" store copy`). If the other replicas are lost, move {folder} away to start a broker"
            f" without replicas; this store can then never join its old group again."
        )


@contextlib.contextmanager
def open_replica(
    settings: BrokerSettings, *, now_ms: int, cuts_damage: bool = False
) -> Iterator[ReplicaEngine]:
    """Recover the engine of a replica, which follows until it is elected. Raises StartError.

    With `cuts_damage`, cut the log at damaged records that no replica has, and mark the replica as
    unclean.
    """
    if is_half_emptied(settings.data_dir):
        empty_store(settings.data_dir)
    opened: list[ReplicaEngine] = []

    def open_following(
        disk: PosixDisk, config: EngineConfig, now_ms: int
    ) -> tuple[Engine, RecoveryReport]:
        fresh = FreshIdentity(os.urandom(UUID_SIZE), os.urandom(ENTROPY_BYTES))
        replica_engine, report = open_replica_engine(
            disk, config, now_ms=now_ms, fresh=fresh, boot_id=boot_id(), cuts_damage=cuts_damage
        )
        opened.append(replica_engine)
        return replica_engine.engine, report

    with _opened(settings, open_following, now_ms=now_ms):
        yield opened[0]


def discard_store(data_dir: Path) -> None:
    """Delete a replica's store, to copy it again; mark the replica as unclean before."""
    mark_doubtful(PosixDisk(data_dir))
    empty_store(data_dir)


@contextlib.contextmanager
def _opened(
    settings: BrokerSettings,
    open_: Callable[[PosixDisk, EngineConfig, int], tuple[Engine, RecoveryReport]],
    *,
    now_ms: int,
) -> Iterator[Engine]:
    began_ns = time.monotonic_ns()
    config, disk = config_of(settings), PosixDisk(settings.data_dir)
    try:
        engine, report = open_(disk, config, now_ms)
    except LogDamaged as error:
        raise LogRejected(
            f"the store in {settings.data_dir} cannot be opened: {error}", error
        ) from error
    except (CorruptStore, DiskFailed) as error:
        raise StartError(f"the store in {settings.data_dir} cannot be opened: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise StartError(
            f"the store in {settings.data_dir} cannot be opened: {error.filename}: {reason}"
        ) from error
    took_ms = (time.monotonic_ns() - began_ns) // 1_000_000
    engine.recovery_ms, engine.recovery_cut_bytes = took_ms, report.cut_bytes
    log.info("store recovered", **report.as_fields(), took_ms=took_ms)
    memory = engine.deduplication.memory
    memory.count_all()
    if memory.share_bytes > memory.memory_bytes:
        log.warning(
            "shares of topics exceed dedup_memory_bytes and shrink alike",
            share_bytes=memory.share_bytes,
            dedup_memory_bytes=memory.memory_bytes,
        )
    try:
        yield engine
    finally:
        engine.close()


def config_of(settings: BrokerSettings) -> EngineConfig:
    """Return the settings of the engine."""
    level = cap_level(FEATURE_LEVEL, settings.feature_level_max)
    return EngineConfig(
        feature_level=FIRST_LEVEL if settings.replica_id >= 0 else level,
        broker_name=settings.name,
        timer=TimerConfig(**_chosen(settings, TimerConfig, prefix="timer_")),
        transaction=TransactionConfig(
            **_chosen(settings, TransactionConfig, prefix="transaction_")
        ),
        dedup=DedupConfig(**_chosen(settings, DedupConfig, prefix="dedup_")),
        **_chosen(settings, EngineConfig),
    )


def _chosen(settings: BrokerSettings, config: type, *, prefix: str = "") -> dict[str, Any]:
    """Return the settings that are fields of `config`, by their name without `prefix`."""
    names = (one.name for one in fields(config))
    return {
        name: getattr(settings, prefix + name)
        for name in names
        if prefix + name in BrokerSettings.model_fields
    }
