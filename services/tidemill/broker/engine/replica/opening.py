"""Opening the store of a replica."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.layout.durable_mark import NO_BOOT_ID
from tidemill.broker.engine.recovery import RecoveryReport, open_damaged, open_replica
from tidemill.broker.engine.replica.known_end import KnownEnd
from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
from tidemill.broker.engine.replica.replica_files import (
    ReplicaFiles,
    damaged_state,
    end_cut,
    find_confirm,
    find_intent,
    identify,
)
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk
from tidemill.broker.engine.store.log_opening import LogOpening


class FreshIdentity(NamedTuple):
    """Random values that a store uses once, when it is new."""

    store_uuid: bytes
    secret: bytes  # of receipt handles; used if this replica founds the group


def open_replica_engine(
    disk: Disk,
    config: EngineConfig,
    *,
    now_ms: int,
    fresh: FreshIdentity,
    boot_id: bytes = NO_BOOT_ID,
    cuts_damage: bool = False,
) -> tuple[ReplicaEngine, RecoveryReport]:
    """Open the store of a replica, or create one. Raises CorruptStore.

    `boot_id` identifies this boot of the machine: bytes written since then have met no power cut.
    With `cuts_damage` no replica has the damaged records. The log is then cut before them and is
    doubtful.
    """
    store_uuid = identify(disk, fresh.store_uuid)
    known_end = KnownEnd(disk, boot_id)

    def finish_cut(opening: LogOpening) -> None:
        cut = find_intent(disk)
        if cut is not None:
            opening.repeat_cut(cut.offset)
            end_cut(disk)

    if cuts_damage:
        known_end.accept_loss()
    proofs = known_end.proofs(confirmed=0 if cuts_damage else find_confirm(disk))
    if known_end.is_same_boot and damaged_state(disk):
        # No power cut tore this copy, so it may have been the newest one. The replica has to catch
        # up before its acks and its log count again.
        known_end.mark_doubtful()
    engine, report = open_replica(disk, config, now_ms=now_ms, proofs=proofs, before=finish_cut)
    files = ReplicaFiles(disk, store_uuid, known_end)
    damaged = files.rewrite_damaged()
    known_end.note_opened(engine.log.log_end)
    if damaged and not report.damaged_file:
        report = replace(report, damaged_file=damaged)
    return ReplicaEngine(engine, files, fresh.secret, now_ms), report


def open_damaged_log(disk: Disk, config: EngineConfig) -> tuple[CommitLog, int]:
    """Open the log of a replica that does not start, to mend it; return its confirm offset too."""
    return open_damaged(disk, config, confirmed=find_confirm(disk))


def mark_doubtful(disk: Disk) -> None:
    """Make durable that this log may lack acknowledged records, before it loses them."""
    KnownEnd(disk, NO_BOOT_ID).mark_doubtful()
