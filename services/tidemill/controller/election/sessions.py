"""Heartbeats of replicas at one controller, with times of its monotonic clock.

`ReplicaSessions` records heartbeats and deaths. Decisions read a `GroupObservation`, a snapshot of
it. Times of two machines are never compared (F-19).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, final

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.record import CutTail, GroupRecord

FORGET_MS = 60_000  # silence after which the session of an unregistered run is deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionTiming:
    """Time-outs of elections. Safety does not depend on them."""

    session_timeout_ms: int = 1_000
    stall_limit_ms: int = 1_500
    peer_silence_ms: int = 600
    blocked_ms: int = 1_000
    deputy_step_ms: int = 1_000
    flapping_guard_ms: int = 30_000
    # Silence of a run before a replica with another store may replace it. A broker restarts within
    # this time. The copy to a new disk takes longer.
    other_store_ms: int = 3_000
    # Time without a confirmed message before the alarm. After a failover or a start, replicas are
    # in sync again sooner.
    too_few_ms: int = 3_000


class ReplicaHealth(Enum):
    """The health of a replica. A replica with a broken disk ends instead."""

    OK = auto()
    SLOW = auto()  # its disk is slow, so it should not be master
    FULL = auto()  # its disk is full, so it accepts no messages as a master


class Heartbeat(NamedTuple):
    """The state of a broker, which its supervisor sends every 200 ms and on change."""

    is_master: bool
    epoch_seen: int
    version_seen: int
    log_epoch: int  # of the last record
    log_end: int
    durable_end: int
    confirm: int
    health: ReplicaHealth
    page_age_ms: int  # age of the state, which the event loop of the broker writes at each turn
    blocked_ms: int = 0  # how long a master has had too few members to confirm messages
    # Silence of each peer, on streams and probes.
    peer_silence_ms: tuple[tuple[ReplicaId, int], ...] = ()
    writable_epoch: int = 0  # a master's epoch, from the confirmation of its first record on
    cut: CutTail | None = None  # the last cut of this process
    diverged: frozenset[ReplicaId] = frozenset()  # replicas whose log differs from the master's


class ReplicaSession(NamedTuple):
    """One run of a replica at this controller."""

    heard_at_ms: int
    beat: Heartbeat | None  # None: no heartbeat yet
    is_dead: bool = False  # its supervisor has reported its end


class GroupObservation(NamedTuple):
    """The knowledge of one controller about one group at one moment."""

    now_ms: int
    sessions: Mapping[ReplicaRun, ReplicaSession]
    rank: int = 0  # 0: it leads; 1: the first deputy
    version_since_ms: int = 0  # first sight of this version of the record
    epoch_since_ms: int | None = None  # first sight of this epoch; None: at the start
    failed_since_ms: int | None = None  # first sight of the master's failure
    has_spec: bool = False  # a spec sets min-in-sync, even if this controller has not read it yet
    # The spec of the group, which the record may not have yet.
    wanted_min_in_sync: int | None = None
    wanted_replicas: int | None = None
    feature_level_max: int = 0  # cap of the level of the group; 0: none
    # Replicas that most proxies reach while they do not reach the master (`reports.py`).
    reached_instead: frozenset[ReplicaId] = frozenset()

    def find_live(self, member: ReplicaRun | None, timing: ElectionTiming) -> Heartbeat | None:
        """Return the last heartbeat of a run, if it is live: not dead, silent or stalled."""
        if member is None:
            return None
        session = self.sessions.get(member)
        if session is None or session.is_dead or session.beat is None:
            return None
        age_ms = self.now_ms - session.heard_at_ms
        is_stalled = session.beat.page_age_ms + age_ms > timing.stall_limit_ms
        if age_ms > timing.session_timeout_ms or is_stalled:
            return None
        return session.beat

    def may_run(self, member: ReplicaRun, silent_ms: int) -> bool:
        """Return whether a run, or its event loop, has been silent for at most `silent_ms`.

        The silence of a run that sent no heartbeat begins with the first sight of the record.
        """
        session = self.sessions.get(member)
        if session is None or session.is_dead:
            return False
        page_age_ms = 0 if session.beat is None else session.beat.page_age_ms
        return self.now_ms - session.heard_at_ms + page_age_ms <= silent_ms

    def reporters_of(self, member: ReplicaRun, silent_ms: int) -> list[ReplicaId]:
        """Return the replicas that report that they heard `member` in the last `silent_ms`.

        If the supervisor has reported the end of `member`, they heard an earlier or a later run.
        """
        session = self.sessions.get(member)
        if session is not None and session.is_dead:
            return []
        return sorted(
            reporter.replica_id
            for reporter, one in self.sessions.items()
            if one.beat is not None and reporter.replica_id != member.replica_id
            for heard, silence_ms in one.beat.peer_silence_ms
            if heard == member.replica_id
            if self.now_ms - one.heard_at_ms + one.beat.page_age_ms + silence_ms <= silent_ms
        )


@final
class ReplicaSessions:
    """All sessions of one group's replicas at one controller."""

    def __init__(self, timing: ElectionTiming) -> None:
        self._timing = timing
        self._sessions: dict[ReplicaRun, ReplicaSession] = {}
        self._version = -1
        self._version_since_ms = 0
        self._epoch = -1
        self._epoch_since_ms: int | None = None
        self._failed: ReplicaRun | None = None
        self._failed_since_ms: int | None = None

    def note_heartbeat(self, member: ReplicaRun, beat: Heartbeat, now_ms: int) -> None:
        """Record a heartbeat."""
        known = self._sessions.get(member)
        is_dead = known is not None and known.is_dead
        self._sessions[member] = ReplicaSession(now_ms, beat, is_dead)

    def note_death(self, member: ReplicaRun, now_ms: int) -> None:
        """Record the end of the process of a run."""
        self._sessions[member] = ReplicaSession(now_ms, None, is_dead=True)

    def note_record(self, record: GroupRecord, now_ms: int) -> None:
        """Record the first sight of a record, and begin a session for each registered run.

        Otherwise a controller that has just started would see all runs as dead.
        """
        if record.version != self._version:
            self._version, self._version_since_ms = record.version, now_ms
        if record.epoch != self._epoch:
            self._epoch_since_ms = None if self._epoch < 0 else now_ms
            self._epoch = record.epoch
        registered = {ReplicaRun(id_, one.incarnation) for id_, one in record.replicas}
        for member in registered:
            self._sessions.setdefault(member, ReplicaSession(now_ms, None))
        for member, session in list(self._sessions.items()):
            # The record does not have a run that is about to register.
            if member not in registered and now_ms - session.heard_at_ms > FORGET_MS:
                del self._sessions[member]

    def note_failure(self, master: ReplicaRun | None, *, has_failed: bool, now_ms: int) -> None:
        """Record whether the master counts as failed: deputies wait from the first sight of it."""
        if not has_failed:
            self._failed, self._failed_since_ms = None, None
        elif self._failed_since_ms is None or self._failed != master:
            self._failed, self._failed_since_ms = master, now_ms

    def observe(
        self,
        *,
        rank: int,
        now_ms: int,
        has_spec: bool = False,
        wanted_min_in_sync: int | None = None,
        wanted_replicas: int | None = None,
        feature_level_max: int = 0,
    ) -> GroupObservation:
        """Return the knowledge of this moment."""
        return GroupObservation(
            now_ms=now_ms,
            sessions=dict(self._sessions),
            rank=rank,
            version_since_ms=self._version_since_ms,
            epoch_since_ms=self._epoch_since_ms,
            failed_since_ms=self._failed_since_ms,
            has_spec=has_spec,
            wanted_min_in_sync=wanted_min_in_sync,
            wanted_replicas=wanted_replicas,
            feature_level_max=feature_level_max,
        )
