"""The master's side of one epoch: streams of replicas, their frames, the confirm offset.

A `Master` lives from its promotion to the next epoch. Another epoch restarts every stream (E11).
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.replication.actions import (
    Action,
    MastershipRelease,
    SetProposal,
    StepDown,
    Stream,
    StreamClose,
    StreamSend,
)
from tidemill.broker.engine.replication.config import AckMode, ReplicationConfig
from tidemill.broker.engine.replication.epoch_journal import (
    CommonPrefix,
    Divergence,
    FullCopy,
    LogExtent,
    agree,
    cut_at,
    with_epoch,
)
from tidemill.broker.engine.replication.fencing import is_late, is_of_epoch, may_serve
from tidemill.broker.engine.replication.messages import (
    Ack,
    ForwardedView,
    Hello,
    MasterHeartbeat,
    Refusal,
    ToReplica,
    Welcome,
)
from tidemill.broker.engine.replication.replicated_log import ReplicatedLog
from tidemill.broker.engine.replication.sync_state import SyncState
from tidemill.broker.engine.replication.transfer import Transfer
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView


@final
class _Follower:
    """A stream of one replica after Welcome."""

    __slots__ = (
        "applied_end",
        "feature_level",
        "heard_at_ms",
        "is_full",
        "member",
        "received_end",
        "sent_at_ms",
        "sent_end",
    )

    def __init__(self, hello: Hello, sent_end: int, now_ms: int) -> None:
        self.member = hello.member
        self.is_full = hello.is_full  # its disk is full, so it gets no data
        self.feature_level = hello.feature_level
        self.sent_end = sent_end
        self.received_end = sent_end
        self.applied_end = sent_end  # until its first ack
        self.sent_at_ms = self.heard_at_ms = now_ms


@final
class Master:
    """The master of one epoch."""

    def __init__(
        self,
        me: ReplicaRun,
        group: str,
        log: ReplicatedLog,
        view: ReplicationView,
        config: ReplicationConfig,
        now_ms: int,
    ) -> None:
        """Begin the epoch: write its journal entry and its first record."""
        assert view.master == me, "elected"
        assert view.epoch >= log.epoch_seen, "and not outdated"
        self.epoch = view.epoch
        self._me = me
        self._group = group
        self._log = log
        self._config = config
        self._journal = with_epoch(
            cut_at(log.journal, log.log_end), view.epoch, log.log_end, log_min=log.log_min
        )
        # Save the journal first. A start that finds the record also finds its epoch; without the
        # record it drops the epoch.
        log.save_journal(self._journal)
        self.sync_state = SyncState(
            me,
            view,
            config,
            epoch_start_end=log.begin_epoch(view.epoch),
            confirm=log.confirm_offset,
            now_ms=now_ms,
        )
        self.transfer: Transfer | None = None
        # Replicas with a log that differs from this log.
        self.diverged_replicas: frozenset[ReplicaId] = frozenset()
        self._transfer_from_ms = now_ms
        self._awake_at_ms = now_ms  # the last event
        self._streams: dict[Stream, _Follower] = {}
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return and clear the pending actions."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def has_confirmed(self) -> bool:
        """Whether the first record of the epoch is confirmed. Then sends get replies."""
        commitment = self.sync_state.commitment
        return commitment.confirm >= commitment.epoch_start_end

    @property
    def accepts_sends(self) -> bool:
        """Whether messages may be appended. False during a hand-over."""
        return self.transfer is None

    # ------------------------------------------------------------ the log

    def handle_progress(self, now_ms: int) -> None:
        """Update the acks after the log has grown or after more of it is durable here."""
        self._note_time(now_ms)
        log, is_durable = self._log, self._config.ack_mode is AckMode.SYNC_FSYNC
        self.sync_state.record_own_end(log.durable_offset if is_durable else log.log_end)
        self._advance(now_ms)

    def _advance(self, now_ms: int) -> None:
        if self.sync_state.confirm > self._log.confirm_offset:
            self._log.confirm(self.sync_state.confirm)
        for stream, follower in list(self._streams.items()):
            self._send_frames(stream, follower, now_ms)
        self._request_release(now_ms)

    def _send_frames(self, stream: Stream, follower: _Follower, now_ms: int) -> None:
        """Send the frames that fit into the window; close the stream if they are deleted."""
        log, config = self._log, self._config
        if follower.sent_end < log.state_floor and not log.can_begin(follower.sent_end):
            # Retention waits only for members, and was faster. The next Hello gets a full copy.
            self._close(stream, f"the log has no records at {follower.sent_end} any more", now_ms)
            return
        while (
            not follower.is_full
            and follower.sent_end < log.log_end
            and follower.sent_end - follower.received_end < config.window_bytes
            # An elected replica first applies its backlog, and all clients wait for that.
            and follower.sent_end - follower.applied_end < config.unapplied_bytes
        ):
            frame = log.frame_at(follower.sent_end, config.frame_bytes)
            if frame is None:
                return  # The next round writes it; `handle_progress` reports it.
            confirm = self.sync_state.confirm
            self._send(stream, frame._replace(epoch=self.epoch, confirm=confirm), now_ms)
            follower.sent_end = frame.end

    def _send(self, stream: Stream, message: ToReplica, now_ms: int) -> None:
        self._streams[stream].sent_at_ms = now_ms
        self._actions.append(StreamSend(stream, message))

    # ------------------------------------------------------------ streams

    def handle_hello(self, stream: Stream, hello: Hello, now_ms: int) -> None:
        """Serve or reject a replica."""
        if hello.group != self._group or hello.member.replica_id == self._me.replica_id:
            self._refuse(
                stream,
                f"this is master {self._me.replica_id} of {self._group}",
                is_stranger=hello.group != self._group,
            )
            return
        if not may_serve(self.epoch, epoch_seen=hello.epoch_seen):
            if hello.member not in self.sync_state.view.sss | self.sync_state.peers.keys():
                # The epoch of an unknown run does not count: it may come from another group record.
                self._refuse(stream, "an unknown replica reports a later epoch")
                return
            # The group record has another master, which this replica has not seen yet. Save the
            # epoch first: a late view must not make this replica master again.
            self._log.save_epoch_seen(hello.epoch_seen)
            self._refuse(stream, "a later epoch has begun")
            self.resign(None)
            self._actions.append(StepDown(f"a replica has seen epoch {hello.epoch_seen}"))
            return
        level = self.sync_state.view.feature_level
        if hello.feature_level < level:
            self._refuse(
                stream, f"feature level {hello.feature_level}; the broker group needs {level}"
            )
            return
        if self._is_contested(hello.member, now_ms):
            self._refuse(stream, "another run of this replica is connected")
            return
        log = self._log
        mine = LogExtent(self._journal, log.log_min, log.log_end, log.state_floor)
        agreement = agree(mine, hello.extent)
        alone = frozenset({hello.member.replica_id})
        if isinstance(agreement, Divergence):
            self.diverged_replicas |= alone
            self._refuse(stream, agreement.why)
            return
        self.diverged_replicas -= alone
        if isinstance(agreement, CommonPrefix) and not log.can_begin(agreement.offset):
            agreement = FullCopy(log.log_min)
        begin = agreement.log_min if isinstance(agreement, FullCopy) else agreement.offset
        # Retention has shortened both logs. Both have this range.
        low = max(log.log_min, hello.extent.log_min)
        digest, confirm = log.digest(min(low, begin), begin), self.sync_state.confirm
        if digest is None:
            # Its digest would differ, and the replica would delete a good copy (F-26).
            self._refuse(stream, f"this master's log before {begin} is damaged")
            return
        self._replace_streams_of(hello.member, now_ms)
        follower = self._streams[stream] = _Follower(hello, begin, now_ms)
        self.sync_state.note_connected(hello.member, now_ms, is_full=hello.is_full)
        self._send(stream, Welcome(self.epoch, self._me, agreement, digest, mine, confirm), now_ms)
        self._send_frames(stream, follower, now_ms)

    def _refuse(self, stream: Stream, why: str, *, is_stranger: bool = False) -> None:
        view = None if is_stranger else self.sync_state.view
        self._actions.append(StreamSend(stream, Refusal(why, view)))
        self._actions.append(StreamClose(stream, why))

    def _is_contested(self, newcomer: ReplicaRun, now_ms: int) -> bool:
        """Return whether another run of this replica is connected and the newcomer is not a member.

        A process that starts from a copy of the volume, with a number that is not its own, must not
        replace the real replica. An ended process sends nothing.
        """
        if newcomer in self.sync_state.view.sss:
            return False
        return any(
            one.member.replica_id == newcomer.replica_id
            and one.member != newcomer
            and now_ms - one.heard_at_ms <= self._config.stream_silence_ms
            for one in self._streams.values()
        )

    def _replace_streams_of(self, member: ReplicaRun, now_ms: int) -> None:
        for stream, follower in list(self._streams.items()):
            if follower.member.replica_id == member.replica_id:
                self._close(stream, "the replica opened another stream", now_ms)

    def handle_ack(self, stream: Stream, ack: Ack, now_ms: int) -> None:
        """Record the ends of an ack; close the stream if the ack is invalid."""
        follower = self._streams.get(stream)
        if follower is None:
            return
        self._note_time(now_ms)
        if stream not in self._streams:
            return
        is_durable = self._config.ack_mode is AckMode.SYNC_FSYNC
        if not (
            is_of_epoch(ack.epoch, self.epoch)
            and ack.member == follower.member
            and follower.received_end <= ack.received_end <= self._log.log_end
            and ack.durable_end <= ack.received_end
        ):
            self._close(stream, f"invalid ack: {ack}", now_ms)
            return
        follower.received_end, follower.heard_at_ms = ack.received_end, now_ms
        follower.applied_end = ack.applied_end
        end = ack.durable_end if is_durable else ack.received_end
        self.sync_state.record_ack(ack.member, end, now_ms, is_slow=ack.is_slow)
        self._advance(now_ms)

    def handle_closed(self, stream: Stream, now_ms: int) -> None:
        """Forget a stream that has ended."""
        follower = self._streams.pop(stream, None)
        if follower is not None:
            self.sync_state.note_disconnected(follower.member, now_ms)
            if self.transfer is not None and self.transfer.target == follower.member:
                self._cancel_transfer(now_ms)

    def _note_time(self, now_ms: int) -> None:
        """Doubt the epoch after a standstill, and close silent streams.

        Earlier acks of silent replicas must not confirm either.
        """
        if is_late(now_ms - self._awake_at_ms, silence_ms=self._config.stream_silence_ms):
            # The replicas that paused with it may connect again, and ack, before a view arrives.
            self.sync_state.doubt(now_ms)
        self._awake_at_ms = now_ms
        self.sync_state.note_silence(now_ms)
        for stream, follower in list(self._streams.items()):
            if is_late(now_ms - follower.heard_at_ms, silence_ms=self._config.stream_silence_ms):
                self._close(stream, "silent", now_ms)

    def _close(self, stream: Stream, why: str, now_ms: int) -> None:
        self.handle_closed(stream, now_ms)
        self._actions.append(StreamClose(stream, why))

    # ------------------------------------------------------------ views and time

    def learn(self, view: ReplicationView, now_ms: int) -> None:
        """Apply a newer view of this epoch."""
        self._note_time(now_ms)
        self.sync_state.learn(view, now_ms)
        for stream, follower in list(self._streams.items()):
            if follower.feature_level < view.feature_level:
                # A retired replica, which the level did not wait for.
                self._close(
                    stream, f"the broker group needs feature level {view.feature_level}", now_ms
                )
        self._advance(now_ms)

    def handle_acceptance(self, version: int, now_ms: int) -> None:
        """Handle the acceptance of the last proposal, which was made against `version`."""
        self._note_time(now_ms)
        self.sync_state.handle_acceptance(version)
        self._advance(now_ms)

    def handle_rejection(self, version: int, now_ms: int) -> None:
        """Handle a rejected proposal that was made against `version`."""
        self.sync_state.handle_rejection(version, now_ms)

    def tick(self, now_ms: int) -> None:
        """Send heartbeats, close silent streams, propose a set, and cancel a late transfer."""
        self._note_time(now_ms)
        for stream, follower in self._streams.items():
            if now_ms - follower.sent_at_ms >= self._config.heartbeat_ms:
                self._send(stream, MasterHeartbeat(self.epoch, self.sync_state.confirm), now_ms)
        proposal = self.sync_state.tick(self._log.log_end, now_ms)
        if proposal is not None:
            self._actions.append(SetProposal(proposal))
        if self.transfer is not None and self.transfer.has_failed(now_ms):
            self._cancel_transfer(now_ms)

    # ------------------------------------------------------------ the hand-over

    def hand_over(self, target: ReplicaId | None, now_ms: int) -> bool:
        """Begin a transfer to `target`, or to the replica that lags least; return whether one runs.

        A running transfer continues. A repeated call does not extend its time.
        """
        if self.transfer is not None:
            return True
        if now_ms < self._transfer_from_ms:
            return False
        near = self._log.log_end - self._config.near_bytes
        acked = self.sync_state.acked
        peers = self.sync_state.peers
        candidates = [
            member
            for member in self.sync_state.view.sss
            if member != self._me
            and target in (None, member.replica_id)
            and peers[member].is_connected
            and acked(member) >= near
        ]
        if not candidates:
            return False
        best = max(candidates, key=lambda member: (acked(member), -member.replica_id))
        self.transfer = Transfer(best, self._config, now_ms)
        self._request_release(now_ms)
        return True

    def _cancel_transfer(self, now_ms: int) -> None:
        """Accept sends again, and begin no other transfer for a while."""
        self.transfer = None
        self._transfer_from_ms = now_ms + self._config.transfer_pause_ms

    def _request_release(self, now_ms: int) -> None:
        transfer, view = self.transfer, self.sync_state.view
        if transfer is None:
            return
        acked = self.sync_state.acked(transfer.target)
        if transfer.is_ready(acked=acked, log_end=self._log.log_end):
            transfer.is_requested = True
            target = transfer.target.replica_id
            paused_ms = now_ms - transfer.began_at_ms
            self._actions.append(
                MastershipRelease(self.epoch, view.version, self._me, target, paused_ms)
            )

    def resign(self, view: ReplicationView | None) -> None:
        """Close all streams. Tell their replicas the view of the new epoch, if it is known."""
        for stream in self._streams:
            if view is not None:
                self._actions.append(StreamSend(stream, ForwardedView(view)))
            self._actions.append(StreamClose(stream, "a later epoch has begun"))
        self._streams.clear()

    def peer_silence_ms(self, now_ms: int) -> dict[ReplicaId, int]:
        """Return for how long each connected replica has been silent."""
        streams = self._streams.values()
        return {one.member.replica_id: now_ms - one.heard_at_ms for one in streams}
