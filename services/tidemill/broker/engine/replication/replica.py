"""A replica's side of one epoch: dial the master, cut what it does not have, append what it sends.

Invariant: what is acked in an epoch was appended behind a cut that the master of that epoch agreed
to, and no ack of an epoch leaves once a later one was seen (F-10).
"""

from __future__ import annotations

from enum import Enum, auto
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
from tidemill.broker.engine.replication.messages import Ack, Beat, Data, Digest, Hello, Welcome
from tidemill.broker.engine.replication.replicated_log import ReplicatedLog
from tidemill.broker.engine.replication.truncation import may_truncate
from tidemill.common.replica_group import ReplicaRun, ReplicationView


class ReplicaPhase(Enum):
    """How far a replica is with its master."""

    DISCONNECTED = auto()  # until it dials again
    DIALLING = auto()
    GREETING = auto()  # Hello is out
    FOLLOWING = auto()
    DIVERGED = auto()  # until nobody needs what it has: an operator must look


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
        assert view.master is not None, "somebody to follow"
        assert view.epoch >= log.epoch_seen, "who is not outdated"
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
        # Of the master of this epoch; None: nothing yet. A connection that was accepted is no word
        # of it: the kernel of one that stands still accepts.
        self.heard_at_ms: int | None = None
        self._dialled_at_ms = now_ms
        self._sent_at_ms = now_ms
        self._acked: Ack | None = None
        self._is_full = False  # and the master was told so, on this stream
        self.is_disk_slow = False  # the disk, as its owner says
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return and clear what is to be done."""
        actions, self._actions = self._actions, []
        return actions

    def learn(self, view: ReplicationView, now_ms: int) -> None:
        """Take a newer view of this epoch.

        Who was away hears its master before it hears that it is no member any more; then nobody
        needs what it has, and it may be copied again.
        """
        self.view = view
        if self.phase is ReplicaPhase.DIVERGED and not self._is_needed:
            self.phase, self._dial_at_ms = ReplicaPhase.DISCONNECTED, now_ms

    # ------------------------------------------------------------ the stream

    def handle_connected(self, stream: Stream, now_ms: int) -> None:
        """Say who we are: the master is connected."""
        log = self._log
        self._stream, self.phase, self._dialled_at_ms = stream, ReplicaPhase.GREETING, now_ms
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
        """Try again after a pause: there is no stream to the master, or no more."""
        self._stream, self._acked = None, None
        if self.phase is not ReplicaPhase.DIVERGED:
            self.phase = ReplicaPhase.DISCONNECTED
            self._dial_at_ms = now_ms + self._pause_ms
            self._pause_ms = min(2 * self._pause_ms, self._config.dial_longest_ms)

    def close(self, why: str, now_ms: int) -> None:
        """End the stream."""
        if self._stream is not None:
            self._actions.append(StreamClose(self._stream, why))
        self.handle_closed(now_ms)

    def tick(self, now_ms: int) -> None:
        """Dial, ack, and give up a master that is silent."""
        if self.phase is ReplicaPhase.DISCONNECTED and now_ms >= self._dial_at_ms:
            self.phase = ReplicaPhase.DIALLING
            address = self.view.address_of(self.master.replica_id)
            self._actions.append(StreamDial(self.master, address))
        elif self._stream is not None and self._silent_ms(now_ms) > self._config.stream_silence_ms:
            self.close("silent", now_ms)
        elif self._stream is not None and self._is_full and self._log.has_room_for(0):
            self.close("there is room again for what the master sends", now_ms)
        elif self.phase is ReplicaPhase.FOLLOWING:
            is_quiet = now_ms - self._sent_at_ms >= self._config.heartbeat_ms
            self._send_ack(now_ms, anyway=is_quiet)

    def _silent_ms(self, now_ms: int) -> int:
        """Return for how long this stream has said nothing."""
        return now_ms - max(self._dialled_at_ms, self.heard_at_ms or 0)

    # ------------------------------------------------------------ what the master says

    def handle_welcome(self, welcome: Welcome, now_ms: int) -> None:
        """Make the log a beginning of the master's."""
        log = self._log
        self.heard_at_ms = now_ms
        if not may_follow(welcome.epoch, epoch_seen=log.epoch_seen):
            self.close(f"epoch {welcome.epoch} is over", now_ms)
            return
        if welcome.epoch > log.epoch_seen:
            log.save_epoch_seen(welcome.epoch)
        self.epoch, self.master = welcome.epoch, welcome.master
        why = self._join(welcome)
        if why:
            self.phase = ReplicaPhase.DIVERGED
            self._actions.append(DivergenceAlarm(why))
            self.close(why, now_ms)
            return
        log.save_journal(welcome.extent.journal)
        self.phase, self._pause_ms = ReplicaPhase.FOLLOWING, self._config.dial_first_ms
        self._confirm(welcome.confirm)
        self._send_ack(now_ms, anyway=True)

    def _join(self, welcome: Welcome) -> str:
        """Cut the log to where it agrees; return why that may not be, or nothing."""
        log, agreement = self._log, welcome.agreement
        if isinstance(agreement, CommonPrefix) and self._matches_digest(
            agreement.offset, welcome.digest
        ):
            cut, journal = agreement.offset, cut_at(log.journal, log.log_end)
            if not may_truncate(
                journal, cut=cut, confirm=log.confirm_offset, unclean_since=self.view.unclean_since
            ):
                return f"a cut at {cut}, before what is confirmed: {log.confirm_offset}"
            if cut < log.log_end:
                log.truncate(cut)
            return ""
        if self._is_needed:
            return "what this replica holds is not what its master has, and others may need it"
        log.start_at(
            agreement.log_min if isinstance(agreement, FullCopy) else welcome.extent.log_min
        )
        return ""

    def _matches_digest(self, cut: int, digest: Digest) -> bool:
        log = self._log
        if not log.log_min <= digest.begin <= digest.end == cut <= log.log_end:
            return False
        return log.digest(digest.begin, digest.end) == digest

    @property
    def _is_needed(self) -> bool:
        """Whether this replica may be elected: then nobody may empty it."""
        me, view = self._me.replica_id, self.view
        return me in view.eligible or any(member.replica_id == me for member in view.sss)

    def handle_data(self, frame: Data, now_ms: int) -> None:
        """Append what the master sends."""
        if is_late(self._silent_ms(now_ms), silence_ms=self._config.stream_silence_ms):
            self.close("silent", now_ms)
            return
        self.heard_at_ms = now_ms
        if self.phase is not ReplicaPhase.FOLLOWING or not is_of_epoch(frame.epoch, self.epoch):
            self.close(f"a frame of epoch {frame.epoch}", now_ms)
        elif frame.offset != self._log.log_end or crc32(frame.data) != frame.crc:
            self.close(f"a frame for {frame.offset} that does not fit, or is damaged", now_ms)
        elif not self._log.has_room_for(len(frame.data)):
            # The next stream says so: it goes on with heartbeats alone.
            self.close("no room on the disk for what the master sends", now_ms)
        else:
            self._log.append(frame)
            self._confirm(frame.confirm)
            if self._config.ack_mode is AckMode.SYNC_MEMORY:
                self._send_ack(now_ms)

    def handle_beat(self, beat: Beat, now_ms: int) -> None:
        """Hear that the master is there."""
        self.heard_at_ms = now_ms
        if self.phase is ReplicaPhase.FOLLOWING and is_of_epoch(beat.epoch, self.epoch):
            self._confirm(beat.confirm)

    def handle_progress(self, now_ms: int) -> None:
        """Hear that more of the log is durable, or applied."""
        if self.phase is ReplicaPhase.FOLLOWING:
            self._send_ack(now_ms)

    def _confirm(self, offset: int) -> None:
        # What is confirmed and has not come yet is confirmed when it comes.
        known = min(offset, self._log.log_end)
        if known > self._log.confirm_offset:
            self._log.confirm(known)

    def _send_ack(self, now_ms: int, *, anyway: bool = False) -> None:
        log = self._log
        assert may_follow(self.epoch, epoch_seen=log.epoch_seen), "an epoch that is over"
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
