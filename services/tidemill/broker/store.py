"""Opening the engine on a folder, with the settings as its configuration."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import structlog

from tidemill.broker.data_dir import boot_id, emptied, wants_to_be_emptied
from tidemill.broker.engine import recovery
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.store_identity import UUID_SIZE
from tidemill.broker.engine.recovery import RecoveryReport
from tidemill.broker.engine.replica.opening import FreshIdentity, mark_doubtful, open_replica_engine
from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
from tidemill.broker.engine.replica.replica_files import FOLDER, find_epoch_seen
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.broker.engine.store.segment import CorruptStore, LogDamaged
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.posix_disk import PosixDisk
from tidemill.broker.settings import BrokerSettings
from tidemill.common.lifecycle import StartError

ENTROPY_BYTES = 32  # for the key of receipt handles

log = structlog.get_logger()


class LogRefused(StartError):
    """A store whose log is damaged: another replica may have what stood there."""

    def __init__(self, reason: str, damage: LogDamaged) -> None:
        super().__init__(reason)
        self.damage = damage


@contextlib.contextmanager
def open_engine(settings: BrokerSettings, *, now_ms: int) -> Iterator[Engine]:
    """Recover the engine from the data directory; raise StartError where that cannot be."""

    def open_alone(
        disk: PosixDisk, config: EngineConfig, now_ms: int
    ) -> tuple[Engine, RecoveryReport]:
        _refuse_replica(disk, settings)
        return recovery.open_engine(disk, config, now_ms=now_ms, entropy=os.urandom(ENTROPY_BYTES))

    with _opened(settings, open_alone, now_ms=now_ms) as engine:
        yield engine


def _refuse_replica(disk: PosixDisk, settings: BrokerSettings) -> None:
    """Refuse to let a replica's store be alone: it would begin an epoch that its group has not.

    Its group takes that for a record that was restored from a backup, and decides nothing more.
    """
    epoch = find_epoch_seen(disk)
    if epoch:
        folder = f"{settings.data_dir}/{FOLDER}"
        raise StartError(
            f"the store in {settings.data_dir} is a replica's, and its broker group has come to"
            f" epoch {epoch}: the others may have what it lacks. Start it with --controllers and"
            f" --replica-id, as before. To look into it, start on a copy (`tidemill store copy`)."
            f" Where the others are lost for good and it is to be a broker of its own, move"
            f" {folder} away: it can never be a replica of them again."
        )


@contextlib.contextmanager
def open_replica(
    settings: BrokerSettings, *, now_ms: int, cuts_damage: bool = False
) -> Iterator[ReplicaEngine]:
    """Do the same for a replica, which decides nothing until it is elected.

    With `cuts_damage` it goes without what nobody has, and says so.
    """
    if wants_to_be_emptied(settings.data_dir):
        emptied(settings.data_dir)
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


def give_up_store(data_dir: Path) -> None:
    """Take away what a replica has, to begin anew; from before that on it is unclean."""
    mark_doubtful(PosixDisk(data_dir))
    emptied(data_dir)


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
        raise LogRefused(
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
    try:
        yield engine
    finally:
        engine.close()


def config_of(settings: BrokerSettings) -> EngineConfig:
    """Return the settings that are the engine's."""
    return EngineConfig(
        broker_name=settings.name,
        timer=TimerConfig(**_chosen(settings, TimerConfig, prefix="timer_")),
        **_chosen(settings, EngineConfig),
    )


def _chosen(settings: BrokerSettings, config: type, *, prefix: str = "") -> dict[str, Any]:
    """Return the settings that are fields of `config` too, there without the prefix."""
    names = (one.name for one in fields(config))
    return {
        name: getattr(settings, prefix + name)
        for name in names
        if prefix + name in BrokerSettings.model_fields
    }
