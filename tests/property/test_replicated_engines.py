"""Three real engines of one broker group: masters die, and deliveries in flight stay in flight.

Machines, logs and folds are those of production. Messages between them arrive at once, or never if
a master dies first. `tests/simulation` covers time and the network.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import ENTROPY, SMALL, PoppedMessage, World
from tests.support.worlds.following import Follower
from tidemill.broker.engine.pop.consumption import AckResult
from tidemill.broker.engine.replica.opening import FreshIdentity, open_replica_engine
from tidemill.broker.engine.replication.actions import (
    DivergenceAlarm,
    MastershipRelease,
    Promotion,
    SetProposal,
    StepDown,
    StreamClose,
    StreamDial,
    StreamSend,
)
from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.engine.replication.messages import Ack, Hello
from tidemill.broker.engine.replication.replication import Replication
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView

STEPS = 30
GROUP, TOPIC = "group", "topic"


class Replica:
    """One run of a replica, from an empty volume."""

    def __init__(self, replica_id: int, number: int, world: Group) -> None:
        self.member = ReplicaRun(ReplicaId(replica_id), f"{replica_id}.{number}")
        self.disk = FaultyDisk(Random(number))
        identity = FreshIdentity(store_uuid=number.to_bytes(16, "big"), secret=ENTROPY)
        self.log, _ = open_replica_engine(self.disk, SMALL, now_ms=world.now_ms, fresh=identity)
        self.log.on_confirmed = self._apply
        self.engine = self.log.engine
        self._world = world
        self.machine = Replication(
            self.member,
            group="g",
            store_uuid=f"store {number}",
            log=self.log,
            config=ReplicationConfig(frame_bytes=900),
        )

    def _apply(self) -> None:
        self.log.now_ms = self._world.now_ms
        for _ in self.log.apply_slices():
            pass

    def sync(self) -> None:
        """Make all written bytes durable."""
        log_offset, files = self.engine.log.begin_sync()
        for file in files:
            file.sync()
        self.engine.log.note_synced(log_offset)
        self._apply()
        self.machine.handle_progress(self._world.now_ms)


class Group:
    """The living replicas, the group record, and the messages between them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_ms = 1_000_000
        self._runs = 0
        self._streams: dict[int, tuple[Replica, Replica]] = {}
        self.replicas = [self._new(n) for n in range(3)]
        members = frozenset(one.member for one in self.replicas)
        self.view = ReplicationView(1, 1, self.replicas[0].member, members, frozenset(), 2)
        self.share_view()

    def _new(self, replica_id: int) -> Replica:
        self._runs += 1
        return Replica(replica_id, self._runs, self)

    @property
    def master(self) -> Replica:
        """The replica that leads."""
        return next(one for one in self.replicas if one.member == self.view.master)

    def share_view(self) -> None:
        """Give the record to all living replicas, and deliver their messages."""
        for one in self.replicas:
            one.machine.learn(self.view, self.now_ms)
        self.carry()

    def carry(self) -> None:
        """Deliver all messages and sync all writes until there are none."""
        is_busy = True
        while is_busy:
            is_busy = False
            for one in self.replicas:
                for action in one.machine.take_actions():
                    is_busy = True
                    self._do(one, action)
            for one in self.replicas:
                if one.engine.log.log_end > one.engine.log.durable_offset:
                    one.engine.log.write()
                    one.sync()
                    is_busy = True

    def _do(self, source: Replica, action: object) -> None:
        now_ms = self.now_ms
        match action:
            case StreamDial(member, _):
                target = next((r for r in self.replicas if r.member == member), None)
                if target is None:
                    source.machine.handle_closed(None, now_ms)
                    return
                self._streams[len(self._streams)] = source, target
                source.machine.handle_connected(len(self._streams) - 1, now_ms)
            case StreamSend(stream, message):
                replica, master = self._streams[stream]
                if isinstance(message, Hello):
                    master.machine.handle_hello(stream, message, now_ms)
                elif isinstance(message, Ack):
                    master.machine.handle_ack(stream, message, now_ms)
                elif replica in self.replicas:
                    replica.machine.handle_message(stream, message, now_ms)
            case StreamClose(stream, _):
                for one in self._streams[stream]:
                    if one is not source and one in self.replicas:
                        one.machine.handle_closed(stream, now_ms)
            case SetProposal(proposal):
                self.view = self.view._replace(version=self.view.version + 1, sss=proposal.sss)
                for one in self.replicas:
                    one.machine.learn(self.view, now_ms)
            case Promotion():
                pass
            case DivergenceAlarm() | StepDown() | MastershipRelease():
                raise AssertionError(f"{source.member}: {action}")

    def pass_time(self, duration_ms: int) -> None:
        """Let time pass, for proposals and for heartbeats with confirm offsets."""
        for _ in range(duration_ms // 50):
            self.now_ms += 50
            for one in self.replicas:
                one.machine.tick(self.now_ms)
            self.carry()

    def fail_over(self) -> None:
        """Kill the master, elect another one, and begin a new replica in its place."""
        dead = self.master
        self.replicas.remove(dead)
        live = frozenset(one.member for one in self.replicas)
        for stream, ends in self._streams.items():
            for one in ends:
                if dead in ends and one in self.replicas:
                    one.machine.handle_closed(stream, self.now_ms)
        self.view = self.view._replace(
            epoch=self.view.epoch + 1,
            version=self.view.version + 1,
            master=self.random.choice(sorted(live)),
            sss=live,
        )
        self.share_view()
        self.replicas.append(self._new(dead.member.replica_id))
        self.share_view()
        self.pass_time(200)
        assert self.view.sss == {one.member for one in self.replicas}, "the new replica has joined"


class Clients:
    """The sends, pops and acks of the clients, and their replies."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.waiting: set[str] = set()
        self.unknown: set[str] = set()  # sent without a reply
        self.taken: dict[str, PoppedMessage] = {}
        self.count = 0
        self._world = World(FaultyDisk(Random(0)))
        self.go_on()

    def go_on(self) -> None:
        """Use this master from here on."""
        self._world.engine = self.group.master.engine
        self._world.disk = self.group.master.disk

    def _round(self) -> None:
        """Confirm the round, as every reply waits for that."""
        self.group.carry()
        self.group.master.machine.handle_progress(self.group.now_ms)
        self.group.carry()
        master = self.group.master
        assert master.log.confirm_offset == master.log.log_end, "all members have the round"

    def send(self) -> None:
        texts = [f"m{self.count + n}" for n in range(self.group.random.randint(1, 5))]
        self.count += len(texts)
        self._world.send(*texts, topic=TOPIC)
        self._round()
        self.waiting.update(texts)

    def send_in_vain(self) -> None:
        """Send messages that only the dying master has, or one other replica too."""
        self.count += 1
        text = f"m{self.count - 1}"
        self._world.send(text, topic=TOPIC)
        if self.group.random.random() < 0.5:
            self.group.master.machine.handle_progress(self.group.now_ms)
            self.group.carry()
        self.unknown.add(text)

    def pop(self) -> None:
        popped = self._world.pop(
            self.group.random.randint(1, 4), group=GROUP, topic=TOPIC, invisible_ms=3_600_000
        )
        self._round()
        for one in popped:
            assert one.body in self.waiting | self.unknown, f"{one.body} is in flight, or acked"
            assert one.attempt == 1
            self.waiting.discard(one.body)
            self.unknown.discard(one.body)
            self.taken[one.body] = one

    def ack(self) -> None:
        if self.taken:
            body = self.group.random.choice(sorted(self.taken))
            assert self._world.ack(self.taken.pop(body)) == [AckResult.APPLIED]
            self._round()

    def fail_over(self) -> None:
        self.send_in_vain()
        self.group.fail_over()
        self.go_on()
        self._round()
        compare(self.group)

    def drain(self) -> None:
        while self.waiting:
            before = len(self.waiting)
            self.pop()
            assert len(self.waiting) < before or self.unknown, f"{self.waiting} are lost"


def compare(group: Group) -> None:
    """Compare the whole state of the master with that of a follower."""
    group.pass_time(250)
    master = group.master
    for one in group.replicas:
        if one is not master:
            follower = Follower(SMALL)
            follower.engine = one.engine
            follower.compare(master.engine, group.now_ms, has_restarted=False)


@pytest.mark.parametrize("seed", seeds("replicated engines", 24))
def test_failovers_lose_no_message_and_deliver_none_again(seed: int) -> None:
    random = Random(seed)
    group = Group(random)
    clients = Clients(group)
    for _ in range(STEPS):
        step = random.choice(
            (clients.send, clients.send, clients.pop, clients.ack, clients.fail_over)
        )
        step()
    clients.fail_over()
    clients.drain()
