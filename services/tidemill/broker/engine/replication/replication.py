"""One replica of a broker group: the epoch that it has seen, and its role in this epoch.

    learn(view)          a view from a controller, the old master, or a refusal
    handle_...           messages and events of streams
    handle_progress      the log has grown, or more of it is durable or applied
    tick                 at least every 50 ms
    take_actions         after each of these calls

Invariant: an epoch is durable before it has any effect. A replica is master only of an epoch whose
view names this run of it (F-14).
"""

from __future__ import annotations

from typing import assert_never, final

from tidemill.broker.engine.replication.actions import (
    Action,
    Promotion,
    StepDown,
    Stream,
    StreamClose,
    StreamSend,
)
from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.engine.replication.epoch_journal import cut_at, last_epoch
from tidemill.broker.engine.replication.fencing import is_news, is_of_group, may_begin, may_lead
from tidemill.broker.engine.replication.master import Master
from tidemill.broker.engine.replication.messages import (
    Ack,
    Data,
    ForwardedView,
    Hello,
    MasterHeartbeat,
    Refusal,
    ToReplica,
    Welcome,
)
from tidemill.broker.engine.replication.replica import Replica
from tidemill.broker.engine.replication.replica_phases import ReplicaPhase
from tidemill.broker.engine.replication.replicated_log import ReplicatedLog
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView


@final
class Replication:
    """A replica's part in its group, for the life of its process."""

    def __init__(
        self,
        me: ReplicaRun,
        *,
        group: str,
        store_uuid: str,
        log: ReplicatedLog,
        config: ReplicationConfig,
    ) -> None:
        self.me = me
        self.view: ReplicationView | None = None
        self.master: Master | None = None
        self.replica: Replica | None = None
        self.has_stepped_down = False
        self.is_disk_slow = False  # set by the owner before a tick
        self._group = group
        self._store_uuid = store_uuid
        self._log = log
        self._config = config
        self._dialled: Stream | None = None
        self._postponed: tuple[ReplicationView, int] | None = None  # a view and its deadline
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return and clear the pending actions, in order."""
        self._collect_actions()
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------ roles

    def learn(self, view: ReplicationView, now_ms: int) -> None:
        """Apply a view if it is newer than the known one."""
        if not is_of_group(view, self._group):
            return
        epoch_seen = self._log.epoch_seen
        if not is_news(self.view, view, epoch_seen=epoch_seen):
            return
        if self._postpone_promotion(view, now_ms):
            return
        if view.epoch > epoch_seen:
            self._log.save_epoch_seen(view.epoch)
        self.view = view
        if self.has_stepped_down:
            return
        if self.master is not None:
            if view.epoch == self.master.epoch:
                if may_lead(view, self.me, epoch_seen=epoch_seen):
                    self.master.learn(view, now_ms)
                    return
                self._step_down(view, "another run of this replica is recorded")
                return
            if view.master != self.me:
                self._step_down(view, f"epoch {view.epoch} has begun")
                return
        log_epoch = last_epoch(cut_at(self._log.journal, self._log.log_end))
        if may_begin(view, self.me, epoch_seen=epoch_seen, log_epoch=log_epoch):
            self._promote(view, now_ms)
        elif view.master is not None and view.master.replica_id != self.me.replica_id:
            self._follow(view, now_ms)
        else:
            self._disconnect_master("the view names no master", now_ms)

    def _postpone_promotion(self, view: ReplicationView, now_ms: int) -> bool:
        """Postpone a view that promotes this replica; return whether it is postponed.

        Meanwhile the replica applies its backlog in slices. In one turn that could take longer than
        the heartbeat timeout of its peers.
        """
        log, config = self._log, self._config
        unapplied = min(log.confirm_offset, log.durable_offset) - log.applied_offset
        is_too_much = (
            self.master is None
            and view.master == self.me
            and unapplied > config.applied_at_once_bytes
        )
        postponed, self._postponed = self._postponed, None
        if is_too_much:
            is_known = postponed is not None and postponed[0].epoch == view.epoch
            until_ms = postponed[1] if postponed and is_known else now_ms + config.apply_first_ms
            if now_ms < until_ms:
                self._postponed = view, until_ms
        return self._postponed is not None

    def _promote(self, view: ReplicationView, now_ms: int) -> None:
        if self.master is not None:
            # Elected again: close the streams of the previous epoch.
            self.master.resign(view)
            self._collect_actions()
        self._disconnect_master("this replica is the master", now_ms)
        self.master = Master(self.me, self._group, self._log, view, self._config, now_ms)
        self._actions.append(Promotion(view))
        self.master.handle_progress(now_ms)

    def _follow(self, view: ReplicationView, now_ms: int) -> None:
        if self.replica is not None and self.replica.epoch == view.epoch:
            self.replica.learn(view, now_ms)
            return
        self._disconnect_master(f"epoch {view.epoch} has begun", now_ms)
        self.replica = Replica(
            self.me, self._group, self._store_uuid, self._log, view, self._config, now_ms
        )
        self.replica.tick(now_ms)

    def _disconnect_master(self, why: str, now_ms: int) -> None:
        if self.replica is not None:
            self.replica.close(why, now_ms)
            self._collect_actions()
            self.replica, self._dialled = None, None

    def _step_down(self, view: ReplicationView | None, why: str) -> None:
        assert self.master is not None, "only a master steps down"
        if view is not None:
            self.master.resign(view)
        self._collect_actions()
        self.master, self.has_stepped_down = None, True
        self._actions.append(StepDown(why))

    def _collect_actions(self) -> None:
        role = self.master or self.replica
        if role is None:
            return
        for action in role.take_actions():
            self._actions.append(action)
            if isinstance(action, StepDown):
                self.master, self.has_stepped_down = None, True

    # ------------------------------------------------------------ events

    def handle_hello(self, stream: Stream, hello: Hello, now_ms: int) -> None:
        """Serve or reject a replica that opened a stream to this one."""
        if self.master is None:
            view = self.view if hello.group == self._group else None
            self._actions.append(
                StreamSend(stream, Refusal("this replica is not the master", view))
            )
            self._actions.append(StreamClose(stream, "not the master"))
        else:
            self.master.handle_hello(stream, hello, now_ms)

    def handle_ack(self, stream: Stream, ack: Ack, now_ms: int) -> None:
        """Record the ack of a following replica."""
        if self.master is not None:
            self.master.handle_ack(stream, ack, now_ms)

    def handle_connected(self, stream: Stream, now_ms: int) -> None:
        """Greet the master on the stream that a `StreamDial` opened."""
        if self.replica is None:
            self._actions.append(StreamClose(stream, "the master has changed since the dial"))
            return
        self._dialled = stream
        self.replica.handle_connected(stream, now_ms)

    def handle_message(self, stream: Stream, message: ToReplica, now_ms: int) -> None:
        """Handle a message of the master."""
        replica = self.replica
        if replica is None or stream != self._dialled:
            return
        match message:
            case Welcome():
                replica.handle_welcome(message, now_ms)
            case Data():
                replica.handle_data(message, now_ms)
            case MasterHeartbeat():
                replica.handle_beat(message, now_ms)
            case ForwardedView(view):
                self.learn(view, now_ms)
            case Refusal(why, view):
                replica.close(why, now_ms)
                if view is not None:
                    self.learn(view, now_ms)
            case _:
                assert_never(message)

    def handle_part(self, now_ms: int) -> None:
        """Handle the arrival of a part of a message of the master."""
        if self.replica is not None:
            self.replica.handle_part(now_ms)

    def handle_closed(self, stream: Stream | None, now_ms: int) -> None:
        """Handle the end of a stream. None means that a dial failed."""
        if self.master is not None and stream is not None:
            self.master.handle_closed(stream, now_ms)
        elif self.replica is not None and stream in (None, self._dialled):
            self._dialled = None
            self.replica.handle_closed(now_ms)

    def handle_progress(self, now_ms: int) -> None:
        """Act on new log records, or on a higher durable or applied offset."""
        if self._postponed is not None:
            self.learn(self._postponed[0], now_ms)
        role = self.master or self.replica
        if role is not None:
            role.handle_progress(now_ms)

    def tick(self, now_ms: int) -> None:
        """Act on the passing of time. Call this at least every 50 ms."""
        if self._postponed is not None:
            self.learn(self._postponed[0], now_ms)
        if self.replica is not None:
            self.replica.is_disk_slow = self.is_disk_slow
        role = self.master or self.replica
        if role is not None:
            role.tick(now_ms)

    def handle_acceptance(self, version: int, now_ms: int) -> None:
        """Handle the acceptance of the last proposal, which was made against `version`."""
        if self.master is not None:
            self.master.handle_acceptance(version, now_ms)

    def handle_rejection(self, version: int, now_ms: int) -> None:
        """Handle a rejected proposal that was made against `version`."""
        if self.master is not None:
            self.master.handle_rejection(version, now_ms)

    def hand_over(self, target: ReplicaId | None, now_ms: int) -> bool:
        """Begin a planned transfer; return whether a target exists."""
        return self.master is not None and self.master.hand_over(target, now_ms)

    # ------------------------------------------------------------ for heartbeats

    @property
    def diverged_replicas(self) -> frozenset[ReplicaId]:
        """Replicas with a log that differs from their master's and may not be cut."""
        if self.master is not None:
            return self.master.diverged_replicas
        is_diverged = self.replica is not None and self.replica.phase is ReplicaPhase.DIVERGED
        return frozenset({self.me.replica_id}) if is_diverged else frozenset()

    def peer_silence_ms(self, now_ms: int) -> dict[ReplicaId, int]:
        """Return for how long each known peer has been silent."""
        if self.master is not None:
            return self.master.peer_silence_ms(now_ms)
        if self.replica is not None and self.replica.heard_at_ms is not None:
            return {self.replica.master.replica_id: now_ms - self.replica.heard_at_ms}
        return {}
