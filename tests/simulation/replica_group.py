"""One broker group of three to five replicas, two controllers and their store, under faults.

    python -m tests.simulation.replica_group --seeds 200 --first 0

Production code makes all decisions: `broker.engine.replication` and `controller.election`. Network,
disks, store and time are simulated. A run begins with a situation that its seed chooses
(`situations.py`) and continues with random faults. A client sends and records the answers. The
history is judged at each confirmation and after all faults are repaired.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol, final

from tests.simulation.loop import simulate
from tests.simulation.replica_controller import (
    Controller,
    Drain,
    ForgetReplica,
    MinInSync,
    ModelStore,
    view_text,
)
from tests.simulation.replica_network import ReplicaNetwork
from tests.simulation.replica_process import Answer, ReplicaProcess, Volume
from tests.simulation.replica_values import Values
from tests.simulation.situations import Situation, SituationNotReached, Stage
from tidemill.broker.engine.replication.config import AckMode, ReplicationConfig
from tidemill.broker.engine.replication.messages import Ack
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView
from tidemill.controller.election.record import GroupRecord, view_of
from tidemill.controller.election.retirement import is_out
from tidemill.controller.election.sessions import ElectionTiming

TROUBLE_S = 40.0  # of virtual time with faults
WRITABLE_S_MAX = 8.0  # after all faults are repaired
IN_SYNC_S_MAX = 60.0
SEND_EVERY_S = 0.02
REPLICAS = 3  # at the beginning and at the end
REPLICAS_MAX = 5  # in between
MIN_IN_SYNC = 2
LOOK_S = 0.05
PODS_EVERY_S = 0.5  # the period of the simulated StatefulSet
NOTES_MAX = 400


@dataclass
class Run:
    """The record and the verdict of one seed."""

    seed: int
    findings: list[str] = field(default_factory=list)
    sent: int = 0
    answered: int = 0
    epochs: int = 0
    longest_gap_s: float = 0.0
    writable_after_s: float = 0.0
    trace: int = 0
    situation: str = ""
    was_staged: bool = False  # the situation was played to its end
    faults: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "; ".join(self.findings) or "ok"
        return (
            f"seed {self.seed}, {self.situation}: "
            f"sent {self.sent}, answered {self.answered}, epochs {self.epochs}, longest gap "
            f"{self.longest_gap_s:.2f} s, healed in {self.writable_after_s:.2f} s: {verdict}"
        )


class Contents(Protocol):
    """The contents of the replicas, with the clients that use and judge them."""

    mode: AckMode | None  # the only possible mode; None: any mode
    situations: Mapping[str, Situation]  # a run chooses one of them

    def volume(self, replica: ReplicaProcess) -> Volume:
        """Return an empty volume."""

    def act(self, replica: ReplicaProcess) -> Answer:
        """Send a request to a master; return the function that delivers its answer."""

    def give_up(self, confirmed: bytes) -> None:
        """Forget everything that is not in `confirmed`: an operator has given it up."""

    async def drain(self) -> None:
        """Let clients receive their backlog after all faults are repaired."""

    def judge(self, confirmed: bytes) -> None:
        """Judge the contents, which all replicas have."""


@final
class World:
    """All processes, the network, and the promises that they have made."""

    def __init__(
        self, run: Run, random: Random, situation: str, contents: Callable[[World], Contents]
    ) -> None:
        self.run = run
        self.random = random
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._failed)
        self.network = ReplicaNetwork(random)
        # In memory mode, a power cut of all replicas would lose acknowledged messages.
        drawn = AckMode.SYNC_FSYNC if random.random() < 0.5 else AckMode.SYNC_MEMORY
        self.findings = run.findings
        self.contents = contents(self)
        run.situation = situation or random.choice(list(self.contents.situations))
        self._situation = self.contents.situations[run.situation]
        mode = self.mode = self.contents.mode or self._situation.mode or drawn
        self.store = ModelStore(GroupRecord(min_in_sync=MIN_IN_SYNC), random)
        config = ReplicationConfig(ack_mode=mode)
        self.replicas = [ReplicaProcess(self, n, config) for n in range(REPLICAS_MAX)]
        self.wanted_replicas = REPLICAS
        self._pods = 0  # replicas below this number have a pod, which restarts them
        self.controllers = [Controller(self, n, ElectionTiming()) for n in range(2)]
        self.counts: Counter[str] = run.faults
        self.latest: dict[str, ReplicationView] = {}
        self.sends = True  # whether clients send
        self.has_stalls = True  # whether syncs stall for longer than a member may lag
        self._ids = 0
        self._confirmed = bytearray()  # every byte that a master has confirmed
        self._masters: dict[int, ReplicaRun] = {}
        # By replica: its life, and the end offset of its compared confirmed bytes.
        self._checked: dict[str, tuple[int, int]] = {}
        self.was_replaced = False  # an operator has replaced a master: confirmed bytes may be cut
        self.store.on_replaced = self._give_up
        self.store.on_removed = self._register_again
        self._paused_at_s: dict[str, float] = {}
        self._answered_at_s = self.loop.time()

    # ------------------------------------------------------------ services of the world

    def now_ms(self) -> int:
        """Return monotonic time."""
        return round(self.loop.time() * 1000)

    def new_id(self) -> str:
        """Return a unique id."""
        self._ids += 1
        return f"write {self._ids}"

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        self.run.notes.append(f"{self.loop.time() - 1000:8.3f} {what}")
        del self.run.notes[:-NOTES_MAX]

    def paused_for_s(self, replica: ReplicaProcess) -> float:
        """Return for how long a process has been paused."""
        return self.loop.time() - self._paused_at_s.get(replica.name, self.loop.time())

    def send_view(
        self, controller: Controller, replica: ReplicaProcess, view: ReplicationView
    ) -> None:
        """Send a view to a replica."""
        run = replica.lives

        def arrive() -> None:
            if not replica.is_alive or replica.lives != run:
                return
            registered = self.store.stored.record.find_member(replica.id)
            if registered == replica.member:
                replica.is_registered = True
            if replica.is_paused:
                replica.deferred.append(lambda: replica.learn(view))
            else:
                replica.learn(view)

        self.network.send(controller.name, replica.name, arrive)

    def accept_proposal(self, controller: Controller, proposal: Proposal) -> None:
        """Send the acceptance of a proposal to its master."""
        replica = self.replicas[proposal.master.replica_id]
        self.network.send(
            controller.name, replica.name, lambda: replica.proposal_accepted(proposal)
        )

    def reject_proposal(self, controller: Controller, proposal: Proposal) -> None:
        """Send the rejection of a proposal to its master."""
        replica = self.replicas[proposal.master.replica_id]
        self.network.send(
            controller.name, replica.name, lambda: replica.proposal_rejected(proposal.version)
        )

    def request_transfer(
        self, controller: Controller, record: GroupRecord, target: ReplicaId
    ) -> None:
        """Ask the master for a transfer."""
        if record.master is not None:
            replica = self.replicas[record.master.replica_id]
            self.network.send(controller.name, replica.name, lambda: replica.hand_over(target))

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Record the error of a callback as a finding: the loop would only log it."""
        error = context.get("exception")
        self.findings.append(f"{type(error).__name__}: {error}, in {context['message']}")

    # ------------------------------------------------------------ invariants

    def check_promotion(self, replica: ReplicaProcess, view: ReplicationView) -> None:
        """Check C11 and F-1: an epoch has one master."""
        self.note(f"{replica.name} leads epoch {view.epoch}: {view_text(view)}")
        self._checked.pop(replica.name, None)
        other = self._masters.setdefault(view.epoch, replica.member)
        if other != replica.member:
            self.findings.append(f"C11: {other} and {replica.member} lead epoch {view.epoch}")

    def check_confirmed(self, replica: ReplicaProcess, offset: int) -> None:
        """Check F-5 and F-7: the confirmed bytes of all masters are the same."""
        checked = self._checked.get(replica.name, (replica.lives, 0))
        begin = checked[1] if checked[0] == replica.lives else 0
        written = replica.volume.confirmed_bytes(begin, offset)
        if len(written) != offset - begin:
            self.findings.append(f"F-5: {replica.name} confirms {offset} beyond its log")
        common = min(offset, len(self._confirmed)) - begin
        if written[:common] != self._confirmed[begin : begin + common]:
            self.findings.append(f"F-5: {replica.name} confirms {offset} of another log")
        self._confirmed += written[common:]
        self._checked[replica.name] = replica.lives, offset

    def _give_up(self, record: GroupRecord) -> None:
        """Forget the confirmed bytes that the replica lacks which an operator makes master.

        A replica that confirms other bytes later, because it does not know the order, causes a
        finding.
        """
        assert record.master is not None, "an operator names a master"
        survivor = self.replicas[record.master.replica_id]
        log = survivor.volume.log_bytes()
        common = next(
            (
                n
                for n, two in enumerate(zip(self._confirmed, log, strict=False))
                if len(set(two)) > 1
            ),
            min(len(self._confirmed), len(log)),
        )
        self.note(f"{survivor.name} is master: {len(self._confirmed) - common} bytes are lost")
        self.was_replaced = True
        self._checked.clear()
        if common < len(self._confirmed):
            del self._confirmed[common:]
            self.contents.give_up(bytes(self._confirmed))

    def _register_again(self) -> None:
        for replica in self.replicas:
            replica.register_again()

    def check_ack(self, replica: ReplicaProcess, ack: Ack) -> None:
        """Check F-10: a replica does not ack an epoch after it has seen a later one."""
        seen = replica.log.epoch_seen
        if ack.epoch < seen:
            self.findings.append(
                f"F-10: {replica.name} acks epoch {ack.epoch} after it has seen {seen}"
            )

    def count_answer(self) -> None:
        """Count a request that was answered with OK."""
        now_s = self.loop.time()
        self.run.longest_gap_s = max(self.run.longest_gap_s, now_s - self._answered_at_s)
        self._answered_at_s = now_s
        self.run.answered += 1

    # ------------------------------------------------------------ the run

    async def go(self, trouble_s: float) -> None:
        """Run the situation and the faults, repair everything, and judge."""
        for controller in self.controllers:
            controller.start()
        pods = asyncio.ensure_future(self._keep_pods())
        clients = asyncio.ensure_future(self._send())
        await self._until_writable(20.0)
        await self._stage()
        self._answered_at_s = self.loop.time()
        end_s = self.loop.time() + trouble_s
        faults = [asyncio.ensure_future(self._disturb(end_s)) for _ in range(2)]
        await asyncio.gather(*faults)
        self._heal()
        self.note("healed")
        healed_s = self.loop.time()
        undrain = asyncio.ensure_future(self._undo_all())
        if not await self._until_writable(WRITABLE_S_MAX):
            self.findings.append(f"C12: not writable {WRITABLE_S_MAX} s after the last fault")
        self.run.writable_after_s = self.loop.time() - healed_s
        if not await self.until(self._is_in_sync, IN_SYNC_S_MAX):
            self.findings.append(f"C12: {view_text_of(self.store)} after {IN_SYNC_S_MAX} s")
        await self.contents.drain()
        clients.cancel()
        undrain.cancel()
        pods.cancel()
        for task in (clients, undrain, pods):
            if task.done() and not task.cancelled():
                task.result()
        await asyncio.sleep(2.0)
        self._judge()
        for replica in self.replicas:
            replica.stop()
        for controller in self.controllers:
            controller.stop()
        await asyncio.sleep(0.1)

    async def _stage(self) -> None:
        """Play the situation of this run in a group without faults, then repair everything."""
        if not await self.until(self._is_in_sync, IN_SYNC_S_MAX):
            return  # The verdict at the end reports this.
        stalls, self.has_stalls = self.has_stalls, False
        self.note(f"situation: {self.run.situation}")
        try:
            await self._situation.play(Stage(self))
            self.run.was_staged = True
        except SituationNotReached:
            self.note("the situation was not reached")
        self._heal()
        self.has_stalls = stalls
        for replica in self.replicas:
            self.start_again(replica)

    async def _send(self) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0, 2 * SEND_EVERY_S))
            takers = [one for one in self.replicas if one.is_alive and one.takes_sends]
            if takers and self.sends:
                # The replica may be deposed without knowing it.
                self.random.choice(takers).carry_out(self.contents.act)

    async def _keep_pods(self) -> None:
        """Add or remove one replica after the other, as a StatefulSet does."""
        while True:
            record = self.store.stored.record
            if self._pods < self.wanted_replicas:
                self._pods += 1
                self.replicas[self._pods - 1].start()
                continue
            last = self.replicas[self._pods - 1]
            if self._pods > self.wanted_replicas and is_out(record, last.id):
                self._pods -= 1
                self.note(f"the pod of {last.name} is removed")
                last.stop()
                if self.random.random() < 0.5:
                    last.volume = self.contents.volume(last)
            for id_, _ in record.replicas:
                if id_ >= self._pods:
                    self.random.choice(self.controllers).ask(ForgetReplica(id_))
            await asyncio.sleep(PODS_EVERY_S)

    def start_again(self, replica: ReplicaProcess) -> None:
        """Start a process unless it runs or its pod was removed."""
        if replica.id < self._pods and not replica.is_alive:
            replica.start()

    async def until(
        self, holds: Callable[[], bool], seconds: float, *, look_s: float = LOOK_S
    ) -> bool:
        """Wait until a condition holds or the time is over; return whether it holds."""
        end_s = self.loop.time() + seconds
        while not holds():
            if self.loop.time() > end_s:
                return False
            await asyncio.sleep(look_s)
        return True

    async def _until_writable(self, seconds: float) -> bool:
        before = self.run.answered
        return await self.until(lambda: self.run.answered > before, seconds)

    def _is_in_sync(self) -> bool:
        record = self.store.stored.record
        live = {one.member for one in self.replicas if one.is_alive}
        return record.sss == live and len(live) == self._pods == self.wanted_replicas

    # ------------------------------------------------------------ faults

    async def _disturb(self, end_s: float) -> None:
        faults = [
            self._kill,
            self._kill,
            self._cut_power,
            self._pause,
            self._partition,
            self._one_way,
            self._isolate,
            self._store_unreachable,
            self._transfer,
            self._kill_controller,
            self._wipe,
            self._drain,
            self._resize,
            self._lower,
            self._slow_down,
        ]
        while self.loop.time() < end_s:
            await asyncio.sleep(self.random.expovariate(1 / 1.5))
            fault = self.random.choice(faults)
            self.counts[fault.__name__] += 1
            await fault()

    def _any_alive(self) -> ReplicaProcess | None:
        alive = [one for one in self.replicas if one.is_alive and not one.is_paused]
        return self.random.choice(alive) if alive else None

    def _all_are_well(self) -> bool:
        """Return whether one volume may be lost, because all others have the confirmed bytes."""
        return self._is_in_sync() and not any(one.is_paused for one in self.replicas)

    async def _down_and_up(self, replica: ReplicaProcess) -> None:
        member = replica.member
        replica.stop()
        if self.random.random() < 0.7:
            # The supervisor lives and reports the death.
            for controller in self.controllers:
                self.network.send(
                    replica.name, controller.name, partial(controller.report_death, member)
                )
        await asyncio.sleep(self.random.uniform(0.1, 4.0))
        self.start_again(replica)

    async def _kill(self) -> None:
        replica = self._any_alive()
        if replica is not None:
            self.note(f"kill {replica.name}")
            await self._down_and_up(replica)

    async def _cut_power(self) -> None:
        """Cut the power of one machine, or of all if acknowledged bytes are on their disks."""
        replica = self._any_alive()
        if replica is None or (self.mode is AckMode.SYNC_MEMORY and not self._all_are_well()):
            return
        every = self.mode is AckMode.SYNC_FSYNC and self.random.random() < 0.3
        victims = [one for one in self.replicas if one.is_alive] if every else [replica]
        self.note(f"power cut of {[one.name for one in victims]}")
        for victim in victims:
            victim.stop()
            victim.boot += 1
            victim.volume.cut_power(self.random)
        await asyncio.sleep(self.random.uniform(0.1, 2.0))
        for victim in victims:
            self.start_again(victim)

    async def _wipe(self) -> None:
        """Replace a volume by an empty volume."""
        replica = self._any_alive()
        if replica is None or not self._all_are_well() or self.random.random() < 0.5:
            return
        self.note(f"wipe {replica.name}")
        replica.stop()
        replica.volume = self.contents.volume(replica)
        await asyncio.sleep(self.random.uniform(0.1, 2.0))
        self.start_again(replica)
        # The next volume may be lost only after this replica has caught up.
        await self.until(self._is_in_sync, 5.0)

    async def _pause(self) -> None:
        """Pause a broker, with or without its supervisor."""
        replica = self._any_alive()
        if replica is None:
            return
        run, is_whole_pod = replica.lives, self.random.random() < 0.5
        self.freeze(replica, is_whole_pod=is_whole_pod)
        await asyncio.sleep(self.random.uniform(0.3, 5.0))
        self.thaw(replica, run)

    def freeze(self, replica: ReplicaProcess, *, is_whole_pod: bool) -> None:
        """Pause a broker; the pause of a whole pod also stops its heartbeats."""
        self.note(f"pause {replica.name}")
        replica.is_paused = True
        self._paused_at_s[replica.name] = self.loop.time()
        if is_whole_pod:
            self.network.blocked |= {(replica.name, one.name) for one in self.controllers}

    def thaw(self, replica: ReplicaProcess, run: int) -> None:
        """Continue a paused run, which then processes the messages that came meanwhile."""
        self.network.blocked -= {(replica.name, one.name) for one in self.controllers}
        if replica.lives == run and replica.is_alive:
            self.note(f"continue {replica.name}")
            replica.is_paused = False
            deferred, replica.deferred = replica.deferred, []
            for act in deferred:
                if replica.is_alive and replica.lives == run:
                    act()

    def _names(self) -> list[str]:
        return [one.name for one in self.replicas] + [one.name for one in self.controllers]

    async def _block(self, ways: set[tuple[str, str]], what: str) -> None:
        self.note(what)
        self.network.blocked |= ways
        await asyncio.sleep(self.random.uniform(0.2, 6.0))
        self.network.blocked -= ways

    async def _partition(self) -> None:
        names = self._names()
        self.random.shuffle(names)
        one, other = names[: len(names) // 2], names[len(names) // 2 :]
        ways = {(a, b) for a in one for b in other} | {(b, a) for a in one for b in other}
        await self._block(ways, f"partition {sorted(one)} from {sorted(other)}")

    async def _one_way(self) -> None:
        a, b = self.random.sample(self._names(), 2)
        await self._block({(a, b)}, f"block messages from {a} to {b}")

    async def _isolate(self) -> None:
        name = self.random.choice([one.name for one in self.replicas])
        others = [one for one in self._names() if one != name]
        only_peers = self.random.random() < 0.5
        if only_peers:
            others = [one for one in others if one.startswith("replica")]
        ways = {(name, one) for one in others} | {(one, name) for one in others}
        await self._block(ways, f"isolate {name} from {others}")

    async def _store_unreachable(self) -> None:
        self.note("the store is unreachable")
        self.store.is_unreachable = True
        await asyncio.sleep(self.random.uniform(0.2, 5.0))
        self.store.is_unreachable = False

    async def _transfer(self) -> None:
        for replica in self.replicas:
            if replica.is_alive and not replica.is_paused and replica.takes_sends:
                self.note(f"request a transfer from {replica.name}")
                replica.hand_over(None)

    async def _drain(self) -> None:
        """Drain a replica and undo that later."""
        replica = self._any_alive()
        if replica is None:
            return
        self.note(f"drain {replica.name}")
        self.random.choice(self.controllers).ask(Drain(replica.id, undo=False))
        await asyncio.sleep(self.random.uniform(0.5, 8.0))
        self.note(f"undo the drain of {replica.name}")
        self.random.choice(self.controllers).ask(Drain(replica.id, undo=True))

    async def _undo_all(self) -> None:
        """Undo the orders of operators until the end, since an order may take effect late."""
        while True:
            record = self.store.stored.record
            for id_ in view_of(record).retired:
                self.random.choice(self.controllers).ask(Drain(id_, undo=True))
            if record.min_in_sync != MIN_IN_SYNC:
                self.random.choice(self.controllers).ask(MinInSync(MIN_IN_SYNC))
            await asyncio.sleep(PODS_EVERY_S)

    async def _resize(self) -> None:
        """Add replicas to the group and remove them later."""
        if self.wanted_replicas != REPLICAS:
            return
        self.wanted_replicas = self.random.randint(REPLICAS + 1, REPLICAS_MAX)
        self.note(f"{self.wanted_replicas} replicas are wanted")
        await asyncio.sleep(self.random.uniform(0.5, 8.0))
        self.wanted_replicas = REPLICAS
        self.note(f"{REPLICAS} replicas are wanted")

    async def _slow_down(self) -> None:
        """Make all syncs of a disk so slow, for so long, that the replica counts as slow."""
        replica = self.random.choice(self.replicas[:REPLICAS])
        self.note(f"the disk of {replica.name} is slow")
        replica.sync_s = self.random.uniform(1.1, 2.0)
        await asyncio.sleep(self.random.uniform(4.0, 12.0))
        replica.sync_s = 0.0
        self.note(f"the disk of {replica.name} is fast again")

    async def _lower(self) -> None:
        """Lower the minimum of replicas in sync to one and restore it later."""
        self.note("one replica in sync is enough")
        self.random.choice(self.controllers).ask(MinInSync(1))
        await asyncio.sleep(self.random.uniform(0.5, 8.0))
        self.note(f"{MIN_IN_SYNC} replicas in sync are required")
        self.random.choice(self.controllers).ask(MinInSync(MIN_IN_SYNC))

    async def _kill_controller(self) -> None:
        controller = self.random.choice(self.controllers)
        if controller.is_alive:
            self.note(f"kill {controller.name}")
            controller.stop()
            await asyncio.sleep(self.random.uniform(0.1, 4.0))
            controller.start()

    def _heal(self) -> None:
        self.network.heal()
        for replica in self.replicas:
            replica.volume.is_stuck = replica.volume.is_full = False
            replica.sync_s, replica.is_nearly_full = 0.0, False
        self.sends, self.store.is_unreachable = True, False
        self.has_stalls = False

    # ------------------------------------------------------------ the verdict

    def _judge(self) -> None:
        run = self.run
        run.epochs = self.store.stored.record.epoch
        replicas = self.replicas[: self._pods]
        logs = [one.volume.confirmed_bytes(0, one.log.log_end) for one in replicas]
        confirmed = bytes(self._confirmed)
        for replica, log in zip(replicas, logs, strict=True):
            if log[: len(confirmed)] != confirmed:
                run.findings.append(f"C2: {replica.name} lacks confirmed bytes")
        if len(set(logs)) > 1:
            run.findings.append(f"F-24: logs of {[len(log) for log in logs]} bytes differ")
        self.contents.judge(confirmed)


def view_text_of(store: ModelStore) -> str:
    """Return a short text of the stored record."""
    record = store.stored.record
    names = ",".join(sorted(member.incarnation for member in record.sss))
    return f"epoch {record.epoch}, sss {names}, master {record.master}"


def run_seed(
    seed: int,
    *,
    trouble_s: float = TROUBLE_S,
    situation: str = "",
    contents: Callable[[World], Contents] = Values,
) -> Run:
    """Run a seed: a situation, by default one that the seed chooses, and then random faults."""
    run, random = Run(seed), Random(seed)

    async def main() -> None:
        world = World(run, random, situation, contents)
        try:
            await world.go(trouble_s)
        finally:
            # The error of a failed task ends the run.
            for replica in world.replicas:
                replica.check()
            for controller in world.controllers:
                controller.check()

    try:
        _, loop = simulate(main(), random)
        run.trace = loop.trace
    except Exception as error:  # noqa: BLE001 - a finding of any kind
        run.findings.append(f"{type(error).__name__}: {error}")
    return run


def main(contents: Callable[[World], Contents] = Values) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print all events")
    arguments = parser.parse_args()
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        run = run_seed(seed, contents=contents)
        if arguments.trace:
            sys.stdout.write("\n".join(run.notes) + "\n")
        sys.stdout.write(f"{run}\n")
        sys.stdout.flush()
        failed += bool(run.findings)
    sys.exit(f"{failed} of {arguments.seeds} seeds failed" if failed else 0)


if __name__ == "__main__":
    main()
