"""One broker group at one controller: its heartbeats, its decisions and its writes.

Two ways lead to a write, both through compare-and-swap with the record that they saw:

    change(request)  a registration, a proposal, a release or an operator asks. The request is
                     judged against each record that is read, and never rebased
    reconcile()      after every event, and at least twice a second, `decide` names the next step

Sessions receive each new record through `GroupListener`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, assert_never, final

import structlog

from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView, name_in_cluster
from tidemill.controller.election.alarms import of_fewer, of_last_resort, of_rollback
from tidemill.controller.election.decide import (
    FullMaster,
    Intent,
    MetaRollback,
    NoAction,
    NoEligibleReplica,
    NoFounder,
    RecordWrite,
    ShortSyncStateSet,
    TransferRequest,
    decide,
    live_of,
)
from tidemill.controller.election.elect import Candidate
from tidemill.controller.election.failure import find_failure
from tidemill.controller.election.forgetting import may_forget
from tidemill.controller.election.history import with_reports
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.partitions import diverged_of, unheard_of
from tidemill.controller.election.record import GroupRecord, view_of
from tidemill.controller.election.registration import FencedRun
from tidemill.controller.election.reports import (
    REPORT_LASTS_MS,
    UnreachableReport,
    find_reached_instead,
)
from tidemill.controller.election.rollback import is_outdated, is_outdated_in_epoch, newest_seen
from tidemill.controller.election.sessions import (
    ElectionTiming,
    GroupObservation,
    Heartbeat,
    ReplicaHealth,
    ReplicaSession,
    ReplicaSessions,
)
from tidemill.controller.election.swap import StoredRecord
from tidemill.controller.group_listener import GroupListener
from tidemill.controller.meta_store import MetaStore, StoreUnreachable
from tidemill.controller.operator_changes import ChangeRequest, Denial
from tidemill.controller.outage_log import OutageLog
from tidemill.controller.record_writer import RecordWriter

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.controller.metrics import ControllerMetrics

LOOK_PERIOD_S: Final = 0.5  # the longest time between two decisions
# Tries of one request against records that other controllers write meanwhile; each is a read and a
# swap.
TRIES_MAX: Final = 4
TRANSFER_GIVE_UP_MS: Final = 30_000  # The target of an operator's transfer may stay down for long.
# Time before the alarm for a group without a founder, or without a replica that may be master since
# the start of this controller. A machine may start all processes together, the replicas last.
START_WAIT_MS: Final = 10_000
QUIET_MS: Final = 1_000  # time without a write before values for people are added to the record
GRANT_MS: Final = 1_500  # of a master's lease

log = structlog.get_logger()


@final
class BrokerGroupControl:
    """One broker group at this controller.

    It is one class, because each decision needs the record and the sessions of one moment.
    """

    def __init__(
        self,
        name: str,
        store: MetaStore,
        *,
        clock: Clock,
        timing: ElectionTiming,
        rank: Callable[[], int],
        metrics: ControllerMetrics,
        cluster: str = "",
        feature_level_max: int = 0,
    ) -> None:
        """Control `name`; `rank` returns 0 while this controller leads, else its deputy number."""
        self.name = name
        self.stored: StoredRecord | None = None
        self.alarm = ""  # the reason why the group needs an operator
        self.notice = ""  # the reason why it waits, without need of an operator
        self.failed_transfer = ""  # the last transfer, if it was given up
        self.has_spec = store.has_specs
        # From the spec, at the leading controller, after it has read the spec.
        self.wanted_min_in_sync: int | None = None
        self.wanted_replicas: int | None = None
        self.listeners: set[GroupListener] = set()
        self.is_removed = False  # The store no longer has this group.
        self._full_name = name_in_cluster(cluster, name) if cluster else ""
        self._clock = clock
        self._timing = timing
        self._feature_level_max = feature_level_max
        self._rank = rank
        self._metrics = metrics
        self._sessions = ReplicaSessions(timing)
        self._writer = RecordWriter(name, store, metrics, self.note_record)
        self._outages = OutageLog(name, clock, metrics)
        self._events = asyncio.Event()
        self._transfer_since_ms: int | None = None
        self._unfounded_since_ms: int | None = None
        self._started_at_ms = clock.monotonic_ms()
        self._has_heard_master = False  # of any epoch
        self._reports: dict[str, UnreachableReport] = {}  # by proxy that follows routes here
        self._proxies = 0

    # ------------------------------------------------------------ events

    def note_heartbeat(self, member: ReplicaRun, beat: Heartbeat) -> None:
        """Record a heartbeat."""
        self._sessions.note_heartbeat(member, beat, self._clock.monotonic_ms())
        if self.stored is not None:
            self._outages.note_heartbeat(self.stored.record, member, beat)
        self._events.set()

    def note_death(self, member: ReplicaRun) -> None:
        """Record a death certificate."""
        self._sessions.note_death(member, self._clock.monotonic_ms())
        self._events.set()

    def note_report(self, report: UnreachableReport, *, proxies: int) -> None:
        """Record the report of one proxy; `proxies` follow routes here."""
        self._reports[report.proxy] = report
        self._proxies = proxies
        old_ms = report.heard_at_ms - REPORT_LASTS_MS
        for proxy in [name for name, one in self._reports.items() if one.heard_at_ms < old_ms]:
            del self._reports[proxy]
        self._events.set()

    def note_record(self, stored: StoredRecord) -> None:
        """Take a record from the store, and send it to listeners if it is newer."""
        if self.stored is not None and stored.record.version <= self.stored.record.version:
            return
        self.stored = stored
        view = self.view_of(stored.record)
        for listener in list(self.listeners):
            listener.send_view(view)
        self._events.set()

    def note_removal(self) -> None:
        """End the sessions of a group that the store no longer has: supervisors attach again."""
        self.is_removed = True
        for listener in list(self.listeners):
            listener.end_session()

    async def refresh(self) -> None:
        """Read the record, since a watch may be late. Keep the known one if the store fails."""
        with contextlib.suppress(StoreUnreachable):
            await self._writer.find()

    # ------------------------------------------------------------ state

    def view(self) -> ReplicationView | None:
        """Return the view for replicas and proxies; None: the record is not known yet."""
        return None if self.stored is None else self.view_of(self.stored.record)

    def view_of(self, record: GroupRecord) -> ReplicationView:
        """Return the view of a record of this group."""
        return view_of(record)._replace(group=self._full_name)

    def grant_ms(self, member: ReplicaRun) -> int:
        """Return the lease of `member` as the master; 0: it has none."""
        record = None if self.stored is None else self.stored.record
        is_master = record is not None and record.master == member
        return GRANT_MS if is_master and self._rank() == 0 else 0

    def sessions(self) -> dict[ReplicaRun, ReplicaSession]:
        """Return the session of each run, for people."""
        return dict(self._observe().sessions)

    @property
    def live_count(self) -> int:
        """Registered replicas that are live."""
        return len(self._live())

    def diverged_replicas(self) -> frozenset[ReplicaId]:
        """Return replicas with a log that differs from their master's and must not be cut."""
        return diverged_of(self._live())

    @property
    def full_count(self) -> int:
        """Live replicas with a full disk."""
        return sum(one.beat.health is ReplicaHealth.FULL for one in self._live())

    def unheard_pairs(self) -> frozenset[tuple[ReplicaId, ReplicaId]]:
        """Return pairs of live replicas where the first does not hear the second."""
        return frozenset() if self.stored is None else unheard_of(self.stored.record, self._live())

    def is_heard(self, member: ReplicaRun | None, observation: GroupObservation) -> bool:
        """Return whether a run is live."""
        return observation.find_live(member, self._timing) is not None

    def _live(self) -> list[Candidate]:
        return [] if self.stored is None else self._live_in(self.stored.record)

    def _live_in(self, record: GroupRecord) -> list[Candidate]:
        return live_of(record, self._observe(), self._timing)

    def _observe(self) -> GroupObservation:
        now_ms = self._clock.monotonic_ms()
        observation = self._sessions.observe(
            rank=self._rank(),
            now_ms=now_ms,
            has_spec=self.has_spec,
            wanted_min_in_sync=self.wanted_min_in_sync,
            wanted_replicas=self.wanted_replicas,
            feature_level_max=self._feature_level_max,
        )
        if not self._reports or self.stored is None:
            return observation
        reached = find_reached_instead(
            self.stored.record, self._reports.values(), proxies=self._proxies, now_ms=now_ms
        )
        return observation._replace(reached_instead=reached)

    # ------------------------------------------------------------ requests

    async def change(
        self, request: ChangeRequest, *, corrects_record: bool = False
    ) -> Denial | None:
        """Make a requested change; return the reason against it, or None.

        Only a request that `corrects_record` changes an outdated one. Raises StoreUnreachable.
        """
        async with self._writer.lock:
            for _ in range(TRIES_MAX):
                stored = await self._read()
                if stored is None:
                    continue
                changed = self._judge(stored.record, request, corrects_record=corrects_record)
                if isinstance(changed, ChangeRejection | FencedRun):
                    return changed
                is_election = changed.epoch != stored.record.epoch
                if is_election:
                    changed = self._note_election(changed, stored.record.master)
                if changed == stored.record:
                    return None
                if await self._writer.swap(stored, changed):
                    if is_election:
                        self._metrics.count_election(self.name, "new_master_elected")
                    return None
        raise StoreUnreachable(
            f"other controllers changed broker group {self.name} at each of {TRIES_MAX} tries;"
            " retry later"
        )

    async def plan(
        self, request: ChangeRequest, *, corrects_record: bool = False
    ) -> GroupRecord | Denial:
        """Return the record of a change, or the reason against it. Raises StoreUnreachable."""
        stored = await self._read()
        if stored is None:
            raise StoreUnreachable(f"another controller changed broker group {self.name}; retry")
        return self._judge(stored.record, request, corrects_record=corrects_record)

    def _judge(
        self, record: GroupRecord, request: ChangeRequest, *, corrects_record: bool
    ) -> GroupRecord | Denial:
        live = self._live_in(record)
        if is_outdated_in_epoch(record, live) and not corrects_record:
            return ChangeRejection(of_rollback(record, newest_seen(live)))
        return request(record, self._observe())

    def judge_removal(self) -> ChangeRejection | None:
        """Return the reason against the removal of the record."""
        sessions, now_ms = self._observe().sessions, self._clock.monotonic_ms()
        return may_forget(sessions, self._timing, now_ms=now_ms)

    async def remove(self) -> ChangeRejection | None:
        """Remove the record of a group without live replicas; return the reason against it.

        A replica that starts afterwards registers in a new record. It has seen an epoch, above
        which an operator must set that record. Raises StoreUnreachable.
        """
        async with self._writer.lock:
            stored = await self._writer.read()
            refusal = self.judge_removal()
            if refusal is not None:
                return refusal
            if not await self._writer.remove(stored):
                return ChangeRejection("its record has just changed, so a replica is live")
            log.warning("broker group removed", group=self.name, epoch=stored.record.epoch)
        return None

    # ------------------------------------------------------------ decisions

    async def run(self) -> None:
        """Decide after every event, and at least every LOOK_PERIOD_S, until cancelled."""
        again_s = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._events.wait()
            self._events.clear()
            try:
                again_s = await self.reconcile()
            except StoreUnreachable as error:
                self._set_alarm(error.describe())
                again_s = LOOK_PERIOD_S

    async def reconcile(self) -> float:
        """Take the next step; return the time until the next decision, in seconds.

        Raises StoreUnreachable.
        """
        if self.stored is None:
            await self._writer.find()
        if self.stored is None:
            return LOOK_PERIOD_S
        intent = self._decide(self.stored.record)
        # Replicas may have seen a newer record than this copy.
        if isinstance(intent, RecordWrite | MetaRollback):
            async with self._writer.lock:
                stored = await self._read()
                if stored is None:
                    return 0.0
                intent = self._decide(stored.record)
                if isinstance(intent, RecordWrite):
                    await self._write(stored, intent)
                    return 0.0
        if isinstance(intent, NoAction):
            await self._add_reports()
        return self._act(intent)

    async def _read(self) -> StoredRecord | None:
        """Read the record and note it; None: a newer one was written meanwhile.

        Only an outdated record is older than the heartbeats from before the read.
        """
        before = self._observe()
        stored = await self._writer.read()
        self._note_state(stored.record)
        record = stored.record
        was_outdated = is_outdated(record, live_of(record, before, self._timing))
        is_late = is_outdated(record, self._live_in(record)) and not was_outdated
        return None if is_late else stored

    def _note_state(self, record: GroupRecord) -> None:
        """Note in the sessions which record is current and whether its master has failed."""
        now_ms = self._clock.monotonic_ms()
        self._sessions.note_record(record, now_ms)
        observation = self._observe()
        master = None if record.master is None else observation.sessions.get(record.master)
        if master is not None and master.beat is not None:
            self._has_heard_master = True
        failure = find_failure(record, observation, self._timing)
        self._sessions.note_failure(record.master, has_failed=failure is not None, now_ms=now_ms)

    def _decide(self, record: GroupRecord) -> Intent:
        self._note_state(record)
        observation = self._observe()
        intent = decide(record, observation, self._timing)
        if isinstance(intent, TransferRequest) and record.transfer is not None:
            since_ms = self._transfer_since_ms or observation.now_ms
            self._transfer_since_ms = since_ms
            if observation.now_ms - since_ms > TRANSFER_GIVE_UP_MS:
                without_transfer = record._replace(transfer=None, version=record.version + 1)
                self.failed_transfer = (
                    f"the transfer to replica {record.transfer} did not complete within"
                    f" {TRANSFER_GIVE_UP_MS // 1_000} s"
                )
                return RecordWrite(without_transfer, self.failed_transfer)
        else:
            self._transfer_since_ms = None
        if record.transfer is not None:
            self.failed_transfer = ""
        return intent

    async def _write(self, stored: StoredRecord, intent: RecordWrite) -> None:
        record, before = intent.record, stored.record
        is_election = record.epoch != before.epoch
        if is_election:
            record = self._note_election(record, before.master)
        if not await self._writer.swap(stored, record):
            return
        if is_election:
            self._metrics.count_election(self.name, "new_master_elected")
        elif before.transfer is not None and record.transfer is None:
            self._metrics.count_election(self.name, "keep_current_master")
        self._set_alarm("")
        # Other elections and a smaller sync state set are reasons to look.
        is_usual = before.epoch == 0 if is_election else len(record.sss) >= len(before.sss)
        (log.info if is_usual else log.warning)(
            "master elected" if is_election else "group record changed",
            group=self.name,
            reason=intent.reason,
            epoch=record.epoch,
            master=None if record.master is None else record.master.replica_id,
            before=None if before.master is None else before.master.replica_id,
            in_sync=sorted(one.replica_id for one in record.sss),
        )

    def _note_election(self, record: GroupRecord, before: ReplicaRun | None) -> GroupRecord:
        session = None if before is None else self._observe().sessions.get(before)
        return self._outages.note_election(record, session)

    async def _add_reports(self) -> None:
        """Add outages and cuts to the history of the record, if some are new."""
        if self.stored is None or self._rank():
            return
        observation = self._observe()
        if observation.now_ms - observation.version_since_ms < QUIET_MS:
            return  # Each write invalidates proposals against the old version: replicas go first.
        outage = self._outages.outage
        cuts = [
            one.beat.cut
            for _, one in sorted(observation.sessions.items())
            if one.beat is not None and one.beat.cut is not None
        ]

        def add(record: GroupRecord, _observation: GroupObservation) -> GroupRecord:
            return with_reports(record, outage=outage, cuts=cuts)

        if add(self.stored.record, observation) != self.stored.record:
            await self.change(add)

    def _act(self, intent: Intent) -> float:
        """Carry out an intent that is not a write; return the time until the next decision."""
        match intent:
            case NoAction(again_at_ms):
                self._set_alarm("")
                return self._wait_s(again_at_ms)
            case NoEligibleReplica() if self._is_starting():
                pass
            case NoEligibleReplica(reason, survivor):
                alarm = reason + of_last_resort(self.name, survivor)
                if alarm != self.alarm:
                    self._metrics.count_election(self.name, "no_master_elected")
                self._set_alarm(alarm)
            case NoFounder(reason):
                self._wait_for_founder(reason)
            case ShortSyncStateSet(reason, again_at_ms, drained):
                assert self.stored is not None, "the decision was about a record"
                self._set_alarm(reason + of_fewer(self.name, self.stored.record, drained))
                return self._wait_s(again_at_ms)
            case FullMaster(reason):
                self._set_alarm(reason)
            case MetaRollback(reason, survivor):
                self._set_alarm(reason + of_last_resort(self.name, survivor))
            case TransferRequest(target):
                assert self.stored is not None, "the decision was about a record"
                for listener in list(self.listeners):
                    listener.hand_over(epoch=self.stored.record.epoch, target=target)
            case RecordWrite():
                pass  # The second read found another record: decide again.
            case _:
                assert_never(intent)
        return LOOK_PERIOD_S

    def _wait_s(self, again_at_ms: int | None) -> float:
        if again_at_ms is None:
            return LOOK_PERIOD_S
        wait_s = (again_at_ms - self._clock.monotonic_ms()) / 1000
        return min(max(wait_s, 0.0), LOOK_PERIOD_S)

    def _is_starting(self) -> bool:
        """Return whether the replicas may still start, as this controller did."""
        age_ms = self._clock.monotonic_ms() - self._started_at_ms
        return not self._has_heard_master and age_ms < START_WAIT_MS

    def _wait_for_founder(self, reason: str) -> None:
        """Raise the alarm if the founder does not start within START_WAIT_MS."""
        now_ms = self._clock.monotonic_ms()
        if self._unfounded_since_ms is None:
            self._unfounded_since_ms = now_ms
        if now_ms - self._unfounded_since_ms >= START_WAIT_MS:
            self._set_alarm(reason)

    def _set_alarm(self, alarm: str) -> None:
        if alarm == self.alarm:
            return
        if alarm:
            log.error("broker group needs an operator", group=self.name, reason=alarm)
        else:
            log.info("broker group recovered", group=self.name)
        self.alarm = alarm
