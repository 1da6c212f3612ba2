"""The replicas of a broker group: engines on `FaultyDisk`s, with streams without delay."""

from __future__ import annotations

from random import Random
from zlib import crc32

from tests.support.bodies import text_of
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import ENTROPY, SMALL, blob
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.replica.opening import FreshIdentity, open_replica_engine
from tidemill.broker.engine.replica.replica_engine import MustBeEmptied
from tidemill.broker.engine.replication.actions import (
    DivergenceAlarm,
    Promotion,
    SetProposal,
    StepDown,
    StreamClose,
    StreamDial,
    StreamSend,
)
from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.engine.replication.messages import Ack, Hello, Welcome
from tidemill.broker.engine.replication.replication import Replication
from tidemill.broker.engine.store.damaged_ranges import MendOutcome, MendRequest
from tidemill.broker.engine.store.mending import ForeignBytes, mend
from tidemill.broker.engine.store.segment import LogDamaged
from tidemill.broker.server.replicas.mending import served
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView
from tidemill.transport.grpc.status import RpcError

MARK_MS = 1_000  # period in which the broker records the durable end of its log


class Node:
    """One replica. Its disk outlives its process."""

    def __init__(self, number: int, config: EngineConfig) -> None:
        self.number = number
        self.config = config
        self.disk = FaultyDisk(Random(number))
        self.runs = 0
        self.boots = 1  # of its machine
        self.is_up = False
        self.diverged = ""
        self.start()

    def start(self) -> None:
        self.runs += 1
        self.is_up = True
        self.me = ReplicaRun(ReplicaId(self.number), f"{self.number}-{self.runs}")
        identity = FreshIdentity(bytes([self.number]) * 16, ENTROPY)
        self.log, self.report = open_replica_engine(
            self.disk,
            self.config,
            now_ms=1_000_000,
            fresh=identity,
            boot_id=self.boots.to_bytes(16),
        )
        self.engine.log.damage.has_replicas = True
        self.replication = Replication(
            self.me, group="g", store_uuid="s", log=self.log, config=ReplicationConfig()
        )

    @property
    def engine(self) -> Engine:
        return self.log.engine

    def kill(self, *, power_cut: bool = False) -> None:
        self.is_up = False
        self.boots += power_cut
        self.disk = self.disk.after_power_cut() if power_cut else self.disk.after_kill()

    def sync(self) -> None:
        """Sync the written bytes and report it to the log."""
        offset, files = self.engine.log.begin_sync()
        for file in [*files, *self.log.begin_sync()]:
            file.sync()
        self.engine.log.note_synced(offset)

    def apply(self) -> None:
        for _ in self.log.apply_slices():
            pass

    def bodies(self) -> list[str]:
        """Return the bodies in the topic's queue, up to the applied end."""
        topic = self.engine.catalog.find_topic("orders")
        if topic is None:
            return []
        queue = self.engine.catalog.queue(topic.id, QueueId(0))
        offsets = [queue.entry(n)[0] for n in range(queue.min_offset, queue.max_offset)]
        return [text_of(self.engine.store.record(offset).tail) for offset in offsets]


class Group:
    """All replicas, and the view that a controller would send them."""

    def __init__(self, count: int = 3, config: EngineConfig = SMALL) -> None:
        self.nodes = [Node(n, config) for n in range(count)]
        self.now_ms = 1_000_000
        self.view = ReplicationView(0, 0, None, frozenset(), frozenset(), 2)
        self._streams: dict[int, tuple[Node, Node]] = {}
        self._next_stream = 1
        self.cut_off: set[int] = set()  # unreachable replicas
        # The last proposed set of a master, if a test wants the group record to follow it.
        self.records_proposals = False
        self._proposal: Proposal | None = None

    def elect(self, number: int, *members: int) -> None:
        """Begin an epoch and send its view to all replicas that are up."""
        master = self.nodes[number]
        members = members or (number,)
        self.view = ReplicationView(
            self.view.epoch + 1,
            self.view.version + 1,
            master.me,
            frozenset(self.nodes[n].me for n in members),
            frozenset(),
            2,
            addresses=tuple((ReplicaId(n.number), f"h{n.number}:1") for n in self.nodes),
        )
        self.share_view()
        self.settle()

    def set_members(self, *members: int) -> None:
        self.view = self.view._replace(
            version=self.view.version + 1, sss=frozenset(self.nodes[n].me for n in members)
        )
        self.share_view()
        self.settle()

    def share_view(self) -> None:
        for node in self.nodes:
            if node.is_up and node.number not in self.cut_off:
                node.replication.learn(self.view, self.now_ms)
                if node.me in self.view.sss:
                    node.log.files.known_end.clear_doubt()
                self._carry(node)

    def send(self, *texts: str, size: int = 0) -> None:
        """Append messages at the master, one round per message, without a sync."""
        assert self.view.master is not None
        node = self.nodes[self.view.master.replica_id]
        topic = node.engine.catalog.find_topic("orders") or node.engine.administration.put_topic(
            "orders", type_=TopicType.NORMAL, queues=1, now_ms=self.now_ms
        )
        for text in texts:
            data = blob(text, size=size)
            node.engine.commands.send(
                topic.id, QueueId(0), data, crc32(data), now_ms=self.now_ms, firing_ms=self.now_ms
            )
            node.engine.write(self.now_ms)
            node.replication.handle_progress(self.now_ms)
            self._carry(node)

    def settle(self, duration_ms: int = 400) -> None:
        """Advance the clock while all replicas sync, send, confirm and apply."""
        for _ in range(duration_ms // 50):
            self.now_ms += 50
            for node in self.nodes:
                if not node.is_up:
                    continue
                node.log.now_ms = self.now_ms
                if self.now_ms % MARK_MS == 0:
                    node.log.files.request_mark(node.log.durable_offset)
                node.sync()
                node.replication.handle_progress(self.now_ms)
                self._carry(node)
                node.replication.tick(self.now_ms)
                self._carry(node)
                node.apply()
            self._record_proposal()

    def _record_proposal(self) -> None:
        """Let the group record have the proposed set, as controllers do."""
        proposal, self._proposal = self._proposal, None
        view = self.view
        if not self.records_proposals or proposal is None:
            return
        if (proposal.epoch, proposal.version) == (view.epoch, view.version):
            self.view = view._replace(version=view.version + 1, sss=proposal.sss)
            self.share_view()
            node = self.nodes[proposal.master.replica_id]
            node.replication.handle_acceptance(proposal.version, self.now_ms)
            self._carry(node)

    def mend(self, number: int) -> list[MendOutcome]:
        """Mend a replica's recorded damage from the other replicas; return the outcomes.

        The replica asks an unreachable replica once. The clock does not advance.
        """
        node, answers = self.nodes[number], []
        log, damage = node.engine.log, node.engine.log.damage
        others = [one.number for one in self.nodes if one is not node]
        while question := damage.next_request(others, self.now_ms):
            answer = self._ask(node, question)
            answers.append(answer)
            damage.handle_outcome(question, answer, self.now_ms)
        damage.forget_before(log.min_offset)
        return answers

    def _ask(self, node: Node, question: MendRequest) -> MendOutcome:
        asked = self.nodes[question.replica_id]
        if not asked.is_up or asked.number in self.cut_off:
            return MendOutcome.SILENT
        try:
            found = served(asked.log, question.begin, question.end)
        except RpcError:
            return MendOutcome.SILENT
        if not found:
            return MendOutcome.NOTHING
        is_written = False
        try:
            for files in mend(node.engine.log, node.disk, question.begin, found):
                for file in files:
                    file.sync()
                    is_written = True
        except ForeignBytes:
            return MendOutcome.NOTHING
        except LogDamaged:
            return MendOutcome.SILENT
        return MendOutcome.MENDED if is_written else MendOutcome.SOUND

    def kill(self, number: int, *, power_cut: bool = False) -> None:
        node = self.nodes[number]
        node.kill(power_cut=power_cut)
        self.lose_streams(node)

    def restart(self, number: int) -> None:
        self.nodes[number].start()
        self.nodes[number].replication.learn(self.view, self.now_ms)
        self._carry(self.nodes[number])

    def lose_streams(self, node: Node) -> None:
        for stream, ends in list(self._streams.items()):
            if node in ends:
                del self._streams[stream]
                for end in ends:
                    if end.is_up:
                        end.replication.handle_closed(stream, self.now_ms)
                        self._carry(end)

    def _carry(self, node: Node) -> None:
        for action in node.replication.take_actions():
            if isinstance(action, StreamDial):
                self._dial(node, action)
            elif isinstance(action, StreamSend):
                self._deliver(node, action)
            elif isinstance(action, StreamClose):
                self._close(action.stream)
            elif isinstance(action, StepDown):
                self.lose_streams(node)
                node.disk = node.disk.after_kill()
                node.start()
                node.replication.learn(self.view, self.now_ms)
                self._carry(node)
                return
            elif isinstance(action, DivergenceAlarm):
                node.diverged = action.why
            elif isinstance(action, SetProposal):
                self._proposal = action.proposal
            elif isinstance(action, Promotion):
                pass

    def _dial(self, node: Node, action: StreamDial) -> None:
        master = self.nodes[action.master.replica_id]
        if not master.is_up or {master.number, node.number} & self.cut_off:
            node.replication.handle_closed(None, self.now_ms)
        else:
            stream, self._next_stream = self._next_stream, self._next_stream + 1
            self._streams[stream] = (node, master)
            node.replication.handle_connected(stream, self.now_ms)
        self._carry(node)

    def _deliver(self, node: Node, action: StreamSend) -> None:
        ends = self._streams.get(action.stream)
        if ends is None:
            return
        replica, master = ends
        message = action.message
        if isinstance(message, Hello):
            master.replication.handle_hello(action.stream, message, self.now_ms)
            self._carry(master)
        elif isinstance(message, Ack):
            master.replication.handle_ack(action.stream, message, self.now_ms)
            self._carry(master)
        else:
            if isinstance(message, Welcome) and replica.engine.state.catch_up is not None:
                replica.log.catch_up_to = message.extent.log_end
            try:
                replica.replication.handle_message(action.stream, message, self.now_ms)
            except MustBeEmptied as must:
                self.lose_streams(replica)
                replica.disk = FaultyDisk(Random(replica.number))
                replica.start()
                replica.log.start_at(must.log_min)
                replica.replication.learn(self.view, self.now_ms)
            self._carry(replica)

    def _close(self, stream: int) -> None:
        for end in self._streams.pop(stream, ()):
            if end.is_up:
                end.replication.handle_closed(stream, self.now_ms)
                self._carry(end)
