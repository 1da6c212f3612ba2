"""One broker group at one controller: what is heard of it, what is decided, and how it is written.

Two ways lead to a write, and both go through compare-and-swap with the record that they saw:

    change(ask)      somebody asks: a registration, a proposal, a release, an operator. What is
                     asked is judged against each record that is read, and never rebased
    reconcile()      nobody asks: after every event and twice a second, `decide` says what to do

Sessions receive each new record through `GroupListener`. One task at a time writes here. Other
controllers write too, which the compare-and-swap detects.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, assert_never, final

import structlog

from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView, name_in_cluster
from tidemill.controller.election.alarms import of_fewer, of_last_resort
from tidemill.controller.election.decide import (
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
from tidemill.controller.election.failure import Failure, find_failure
from tidemill.controller.election.forgetting import may_forget
from tidemill.controller.election.history import HANDED_OVER, Outage, kind_of, with_reports
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.partitions import diverged_of, unheard_of
from tidemill.controller.election.record import GroupRecord, Transition, view_of
from tidemill.controller.election.registration import FencedRun
from tidemill.controller.election.reports import (
    REPORT_LASTS_MS,
    UnreachableReport,
    find_reached_instead,
)
from tidemill.controller.election.sessions import (
    ElectionTiming,
    Heartbeat,
    ReplicaSession,
    ReplicaSessions,
    Sight,
)
from tidemill.controller.election.swap import (
    StoredRecord,
    WriteAttempt,
    WriteOutcome,
    attempt_no_change,
    attempt_write,
    outcome_of,
)
from tidemill.controller.meta_store import MetaStore, StoreUnreachable, WriteFailure

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.controller.metrics import ControllerMetrics

LOOK_PERIOD_S: Final = 0.5  # at least so often the record is compared with what is seen
# Of one request against records that others write at the same time; each try is a read and a swap.
TRIES_MAX: Final = 4
RESOLVE_TRIES_MAX: Final = 5  # of finding out what became of a swap whose answer was lost
WRITE_ID_BYTES: Final = 8
# A transfer that an operator wants and that does not come about: the target may be gone for long.
TRANSFER_GIVE_UP_MS: Final = 30_000
# Until a group that nobody has begun is told of: its first replica may start last, on a machine
# that starts all of them at once.
FOUNDER_WAIT_MS: Final = 10_000
# The record is left alone for so long before what people read is added to it.
QUIET_MS: Final = 1_000
GRANT_MS: Final = 1_500  # of a master's lease (failover.md 14.2)

log = structlog.get_logger()

Denial: TypeAlias = ChangeRejection | FencedRun
# Judges one record: the next one, the same one (there is nothing to do), or why not.
ChangeRequest: TypeAlias = Callable[[GroupRecord, Sight], GroupRecord | Denial]


class GroupListener(Protocol):
    """Who hears of a group: a session of a replica, or a proxy's routes."""

    def news(self, view: ReplicationView) -> None:
        """Take a record that is new."""

    def hand_over(self, *, epoch: int, target: ReplicaId) -> None:
        """Hear that the master should hand over; said again as long as it is wanted."""

    def forgotten(self) -> None:
        """Hear that there is no such group any more: nothing comes of what is said here."""


class _Outage(NamedTuple):
    """An election that this controller has made, and what came of it."""

    election: Transition
    elected_at_ms: int  # monotonic
    away: Outage | None = None


@final
class BrokerGroupControl:
    """A broker group, as this controller sees it."""

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
    ) -> None:
        """Watch over `name`; `rank` says whether this controller leads (0), or waits its turn."""
        self.name = name
        self.stored: StoredRecord | None = None
        self.alarm = ""  # why it is not available, or needs somebody
        self.notice = ""  # what it waits for, that nobody needs to mend
        self.given_up = ""  # the last transfer, where it did not come about
        self.wanted_min_in_sync: int | None = None  # where somebody says so
        self.wanted_replicas: int | None = None  # where somebody says so
        self.listeners: set[GroupListener] = set()
        self.is_forgotten = False  # this is nobody's group any more, whoever holds it still
        self._full_name = name_in_cluster(cluster, name) if cluster else ""
        self._store = store
        self._clock = clock
        self._timing = timing
        self._rank = rank
        self._metrics = metrics
        self._sessions = ReplicaSessions(timing)
        self._writing = asyncio.Lock()
        self._events = asyncio.Event()
        self._transfer_since_ms: int | None = None
        self._unfounded_since_ms: int | None = None
        self._reports: dict[str, UnreachableReport] = {}  # by proxy: as many as follow routes here
        self._proxies = 0
        self._outage: _Outage | None = None  # the last that this controller has ended

    # ------------------------------------------------------------ what is heard

    def heard(self, member: ReplicaRun, beat: Heartbeat) -> None:
        """Take a heartbeat."""
        self._sessions.heard(member, beat, self._clock.monotonic_ms())
        self._note_writable(member, beat)
        self._events.set()

    def died(self, member: ReplicaRun) -> None:
        """Take a death certificate."""
        self._sessions.died(member, self._clock.monotonic_ms())
        self._events.set()

    def reported(self, report: UnreachableReport, *, proxies: int) -> None:
        """Take what a proxy, of so many that follow routes here, cannot reach."""
        self._reports[report.proxy] = report
        self._proxies = proxies
        old_ms = report.heard_at_ms - REPORT_LASTS_MS
        for proxy in [name for name, one in self._reports.items() if one.heard_at_ms < old_ms]:
            del self._reports[proxy]
        self._events.set()

    def saw(self, stored: StoredRecord | None) -> None:
        """Take a record that was read, if it is newer than what is known."""
        known = self.stored
        if stored is None or (known is not None and stored.record.version <= known.record.version):
            return
        self.stored = stored
        view = self._view_of(stored.record)
        for listener in list(self.listeners):
            listener.news(view)
        self._events.set()

    async def refresh(self) -> None:
        """Read the record, where that can be done: a watch may be late."""
        with contextlib.suppress(StoreUnreachable):
            self.saw(await self._store.get(self.name))

    def view(self) -> ReplicationView | None:
        """Return what replicas and proxies are told; None: nothing is known of the group yet."""
        return None if self.stored is None else self._view_of(self.stored.record)

    def _view_of(self, record: GroupRecord) -> ReplicationView:
        return view_of(record)._replace(group=self._full_name)

    def grant_ms(self, member: ReplicaRun) -> int:
        """Return for how long a run may believe that it is master; 0: not at all."""
        record = None if self.stored is None else self.stored.record
        is_master = record is not None and record.master == member
        return GRANT_MS if is_master and self._rank() == 0 else 0

    def sessions(self) -> dict[ReplicaRun, ReplicaSession]:
        """Return what was heard of each run, for people."""
        return dict(self._sight().sessions)

    @property
    def live_count(self) -> int:
        """How many replicas are registered, heard, and turn."""
        return len(self._live())

    def diverged(self) -> frozenset[ReplicaId]:
        """Return whose log is not their master's, and may not be cut."""
        return diverged_of(self._live())

    def unheard(self) -> frozenset[tuple[ReplicaId, ReplicaId]]:
        """Return who hears nothing of whom, of those that are heard here."""
        return frozenset() if self.stored is None else unheard_of(self.stored.record, self._live())

    def _live(self) -> list[Candidate]:
        if self.stored is None:
            return []
        return live_of(self.stored.record, self._sight(), self._timing)

    def is_heard(self, member: ReplicaRun | None, sight: Sight) -> bool:
        """Whether a run is there, as far as is heard."""
        return sight.find_live(member, self._timing) is not None

    def _sight(self) -> Sight:
        now_ms = self._clock.monotonic_ms()
        sight = self._sessions.sight(
            rank=self._rank(),
            now_ms=now_ms,
            wanted_min_in_sync=self.wanted_min_in_sync,
            wanted_replicas=self.wanted_replicas,
        )
        if not self._reports or self.stored is None:
            return sight
        reached = find_reached_instead(
            self.stored.record, self._reports.values(), proxies=self._proxies, now_ms=now_ms
        )
        return sight._replace(reached_instead=reached)

    # ------------------------------------------------------------ what is asked

    async def change(self, ask: ChangeRequest) -> Denial | None:
        """Do what is asked; return why not, or None. Raises StoreUnreachable."""
        async with self._writing:
            for _ in range(TRIES_MAX):
                stored = await self._read()
                self._look(stored.record)
                wanted = ask(stored.record, self._sight())
                if isinstance(wanted, ChangeRejection | FencedRun):
                    return wanted
                if wanted.epoch != stored.record.epoch:
                    wanted = self._stamped(wanted, stored.record.master)
                if wanted == stored.record:
                    return None
                if await self._swap(stored, wanted):
                    if wanted.epoch != stored.record.epoch:
                        self._metrics.decided(self.name, "new_master_elected")
                    return None
        raise StoreUnreachable(f"{TRIES_MAX} writes of others came first")

    async def remove(self) -> Denial | None:
        """Take the record away, when nobody was heard of; return why not. Raises StoreUnreachable.

        A replica that comes afterwards registers anew, with a group that nothing is decided about:
        it has seen an epoch, which an operator must set the record above.
        """
        async with self._writing:
            stored, sessions = await self._read(), self._sight().sessions
            now_ms = self._clock.monotonic_ms()
            refusal = may_forget(sessions, self._timing, now_ms=now_ms)
            if refusal is not None:
                return refusal
            if await self._store.remove(self.name, stored.token) is not None:
                return ChangeRejection("its record is being changed: somebody is there")
            log.warning("a broker group is forgotten", group=self.name, epoch=stored.record.epoch)
        return None

    def forget(self) -> None:
        """Hear that the record is gone: who speaks for a replica is to begin anew."""
        self.is_forgotten = True
        for listener in list(self.listeners):
            listener.forgotten()

    async def _read(self) -> StoredRecord:
        stored = await self._metrics.timed("get", self._store.get(self.name))
        if stored is None:
            raise StoreUnreachable(f"the store has no group {self.name}")
        self.saw(stored)
        return stored

    async def _swap(self, base: StoredRecord, record: GroupRecord) -> bool:
        """Write a record; whether it was written. Raises StoreUnreachable where nobody knows."""
        made = attempt_write(base, record, secrets.token_hex(WRITE_ID_BYTES))
        result = await self._metrics.timed("swap", self._store.swap(self.name, made))
        match result:
            case StoredRecord():
                self.saw(result)
                return True
            case WriteFailure.CONFLICT:
                return False
            case WriteFailure.UNKNOWN:
                return await self._resolve(made)
            case _:
                assert_never(result)

    async def _resolve(self, made: WriteAttempt) -> bool:
        """Find out what became of a write, before anything else is decided (F-29)."""
        for _ in range(RESOLVE_TRIES_MAX):
            found = await self._read()
            match outcome_of(made, found):
                case WriteOutcome.APPLIED:
                    return True
                case WriteOutcome.OVERTAKEN:
                    return False
                case WriteOutcome.PENDING:
                    # What changes nothing, written from the same version, ends it.
                    end = attempt_no_change(found, secrets.token_hex(WRITE_ID_BYTES))
                    result = await self._store.swap(self.name, end)
                    if isinstance(result, StoredRecord):
                        self.saw(result)
                        return False
        raise StoreUnreachable("what became of a write is not known")

    # ------------------------------------------------------------ what is decided

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
                self._alarm(f"the store cannot be reached: {error}")
                again_s = LOOK_PERIOD_S

    async def reconcile(self) -> float:
        """Do what is to be done now; return after how many seconds to look again at the latest.

        Raises StoreUnreachable.
        """
        if self.stored is None:
            self.saw(await self._store.get(self.name))
        if self.stored is None:
            return LOOK_PERIOD_S
        intent = self._decide(self.stored.record)
        # Who has seen more than the record has may have seen more than our copy of it.
        if isinstance(intent, RecordWrite | MetaRollback):
            async with self._writing:
                stored = await self._read()
                intent = self._decide(stored.record)
                if isinstance(intent, RecordWrite):
                    await self._write(stored, intent)
                    return 0.0
        if isinstance(intent, NoAction):
            await self._report()
        return self._act(intent)

    def _look(self, record: GroupRecord) -> Failure | None:
        """Let the sessions see the record, and note whether its master has failed."""
        now_ms = self._clock.monotonic_ms()
        self._sessions.look(record, now_ms)
        failure = find_failure(record, self._sight(), self._timing)
        self._sessions.note_failure(record.master, has_failed=failure is not None, now_ms=now_ms)
        return failure

    def _decide(self, record: GroupRecord) -> Intent:
        self._look(record)
        sight = self._sight()
        intent = decide(record, sight, self._timing)
        if isinstance(intent, TransferRequest) and record.transfer is not None:
            since_ms = self._transfer_since_ms or sight.now_ms
            self._transfer_since_ms = since_ms
            if sight.now_ms - since_ms > TRANSFER_GIVE_UP_MS:
                given_up = record._replace(transfer=None, version=record.version + 1)
                reason = f"the transfer to replica {record.transfer} did not come about"
                self.given_up = reason
                return RecordWrite(given_up, reason)
        else:
            self._transfer_since_ms = None
        if record.transfer is not None:
            self.given_up = ""
        return intent

    async def _write(self, stored: StoredRecord, intent: RecordWrite) -> None:
        record, master = intent.record, stored.record.master
        is_election = record.epoch != stored.record.epoch
        if is_election:
            record = self._stamped(record, master)
        is_written = await self._swap(stored, record)
        if is_written and is_election:
            self._metrics.decided(self.name, "new_master_elected")
        elif is_written and stored.record.transfer is not None and record.transfer is None:
            self._metrics.decided(self.name, "keep_current_master")
        if is_written:
            self._alarm("")
            log.warning(
                "another master is elected" if is_election else "the record is changed",
                group=self.name,
                reason=intent.reason,
                epoch=record.epoch,
                master=None if record.master is None else record.master.replica_id,
                before=None if master is None else master.replica_id,
                in_sync=sorted(one.replica_id for one in record.sss),
            )

    def _stamped(self, record: GroupRecord, before: ReplicaRun | None) -> GroupRecord:
        """Return the record with when its election was, and how long it took to be wanted."""
        session = None if before is None else self._sight().sessions.get(before)
        last, now_ms = record.history[-1], self._clock.monotonic_ms()
        if session is not None and last.reason != HANDED_OVER:
            last = last._replace(detected_ms=now_ms - session.heard_at_ms)
        last = last._replace(at_ms=self._clock.wall_ms())
        self._outage = _Outage(last, now_ms)
        return record._replace(history=(*record.history[:-1], last))

    def _note_writable(self, member: ReplicaRun, beat: Heartbeat) -> None:
        """Note that a master that was elected here has its first commit: the outage is over."""
        outage, record = self._outage, None if self.stored is None else self.stored.record
        if outage is None or outage.away is not None or record is None:
            return
        election = outage.election
        if beat.writable_epoch == election.epoch == record.epoch and record.master == member:
            away_ms = election.detected_ms + self._clock.monotonic_ms() - outage.elected_at_ms
            self._outage = outage._replace(away=Outage(election.epoch, away_ms))
            if election.source is not None:
                self._metrics.failed_over(self.name, kind_of(election.reason), away_ms)

    async def _report(self) -> None:
        """Add to the history what is known of its elections by now, if anything is."""
        if self.stored is None or self._rank():
            return
        sight = self._sight()
        if sight.now_ms - sight.version_since_ms < QUIET_MS:
            return  # What replicas propose comes first: each write ends what was made before it.
        away = None if self._outage is None else self._outage.away
        cuts = [
            one.beat.cut
            for _, one in sorted(sight.sessions.items())
            if one.beat is not None and one.beat.cut is not None
        ]

        def ask(record: GroupRecord, _sight: Sight) -> GroupRecord:
            return with_reports(record, away=away, cuts=cuts)

        if ask(self.stored.record, sight) != self.stored.record:
            await self.change(ask)

    def _act(self, intent: Intent) -> float:
        """Do what is no write."""
        match intent:
            case NoAction(again_at_ms):
                self._alarm("")
                return self._wait_s(again_at_ms)
            case NoEligibleReplica(reason, survivor):
                alarm = reason + of_last_resort(self.name, survivor)
                if alarm != self.alarm:
                    self._metrics.decided(self.name, "no_master_elected")
                self._alarm(alarm)
            case NoFounder(reason):
                self._wait_for_founder(reason)
            case ShortSyncStateSet(reason, again_at_ms, drained):
                assert self.stored is not None, "what was decided upon"
                self._alarm(reason + of_fewer(self.name, self.stored.record, drained))
                return self._wait_s(again_at_ms)
            case MetaRollback(_, reason, survivor):
                self._alarm(reason + of_last_resort(self.name, survivor))
            case TransferRequest(target):
                assert self.stored is not None, "what was decided upon"
                for listener in list(self.listeners):
                    listener.hand_over(epoch=self.stored.record.epoch, target=target)
            case RecordWrite():
                pass  # The record was another one when it was read again: look once more.
            case _:
                assert_never(intent)
        return LOOK_PERIOD_S

    def _wait_s(self, again_at_ms: int | None) -> float:
        if again_at_ms is None:
            return LOOK_PERIOD_S
        wait_s = (again_at_ms - self._clock.monotonic_ms()) / 1000
        return min(max(wait_s, 0.0), LOOK_PERIOD_S)

    def _wait_for_founder(self, reason: str) -> None:
        """Say that the group has not begun, when it should have: replicas start one by one."""
        now_ms = self._clock.monotonic_ms()
        if self._unfounded_since_ms is None:
            self._unfounded_since_ms = now_ms
        if now_ms - self._unfounded_since_ms >= FOUNDER_WAIT_MS:
            self._alarm(reason)

    def _alarm(self, alarm: str) -> None:
        if alarm == self.alarm:
            return
        if alarm:
            log.error("a broker group needs somebody", group=self.name, reason=alarm)
        else:
            log.info("the broker group is well again", group=self.name)
        self.alarm = alarm
