"""The broker's state machine: its parts, and the round.

The round loop owns the engine. Every call is synchronous and gets the time as an argument. A call
that changes something records an entry, which the fold applies to the state and adds to the pending
round. The effects of a round may leave the process when `log.committed_offset` has reached the log
end at the end of that round.

A round of the owner:

    1. the queued calls, and `due_slices`; polls that `take_ready` names pop again
    2. `write_slices`: one writev, or several for a large round
    3. fdatasync of the files that `log.begin_sync` names, in another process; rounds continue
    4. `log.synced`
    5. the answers of all rounds up to that offset

It is one module, because it is the list of all parts of the engine.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import final

from tidemill.broker.engine.commands import Commands
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.configuration.administration import Administration
from tidemill.broker.engine.configuration.broker_groups import BrokerGroups
from tidemill.broker.engine.configuration.following import Following
from tidemill.broker.engine.configuration.group_pauses import GroupPauseCommands
from tidemill.broker.engine.configuration.key_spreads import KeySpreads
from tidemill.broker.engine.configuration.purge import Purge
from tidemill.broker.engine.configuration.security import SecurityAdministration
from tidemill.broker.engine.dead_letter.bulk import LetterWork
from tidemill.broker.engine.dead_letter.inspection import LetterInspection
from tidemill.broker.engine.dead_letter.letters import DeadLetters
from tidemill.broker.engine.dead_letter.recent import RecentLetters
from tidemill.broker.engine.dedup.deduplication import Deduplication
from tidemill.broker.engine.dedup.first_messages import FirstMessages
from tidemill.broker.engine.dedup.inspection import KeyInspection
from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.events.history import EventHistory
from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.entry import EpochStart
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.layout.operation import OperationKind
from tidemill.broker.engine.layout.record import RecordHeader, RecordKind
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, ConfigChanges, feature_level_item
from tidemill.broker.engine.operation.runner import OperationRunner
from tidemill.broker.engine.pop.consumption import Consumption
from tidemill.broker.engine.pop.pauses import GroupPauses
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.pop.stated_rows import restarted_deliveries
from tidemill.broker.engine.queries.inspection import Inspection
from tidemill.broker.engine.queue_trims import QueueTrims
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.store.message_index import MessageIndex
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.bulk_changes import TimerWork
from tidemill.broker.engine.timer.delayed_messages import DelayedMessages
from tidemill.broker.engine.timer.held_segments import HeldSegments
from tidemill.broker.engine.timer.index import TimerIndex, open_index
from tidemill.broker.engine.transaction.checks import HalfChecks
from tidemill.broker.engine.transaction.halves import HalfMessages
from tidemill.broker.engine.transaction.inspection import TransactionInspection
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.broker.engine.transaction.transactions import Transactions
from tidemill.broker.engine.upkeep.archive_gate import ArchiveGate
from tidemill.broker.engine.upkeep.background import BackgroundJobs
from tidemill.broker.engine.upkeep.checkpoint import Checkpoints, SnapshotSize
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes
from tidemill.broker.engine.upkeep.log_ages import LogAges
from tidemill.broker.engine.upkeep.log_space import LogSpace
from tidemill.broker.engine.upkeep.merge import Merges
from tidemill.broker.engine.upkeep.packing import Packing
from tidemill.broker.engine.upkeep.parts import QuietMoment, UpkeepParts
from tidemill.broker.engine.upkeep.rebuild import Rebuilds
from tidemill.broker.engine.upkeep.retention import Retention

REVIVES_A_TURN = 2  # slices of revive in a round of a busy broker
STATED_A_COMMIT = 16  # records of up to 450 KiB that a start writes together
FALLS_MAX = 16  # starts with a clock that was set back, the newest; older ones are years ago
ROOM_PERIOD_MS = 1_000  # between two checks of the disk for work that waits for room


@final
class Engine:
    """The store and the consumption of one broker group. `recovery.open_engine` opens it.

    It is one class, because it is the list of the parts, and of their turns in a round.
    """

    def __init__(self, disk: Disk, config: EngineConfig) -> None:
        """Make the parts and connect them. It is one list, because each part needs earlier ones."""
        self.disk = disk
        self.config = config
        self.tally = Tally()
        self.catalog = Catalog()
        self.mappings = Mappings(disk)
        self.log = CommitLog(disk, self.mappings, segment_bytes=config.segment_bytes)
        self.store = MessageStore(self.log, self.catalog, MessageIndex(self.tally))
        self.state = PopState(self.catalog, self.tally)
        self.transaction_table = TransactionTable(config.transaction)
        self.key_tables = KeyTables(self.catalog)
        snapshot_size = SnapshotSize(
            self.catalog, self.state, self.transaction_table, self.key_tables
        )
        self.room = DiskRoom(
            disk,
            self.log,
            snapshot_size,
            reserve_bytes=config.disk_reserve_bytes,
            segment_bytes=config.segment_bytes,
        )
        timer_index = open_index(disk, self.mappings, config.timer, self.log)
        self.fold = Fold(
            self.log,
            self.catalog,
            self.store,
            self.state,
            timer_index,
            self.transaction_table,
            self.key_tables,
        )
        self.consumption = Consumption(
            self.state,
            self.store,
            self.catalog,
            self.fold,
            self.tally,
            self.room,
            deliveries_max=config.deliveries_max,
        )
        self._acks = self.consumption.acks
        self.trims = QueueTrims(self.catalog, self.state, self._acks, self.fold)
        firsts = FirstMessages(self.log, timer_index, self.transaction_table)
        self.deduplication = Deduplication(
            self.key_tables, firsts, self.catalog, self.log, config.dedup
        )
        self.dead_letters = DeadLetters(
            self.catalog,
            self.store,
            self.state,
            self.consumption.redelivery,
            self._acks,
            self.fold,
            self.tally,
            self.room,
        )
        self.letter_inspection = LetterInspection(
            self.dead_letters, self.catalog, retention_ms=config.retention_ms
        )
        self.recent_letters = RecentLetters(self.catalog, self.store)
        self.key_inspection = KeyInspection(self.deduplication, firsts, self.fold)
        self._open_upkeep(timer_index, snapshot_size)
        letter_work = LetterWork(self.dead_letters, self.catalog)
        timer_work = TimerWork(self.timers.changes)
        self.operations = OperationRunner(
            self.catalog,
            self.fold,
            self.room,
            {
                OperationKind.REPLAY: letter_work,
                OperationKind.DISCARD: letter_work,
                OperationKind.CANCEL_TIMERS: timer_work,
                OperationKind.RESCHEDULE_TIMERS: timer_work,
                OperationKind.FIRE_TIMERS: timer_work,
            },
            lambda: self.state_mark,
        )
        self.commands = Commands(
            self.log,
            self.catalog,
            self.state,
            self.fold,
            self.consumption,
            self.timers,
            self.transactions,
            self.deduplication,
            self.room,
            segment_bytes=config.segment_bytes,
        )
        self.inspection = Inspection(self.catalog, self.store, self.state, self.tally, timer_index)
        self.events = EventHistory(
            self.catalog, self.store, timer_index, self.transaction_table, self.tally
        )
        self.administration = Administration(
            self.catalog,
            self.store,
            self.fold,
            self.consumption,
            self.inspection,
            config,
            check_sends=self.commands.check_sends,
            groups_below=self._groups_below,
            keys=self.key_tables,
        )
        self.purge = Purge(self.catalog, self.trims)
        self.broker_groups = BrokerGroups(self.catalog, self.administration)
        self.security = SecurityAdministration(
            self.catalog, self.administration, groups_below=self._groups_below
        )
        self.key_spreads = KeySpreads(self.catalog, self.administration, self.key_tables)
        self.group_pauses = GroupPauseCommands(self.catalog, self.administration)
        self._pauses = GroupPauses(self.catalog, self.state)
        self.following = Following(
            self.catalog,
            self.administration,
            self.security,
            self.inspection,
            timer_index,
            self.transaction_table,
            self.key_tables,
            archive_group=config.archive_gate_group,
        )
        # The level to which this broker may raise its log; views raise that of a replica.
        self.allowed_level = config.feature_level
        self.recovery_ms = 0  # how long the last recovery took, as the shell measured
        self.recovery_cut_bytes = 0  # what that recovery cut from the end of the log
        self.last_stored_at_ms = 0  # of the last record read before `take_over`; 0: none
        self.is_last_time_known = True  # False: it is that of an older record

    def _open_upkeep(self, timer_index: TimerIndex, snapshot_size: SnapshotSize) -> None:
        """Make the timers, the transactions and the background jobs.

        It is one list, because each part needs earlier ones.
        """
        config = self.config
        self.quiet = QuietMoment(self.log, self._acks)
        parts = UpkeepParts(
            config,
            self.disk,
            self.mappings,
            self.store,
            self.catalog,
            self.state,
            self.quiet,
            self.room,
            self.tally,
        )
        self.live_bytes = LiveBytes(self.store, self.catalog)
        self.packing = Packing(parts, self.live_bytes)
        held_segments = HeldSegments(timer_index, self.log, self.catalog)
        self.checkpoints = Checkpoints(
            parts, snapshot_size, self.transaction_table, self.key_tables
        )
        self.timers = DelayedMessages(
            self.disk,
            config.timer,
            self.store,
            self.catalog,
            timer_index,
            held_segments,
            self.fold,
            self.tally,
            self.room,
            ready=self.state.mark_topic_ready,
            is_retirement_near=self._is_retirement_near,
        )
        halves = self.half_messages = HalfMessages(
            self.store, self.catalog, self.fold, self.tally, ready=self.state.mark_topic_ready
        )
        self.half_checks = HalfChecks(
            self.transaction_table, halves, self.fold, self.tally, self.room
        )
        self.transactions = Transactions(
            self.transaction_table,
            halves,
            self.half_checks,
            TransactionInspection(self.transaction_table, self.store, self.catalog),
            self.catalog,
            self.fold,
            self.room,
            schedule_timer=self.timers.commands.schedule,
            take_key=self.deduplication.take,
            due_max=self.deduplication.due_max_ms,
            open_max=config.transaction.open_max,
        )
        self.retention = Retention(
            parts,
            self._acks,
            timer_index,
            held_segments,
            self.fold,
            self.trims,
            self.checkpoints,
            ArchiveGate(self.catalog, self.room, config),
            LogAges(),
            self.live_bytes,
            self.transaction_table,
            self.half_checks,
            self.key_tables,
        )
        self.log_space = LogSpace(
            self.store,
            self.catalog,
            self.live_bytes,
            timer_index,
            self.retention,
            self.transaction_table,
        )
        self.retention.rules.may_free_space = self._may_free_space
        self.retention.rules.may_pack = self.packing.may_pack
        self.rebuilds = Rebuilds(parts, self.checkpoints, ended=self._resume)
        self.merges = Merges(parts, self.checkpoints, self.live_bytes)
        self.background = BackgroundJobs(
            self.store,
            self.checkpoints,
            self.timers,
            self.retention,
            self.packing,
            self.rebuilds,
            self.merges,
            self.quiet,
            self.room,
        )

    def _is_retirement_near(self, now_ms: int, lead_ms: int) -> bool:
        """Return whether the retention of the segment at the state floor ends soon."""
        return self.retention.is_near(now_ms, lead_ms)

    def _groups_below(self, level: int) -> list[str]:
        """Return the broker groups of the cluster below a feature level."""
        return self.broker_groups.find_below(level)

    def _may_free_space(self, now_ms: int) -> bool:
        """Return whether a pack, fewer entries, or the oldest segment may free space now."""
        if self.packing.next_ms() is not None or self.merges.may_free_space:
            return True
        return self.retention.wants_checkpoint(now_ms, self.timers)

    def _resume(self) -> None:
        """Continue the work that waited for the rebuild of a queue file."""
        self.consumption.resume()
        self.retention.request_look()

    # ------------------------------------------------------------ the round

    @property
    def state_mark(self) -> tuple[int, int]:
        """A value that changes with every state change: the log end and the gathered acks."""
        return self.log.log_end, self._acks.gathered_count

    def write_slices(self, now_ms: int) -> Iterator[None]:
        """Write the pending round to the disk; yield between slices of it.

        No command may come before the end. Raises DiskFailed, which is final.
        """
        self._acks.record(now_ms)
        return self.log.write_slices()

    def write(self, now_ms: int) -> None:
        """Write the pending round to the disk in one slice. Raises DiskFailed, which is final."""
        for _ in self.write_slices(now_ms):
            pass

    def commit(self, now_ms: int) -> None:
        """Write and sync the pending round at once, for a caller without a sync process."""
        self.write(now_ms)
        log_offset, files = self.log.begin_sync()
        for file in files:
            file.sync()
        self.log.note_synced(log_offset)

    def finish(self, now_ms: int) -> None:
        """Write the timer files after the last round, so that the next start is short."""
        for files in self.timers.finish(now_ms):
            for file in files:
                file.sync()

    def close(self) -> None:
        """Close the files. No record is written: a stop and a crash recover alike."""
        self.timers.close()
        self.log.close()

    # ------------------------------------------------------------ time and wake-ups

    def run_due(
        self,
        now_ms: int,
        *,
        firing_ms: int,
        expiry_ms: int | None = None,
        monotonic_ms: int | None = None,
    ) -> bool:
        """Do all of `due_slices` in one slice; return whether more is due."""
        slices = self.due_slices(
            now_ms, firing_ms=firing_ms, expiry_ms=expiry_ms, monotonic_ms=monotonic_ms
        )
        while True:
            try:
                next(slices)
            except StopIteration as ended:
                return bool(ended.value)

    def due_slices(
        self,
        now_ms: int,
        *,
        firing_ms: int,
        expiry_ms: int | None = None,
        monotonic_ms: int | None = None,
    ) -> Generator[None, None, bool]:
        """Revive messages and deliver timers that are due, a bounded part; return if more is due.

        Yields between slices; no command may come between them. Deliveries expire by `expiry_ms`
        (default: `now_ms`), delayed messages are due by `firing_ms`: these two clocks wait out a
        jump of wall time. Clients fall silent by `monotonic_ms`.
        """
        self._acks.record(now_ms)
        self._raise_feature_level(now_ms)
        expiry_ms = now_ms if expiry_ms is None else expiry_ms
        monotonic_ms = now_ms if monotonic_ms is None else monotonic_ms
        has_more = False
        if self.log.damage.take_ended():
            self.consumption.resume()
            self.timers.deliverer.resume(now_ms)
        # Copies wait for room. Otherwise they would use up what acks and retention need.
        if self.room.may_copy:
            self.consumption.damaged.settle(now_ms)
            for _ in range(REVIVES_A_TURN):
                has_more = self.consumption.reviver.run_due(
                    now_ms, expiry_ms=expiry_ms, monotonic_ms=monotonic_ms, log_end=self.log.log_end
                )
                yield
                if not has_more:
                    break
        yield from self.half_checks.due_slices(now_ms, due_ms=expiry_ms)
        self._pauses.end_due(now_ms)
        has_more |= self.deduplication.sweep()
        has_more |= self.key_spreads.run_due(now_ms)
        yield
        has_more |= yield from self.operations.due_slices(
            now_ms, firing_ms=firing_ms, monotonic_ms=monotonic_ms
        )
        has_timers = yield from self.timers.due_slices(now_ms, firing_ms=firing_ms)
        return has_timers or has_more

    def next_due_ms(
        self, now_ms: int, *, firing_ms: int, expiry_ms: int | None = None
    ) -> int | None:
        """Return the wall time at which `run_due` or `take_ready` has work; None: never."""
        has_damaged = self.consumption.damaged.is_due and self.room.may_copy
        is_raised = self.allowed_level > self.catalog.feature_level
        has_mended = self.log.damage.has_ended
        if self.state.ready or self.state.ready_topics or has_damaged or has_mended or is_raised:
            # A pop leaves the second part of a long scan to the next round.
            return now_ms
        expiry_ms = now_ms if expiry_ms is None else expiry_ms
        revive_ms = self.consumption.reviver.next_due_ms()
        if revive_ms is not None:
            revive_ms += now_ms - expiry_ms
            if not self.room.may_copy:
                revive_ms = max(revive_ms, now_ms + ROOM_PERIOD_MS)
        check_ms = self.half_checks.next_due_ms()
        if check_ms is not None:
            check_ms += now_ms - expiry_ms
        keys_ms = self.deduplication.next_due_ms(now_ms)
        timers_ms = self.timers.next_due_ms(now_ms, firing_ms=firing_ms)
        spreads_ms, pauses_ms = self.key_spreads.next_due_ms(now_ms), self._pauses.next_due_ms()
        operations_ms = self.operations.next_due_ms(now_ms)
        dues = (revive_ms, check_ms, keys_ms, spreads_ms, pauses_ms, timers_ms, operations_ms)
        return min((due for due in dues if due is not None), default=None)

    def take_ready(self) -> tuple[set[TopicId], set[tuple[GroupId, TopicId]]]:
        """Return and clear what became available: topic ids, and (group id, topic id) pairs."""
        ready = self.state.ready_topics, self.state.ready
        self.state.ready_topics, self.state.ready = set(), set()
        return ready

    def take_config_changes(self) -> ConfigChanges:
        """Return and clear the changed and deleted topics and consumer groups."""
        changes, self.catalog.changes = self.catalog.changes, ConfigChanges()
        return changes

    # ------------------------------------------------------------ the begin of an epoch

    def note_time(self, header: RecordHeader) -> None:
        """Note the time of a record of an earlier process or of the master.

        A process records that its clock was set back after its first record, and may have ended in
        between. So that first record alone does not set the time back.
        """
        if header.kind != RecordKind.EPOCH_START or header.stored_at_ms > self.last_stored_at_ms:
            self.last_stored_at_ms = header.stored_at_ms
        if header.kind != RecordKind.EPOCH_START:
            self.is_last_time_known = True

    def take_over(self, secret: bytes, now_ms: int, *, epoch: int | None = None) -> None:
        """Begin to decide. The whole log is applied, and no other process appends to it.

        Makes the first record of the epoch durable; in a new store also its name and `secret`. A
        broker without replicas begins the next epoch by itself. A replica gets its `epoch`.
        """
        self.room.measure()
        self.timers.recovery.finish_replay(now_ms)
        self.log.epoch = self.log.epoch + 1 if epoch is None else epoch
        fall = self.log.log_end
        self.fold.append(EpochStart(), now_ms)
        if now_ms < self.last_stored_at_ms:
            # A search by time has to look on both sides of this offset.
            known = [one for one in self.catalog.clock_falls if one > self.log.min_offset]
            item = {"op": "clockBack", "at": [*known, fall][-FALLS_MAX:]}
            self.fold.append(ConfigItem(item), now_ms)
        elif not self.is_last_time_known:
            # The clock may have been set back: the replay read no record.
            self.fold.append(ConfigItem({"op": "broughtBack", "before": fall}), now_ms)
        self._bring_back(now_ms)
        for _ in self.consumption.renewals.suspend_unproven(now_ms):
            self.commit(now_ms)
        self.deduplication.take_over()
        self.key_spreads.take_over()
        self.consumption.reviver.take_over()
        self.half_checks.take_over(now_ms)
        if not self.catalog.handle_secret:
            item = {"op": "broker", "name": self.config.broker_name, "handleSecret": secret.hex()}
            self.fold.append(ConfigItem(item), now_ms)
        self._raise_feature_level(now_ms)
        self.commit(now_ms)

    def begin_epoch(self, epoch: int, now_ms: int) -> None:
        """Begin a later epoch between two rounds; make its first record durable."""
        assert self.log.log_end == self.log.written_offset, "no round is pending"
        self.log.epoch = epoch
        self.fold.append(EpochStart(), now_ms)
        self.commit(now_ms)

    def _raise_feature_level(self, now_ms: int) -> None:
        """Record the allowed feature level, before the first record that needs it."""
        if self.allowed_level > self.catalog.feature_level:
            self.fold.append(ConfigItem(feature_level_item(self.allowed_level)), now_ms)

    def _bring_back(self, now_ms: int) -> None:
        """Record that deliveries with a pop time in the future begin now."""
        for n, entry in enumerate(restarted_deliveries(self.state, now_ms)):
            if n == 0:
                # First: if the start is cut short between these records, the next start continues.
                # No ack of a delivery that was brought back may then be answered with ALREADY.
                item = {"op": "broughtBack", "before": self.log.log_end}
                self.fold.append(ConfigItem(item), now_ms)
            self.fold.append(entry, now_ms)
            if n % STATED_A_COMMIT == STATED_A_COMMIT - 1:
                self.commit(now_ms)
