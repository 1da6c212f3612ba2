"""The sync state set of a master: the members, their acks, and the desired members.

The master proposes a set, a controller checks it, and the group record decides. Until the master
learns a view with a higher version, every set that it proposed against the current version may
already be recorded, or be recorded later. A rejection ends none of them, because another controller
may hold a copy of the request.
"""

from __future__ import annotations

from collections import deque
from typing import final

from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.engine.replication.confirm import (
    Commitment,
    has_caught_up,
    with_ack,
    with_doubt,
    with_joiners,
    with_proposal,
    with_silent,
    with_view,
    without_acks_of,
)
from tidemill.broker.engine.replication.fencing import is_late
from tidemill.common.replica_group import Proposal, ReplicaRun, ReplicationView

# The confirm offset waits this long for a replica that lags a little, and again after a pause.
HOLD_MS = 200
HOLD_PAUSE_MS = 2_000
SAMPLE_MS = 100  # Period of the samples of the log end. A lag is known to this precision.


@final
class ReplicaPeer:
    """The master's knowledge of one run of a replica."""

    __slots__ = (
        "caught_up_since_ms",
        "disconnected_at_ms",
        "heard_at_ms",
        "held_at_ms",
        "is_connected",
        "is_full",
        "is_slow",
    )

    def __init__(self, now_ms: int) -> None:
        self.is_connected = False
        self.disconnected_at_ms = now_ms
        self.heard_at_ms = now_ms  # its last ack, on any stream
        self.caught_up_since_ms: int | None = None  # connected, and within the longest lag
        self.held_at_ms = now_ms - HOLD_MS - HOLD_PAUSE_MS
        self.is_slow = False
        self.is_full = False  # it takes no data, so it cannot keep up


@final
class SyncState:
    """Members of one epoch, proposals, and the resulting confirm offset."""

    def __init__(
        self,
        me: ReplicaRun,
        view: ReplicationView,
        config: ReplicationConfig,
        *,
        epoch_start_end: int,
        confirm: int,
        now_ms: int,
    ) -> None:
        assert view.master == me, "a set is kept by its master"
        self.commitment = Commitment(me, view, epoch_start_end, confirm)
        self.peers: dict[ReplicaRun, ReplicaPeer] = {
            member: ReplicaPeer(now_ms) for member in view.sss if member != me
        }
        self._me = me
        self._config = config
        self._propose_at_ms = now_ms  # earliest time of the next proposal
        self._proof_version: int | None = None  # of the proposal that ends the doubt
        self._proof_again_ms = config.proposal_again_ms  # wait for its answer
        self._log_ends: deque[tuple[int, int]] = deque()  # (time, log end), one per SAMPLE_MS
        self._removals: dict[int, deque[int]] = {}  # replica id: times of its removals

    # ------------------------------------------------------------ knowledge

    @property
    def view(self) -> ReplicationView:
        """The newest view of this epoch."""
        return self.commitment.view

    @property
    def confirm(self) -> int:
        """The confirm offset."""
        return self.commitment.confirm

    @property
    def is_short(self) -> bool:
        """Whether the recorded set is too small to confirm anything."""
        return len(self.view.sss) < self.view.min_in_sync

    @property
    def is_doubtful(self) -> bool:
        """Whether the epoch may have ended during a standstill. Then nothing is confirmed."""
        return self.commitment.is_doubtful

    def acked(self, member: ReplicaRun) -> int:
        """Return the acked end of a member."""
        return dict(self.commitment.acked).get(member, 0)

    def learn(self, view: ReplicationView, now_ms: int) -> None:
        """Apply a newer view of this epoch."""
        before = self.commitment
        self.commitment = with_view(before, view)
        if self.commitment.view is before.view:
            return
        if not before.is_doubtful:
            self._propose_at_ms = now_ms
        # In doubt, the answer to the proposal under way follows. Another one would forget it.
        for member in before.view.sss - view.sss:
            times = deque[int](maxlen=self._config.removals_max)
            self._removals.setdefault(member.replica_id, times).append(now_ms)
        for member in view.sss - {self._me}:
            self.peers.setdefault(member, ReplicaPeer(now_ms))
        self._forget_ended_runs()

    def note_connected(self, member: ReplicaRun, now_ms: int, *, is_full: bool) -> None:
        """Record that a stream of `member` got its Welcome."""
        peer = self.peers.setdefault(member, ReplicaPeer(now_ms))
        peer.is_connected, peer.is_full = True, is_full

    def note_disconnected(self, member: ReplicaRun, now_ms: int) -> None:
        """Record that the stream of `member` has ended."""
        peer = self.peers[member]
        peer.is_connected, peer.disconnected_at_ms, peer.caught_up_since_ms = False, now_ms, None
        self._forget_ended_runs()

    def _forget_ended_runs(self) -> None:
        """Forget ended runs. An epoch may last for months and see many runs."""
        needed = self.view.sss | self.commitment.proposed
        for member, peer in list(self.peers.items()):
            if not peer.is_connected and member not in needed:
                del self.peers[member]
                self.commitment = without_acks_of(self.commitment, member)

    def record_own_end(self, end: int) -> None:
        """Record that the master has everything before `end`."""
        self.commitment = with_ack(self.commitment, self._me, end)

    def record_ack(self, member: ReplicaRun, end: int, now_ms: int, *, is_slow: bool) -> None:
        """Record an ack of a replica: it has everything before `end`."""
        peer = self.peers[member]
        peer.heard_at_ms, peer.is_slow = now_ms, is_slow
        self.commitment = with_ack(self.commitment, member, end)

    def note_silence(self, now_ms: int) -> None:
        """Let the acks of silent replicas confirm nothing more until they ack again.

        This does not depend on their streams: a stream may have ended before a pause of this
        process, and its end may be the first that the process reads after it (`is_late`).
        """
        for member, peer in self.peers.items():
            silent_ms = now_ms - peer.heard_at_ms
            if is_late(silent_ms, silence_ms=self._config.stream_silence_ms):
                self.commitment = with_silent(self.commitment, member)

    def doubt(self, now_ms: int) -> None:
        """Confirm nothing until a proposal from now on is accepted: the epoch may have ended.

        Only the record of the group tells, because its other members may have paused, too.
        """
        self.commitment = with_doubt(self.commitment, is_doubtful=True)
        self._proof_version, self._propose_at_ms = None, now_ms
        self._proof_again_ms = self._config.proposal_again_ms

    # ------------------------------------------------------------ proposals

    def tick(self, log_end: int, now_ms: int) -> Proposal | None:
        """Return the set to propose now, if any. It is in force on return."""
        self._sample_log_end(log_end, now_ms)
        self._update_peers(now_ms)
        self._hold_for_joiners(log_end, now_ms)
        # In doubt, propose the recorded set, which the controllers never refuse in this epoch.
        members = self.view.sss if self.is_doubtful else self.desired_set(now_ms)
        is_same = members == self.view.sss and not self.commitment.proposed
        if is_same and not self.is_doubtful:
            return None
        if now_ms < self._propose_at_ms:
            return None
        return self.propose(members, now_ms)

    def propose(self, members: frozenset[ReplicaRun], now_ms: int) -> Proposal:
        """Propose a set. From now on its members must ack, even if the proposal is rejected."""
        self.commitment, proposal = with_proposal(self.commitment, members)
        self._proof_version = proposal.version
        again_ms = self._config.proposal_again_ms
        if self.is_doubtful:
            # Only the answer to the last proposal counts, and controllers may be slow.
            again_ms = self._proof_again_ms
            self._proof_again_ms = min(2 * again_ms, self._config.proof_again_ms_max)
        self._propose_at_ms = now_ms + again_ms
        return proposal

    def handle_acceptance(self, version: int) -> None:
        """Handle the acceptance of the last proposal, against `version`: the epoch lasts."""
        if version == self._proof_version and self.is_doubtful:
            self.commitment = with_doubt(self.commitment, is_doubtful=False)
            self._propose_at_ms = 0  # Another set may be desired.

    def handle_rejection(self, version: int, now_ms: int) -> None:
        """Handle a rejected proposal against `version`: allow another one soon.

        The proposed members stay in force (see the module docstring).
        """
        if version == self.view.version or self.is_doubtful:
            self._propose_at_ms = now_ms + self._config.refused_again_ms

    def desired_set(self, now_ms: int) -> frozenset[ReplicaRun]:
        """Return the desired members: members that keep up, and replicas that have caught up.

        Leave out members with slow disks while enough others remain.
        """
        found = frozenset(
            member
            for member in self.view.sss | self.peers.keys()
            if member == self._me
            or (
                self._may_stay(member, now_ms)
                if member in self.view.sss
                else self._may_join(member, now_ms)
            )
        )
        for member in sorted(found - {self._me}):
            if self.peers[member].is_slow and len(found) > self.view.min_in_sync:
                found -= {member}
        return found

    def _may_stay(self, member: ReplicaRun, now_ms: int) -> bool:
        peer = self.peers[member]
        if not peer.is_connected:
            is_replaced = any(
                other.is_connected and run.replica_id == member.replica_id
                for run, other in self.peers.items()
            )
            return (
                not is_replaced and now_ms - peer.disconnected_at_ms <= self._config.stream_gone_ms
            )
        return self._keeps_up(member, now_ms)

    def _may_join(self, member: ReplicaRun, now_ms: int) -> bool:
        return has_caught_up(self.commitment, member) and self._is_admissible(member, now_ms)

    def _is_admissible(self, member: ReplicaRun, now_ms: int) -> bool:
        if member.replica_id in self.view.retired:
            # The controllers would reject the proposal, but the replica would have to ack.
            return False
        peer = self.peers[member]
        # A replica that cannot stay would be removed at once and join again, without end.
        if peer.caught_up_since_ms is None:
            return False
        if peer.is_slow and not self.is_short:
            return False
        # While nothing can be confirmed, every replica that has caught up may join.
        is_on_trial = not self.is_short and self._flaps(member, now_ms)
        wait_ms = self._config.caught_up_for_ms if is_on_trial else 0
        return now_ms - peer.caught_up_since_ms >= wait_ms

    def _keeps_up(self, member: ReplicaRun, now_ms: int) -> bool:
        return not self.peers[member].is_full and self.acked(member) >= self._lag_limit(now_ms)

    def _flaps(self, member: ReplicaRun, now_ms: int) -> bool:
        times = self._removals.get(member.replica_id, ())
        recent = sum(now_ms - at_ms < self._config.removals_window_ms for at_ms in times)
        return recent >= self._config.removals_max

    def _update_peers(self, now_ms: int) -> None:
        for member, peer in self.peers.items():
            if not peer.is_connected or not self._keeps_up(member, now_ms):
                peer.caught_up_since_ms = None
            elif peer.caught_up_since_ms is None:
                peer.caught_up_since_ms = now_ms

    def _hold_for_joiners(self, log_end: int, now_ms: int) -> None:
        """Let commits wait for replicas that may join and lag a little, so that they catch up."""
        joiners = set()
        for member, peer in self.peers.items():
            is_near = self.acked(member) >= log_end - self._config.near_bytes
            if member in self.view.sss or not is_near or not self._is_admissible(member, now_ms):
                continue
            if now_ms - peer.held_at_ms >= HOLD_MS + HOLD_PAUSE_MS:
                peer.held_at_ms = now_ms
            if now_ms - peer.held_at_ms < HOLD_MS:
                joiners.add(member)
        self.commitment = with_joiners(self.commitment, frozenset(joiners))

    def _sample_log_end(self, log_end: int, now_ms: int) -> None:
        if not self._log_ends or now_ms - self._log_ends[-1][0] >= SAMPLE_MS:
            self._log_ends.append((now_ms, log_end))
        # One sample older than the longest lag is enough.
        oldest_ms = now_ms - self._config.lag_longest_ms
        while len(self._log_ends) > 1 and self._log_ends[1][0] <= oldest_ms:
            self._log_ends.popleft()

    def _lag_limit(self, now_ms: int) -> int:
        """Return the log end at the time when the longest allowed lag began."""
        at_ms, end = self._log_ends[0] if self._log_ends else (now_ms, 0)
        return end if now_ms - at_ms >= self._config.lag_longest_ms else 0
