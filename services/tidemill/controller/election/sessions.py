"""What a controller has heard of replicas, and when, on its own monotonic clock.

`ReplicaSessions` records heartbeats and deaths. A `Sight` is the part of it that decisions see at
one moment. Times of two machines are never compared (F-19).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, final

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.record import CutTail, GroupRecord

FORGET_MS = 60_000  # a run that is not registered and not heard of: it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionTiming:
    """How long is waited for whom (failover.md 20). Nothing here is needed for safety."""

    session_timeout_ms: int = 1_000
    stall_limit_ms: int = 1_500
    peer_silence_ms: int = 600
    blocked_ms: int = 1_000
    deputy_step_ms: int = 1_000
    flapping_guard_ms: int = 30_000
    # A run that was heard so lately is waited for before another store takes its replica's place:
    # as long as a broker takes to start again. Who brings a new disk copies for longer than that.
    other_store_ms: int = 3_000
    # A group that confirms nothing for so long is told of: who is left behind by a failover, or
    # begins, is in sync again sooner.
    too_few_ms: int = 3_000


class ReplicaHealth(Enum):
    """What a replica's supervisor says of it; one whose disk is broken ends, and is dead."""

    OK = auto()
    SLOW = auto()  # its disk is: it should not be master


class Heartbeat(NamedTuple):
    """What a supervisor says of its broker, every 200 ms and on change."""

    is_master: bool
    epoch_seen: int
    version_seen: int
    log_epoch: int  # of the last record
    log_end: int
    durable_end: int
    confirm: int
    health: ReplicaHealth
    page_age_ms: int  # since the broker's event loop has last turned
    blocked_ms: int = 0  # for how long a master has too few members to confirm anything
    # Since anything was heard of each peer, by stream or probe.
    peer_silence_ms: tuple[tuple[ReplicaId, int], ...] = ()
    writable_epoch: int = 0  # the epoch that a master leads, when its first record is confirmed
    cut: CutTail | None = None  # the last that this process has made
    diverged: frozenset[ReplicaId] = frozenset()  # whose log is not their master's, as it knows


class ReplicaSession(NamedTuple):
    """One run of a replica, as this controller knows it."""

    heard_at_ms: int
    beat: Heartbeat | None  # None: it has said nothing yet
    is_dead: bool = False  # its supervisor has said so, and then it is so


class Sight(NamedTuple):
    """What one controller sees of one group at one moment."""

    now_ms: int
    sessions: Mapping[ReplicaRun, ReplicaSession]
    rank: int = 0  # 0 leads, the first deputy has 1
    version_since_ms: int = 0  # since when the record has its version
    epoch_since_ms: int | None = None  # when its epoch was seen to begin, if it was
    failed_since_ms: int | None = None  # since when the master counts as failed here
    # What the group's owner wants, where that is not in the record yet.
    wanted_min_in_sync: int | None = None
    wanted_replicas: int | None = None
    # Whom most proxies reach while they do not reach the master (`reports.py`).
    reached_instead: frozenset[ReplicaId] = frozenset()

    def find_live(self, member: ReplicaRun | None, timing: ElectionTiming) -> Heartbeat | None:
        """Return the last heartbeat of a run that is there, is heard, and turns."""
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
        """Take a heartbeat."""
        known = self._sessions.get(member)
        is_dead = known is not None and known.is_dead
        self._sessions[member] = ReplicaSession(now_ms, beat, is_dead)

    def note_death(self, member: ReplicaRun, now_ms: int) -> None:
        """Take a death certificate: the process of this run has ended."""
        self._sessions[member] = ReplicaSession(now_ms, None, is_dead=True)

    def note_record(self, record: GroupRecord, now_ms: int) -> None:
        """Note since when the record is as it is, and give who was never heard of a first chance.

        A controller that has just begun to watch must not take everybody for dead.
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
            # Of a run that is about to register the record may say nothing yet.
            if member not in registered and now_ms - session.heard_at_ms > FORGET_MS:
                del self._sessions[member]

    def note_failure(self, master: ReplicaRun | None, *, has_failed: bool, now_ms: int) -> None:
        """Note whether the master counts as failed: deputies wait from when it first did."""
        if not has_failed:
            self._failed, self._failed_since_ms = None, None
        elif self._failed_since_ms is None or self._failed != master:
            self._failed, self._failed_since_ms = master, now_ms

    def observe(
        self,
        *,
        rank: int,
        now_ms: int,
        wanted_min_in_sync: int | None = None,
        wanted_replicas: int | None = None,
    ) -> Sight:
        """Return what is seen now."""
        return Sight(
            now_ms=now_ms,
            sessions=dict(self._sessions),
            rank=rank,
            version_since_ms=self._version_since_ms,
            epoch_since_ms=self._epoch_since_ms,
            failed_since_ms=self._failed_since_ms,
            wanted_min_in_sync=wanted_min_in_sync,
            wanted_replicas=wanted_replicas,
        )
