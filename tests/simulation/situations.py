"""Situations that need a single rule of replication to prevent a loss.

Random faults seldom happen in an order that needs the rule. Each situation is such an order: each
step waits for the effect of the step before. A run begins with one situation. The seed chooses the
situation, the roles of the replicas, the delays, and the bytes that survive a power cut.
`tests/property/test_replica_simulation.py` lists the relaxed rules that each situation finds.

A situation ends early if the network of the seed loses the message that the next step waits for.
`Run.was_staged` is true for a situation that was played to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tests.simulation.replica_controller import Drain, ForgetGroup, ReplaceMaster
from tidemill.broker.engine.replication.config import AckMode
from tidemill.controller.election.record import GroupRecord, ids_of

if TYPE_CHECKING:
    from tests.simulation.replica_group import World
    from tests.simulation.replica_process import ReplicaProcess

STEP_S_MAX = 6.0  # the longest step: notice a lag and get a proposal through
LOOK_S = 0.005
WORK_S = 0.3  # clients send some messages, which are confirmed if that is possible
ELECTION_S = 3.0  # an election takes place if it is possible
SLOW_SYNC_S = 1.5  # added to each sync of a slow disk: a master does not wait so long
BEHIND_REPLICAS_S = 0.02  # added to each sync: acks of replicas come before it ends
FAR_BEHIND_REPLICAS_S = 0.1  # the same, for a slow disk
# After an election, the next one waits half a minute, unless the master confirms nothing.
GUARDED_S = 45.0
ANSWERS = 50
ORDER_EVERY_S = 0.5  # an operator repeats a rejected order
ORDERS_MAX = 20
IMPATIENT_S = 0.02  # so the order is executed as early as the controllers permit
IMPATIENT_ORDERS_MAX = 500
FORGETTING_S_MAX = 60  # longer than the silence after which a group may be forgotten
NOTICE_S = 2.0  # a stream falls silent, its member is missed, and the master proposes a change


class SituationNotReached(Exception):
    """The state that a step waits for did not come in time."""


@final
class Stage:
    """A group of three replicas in sync: the master and two others in random order."""

    def __init__(self, world: World) -> None:
        record = world.store.stored.record
        assert record.master is not None, "a group in sync has a master"
        self.world = world
        self.master = world.replicas[record.master.replica_id]
        others = [one for one in world.replicas if one.is_alive and one is not self.master]
        world.random.shuffle(others)
        self.second, self.third = others
        self.all = (self.master, self.second, self.third)
        self.controllers = [one.name for one in world.controllers]

    @property
    def record(self) -> GroupRecord:
        """The stored record."""
        return self.world.store.stored.record

    def is_member(self, replica: ReplicaProcess) -> bool:
        """Return whether any run of a replica is in the recorded sync state set."""
        return replica.id in ids_of(self.record.sss)

    def leads(self, replica: ReplicaProcess) -> bool:
        """Return whether a replica is the recorded master and knows it."""
        machine = replica.machine
        return (
            self.record.master == replica.member
            and machine is not None
            and machine.master is not None
            and machine.master.epoch == self.record.epoch
        )

    # ------------------------------------------------------------ network

    def cut(self, one: ReplicaProcess, *others: ReplicaProcess) -> None:
        """Block all messages between a replica and others."""
        for other in others:
            self.world.network.blocked |= {(one.name, other.name), (other.name, one.name)}

    def join(self, one: ReplicaProcess, *others: ReplicaProcess) -> None:
        """Allow messages between a replica and others."""
        for other in others:
            self.world.network.blocked -= {(one.name, other.name), (other.name, one.name)}

    def cut_one_way(self, one: ReplicaProcess, other: ReplicaProcess) -> None:
        """Block messages in one direction."""
        self.world.network.blocked.add((one.name, other.name))

    def deafen(self, replica: ReplicaProcess) -> None:
        """Block messages from controllers to a replica."""
        self.world.network.blocked |= {(name, replica.name) for name in self.controllers}

    def mute(self, replica: ReplicaProcess) -> None:
        """Block messages from a replica to controllers."""
        self.world.network.blocked |= {(replica.name, name) for name in self.controllers}

    def reconnect(self, replica: ReplicaProcess) -> None:
        """Undo `mute` and `deafen`."""
        for name in self.controllers:
            self.world.network.blocked -= {(name, replica.name), (replica.name, name)}

    def hold(self, replica: ReplicaProcess, *controllers: str) -> None:
        """Keep messages from a replica to controllers in flight from now on."""
        self.world.network.holds |= {(replica.name, name) for name in controllers}

    def let_arrive(self, replica: ReplicaProcess, *controllers: str) -> None:
        """Deliver the messages that `hold` has kept in flight."""
        for name in controllers:
            self.world.network.let_arrive((replica.name, name))

    # ------------------------------------------------------------ processes

    def kill(self, *replicas: ReplicaProcess) -> None:
        """Kill processes and their supervisors."""
        for one in replicas:
            one.stop()

    def cut_power(self, *replicas: ReplicaProcess) -> None:
        """Cut the power of machines; afterwards their disks sync again."""
        for one in replicas:
            one.stop()
            one.boot += 1
            one.volume.cut_power(self.world.random)
            one.volume.is_stuck = False

    def start(self, *replicas: ReplicaProcess) -> None:
        """Start processes again."""
        for one in replicas:
            self.world.start_again(one)

    # ------------------------------------------------------------ time

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises NotReached."""
        if not await self.world.until(holds, STEP_S_MAX, look_s=LOOK_S):
            raise SituationNotReached

    async def expel(self, replica: ReplicaProcess, *others: ReplicaProcess) -> None:
        """Cut a replica off, and wait until the master knows that it is not a member."""
        self.cut(replica, *others)
        await self.until(lambda: not self.is_member(replica))
        await self.until(lambda: _knows_version(self.master, self.record.version))

    async def until_elected(self, replica: ReplicaProcess) -> None:
        """Wait until a replica leads."""
        await self.until(lambda: self.leads(replica))

    async def until_registered(self, replica: ReplicaProcess) -> None:
        """Wait until the current run of a replica is recorded."""
        await self.until(lambda: self.record.find_member(replica.id) == replica.member)


async def left_alone(stage: Stage) -> None:
    """A master without replicas goes on with a new member; another master is elected."""
    master, second, third = stage.all
    await stage.expel(third, master, second)
    stage.cut(master, second)
    await stage.until(lambda: stage.record.sss == {master.member})
    stage.mute(master)
    stage.deafen(master)
    stage.deafen(third)
    stage.join(master, third)
    await stage.until_elected(second)
    await asyncio.sleep(NOTICE_S)


async def joined_unnoticed(stage: Stage) -> None:
    """A replica becomes a member without its master knowing, and the earlier members die."""
    master, second, third = stage.all
    await stage.expel(third, master, second)
    stage.deafen(master)
    stage.join(third, master, second)
    await stage.until(lambda: stage.is_member(third))
    stage.cut_one_way(master, third)
    await asyncio.sleep(WORK_S)
    stage.kill(master, second)
    await stage.until_elected(third)


async def once_eligible(stage: Stage) -> None:
    """Both members of a new set die; an earlier eligible replica is the only survivor."""
    master, second, third = stage.all
    await stage.expel(second, master, third)
    stage.cut(third, master)
    await stage.until(lambda: stage.record.sss == {master.member})
    stage.join(second, master)
    await stage.until(lambda: stage.record.sss == {master.member, second.member})
    await asyncio.sleep(WORK_S)
    stage.kill(master, second)
    await asyncio.sleep(ELECTION_S)


async def behind_and_alone(stage: Stage) -> None:
    """Members die one after the other; the only survivor had fallen behind."""
    master, second, third = stage.all
    await stage.expel(third, master, second)
    stage.kill(master)
    await stage.until_elected(second)
    stage.kill(second)
    await asyncio.sleep(ELECTION_S)


async def memory_lost_twice(stage: Stage) -> None:
    """The machine of a member loses power, and its next process dies before it can report that."""
    master, second, third = stage.all
    await _lose_memory(stage)
    stage.mute(third)
    stage.start(third)
    await asyncio.sleep(WORK_S)
    stage.kill(third)
    stage.reconnect(third)
    stage.start(third)
    await stage.until_registered(third)
    stage.mute(second)
    stage.kill(master)
    await asyncio.sleep(ELECTION_S)


async def memory_lost_of_two(stage: Stage) -> None:
    """One of two members loses its memory, and the other member dies."""
    master, second, third = stage.all
    await stage.expel(second, master, third)
    await _lose_memory(stage)
    stage.start(third)
    await stage.until_registered(third)
    stage.kill(master)
    await asyncio.sleep(ELECTION_S)


async def _lose_memory(stage: Stage) -> None:
    """Cut the power of the third replica; the master cannot propose its removal meanwhile."""
    master, second, third = stage.all
    third.volume.is_stuck = True
    await asyncio.sleep(WORK_S)
    stage.mute(master)
    stage.cut(third, master, second)
    stage.cut_power(third)


async def mistaken_for_an_earlier_run(stage: Stage) -> None:
    """A master has a stream of a run whose machine lost power, and proposes this run."""
    master, second, third = stage.all
    third.volume.is_stuck = True
    await asyncio.sleep(WORK_S)
    stage.world.sends = False
    await asyncio.sleep(WORK_S)
    stage.cut(third, master, second)
    stage.cut_power(third)
    stage.start(third)
    await stage.until_registered(third)
    await asyncio.sleep(WORK_S)
    stage.world.sends = True
    stage.mute(second)
    stage.kill(master)
    await asyncio.sleep(ELECTION_S)


async def replaced_proposal(stage: Stage) -> None:
    """A proposal arrives late, after its master has proposed the opposite."""
    master, second, third = stage.all
    await stage.expel(third, master, second)
    stage.hold(master, *stage.controllers)
    stage.join(third, master, second)
    await stage.until(lambda: third.member in _proposed(master))
    stage.cut(third, master)
    await asyncio.sleep(NOTICE_S)
    stage.deafen(master)
    stage.let_arrive(master, *stage.controllers)
    await stage.until(lambda: stage.is_member(third))
    await asyncio.sleep(WORK_S)
    stage.kill(master, second)
    await stage.until_elected(third)


async def outdated_proposal(stage: Stage) -> None:
    """A copy of a proposal arrives long after the proposal was accepted and undone."""
    master, second, third = stage.all
    slow = stage.controllers[0]
    await stage.expel(third, master, second)
    stage.hold(master, slow)
    stage.join(third, master, second)
    await stage.until(lambda: stage.is_member(third))
    stage.world.network.holds.clear()
    await stage.expel(third, master)
    stage.deafen(master)
    stage.let_arrive(master, slow)
    await asyncio.sleep(2 * WORK_S)
    stage.kill(master, second)
    await asyncio.sleep(ELECTION_S)


async def proposal_of_a_deposed_master(stage: Stage) -> None:
    """The proposal of a master that was cut off arrives after the next election."""
    master, second, third = stage.all
    stage.hold(master, *stage.controllers)
    stage.deafen(master)
    stage.cut(master, second, third)
    await stage.until(lambda: stage.leads(second) or stage.leads(third))
    await asyncio.sleep(NOTICE_S)
    stage.let_arrive(master, *stage.controllers)
    await asyncio.sleep(WORK_S)


async def journal_without_records(stage: Stage) -> None:
    """A replica knows of an epoch without having its records, and the master of it dies."""
    master, second, third = stage.all
    await stage.expel(third, master, second)
    stage.kill(master)
    await stage.until_elected(second)
    third.volume.is_full = True
    stage.join(third, second)
    await stage.until(lambda: _knows_epoch(third, stage.record.epoch))
    stage.kill(second)
    stage.start(master)
    await stage.until_elected(master)
    third.volume.is_full = False
    stage.join(third, master)
    await asyncio.sleep(NOTICE_S)


async def two_epochs_at_one_place(stage: Stage) -> None:
    """A master dies before another replica has its first record; two epochs begin at one offset."""
    master, second, third = stage.all
    stage.kill(master)
    second.volume.is_full = third.volume.is_full = True
    await stage.until(lambda: stage.leads(second) or stage.leads(third))
    first, other = (second, third) if stage.leads(second) else (third, second)
    await stage.until(lambda: _knows_epoch(other, stage.record.epoch))
    stage.kill(first)
    await stage.until_elected(other)
    second.volume.is_full = third.volume.is_full = False
    stage.start(first, master)
    await asyncio.sleep(NOTICE_S)


async def outdated_view(stage: Stage) -> None:
    """A view without the newest member arrives late at the master, and earlier members die."""
    master, second, third = stage.all
    network, way = stage.world.network, (stage.controllers[0], master.name)
    network.holds.add(way)
    await stage.expel(third, master, second)
    await asyncio.sleep(WORK_S)
    network.holds.clear()
    stage.join(third, master, second)
    await stage.until(lambda: stage.is_member(third))
    await stage.until(lambda: _knows_version(master, stage.record.version))
    stage.deafen(master)
    stage.mute(master)
    stage.cut(third, master)
    await asyncio.sleep(NOTICE_S)
    network.let_arrive(way)
    await asyncio.sleep(WORK_S)
    stage.kill(master, second)
    await stage.until_elected(third)


async def elected_again_unnoticed(stage: Stage) -> None:
    """A master cut off from controllers hands over, is elected again, and hears it of a replica."""
    master, second, third = stage.all
    stage.mute(third)
    stage.deafen(third)
    await asyncio.sleep(NOTICE_S)
    stage.deafen(master)
    master.hand_over(second.id)
    await stage.until_elected(second)
    stage.kill(second)
    await stage.until(lambda: stage.record.master == master.member)
    stage.reconnect(third)
    await stage.until(lambda: third.log.epoch_seen == stage.record.epoch)
    await asyncio.sleep(NOTICE_S)


async def power_cut_at_the_beginning(stage: Stage) -> None:
    """A master loses power before the first record of its epoch is durable."""
    master, second, third = stage.all
    second.volume.is_stuck = third.volume.is_stuck = True
    await asyncio.sleep(WORK_S)
    stage.kill(master)
    await stage.until(lambda: stage.leads(second) or stage.leads(third))
    first = second if stage.leads(second) else third
    stage.cut_power(first)
    stage.start(first)
    await stage.until_registered(first)
    await asyncio.sleep(WORK_S)


async def power_cut_of_all(stage: Stage) -> None:
    """All machines lose power before the last messages are durable anywhere."""
    for one in stage.all:
        one.volume.is_stuck = True
    await asyncio.sleep(WORK_S)
    stage.cut_power(*stage.all)


async def slow_disk_of_a_master(stage: Stage) -> None:
    """The syncs of a master take over a second: it is replaced and removed, and comes back."""
    world, master = stage.world, stage.master
    master.sync_s = SLOW_SYNC_S
    if not await world.until(lambda: stage.record.master != master.member, GUARDED_S):
        raise SituationNotReached
    await stage.until(lambda: not stage.is_member(master))
    await _goes_on(stage)
    master.sync_s = 0.0
    if not await world.until(lambda: stage.is_member(master), GUARDED_S):
        raise SituationNotReached


async def slow_disk_of_a_replica(stage: Stage) -> None:
    """The syncs of a replica take over a second: it is removed, and comes back."""
    world, third = stage.world, stage.third
    third.sync_s = SLOW_SYNC_S
    if not await world.until(lambda: not stage.is_member(third), GUARDED_S):
        raise SituationNotReached
    await _goes_on(stage)
    third.sync_s = 0.0
    if not await world.until(lambda: stage.is_member(third), GUARDED_S):
        raise SituationNotReached
    assert stage.record.master == stage.master.member, "the master was replaced without need"


async def full_disk_of_a_master(stage: Stage) -> None:
    """The disk of a master is full: a replica with room takes over once, and keeps the role."""
    world, master = stage.world, stage.master
    master.volume.is_full = True
    if not await world.until(lambda: stage.record.master != master.member, GUARDED_S):
        raise SituationNotReached
    epoch = stage.record.epoch
    await _goes_on(stage)
    master.volume.is_full = False
    if not await world.until(lambda: stage.is_member(master), GUARDED_S):
        raise SituationNotReached
    assert stage.record.epoch == epoch, "the master was replaced without need"


async def full_disk_of_an_heir(stage: Stage) -> None:
    """A master leaves while one of the two others is full: the one with room takes over."""
    world, (master, full, heir) = stage.world, stage.all
    full.is_nearly_full = True
    await asyncio.sleep(WORK_S)
    for _ in range(ORDERS_MAX):
        world.random.choice(world.controllers).ask(Drain(master.id, undo=False))
        await asyncio.sleep(ORDER_EVERY_S)
        if stage.record.master != master.member:
            break
    else:
        raise SituationNotReached
    assert stage.record.master == heir.member, "a full replica is master, and another has room"
    await _goes_on(stage)


async def _goes_on(stage: Stage) -> None:
    """Wait until clients are answered at their usual pace. Raises NotReached."""
    answered = stage.world.run.answered
    await stage.until(lambda: stage.world.run.answered > answered + ANSWERS)


async def replaced_while_paused(stage: Stage) -> None:
    """Both members pause, an operator replaces the master, and the members continue."""
    world, (master, second, third) = stage.world, stage.all
    await stage.expel(third, master, second)
    # They pause one after the other: some acks of the second replica are in flight to the master,
    # others have come, and the master waits for its own disk.
    master.sync_s = world.random.choice((0.0, BEHIND_REPLICAS_S))
    await asyncio.sleep(WORK_S)
    stage.join(third, master, second)
    # The members may connect to each other before a controller reaches them.
    silent = {(one.name, each.name) for one in world.controllers for each in (master, second)}
    world.network.blocked |= silent
    for one in (master, second):
        world.freeze(one, is_whole_pod=True)
        await asyncio.sleep(world.random.uniform(0, 0.01))
    runs = {one: one.lives for one in (master, second)}
    for _ in range(IMPATIENT_ORDERS_MAX):
        # Controllers reject the order while a replica with all messages sends heartbeats.
        world.random.choice(world.controllers).ask(ReplaceMaster(third.id))
        await asyncio.sleep(IMPATIENT_S)
        if world.was_replaced:
            break
    for one in world.random.sample([master, second], 2):
        world.thaw(one, runs[one])
    if not world.was_replaced:
        raise SituationNotReached
    await asyncio.sleep(world.random.choice([0.0, NOTICE_S]))
    world.network.blocked -= silent
    await asyncio.sleep(NOTICE_S)


async def replaced_after_a_loss(stage: Stage) -> None:
    """The other member ends, its master pauses at once, and an operator replaces the master.

    The end of the stream is known before the pause. The master's own sync ends after it.
    """
    world, (master, second, third) = stage.world, stage.all
    await stage.expel(third, master, second)
    master.sync_s = FAR_BEHIND_REPLICAS_S
    await asyncio.sleep(WORK_S)
    stage.join(third, master, second)
    stage.kill(second)
    await asyncio.sleep(world.random.uniform(0, FAR_BEHIND_REPLICAS_S / 2))
    world.freeze(master, is_whole_pod=True)
    life = master.lives
    for _ in range(IMPATIENT_ORDERS_MAX):
        world.random.choice(world.controllers).ask(ReplaceMaster(third.id))
        await asyncio.sleep(IMPATIENT_S)
        if world.was_replaced:
            break
    world.thaw(master, life)
    if not world.was_replaced:
        raise SituationNotReached
    await asyncio.sleep(NOTICE_S)


async def forgotten_while_cut_off(stage: Stage) -> None:
    """A running group is cut off from controllers and forgotten; an operator names a master."""
    world = stage.world
    for one in stage.all:
        stage.mute(one)
        stage.deafen(one)
    await _forget(stage)
    for one in world.random.sample(stage.all, 3):
        await asyncio.sleep(world.random.uniform(0, ORDER_EVERY_S))
        stage.reconnect(one)
    await _replace(stage, world.random.choice(stage.all))


async def forgotten_while_down(stage: Stage) -> None:
    """All processes end, their group is forgotten, and some of them start again."""
    world = stage.world
    stage.kill(*stage.all)
    await _forget(stage)
    back = world.random.sample(stage.all, world.random.randint(1, 3))
    stage.start(*back)
    await _replace(stage, world.random.choice(back))


async def forgotten_with_an_epoch(stage: Stage) -> None:
    """Only its master has seen the last epoch, and is cut off while another master is named."""
    master, second, third = stage.all
    stage.mute(third)
    stage.deafen(third)
    stage.cut(third, master, second)
    stage.kill(master)
    await stage.until_elected(second)
    stage.cut(second, third)
    stage.mute(second)
    stage.deafen(second)
    await _forget(stage)
    stage.reconnect(third)
    await _replace(stage, third)
    stage.reconnect(second)
    stage.join(second, third)
    stage.start(master)
    await asyncio.sleep(NOTICE_S)


async def restored_in_an_epoch(stage: Stage) -> None:
    """The record is restored from before a replica left the set, and only that one is live."""
    world, (master, second, third) = stage.world, stage.all
    backup = stage.record
    await stage.expel(third, master, second)
    await _goes_on(stage)
    await stage.until(lambda: _knows_version(third, stage.record.version))
    if stage.record.epoch != backup.epoch:
        raise SituationNotReached
    world.store.restore(backup)
    stage.kill(master, second)
    found = world.counts["meta rollback"]
    await stage.until(lambda: world.counts["meta rollback"] > found)
    await asyncio.sleep(ELECTION_S)
    assert stage.record == backup, "an outdated record was changed"
    await _replace(stage, third)
    stage.start(master, second)


async def _forget(stage: Stage) -> None:
    """Delete the record of the group as soon as controllers allow it. Raises NotReached."""
    world, removals = stage.world, stage.world.store.removals
    for _ in range(FORGETTING_S_MAX):
        world.random.choice(world.controllers).ask(ForgetGroup())
        await asyncio.sleep(1.0)
        if world.store.removals > removals:
            return
    raise SituationNotReached


async def _replace(stage: Stage, replica: ReplicaProcess) -> None:
    """Make a replica master, although it may lack messages. Raises NotReached."""
    world = stage.world
    for _ in range(ORDERS_MAX):
        if world.was_replaced:
            break
        world.random.choice(world.controllers).ask(ReplaceMaster(replica.id))
        await asyncio.sleep(ORDER_EVERY_S)
    await stage.until_elected(replica)


def _proposed(replica: ReplicaProcess) -> frozenset[object]:
    master = replica.machine.master if replica.machine is not None else None
    return frozenset() if master is None else master.sync_state.commitment.proposed


def _knows_epoch(replica: ReplicaProcess, epoch: int) -> bool:
    return any(entry.epoch == epoch for entry in replica.log.journal)


def _knows_version(replica: ReplicaProcess, version: int) -> bool:
    view = replica.machine.view if replica.machine is not None else None
    return view is not None and view.version == version


class Situation(NamedTuple):
    """The function that plays a situation, and its mode; None: a random mode."""

    play: Callable[[Stage], Awaitable[None]]
    mode: AckMode | None = None


FSYNC, MEMORY = AckMode.SYNC_FSYNC, AckMode.SYNC_MEMORY
SITUATIONS: Final[Mapping[str, Situation]] = {
    "left alone": Situation(left_alone),
    "joined unnoticed": Situation(joined_unnoticed),
    "once eligible": Situation(once_eligible),
    "behind and alone": Situation(behind_and_alone),
    "memory lost twice": Situation(memory_lost_twice, MEMORY),
    "memory lost of two": Situation(memory_lost_of_two, MEMORY),
    "mistaken for an earlier run": Situation(mistaken_for_an_earlier_run, MEMORY),
    "a replaced proposal": Situation(replaced_proposal),
    "an outdated proposal": Situation(outdated_proposal),
    "a proposal of a deposed master": Situation(proposal_of_a_deposed_master),
    "a journal without records": Situation(journal_without_records),
    "two epochs at one place": Situation(two_epochs_at_one_place),
    "an outdated view": Situation(outdated_view),
    "elected again unnoticed": Situation(elected_again_unnoticed),
    "power cut at the beginning": Situation(power_cut_at_the_beginning, FSYNC),
    "power cut of all": Situation(power_cut_of_all, FSYNC),
    "slow disk of a master": Situation(slow_disk_of_a_master, FSYNC),
    "slow disk of a replica": Situation(slow_disk_of_a_replica, FSYNC),
    "full disk of a master": Situation(full_disk_of_a_master),
    "full disk of an heir": Situation(full_disk_of_an_heir),
}

# Situations with an order of an operator. The loss that the order causes is not a finding, but any
# other loss is.
OPERATED: Final[Mapping[str, Situation]] = {
    "replaced while paused": Situation(replaced_while_paused),
    "replaced after a loss": Situation(replaced_after_a_loss),
    "forgotten while cut off": Situation(forgotten_while_cut_off),
    "forgotten while down": Situation(forgotten_while_down),
    "forgotten with an epoch": Situation(forgotten_with_an_epoch),
    "restored in an epoch": Situation(restored_in_an_epoch),
}
