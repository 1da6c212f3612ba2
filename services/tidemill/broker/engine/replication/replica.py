"""A replica's side of one epoch: dial the master, cut the log, append the master's frames.

Invariant: a replica acks bytes in an epoch only if it appended them after a cut that the master of
this epoch agreed to. It sends no ack of an epoch after it has seen a later one (F-10).
"""

from __future__ import annotations

from typing import final
from zlib import crc32

from tidemill.broker.engine.replication.actions import (
    Action,
    DivergenceAlarm,
    Stream,
    StreamClose,
    StreamDial,
    StreamSend,
)
from tidemill.broker.engine.replication.config import AckMode, ReplicationConfig
from tidemill.broker.engine.replication.epoch_journal import (
    CommonPrefix,
    FullCopy,
    LogExtent,
    cut_at,
)
from tidemill.broker.engine.replication.fencing import is_late, is_of_epoch, may_follow
from tidemill.broker.engine.replication.messages import (
    Ack,
    Data,
    Digest,
    Hello,
    MasterHeartbeat,
    Welcome,
)
from tidemill.broker.engine.replication.replica_phases import TRANSITIONS, PhaseChange, ReplicaPhase
from tidemill.broker.engine.replication.replicated_log import ReplicatedLog
from tidemill.broker.engine.replication.truncation import may_truncate
from tidemill.common.replica_group import ReplicaRun, ReplicationView

# Each replica saves a journal before its first record.
NEEDED = "the log differs from the master's, and the group may need it"
WAS_ALONE = (
    "the log has messages of a broker without replicas and no epoch of a broker group, so it is not"
    " deleted for the master's log. If the number and the data directory of this replica are right,"
    " move the data directory away and start the replica: it copies the log of its group"
)


@final
class Replica:
    """A replica that follows the master of one epoch."""

    def __init__(
        self,
        me: ReplicaRun,
        group: str,
        store_uuid: str,
        log: ReplicatedLog,
        view: ReplicationView,
        config: ReplicationConfig,
        now_ms: int,
    ) -> None:
        assert view.master is not None, "a master to follow"
        assert view.epoch >= log.epoch_seen, "not outdated"
        self.epoch = view.epoch
        self.master: ReplicaRun = view.master
        self.phase = ReplicaPhase.DISCONNECTED
        self.view = view
        self._me = me
        self._group = group
        self._store_uuid = store_uuid
        self._log = log
        self._config = config
        self._stream: Stream | None = None
        self._dial_at_ms = now_ms
        self._pause_ms = config.dial_first_ms
        # Time of the last message of this epoch's master; None if there was none. An accepted
        # connection is not a message: the kernel of a paused process accepts connections.
        self.heard_at_ms: int | None = None
        self._dialled_at_ms = now_ms
        self._sent_at_ms = now_ms
        self._acked: Ack | None = None
        self._is_full = False  # and the Hello of this stream said so
        self.is_disk_slow = False  # set by the owner
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return and clear the pending actions."""
        actions, self._actions = self._actions, []
        return actions

    def _may_change(self, change: PhaseChange) -> bool:
        """Return whether `change` is possible in this phase."""
        return self.phase in TRANSITIONS[change]

    def _change(self, change: PhaseChange) -> None:
        self.phase = TRANSITIONS[change][self.phase]

    def learn(self, view: ReplicationView, now_ms: int) -> None:
        """Apply a newer view of this epoch.

        A replica that was down may reach its master before it learns that it is not a member any
        more. When it learns that, the group does not need its log, and it may copy the master's.
        """
        self.view = view
        if self._may_change(PhaseChange.RELEASE) and not self._is_needed and not self._was_alone:
            self._change(PhaseChange.RELEASE)
            self._dial_at_ms = now_ms

    # ------------------------------------------------------------ the stream

    def handle_connected(self, stream: Stream, now_ms: int) -> None:
        """Send Hello on the new stream."""
        log = self._log
        self._change(PhaseChange.CONNECT)
        self._stream, self._dialled_at_ms = stream, now_ms
        extent = LogExtent(cut_at(log.journal, log.log_end), log.log_min, log.log_end)
        self._is_full = not log.has_room_for(0)
        hello = Hello(
            self._group,
            self._me,
            self._store_uuid,
            log.epoch_seen,
            self.view.version,
            extent,
            log.durable_offset,
            self._is_full,
        )
        self._actions.append(StreamSend(stream, hello))

    def handle_closed(self, now_ms: int) -> None:
        """Forget the stream, or the failed dial, and dial again after a pause."""
        self._stream, self._acked = None, None
        if self._may_change(PhaseChange.DISCONNECT):
            self._change(PhaseChange.DISCONNECT)
            self._dial_at_ms = now_ms + self._pause_ms
            self._pause_ms = min(2 * self._pause_ms, self._config.dial_longest_ms)

    def close(self, why: str, now_ms: int) -> None:
        """Close the stream."""
        if self._stream is not None:
            self._actions.append(StreamClose(self._stream, why))
        self.handle_closed(now_ms)

    def tick(self, now_ms: int) -> None:
        """Dial, ack, or close the stream of a silent master."""
        if self._may_change(PhaseChange.DIAL) and now_ms >= self._dial_at_ms:
            self._change(PhaseChange.DIAL)
            address = self.view.address_of(self.master.replica_id)
            self._actions.append(StreamDial(self.master, address))
        elif self._stream is not None and self._silent_ms(now_ms) > self._config.stream_silence_ms:
            self.close("silent", now_ms)
        elif self._stream is not None and self._is_full and self._log.has_room_for(0):
            self.close("the disk has room again", now_ms)
        elif self.phase is ReplicaPhase.FOLLOWING:
            is_quiet = now_ms - self._sent_at_ms >= self._config.heartbeat_ms
            self._send_ack(now_ms, anyway=is_quiet)

    def _silent_ms(self, now_ms: int) -> int:
        """Return for how long the master has been silent on this stream."""
        return now_ms - max(self._dialled_at_ms, self.heard_at_ms or 0)

    # ------------------------------------------------------------ messages of the master

    def handle_welcome(self, welcome: Welcome, now_ms: int) -> None:
        """Make the log a prefix of the master's log, and follow."""
        log = self._log
        if not self._may_change(PhaseChange.JOIN):
            return  # This replica has closed the stream.
        if not self._hear(now_ms):
            return
        if not may_follow(welcome.epoch, epoch_seen=log.epoch_seen):
            self.close(f"epoch {welcome.epoch} has ended", now_ms)
            return
        if welcome.epoch > log.epoch_seen:
            log.save_epoch_seen(welcome.epoch)
        self.epoch, self.master = welcome.epoch, welcome.master
        why = self._join(welcome)
        if why:
            self._change(PhaseChange.DIVERGE)
            self._actions.append(DivergenceAlarm(why))
            self.close(why, now_ms)
            return
        log.save_journal(welcome.extent.journal)
        log.follow_state_floor(welcome.extent.state_floor, welcome.extent.log_end)
        self._change(PhaseChange.JOIN)
        self._pause_ms = self._config.dial_first_ms
        self._confirm(welcome.confirm)
        self._send_ack(now_ms, anyway=True)

    def _join(self, welcome: Welcome) -> str:
        """Cut the log to the common part. Return the reason if that is not allowed, else ""."""
        log, agreement = self._log, welcome.agreement
        if self._was_alone:
            return WAS_ALONE
        if isinstance(agreement, CommonPrefix) and self._matches_digest(
            agreement.offset, welcome.digest
        ):
            cut, journal = agreement.offset, cut_at(log.journal, log.log_end)
            if not may_truncate(
                journal, cut=cut, confirm=log.confirm_offset, unclean_since=self.view.unclean_since
            ):
                return f"the cut at {cut} is before the confirm offset {log.confirm_offset}"
            if self._is_needed and cut < welcome.extent.state_floor:
                return NEEDED  # It would be emptied: state before the floor is not stated again.
            if cut < log.log_end:
                log.truncate(cut)
            return ""
        if self._is_needed:
            return NEEDED
        log.start_at(
            agreement.log_min if isinstance(agreement, FullCopy) else welcome.extent.log_min
        )
        return ""

    def _matches_digest(self, cut: int, digest: Digest) -> bool:
        log = self._log
        if not log.log_min <= digest.begin <= digest.end == cut <= log.log_end:
            return False
        mine = log.digest(digest.begin, digest.end)
        return mine is not None and digest.matches(mine)

    @property
    def _was_alone(self) -> bool:
        """Whether the log is one of a broker without replicas."""
        return self._log.log_min < self._log.log_end and not self._log.journal

    @property
    def _is_needed(self) -> bool:
        """Whether this replica may be elected. Then its log must not be deleted."""
        me, view = self._me.replica_id, self.view
        return me in view.eligible or any(member.replica_id == me for member in view.sss)

    def handle_part(self, now_ms: int) -> None:
        """Note that the master is not silent: a part of its next message has arrived."""
        if self.phase is ReplicaPhase.FOLLOWING:
            self._hear(now_ms)

    def _hear(self, now_ms: int) -> bool:
        """Note that the master is heard. Close the stream instead, and return False, if late."""
        if is_late(self._silent_ms(now_ms), silence_ms=self._config.stream_silence_ms):
            self.close("silent", now_ms)
            return False
        self.heard_at_ms = now_ms
        return True

    def handle_data(self, frame: Data, now_ms: int) -> None:
        """Append a frame of the master."""
        if not self._hear(now_ms):
            return
        if self.phase is not ReplicaPhase.FOLLOWING or not is_of_epoch(frame.epoch, self.epoch):
            self.close(f"unexpected frame of epoch {frame.epoch}", now_ms)
        elif frame.offset != self._log.log_end or crc32(frame.data) != frame.crc:
            self.close(f"the frame for {frame.offset} is damaged or not at the log end", now_ms)
        elif not self._log.has_room_for(len(frame.data)):
            # The next Hello reports it. That stream then carries only heartbeats.
            self.close("the disk has no room for the master's frames", now_ms)
        else:
            self._log.append(frame)
            self._confirm(frame.confirm)
            if self._config.ack_mode is AckMode.SYNC_MEMORY:
                self._send_ack(now_ms)

    def handle_beat(self, beat: MasterHeartbeat, now_ms: int) -> None:
        """Record a heartbeat and its confirm offset."""
        if (
            self._hear(now_ms)
            and self.phase is ReplicaPhase.FOLLOWING
            and is_of_epoch(beat.epoch, self.epoch)
        ):
            self._confirm(beat.confirm)

    def handle_progress(self, now_ms: int) -> None:
        """Ack records that are now durable or applied."""
        if self.phase is ReplicaPhase.FOLLOWING:
            self._send_ack(now_ms)

    def _confirm(self, offset: int) -> None:
        # The offset may lie after the log end. Later frames repeat it.
        known = min(offset, self._log.log_end)
        if known > self._log.confirm_offset:
            self._log.confirm(known)

    def _send_ack(self, now_ms: int, *, anyway: bool = False) -> None:
        log = self._log
        assert may_follow(self.epoch, epoch_seen=log.epoch_seen), "the epoch has ended"
        ack = Ack(
            self.epoch,
            self._me,
            log.log_end,
            log.durable_offset,
            log.applied_offset,
            self.is_disk_slow,
        )
        if self._stream is not None and (anyway or ack != self._acked):
            self._acked, self._sent_at_ms = ack, now_ms
            self._actions.append(StreamSend(self._stream, ack))
