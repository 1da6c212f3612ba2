"""Opening the engine: the files on disk become a state, the fold of a prefix of the log.

1. Read the checkpoint file and open the segments. Sync the log after the durable offset of the
   checkpoint: a killed process may have written there without a sync.
2. Open the queue and index files without a gap up to the checkpoint, or up to the first damaged
   directory. Load the newest usable snapshot. Blocks are not verified before their first use. A
   damaged block is rebuilt in the background.
3. Apply the log from there. Slices of the snapshot are of different moments. Up to the last of
   them, each record changes only the slices that do not contain it. Then `CatchUp.finish` builds
   the lists, and `Fold.apply` alone applies the remaining records. Packs may lack records before
   the state floor, so the others there change no state (ADR 0069).
4. Cut a torn tail. Refuse to start if durable bytes are damaged.
5. Begin a new epoch, durably.

A missing or damaged derived file makes the start longer, but loses nothing: the log has it all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.fold import StateBehindGap
from tidemill.broker.engine.layout import (
    audit,
    block_file,
    dead_letter,
    delivery_rows,
    operation,
    progress_rows,
    snapshot,
    store_checkpoint,
)
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.floor import decode_gap
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, QueueOffset, TopicId
from tidemill.broker.engine.layout.record import UnknownRecord, is_gap
from tidemill.broker.engine.layout.snapshot import SnapshotSection
from tidemill.broker.engine.pop.catch_up import CatchUp
from tidemill.broker.engine.store.block_file import BlockFile, open_block_file, open_chain
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk, ReadFailed
from tidemill.broker.engine.store.log_opening import DurabilityProofs, LogOpening
from tidemill.broker.engine.store.log_times import NEVER_MS, first_stored_at_ms
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.store.segment import MEND_REMEDY, CorruptStore
from tidemill.broker.engine.upkeep.checkpoint import (
    CHECKPOINT_FILE,
    INDEX_FOLDER,
    QUEUES_FOLDER,
    SNAPSHOTS_FOLDER,
    add_runs,
)
from tidemill.message.resource_names import HIDDEN_TOPICS, TIMER_TOPIC

SECRET_SIZE = 32  # bytes
NEVER = 1 << 62  # a log offset that no record has


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """The findings of a start."""

    is_new: bool
    epoch: int
    log_bytes: int
    replayed_from: int
    replayed_records: int
    cut_bytes: int
    snapshot: str
    damaged_file: str  # the checkpoint file, or the first derived file with damage; "": none
    timers: str  # the timer files that were rebuilt: "", "wheel", or "all"

    def as_fields(self) -> dict[str, Any]:
        """Return the report for a log line."""
        return asdict(self)


def open_engine(
    disk: Disk, config: EngineConfig, *, now_ms: int, entropy: bytes
) -> tuple[Engine, RecoveryReport]:
    """Recover an engine from `disk`, or create one on an empty disk.

    A new store makes its secret of receipt handles from `entropy`. Raises CorruptStore.
    """
    assert len(entropy) >= SECRET_SIZE, "the secret of receipt handles needs 32 random bytes"
    state_from = 0
    while True:
        try:
            return _open_engine(disk, config, now_ms, entropy[:SECRET_SIZE], state_from)
        except StateBehindGap as error:
            # A replica has copied gaps and not packed them yet, so no header names their floor. A
            # gap is before its floor, so the floor rises with each attempt.
            state_from = error.gap.floor


def _open_engine(
    disk: Disk, config: EngineConfig, now_ms: int, secret: bytes, state_from: int
) -> tuple[Engine, RecoveryReport]:
    engine = Engine(disk, config)
    opening = LogOpening(engine.log, disk, engine.mappings)
    checkpoint, damaged_file = _read_checkpoint(disk)
    opening.find_segments(durable_offset=checkpoint.durable_offset if checkpoint else 0)
    is_new = _is_new(engine, checkpoint)
    if is_new:
        engine.timers.recovery.open_empty()
    recovery = _Recovery(engine, opening, checkpoint, state_from=state_from)
    report = {} if is_new else recovery.run(now_ms)
    engine.take_over(secret, now_ms)
    # The recovered log is durable. From now on, damage in it is not a torn tail.
    for files in engine.checkpoints.write_file(
        engine.store.derived_offset, min_offset=engine.log.min_offset
    ):
        for file in files:
            file.sync()
    engine.log.reader.is_starting = False
    return engine, _report(engine, report, is_new=is_new, damaged_file=damaged_file)


def open_replica(
    disk: Disk,
    config: EngineConfig,
    *,
    now_ms: int,
    proofs: DurabilityProofs,
    before: Callable[[LogOpening], None],
) -> tuple[Engine, RecoveryReport]:
    """Recover the engine of a replica. It decides nothing and records nothing.

    Only confirmed records are applied: the derived files, the snapshot, and the log up to their
    end. `proofs` separate damage from a torn tail. `before` completes an interrupted cut before the
    log is read. Raises CorruptStore.
    """
    engine = Engine(disk, config)
    engine.log.has_replicas = True
    opening = LogOpening(engine.log, disk, engine.mappings)
    before(opening)
    checkpoint, damaged_file = _read_checkpoint(disk)
    opening.find_segments(durable_offset=checkpoint.durable_offset if checkpoint else 0)
    is_new = _is_new(engine, checkpoint)
    report: dict[str, Any] = {}
    if is_new:
        engine.timers.recovery.open_empty()
        engine.log.applied_offset = LogOffset(0)
    else:
        recovery = _Recovery(engine, opening, checkpoint, is_replica=True)
        durable_offset = max(recovery.proofs.durable_offset, proofs.durable_offset)
        recovery.proofs = proofs._replace(durable_offset=durable_offset)
        report = recovery.run(now_ms)
    engine.timers.index.is_following = True
    engine.log.reader.is_starting = False
    return engine, _report(engine, report, is_new=is_new, damaged_file=damaged_file)


def open_damaged(disk: Disk, config: EngineConfig, *, confirmed: int) -> tuple[CommitLog, int]:
    """Open the log of a replica that does not start; return it with the end of the mendable part.

    That part is durable and confirmed, so other replicas have the same bytes. Raises CorruptStore.
    """
    mappings = Mappings(disk)
    log = CommitLog(disk, mappings, segment_bytes=config.segment_bytes)
    checkpoint, _ = _read_checkpoint(disk)
    durable_offset = checkpoint.durable_offset if checkpoint else 0
    LogOpening(log, disk, mappings).find_segments(durable_offset=durable_offset)
    log.log_end = log.segments[-1].end if log.segments else LogOffset(0)
    log.open_for_append()
    return log, max(durable_offset, confirmed)


def _is_new(engine: Engine, checkpoint: store_checkpoint.StoreCheckpoint | None) -> bool:
    """Whether the store never had a log. Raises CorruptStore if its log is missing."""
    if not engine.log.segments and checkpoint is not None:
        raise CorruptStore(
            "the folder log holds no segment, but the checkpoint file says that there were some. "
            f"{MEND_REMEDY}"
        )
    return not engine.log.segments


def _report(
    engine: Engine, found: dict[str, Any], *, is_new: bool, damaged_file: str
) -> RecoveryReport:
    return RecoveryReport(
        is_new=is_new,
        epoch=engine.log.epoch,
        log_bytes=engine.log.log_end - engine.log.min_offset,
        replayed_from=found.get("from", 0),
        replayed_records=found.get("records", 0),
        cut_bytes=found.get("cut", 0),
        snapshot=found.get("snapshot", ""),
        damaged_file=damaged_file or found.get("damaged_file", ""),
        timers=engine.timers.recovery.rebuilt_files,
    )


def _read_checkpoint(disk: Disk) -> tuple[store_checkpoint.StoreCheckpoint | None, str]:
    """Return the checkpoint, and the name of its file if it is damaged.

    A damaged checkpoint counts as missing: the start takes longer and writes it again.
    """
    try:
        data = disk.read(CHECKPOINT_FILE)
    except ReadFailed:
        return None, CHECKPOINT_FILE
    checkpoint = store_checkpoint.find(data)
    return checkpoint, CHECKPOINT_FILE if data is not None and checkpoint is None else ""


class _Recovery:
    """One recovery, from the checkpoint to the end of the log."""

    def __init__(
        self,
        engine: Engine,
        opening: LogOpening,
        checkpoint: store_checkpoint.StoreCheckpoint | None,
        *,
        is_replica: bool = False,
        state_from: int = 0,
    ) -> None:
        self._is_replica = is_replica
        self._state_from = state_from
        self._engine = engine
        self._opening = opening
        self._disk = engine.disk
        self.proofs = DurabilityProofs(
            durable_offset=checkpoint.durable_offset if checkpoint else 0
        )
        self._derived_offset = checkpoint.derived_offset if checkpoint else 0
        self._min_offset = checkpoint.min_offset if checkpoint else None
        self._epoch = checkpoint.epoch if checkpoint else 0
        engine.log.checkpoint_end = LogOffset(self.proofs.durable_offset)

    def run(self, now_ms: int) -> dict[str, Any]:
        """Recover; return a report. Raises CorruptStore."""
        try:
            return self._recover(now_ms)
        except UnknownRecord as error:
            raise CorruptStore(
                f"the store holds a {error}, which this version does not know. Start the version"
                " that wrote it, or a later one"
            ) from error

    def _recover(self, now_ms: int) -> dict[str, Any]:
        engine, log = self._engine, self._engine.log
        if self._min_offset is not None and log.min_offset > self._min_offset:
            raise CorruptStore(
                f"the log begins at offset {log.min_offset} with {log.segments[0].name}, and "
                f"its checkpoint knows of it from {self._min_offset} on. {MEND_REMEDY}"
            )
        # The epoch of the last process: the replay may not read its records.
        log.epoch = max(log.epoch, self._epoch)
        # Packs may lack the records before this floor, also if no snapshot is found.
        engine.fold.state_from = max(log.packed_floor, self._state_from)
        log.note_floor(engine.fold.state_from)
        self._open_derived()
        damaged_file = next(iter(engine.store.damaged_files), "")
        engine.store.derived_offset = self._derived_offset
        catch_up = engine.state.catch_up = CatchUp(engine.state)
        snapshot_name, covered, caught_up_at = self._load_snapshot(catch_up)
        # Without the timer topic, there was no timer before the snapshot.
        if not snapshot_name or engine.catalog.find_topic(TIMER_TOPIC) is not None:
            engine.fold.timers_from = engine.timers.recovery.open()
        else:
            engine.timers.recovery.open_empty()
            engine.fold.timers_from = covered
        replay_from = min(self._derived_offset, covered, engine.fold.timers_from)
        replay_from = max(replay_from, log.min_offset)
        # A replica must first apply everything that its files contain.
        stop = NEVER
        if self._is_replica:
            contained = max(self._derived_offset, engine.fold.timers_from)
            stop = max(contained, caught_up_at) if snapshot_name else replay_from
            log.applied_offset = LogOffset(replay_from)
        records = self._replay(
            replay_from, stop=stop, catch_up=catch_up, caught_up_at=caught_up_at, now_ms=now_ms
        )
        cut_bytes = self._opening.finish(self.proofs)
        if not engine.is_last_time_known:
            self._look_at_last_time()
        if self._is_replica:
            log.committed_offset = log.folded_offset
        # Without a snapshot, a replica learns from its master when it has caught up.
        is_caught_up = bool(snapshot_name) or not self._is_replica
        if engine.state.catch_up is not None and is_caught_up:
            catch_up.finish(now_ms=now_ms)
        if is_caught_up:
            # Not earlier: queue files may contain topics that the snapshot does not.
            engine.catalog.forget_unknown_queues()
            engine.key_tables.settle()
        self._drop_hidden_before_floor()
        # The snapshot may be older than the last drop of a segment, which has no record.
        engine.catalog.deleted_names.drop_before(
            engine.log.state_floor, now_ms - engine.config.recreate_block_ms
        )
        engine.store.verified_from = replay_from
        engine.log.record_count = records
        engine.take_config_changes()
        engine.take_ready()
        return {
            "from": replay_from,
            "records": records,
            "cut": cut_bytes,
            "snapshot": snapshot_name,
            "damaged_file": damaged_file,
        }

    def _replay(
        self, replay_from: int, *, stop: int, catch_up: CatchUp, caught_up_at: int, now_ms: int
    ) -> int:
        """Read the log to its end, apply the records before `stop`, and return their number."""
        engine, log = self._engine, self._engine.log
        engine.is_last_time_known = False
        records = 0
        for found in self._opening.scan(LogOffset(replay_from)):
            if engine.state.catch_up is not None and found.log_offset >= caught_up_at:
                catch_up.finish(now_ms=now_ms)
            if found.log_offset >= stop:
                if is_gap(found.header):
                    # This replica may become the master before it learns of the state floor.
                    behind = decode_gap(found.body).floor
                    engine.fold.state_from = max(engine.fold.state_from, behind)
                continue
            engine.fold.apply(found)
            records += 1
            engine.note_time(found.header)
            if self._is_replica:
                log.applied_offset = LogOffset(found.log_offset + found.header.size)
        return records

    def _look_at_last_time(self) -> None:
        """If the replay read no record, take a time from the last segment's begin."""
        log = self._engine.log
        written = [n for n, one in enumerate(log.segments) if one.start < log.log_end]
        stored_at_ms = first_stored_at_ms(log, written[-1]) if written else NEVER_MS
        if stored_at_ms < NEVER_MS:
            self._engine.last_stored_at_ms = max(self._engine.last_stored_at_ms, stored_at_ms)

    def _drop_hidden_before_floor(self) -> None:
        """Let the queues of hidden topics begin at the state floor: earlier ones are not needed."""
        catalog, floor = self._engine.catalog, LogOffset(self._engine.log.state_floor)
        topic_ids = {catalog.topic_ids.get(name) for name in HIDDEN_TOPICS}
        for queue in [one for key, one in catalog.queues.items() if key[0] in topic_ids]:
            try:
                queue.drop_before(floor)
            except BlockFileDamaged:
                queue.drop_known_before(floor)

    # ------------------------------------------------------------ derived files

    def _open_derived(self) -> None:
        """Open the derived files without a gap up to the derived offset; note damaged blocks."""
        engine, low = self._engine, self._engine.log.min_offset
        queues = self._open_chain(QUEUES_FOLDER, block_file.QUEUE_MAGIC)
        index = self._open_chain(INDEX_FOLDER, block_file.INDEX_MAGIC)
        self._derived_offset = _common_end(queues, index, low)
        for chain in (queues, index):
            while chain and chain[-1].to_offset > self._derived_offset:
                name = chain.pop().name
                engine.mappings.forget(name)
                self._disk.delete(name)
        for file in queues:
            for row in file.rows():
                engine.catalog.queue(TopicId(row.key_1), QueueId(row.key_2))
            add_runs(engine.catalog, file, range(file.row_count))
        for queue in engine.catalog.queues.values():
            try:
                queue.drop_before(low)
            except BlockFileDamaged:
                queue.drop_known_before(low)
        engine.store.queue_files, engine.store.index.files = queues, index

    def _open_chain(self, folder: str, magic: int) -> list[BlockFile]:
        engine = self._engine
        return open_chain(
            self._disk,
            engine.mappings,
            folder,
            magic,
            engine.store.damaged_files,
            to_offset=self._derived_offset,
        )

    def _load_snapshot(self, catch_up: CatchUp) -> tuple[str, int, int]:
        """Load the newest snapshot that begins in the log.

        Returns its name, its begin, and the log offset after its last slice. Without a snapshot
        the last value is the end of the log: up to there the log restates everything that dropped
        segments stated.
        """
        mappings = self._engine.mappings
        for name in self._disk.names(SNAPSHOTS_FOLDER):
            if not name[-1].isdigit():
                # An earlier process ended during the write. The file may take needed space.
                self._disk.delete(name)
        for name in reversed(self._disk.names(SNAPSHOTS_FOLDER)):
            try:
                file = open_block_file(mappings, name, block_file.SNAPSHOT_MAGIC, {})
                is_usable = self._engine.log.state_floor <= file.from_offset <= self._derived_offset
                if is_usable:
                    rows = list(file.rows())
                    blocks = [file.block(n, row.items) for n, row in enumerate(rows)]
            except (BlockFileDamaged, ValueError):
                continue
            if is_usable:
                for row, data in zip(rows, blocks, strict=True):
                    self._load_section(catch_up, row, data)
                catch_up.end_deliveries()
                self._engine.transaction_table.end_load()
                self._engine.key_tables.end_load()
                mappings.forget(name)
                return name, file.from_offset, max(row.first for row in rows)
        return "", 0, NEVER

    def _load_section(
        self, catch_up: CatchUp, row: block_file.DirectoryRow, data: memoryview
    ) -> None:
        engine, covered = self._engine, row.first
        match row.key_1:
            case SnapshotSection.CATALOG:
                for item in snapshot.decode_items(data):
                    if item["op"] == "floor":
                        engine.log.note_floor(item["at"])
                        continue
                    # The record that states the item is unknown: the next retirement restates it.
                    engine.catalog.apply(item, LogOffset(0), is_stated=True)
                engine.fold.catalog_from = covered
            case SnapshotSection.AUDIT:
                for kept in audit.decode_rows(data):
                    # As for the catalog: the next retirement restates it.
                    engine.catalog.audit.add(kept, LogOffset(0))
            case SnapshotSection.TRANSACTIONS:
                engine.transaction_table.load(data)
            case SnapshotSection.KEYS:
                engine.key_tables.load(data)
            case SnapshotSection.OPERATIONS:
                stated = operation.decode_operations(data)
                engine.catalog.operations.apply_stated(stated, LogOffset(0))
            case SnapshotSection.LETTERS:
                letters = dead_letter.decode_ranges(data)
                # As for the catalog: the next retirement restates them.
                engine.catalog.settled_letters.settle(*letters, LogOffset(0))
            case SnapshotSection.QUEUES:
                for end in snapshot.decode_ends(data):
                    queue = engine.catalog.queue(end.topic_id, end.queue_id)
                    queue.restart_at(QueueOffset(end.end_offset), LogOffset(end.stated_at))
                    queue.trim(QueueOffset(end.low))
            case SnapshotSection.PROGRESS:
                catch_up.load_progress(progress_rows.decode(data), covered)
            case SnapshotSection.ORDERED:
                (progress,), deliveries = snapshot.decode_ordered(data)
                catch_up.load_ordered(progress, deliveries, covered)
            case SnapshotSection.DELIVERIES:
                catch_up.load_deliveries(row.key_2, delivery_rows.decode(data), covered)
            case kind:
                raise UnknownRecord(f"snapshot section {kind}")


def _common_end(queues: list[BlockFile], index: list[BlockFile], low: int) -> int:
    """Return the last offset at which files of both chains end; 0 if there is none.

    Both chains must begin at the log's minimum offset `low` or before. After a merge, the files of
    a chain end at fewer offsets.
    """
    if any(not chain or chain[0].from_offset > low for chain in (queues, index)):
        return 0
    return max({f.to_offset for f in queues} & {f.to_offset for f in index}, default=0)
