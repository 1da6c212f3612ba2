"""Opening the engine: from what is on disk to a state that is the fold of a prefix of the log.

1. Open the segments; read the checkpoint file.
2. Open the queue and index files that join up to the checkpoint; load the newest usable snapshot.
3. Replay the log from there: every record is folded in by what its section does not yet contain.
4. Cut a torn tail; refuse to start over damaged durable bytes.
5. Rebuild lists and counts; begin a new epoch, and make that durable.

Whatever is missing or damaged among the derived files costs time only: the log says it all again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tidemill.broker.engine.background import (
    CHECKPOINT_FILE,
    INDEX_FOLDER,
    QUEUES_FOLDER,
    SECTION_CATALOG,
    SECTION_DELIVERIES,
    SECTION_ORDERED,
    SECTION_PROGRESS,
    SECTION_QUEUES,
    SNAPSHOTS_FOLDER,
    add_runs,
    write_checkpoint_file,
)
from tidemill.broker.engine.engine import Engine, EngineConfig
from tidemill.broker.engine.layout import block_file, message, pop_checkpoint, store_checkpoint
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.message import Place
from tidemill.broker.engine.layout.record import Kind, UnknownRecord
from tidemill.broker.engine.message_store import cause_of
from tidemill.broker.engine.metadata.catalog import decode_config
from tidemill.broker.engine.store.block_file import BlockFile, open_chain
from tidemill.broker.engine.store.commit_log import CorruptStore, Record
from tidemill.broker.engine.store.disk import Disk
from tidemill.broker.engine.timer.status import TIMER_TOPIC

SECRET_SIZE = 32  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What a start found."""

    is_new: bool
    epoch: int
    log_bytes: int
    replayed_from: int
    replayed_records: int
    cut_bytes: int
    snapshot: str
    timers: str  # what of their files was made again: "", "wheel", or "all"

    def as_fields(self) -> dict[str, Any]:
        """Return the report for a log line."""
        return asdict(self)


def open_engine(
    disk: Disk, config: EngineConfig, *, now_ms: int, entropy: bytes
) -> tuple[Engine, RecoveryReport]:
    """Recover an engine from `disk`, or make a new one on an empty disk.

    `entropy` is used once in a store's life, for the secret of receipt handles. Raises CorruptStore
    with the file, the offset and what to do.
    """
    assert len(entropy) >= SECRET_SIZE, "the secret of receipt handles needs 32 random bytes"
    engine = Engine(disk, config)
    engine.log.open_segments()
    is_new = not engine.log.segments
    checkpoint = store_checkpoint.find(disk.read(CHECKPOINT_FILE))
    if is_new and checkpoint is not None:
        raise CorruptStore(
            "the folder log holds no segment, but the checkpoint file says that there were some. "
            "Restore the folder from a backup, and start again."
        )
    report = _Replay(engine, checkpoint).run(now_ms) if not is_new else {}
    engine.timers.end_replay(now_ms)
    engine.log.epoch += 1
    engine.begin_epoch(entropy[:SECRET_SIZE], now_ms)
    engine.commit()
    # What was found is durable: from now on damage to it is never taken for a torn tail.
    for files in write_checkpoint_file(
        engine, engine.derived_offset, min_offset=engine.log.min_offset
    ):
        for file in files:
            file.sync()
    return engine, RecoveryReport(
        is_new=is_new,
        epoch=engine.log.epoch,
        log_bytes=engine.log_end - engine.log.min_offset,
        replayed_from=report.get("from", 0),
        replayed_records=report.get("records", 0),
        cut_bytes=report.get("cut", 0),
        snapshot=report.get("snapshot", ""),
        timers=engine.timers.made_again,
    )


class _Replay:
    """One recovery, from the checkpoint to the end of the log."""

    def __init__(self, engine: Engine, checkpoint: store_checkpoint.StoreCheckpoint | None) -> None:
        self._engine = engine
        self._disk = engine.disk
        self._durable_offset = checkpoint.durable_offset if checkpoint else 0
        self._derived_offset = checkpoint.derived_offset if checkpoint else 0
        self._min_offset = checkpoint.min_offset if checkpoint else None
        self._catalog_covered = 0
        self._timers_from = 0
        engine.log.epoch = checkpoint.epoch if checkpoint else 0

    def run(self, now_ms: int) -> dict[str, Any]:
        engine, log = self._engine, self._engine.log
        if self._min_offset is not None and log.min_offset > self._min_offset:
            raise CorruptStore(
                f"the log begins at offset {log.min_offset} with {log.segments[0].file.name}, and "
                f"its checkpoint knows of it from {self._min_offset} on. Restore the missing files "
                f"from a backup, and start again."
            )
        self._open_derived()
        snapshot, covered = self._load_snapshot()
        # Without their topic there was no timer before the snapshot.
        has_timers = not snapshot or engine.catalog.find_topic(TIMER_TOPIC) is not None
        self._timers_from = engine.timers.open() if has_timers else covered
        replay_from = min(self._derived_offset, covered, self._timers_from)
        replay_from = max(replay_from, log.min_offset)
        records = 0
        try:
            for found in log.scan(replay_from):
                self._fold(found)
                records += 1
        except UnknownRecord as error:
            raise CorruptStore(
                f"the log holds a {error}, which this version does not know. Start the version "
                f"that wrote it, or a later one."
            ) from error
        cut_bytes = log.finish_recovery(durable_offset=self._durable_offset)
        engine.state.end_replay(now_ms=now_ms)
        engine.drop_unknown_queues()
        engine.store.verified_from = replay_from
        engine.derived_offset = self._derived_offset
        engine.log.record_count = records
        engine.take_config_changes()
        engine.take_ready()
        return {"from": replay_from, "records": records, "cut": cut_bytes, "snapshot": snapshot}

    # ------------------------------------------------------------ derived files

    def _open_derived(self) -> None:
        disk, low = self._disk, self._engine.log.min_offset
        queues = open_chain(
            disk, QUEUES_FOLDER, block_file.QUEUE_MAGIC, to_offset=self._derived_offset
        )
        index = open_chain(
            disk, INDEX_FOLDER, block_file.INDEX_MAGIC, to_offset=self._derived_offset
        )
        ends = [chain[-1].to_offset for chain in (queues, index) if _is_whole(chain, low)]
        self._derived_offset = min(ends) if len(ends) == 2 else 0
        for file in [*queues, *index]:
            if file.to_offset > self._derived_offset:
                disk.delete(file.name)
        kept = [file for file in queues if file.to_offset <= self._derived_offset]
        for file in kept:
            for row in file.rows:
                self._engine.catalog.queue(row.key_1, row.key_2)
            add_runs(self._engine, file)
        for queue in self._engine.catalog.queues.values():
            queue.drop_before(low)
        self._engine.index.files = [f for f in index if f.to_offset <= self._derived_offset]

    def _load_snapshot(self) -> tuple[str, int]:
        """Load the newest snapshot that the log still joins; return its name and its begin."""
        for name in reversed(self._disk.names(SNAPSHOTS_FOLDER)):
            try:
                file = BlockFile(self._disk, name, block_file.SNAPSHOT_MAGIC)
                is_usable = self._engine.log.min_offset <= file.from_offset <= self._derived_offset
                if is_usable:
                    blocks = [file.block(n, row.items) for n, row in enumerate(file.rows)]
            except (BlockFileDamaged, ValueError):
                continue
            if is_usable:
                for row, data in zip(file.rows, blocks, strict=True):
                    self._load_section(row, data)
                return name, file.from_offset
        return "", 0

    def _load_section(self, row: block_file.Row, data: memoryview) -> None:
        engine, covered = self._engine, row.first
        match row.key_1:
            case kind if kind == SECTION_CATALOG:
                for config in json.loads(bytes(data)):
                    # Which record states it is not known: the next retirement states it again.
                    engine.catalog.apply(config, 0)
                self._catalog_covered = covered
            case kind if kind == SECTION_QUEUES:
                for topic_id, queue_id, end, stated_at in json.loads(bytes(data)):
                    engine.catalog.queue(topic_id, queue_id).restart_at(end, stated_at)
            case kind if kind == SECTION_PROGRESS:
                engine.state.load_progress(data, covered)
            case kind if kind == SECTION_ORDERED:
                engine.state.load_ordered(data, covered)
            case kind if kind == SECTION_DELIVERIES:
                engine.state.load_deliveries(data)
                engine.state.set_slots_covered(row.key_2, covered)
            case kind:
                raise AssertionError(f"unknown snapshot section {kind}")

    # ------------------------------------------------------------ fold

    def _fold(self, found: Record) -> None:
        engine, header = self._engine, found.header
        log_offset = header.log_offset
        if log_offset >= self._timers_from:
            engine.timers.replay(found)
        match header.kind:
            case Kind.MESSAGE:
                place = Place._make(message.PLACE.unpack_from(found.body))
                engine.store.replay_message(found, place, derived_offset=self._derived_offset)
                cause = cause_of(found)
                if cause is not None:
                    engine.state.replay_settle(
                        cause.slot, cause.delivery_id, 1 << cause.message_index, log_offset
                    )
            case Kind.CK:
                ck = pop_checkpoint.decode(found.body)
                engine.state.replay_ck(ck, log_offset, header.stored_at_ms)
            case Kind.ACK:
                engine.state.replay_acks(found.body, log_offset)
            case Kind.CONFIG:
                self._fold_config(decode_config(found.body), log_offset)
            case Kind.STATE:
                self._fold_state(found)
            case Kind.EPOCH_START:
                pass  # Its epoch is in every header.
            case Kind.TIMER | Kind.FRONTIER:
                pass  # All of it is the timers'.
            case kind:
                raise AssertionError(f"unknown kind {kind}")

    def _fold_config(self, config: dict[str, Any], log_offset: int) -> None:
        engine = self._engine
        if config["op"] == "reset":
            engine.state.apply_reset(config, log_offset)
            return
        if log_offset >= self._catalog_covered:
            engine.catalog.apply(config, log_offset)
        if config["op"] == "deleteTopic":
            engine.state.forget(topic_id=config["id"])
        elif config["op"] == "deleteGroup":
            engine.state.forget(group_id=config["id"])

    def _fold_state(self, found: Record) -> None:
        engine, store, log_offset = self._engine, self._engine.store, found.log_offset
        match found.body[0]:
            case store.CONFIG:
                if log_offset >= self._catalog_covered:
                    engine.catalog.apply(decode_config(found.tail), log_offset)
            case store.QUEUES:
                for topic_id, queue_id, end in json.loads(bytes(found.tail)):
                    engine.catalog.queue(topic_id, queue_id).restart_at(end, log_offset)
            case store.PROGRESS:
                engine.state.load_progress(found.tail, log_offset)
            case store.DELIVERIES:
                engine.state.replay_deliveries(found.tail, log_offset)
            case what:
                raise UnknownRecord(f"STATE record of kind {what} at log offset {log_offset}")


def _is_whole(chain: list[BlockFile], low: int) -> bool:
    return bool(chain) and chain[0].from_offset <= low
