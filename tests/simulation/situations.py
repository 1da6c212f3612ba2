"""Situations in which one rule alone stands between a group and a loss.

Random faults seldom come in the order in which a rule is needed. Each situation here is such an
order: it waits for one thing before it does the next. A run begins with one of them, which its seed
draws, and so are the parts that replicas have in it, delays, and what a power cut leaves.
`tests/property/test_replica_simulation.py` says which rule is missed in which.

A situation whose next thing does not come, since the seed's network lost what would have brought
it, ends there: `Run.was_staged` says which have come to their end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tests.simulation.replica_controller import ForgetGroup, Replace
from tidemill.broker.engine.replication.config import AckMode
from tidemill.controller.election.record import GroupRecord, ids_of

if TYPE_CHECKING:
    from tests.simulation.replica_group import World
    from tests.simulation.replica_process import ReplicaProcess

STEP_S_MAX = 6.0  # the longest wait here is for a lag to be noticed, and a proposal to get through
LOOK_S = 0.005
WORK_S = 0.3  # in which clients send some messages, and they are confirmed if they are going to be
ELECTION_S = 3.0  # in which whoever may be master is
SLOW_SYNC_S = 1.5  # and what a sync takes: no disk that anybody would wait for
# An election is followed by no other for half a minute, but where nothing is confirmed.
GUARDED_S = 45.0
ANSWERS = 50
ORDER_EVERY_S = 0.5  # an operator who is refused tries again
ORDERS_MAX = 20
FORGETTING_S_MAX = 60  # longer than a group must be silent for
BOTH_S = 2.0  # in which a stream falls silent, its member is missed, and a proposal is made of it


class NotReached(Exception):
    """What a situation waits for has not come."""


@final
class Stage:
    """A group of three that is in sync: its master, and the other two in an order of the seed."""

    def __init__(self, world: World) -> None:
        record = world.store.stored.record
        assert record.master is not None, "a group in sync has one"
        self.world = world
        self.master = world.replicas[record.master.replica_id]
        others = [one for one in world.replicas if one.is_alive and one is not self.master]
        world.random.shuffle(others)
        self.second, self.third = others
        self.all = (self.master, self.second, self.third)
        self.controllers = [one.name for one in world.controllers]

    @property
    def record(self) -> GroupRecord:
        """What is recorded now."""
        return self.world.store.stored.record

    def is_member(self, replica: ReplicaProcess) -> bool:
        """Whether a replica is in the recorded sync state set, in whichever run."""
        return replica.id in ids_of(self.record.sss)

    def leads(self, replica: ReplicaProcess) -> bool:
        """Whether a replica is the recorded master, and knows it."""
        machine = replica.machine
        return (
            self.record.master == replica.member
            and machine is not None
            and machine.master is not None
            and machine.master.epoch == self.record.epoch
        )

    # ------------------------------------------------------------ who hears whom

    def cut(self, one: ReplicaProcess, *others: ReplicaProcess) -> None:
        """Let nothing pass between replicas."""
        for other in others:
            self.world.network.blocked |= {(one.name, other.name), (other.name, one.name)}

    def join(self, one: ReplicaProcess, *others: ReplicaProcess) -> None:
        """Let all pass between replicas."""
        for other in others:
            self.world.network.blocked -= {(one.name, other.name), (other.name, one.name)}

    def cut_one_way(self, one: ReplicaProcess, other: ReplicaProcess) -> None:
        """Let nothing pass from one to the other."""
        self.world.network.blocked.add((one.name, other.name))

    def deafen(self, replica: ReplicaProcess) -> None:
        """Let controllers' words not come to a replica."""
        self.world.network.blocked |= {(name, replica.name) for name in self.controllers}

    def mute(self, replica: ReplicaProcess) -> None:
        """Let a replica's words not come to controllers."""
        self.world.network.blocked |= {(replica.name, name) for name in self.controllers}

    def give_voice(self, replica: ReplicaProcess) -> None:
        """End what `mute` and `deafen` have begun."""
        for name in self.controllers:
            self.world.network.blocked -= {(name, replica.name), (replica.name, name)}

    def hold(self, replica: ReplicaProcess, *controllers: str) -> None:
        """Keep on their way what a replica says to controllers from here on."""
        self.world.network.holds |= {(replica.name, name) for name in controllers}

    def let_arrive(self, replica: ReplicaProcess, *controllers: str) -> None:
        """Bring what was kept on its way."""
        for name in controllers:
            self.world.network.let_arrive((replica.name, name))

    # ------------------------------------------------------------ who is there

    def kill(self, *replicas: ReplicaProcess) -> None:
        """Kill processes; their supervisors die with them."""
        for one in replicas:
            one.stop()

    def cut_power(self, *replicas: ReplicaProcess) -> None:
        """End machines, with what their disks have not synced, and mend those disks."""
        for one in replicas:
            one.stop()
            one.boot += 1
            one.volume.cut_power(self.world.random)
            one.volume.is_stuck = False

    def start(self, *replicas: ReplicaProcess) -> None:
        """Start processes anew."""
        for one in replicas:
            self.world.start_again(one)

    # ------------------------------------------------------------ time

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something. Raises NotReached."""
        if not await self.world.until(holds, STEP_S_MAX, look_s=LOOK_S):
            raise NotReached

    async def leaves(self, replica: ReplicaProcess, *others: ReplicaProcess) -> None:
        """Cut a replica off from others, and wait until it is no member, and its master knows."""
        self.cut(replica, *others)
        await self.until(lambda: not self.is_member(replica))
        await self.until(lambda: _knows_version(self.master, self.record.version))

    async def is_elected(self, replica: ReplicaProcess) -> None:
        """Wait until a replica leads."""
        await self.until(lambda: self.leads(replica))

    async def registers(self, replica: ReplicaProcess) -> None:
        """Wait until the present run of a replica is the recorded one."""
        await self.until(lambda: self.record.find_member(replica.id) == replica.member)


async def left_alone(stage: Stage) -> None:
    """A master that is left alone goes on with one who joins it, and another one is elected."""
    master, second, third = stage.all
    await stage.leaves(third, master, second)
    stage.cut(master, second)
    await stage.until(lambda: stage.record.sss == {master.member})
    stage.mute(master)
    stage.deafen(master)
    stage.deafen(third)
    stage.join(master, third)
    await stage.is_elected(second)
    await asyncio.sleep(BOTH_S)


async def joined_without_a_word(stage: Stage) -> None:
    """A replica becomes a member, its master does not hear of it, and members of before die."""
    master, second, third = stage.all
    await stage.leaves(third, master, second)
    stage.deafen(master)
    stage.join(third, master, second)
    await stage.until(lambda: stage.is_member(third))
    stage.cut_one_way(master, third)
    await asyncio.sleep(WORK_S)
    stage.kill(master, second)
    await stage.is_elected(third)


async def once_eligible(stage: Stage) -> None:
    """Who was eligible beside a master alone is left over when both of a new set die."""
    master, second, third = stage.all
    await stage.leaves(second, master, third)
    stage.cut(third, master)
    await stage.until(lambda: stage.record.sss == {master.member})
    stage.join(second, master)
    await stage.until(lambda: stage.record.sss == {master.member, second.member})
    await asyncio.sleep(WORK_S)
    stage.kill(master, second)
    await asyncio.sleep(ELECTION_S)


async def behind_and_alone(stage: Stage) -> None:
    """Members die one after the other, and who is left had fallen behind."""
    master, second, third = stage.all
    await stage.leaves(third, master, second)
    stage.kill(master)
    await stage.is_elected(second)
    stage.kill(second)
    await asyncio.sleep(ELECTION_S)


async def memory_lost_twice(stage: Stage) -> None:
    """A member's machine loses power, and its process dies before it could say so."""
    master, second, third = stage.all
    await _lose_memory(stage)
    stage.mute(third)
    stage.start(third)
    await asyncio.sleep(WORK_S)
    stage.kill(third)
    stage.give_voice(third)
    stage.start(third)
    await stage.registers(third)
    stage.mute(second)
    stage.kill(master)
    await asyncio.sleep(ELECTION_S)


async def memory_lost_of_two(stage: Stage) -> None:
    """One of two members loses its memory, and the other one dies."""
    master, second, third = stage.all
    await stage.leaves(second, master, third)
    await _lose_memory(stage)
    stage.start(third)
    await stage.registers(third)
    stage.kill(master)
    await asyncio.sleep(ELECTION_S)


async def _lose_memory(stage: Stage) -> None:
    """Cut the power of the third's machine; its master cannot propose it away meanwhile."""
    master, second, third = stage.all
    third.volume.is_stuck = True
    await asyncio.sleep(WORK_S)
    stage.mute(master)
    stage.cut(third, master, second)
    stage.cut_power(third)


async def taken_for_a_former_run(stage: Stage) -> None:
    """A master still has the stream of a run whose machine lost power, and proposes that run."""
    master, second, third = stage.all
    third.volume.is_stuck = True
    await asyncio.sleep(WORK_S)
    stage.world.sends = False
    await asyncio.sleep(WORK_S)
    stage.cut(third, master, second)
    stage.cut_power(third)
    stage.start(third)
    await stage.registers(third)
    await asyncio.sleep(WORK_S)
    stage.world.sends = True
    stage.mute(second)
    stage.kill(master)
    await asyncio.sleep(ELECTION_S)


async def replaced_proposal(stage: Stage) -> None:
    """A proposal arrives of late, when its master has proposed the opposite."""
    master, second, third = stage.all
    await stage.leaves(third, master, second)
    stage.hold(master, *stage.controllers)
    stage.join(third, master, second)
    await stage.until(lambda: third.member in _proposed(master))
    stage.cut(third, master)
    await asyncio.sleep(BOTH_S)
    stage.deafen(master)
    stage.let_arrive(master, *stage.controllers)
    await stage.until(lambda: stage.is_member(third))
    await asyncio.sleep(WORK_S)
    stage.kill(master, second)
    await stage.is_elected(third)


async def outdated_proposal(stage: Stage) -> None:
    """A copy of a proposal arrives when it was carried out, and undone, long ago."""
    master, second, third = stage.all
    slow = stage.controllers[0]
    await stage.leaves(third, master, second)
    stage.hold(master, slow)
    stage.join(third, master, second)
    await stage.until(lambda: stage.is_member(third))
    stage.world.network.holds.clear()
    await stage.leaves(third, master)
    stage.deafen(master)
    stage.let_arrive(master, slow)
    await asyncio.sleep(2 * WORK_S)
    stage.kill(master, second)
    await asyncio.sleep(ELECTION_S)


async def proposal_of_a_deposed_master(stage: Stage) -> None:
    """What a master has proposed that was cut off arrives when another one leads."""
    master, second, third = stage.all
    stage.hold(master, *stage.controllers)
    stage.deafen(master)
    stage.cut(master, second, third)
    await stage.until(lambda: stage.leads(second) or stage.leads(third))
    await asyncio.sleep(BOTH_S)
    stage.let_arrive(master, *stage.controllers)
    await asyncio.sleep(WORK_S)


async def journal_without_records(stage: Stage) -> None:
    """A replica far behind knows of an epoch of which it has nothing, and that master dies."""
    master, second, third = stage.all
    await stage.leaves(third, master, second)
    stage.kill(master)
    await stage.is_elected(second)
    third.volume.is_full = True
    stage.join(third, second)
    await stage.until(lambda: _knows_epoch(third, stage.record.epoch))
    stage.kill(second)
    stage.start(master)
    await stage.is_elected(master)
    third.volume.is_full = False
    stage.join(third, master)
    await asyncio.sleep(BOTH_S)


async def two_epochs_at_one_place(stage: Stage) -> None:
    """A master dies before anybody has the first record of its epoch; the next begins there."""
    master, second, third = stage.all
    stage.kill(master)
    second.volume.is_full = third.volume.is_full = True
    await stage.until(lambda: stage.leads(second) or stage.leads(third))
    first, other = (second, third) if stage.leads(second) else (third, second)
    await stage.until(lambda: _knows_epoch(other, stage.record.epoch))
    stage.kill(first)
    await stage.is_elected(other)
    second.volume.is_full = third.volume.is_full = False
    stage.start(first, master)
    await asyncio.sleep(BOTH_S)


async def view_of_before(stage: Stage) -> None:
    """A view that lacks a member comes to its master late, and members of before die."""
    master, second, third = stage.all
    network, way = stage.world.network, (stage.controllers[0], master.name)
    network.holds.add(way)
    await stage.leaves(third, master, second)
    await asyncio.sleep(WORK_S)
    network.holds.clear()
    stage.join(third, master, second)
    await stage.until(lambda: stage.is_member(third))
    await stage.until(lambda: _knows_version(master, stage.record.version))
    stage.deafen(master)
    stage.mute(master)
    stage.cut(third, master)
    await asyncio.sleep(BOTH_S)
    network.let_arrive(way)
    await asyncio.sleep(WORK_S)
    stage.kill(master, second)
    await stage.is_elected(third)


async def elected_again_unawares(stage: Stage) -> None:
    """A master that hears nothing hands over, and is elected again; a replica tells it so."""
    master, second, third = stage.all
    stage.mute(third)
    stage.deafen(third)
    await asyncio.sleep(BOTH_S)
    stage.deafen(master)
    master.hand_over(second.id)
    await stage.is_elected(second)
    stage.kill(second)
    await stage.until(lambda: stage.record.master == master.member)
    stage.give_voice(third)
    await stage.until(lambda: third.log.epoch_seen == stage.record.epoch)
    await asyncio.sleep(BOTH_S)


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
    await stage.registers(first)
    await asyncio.sleep(WORK_S)


async def power_cut_of_all(stage: Stage) -> None:
    """All machines lose power before what was sent is durable anywhere."""
    for one in stage.all:
        one.volume.is_stuck = True
    await asyncio.sleep(WORK_S)
    stage.cut_power(*stage.all)


async def slow_disk_of_a_master(stage: Stage) -> None:
    """No sync of a master comes back within a second: another one leads, and it is done without."""
    world, master = stage.world, stage.master
    master.sync_s = SLOW_SYNC_S
    if not await world.until(lambda: stage.record.master != master.member, GUARDED_S):
        raise NotReached
    await stage.until(lambda: not stage.is_member(master))
    await _goes_on(stage)
    master.sync_s = 0.0
    if not await world.until(lambda: stage.is_member(master), GUARDED_S):
        raise NotReached


async def slow_disk_of_a_replica(stage: Stage) -> None:
    """No sync of a replica comes back within a second: it is done without, and comes back."""
    world, third = stage.world, stage.third
    third.sync_s = SLOW_SYNC_S
    if not await world.until(lambda: not stage.is_member(third), GUARDED_S):
        raise NotReached
    await _goes_on(stage)
    third.sync_s = 0.0
    if not await world.until(lambda: stage.is_member(third), GUARDED_S):
        raise NotReached
    assert stage.record.master == stage.master.member, "nobody else was needed"


async def _goes_on(stage: Stage) -> None:
    """Wait until clients are answered at their usual pace. Raises NotReached."""
    answered = stage.world.run.answered
    await stage.until(lambda: stage.world.run.answered > answered + ANSWERS)


async def replaced_while_still(stage: Stage) -> None:
    """Who has everything stands still, an operator replaces it, and it goes on."""
    world, (master, second, third) = stage.world, stage.all
    await stage.leaves(third, master, second)
    await asyncio.sleep(WORK_S)
    stage.join(third, master, second)
    # One after the other: of what the second has acked, some waits at the master.
    for one in (master, second):
        world.freeze(one, is_whole_pod=True)
        await asyncio.sleep(world.random.uniform(0, 0.01))
    runs = {one: one.lives for one in (master, second)}
    for _ in range(ORDERS_MAX):
        # Refused as long as anybody is heard who lacks nothing.
        world.random.choice(world.controllers).ask(Replace(third.id))
        await asyncio.sleep(ORDER_EVERY_S)
        if world.was_replaced:
            break
    for one in world.random.sample([master, second], 2):
        world.thaw(one, runs[one])
    if not world.was_replaced:
        raise NotReached
    await asyncio.sleep(BOTH_S)


async def forgotten_while_away(stage: Stage) -> None:
    """No controller hears of a group that goes on; it is forgotten, and somebody leads it again."""
    world = stage.world
    for one in stage.all:
        stage.mute(one)
        stage.deafen(one)
    await _forget(stage)
    for one in world.random.sample(stage.all, 3):
        await asyncio.sleep(world.random.uniform(0, ORDER_EVERY_S))
        stage.give_voice(one)
    await _replace(stage, world.random.choice(stage.all))


async def forgotten_while_down(stage: Stage) -> None:
    """All processes have ended, their group is forgotten, and they come back."""
    world = stage.world
    stage.kill(*stage.all)
    await _forget(stage)
    back = world.random.sample(stage.all, world.random.randint(1, 3))
    stage.start(*back)
    await _replace(stage, world.random.choice(back))


async def forgotten_with_an_epoch_that_one_has_seen(stage: Stage) -> None:
    """Of the last epoch only its master knows, which is away while another one is named."""
    master, second, third = stage.all
    stage.mute(third)
    stage.deafen(third)
    stage.cut(third, master, second)
    stage.kill(master)
    await stage.is_elected(second)
    stage.cut(second, third)
    stage.mute(second)
    stage.deafen(second)
    await _forget(stage)
    stage.give_voice(third)
    await _replace(stage, third)
    stage.give_voice(second)
    stage.join(second, third)
    stage.start(master)
    await asyncio.sleep(BOTH_S)


async def _forget(stage: Stage) -> None:
    """Take away what is known of the group, as soon as that may be. Raises NotReached."""
    world, removals = stage.world, stage.world.store.removals
    for _ in range(FORGETTING_S_MAX):
        world.random.choice(world.controllers).ask(ForgetGroup())
        await asyncio.sleep(1.0)
        if world.store.removals > removals:
            return
    raise NotReached


async def _replace(stage: Stage, replica: ReplicaProcess) -> None:
    """Make a replica master, whatever it lacks. Raises NotReached."""
    world = stage.world
    for _ in range(ORDERS_MAX):
        if world.was_replaced:
            break
        world.random.choice(world.controllers).ask(Replace(replica.id))
        await asyncio.sleep(ORDER_EVERY_S)
    await stage.is_elected(replica)


def _proposed(replica: ReplicaProcess) -> frozenset[object]:
    master = replica.machine.master if replica.machine is not None else None
    return frozenset() if master is None else master.sync_state.commitment.proposed


def _knows_epoch(replica: ReplicaProcess, epoch: int) -> bool:
    return any(entry.epoch == epoch for entry in replica.log.journal)


def _knows_version(replica: ReplicaProcess, version: int) -> bool:
    view = replica.machine.view if replica.machine is not None else None
    return view is not None and view.version == version


class Situation(NamedTuple):
    """What is played, and in which mode; None: in whichever the seed draws."""

    play: Callable[[Stage], Awaitable[None]]
    mode: AckMode | None = None


FSYNC, MEMORY = AckMode.SYNC_FSYNC, AckMode.SYNC_MEMORY
SITUATIONS: Final[Mapping[str, Situation]] = {
    "left alone": Situation(left_alone),
    "joined without a word": Situation(joined_without_a_word),
    "once eligible": Situation(once_eligible),
    "behind, and alone": Situation(behind_and_alone),
    "memory lost twice": Situation(memory_lost_twice, MEMORY),
    "memory lost of two": Situation(memory_lost_of_two, MEMORY),
    "taken for a former run": Situation(taken_for_a_former_run, MEMORY),
    "a proposal that was replaced": Situation(replaced_proposal),
    "a proposal of before": Situation(outdated_proposal),
    "a proposal of a deposed master": Situation(proposal_of_a_deposed_master),
    "a journal without records": Situation(journal_without_records),
    "two epochs at one place": Situation(two_epochs_at_one_place),
    "a view of before": Situation(view_of_before),
    "elected again unawares": Situation(elected_again_unawares),
    "power cut at the beginning": Situation(power_cut_at_the_beginning, FSYNC),
    "power cut of all": Situation(power_cut_of_all, FSYNC),
    "slow disk of a master": Situation(slow_disk_of_a_master, FSYNC),
    "slow disk of a replica": Situation(slow_disk_of_a_replica, FSYNC),
}

# With what an operator orders: what is lost by it is no finding, and whatever else is lost is one.
OPERATED: Final[Mapping[str, Situation]] = {
    "replaced while still": Situation(replaced_while_still),
    "forgotten while away": Situation(forgotten_while_away),
    "forgotten while down": Situation(forgotten_while_down),
    "forgotten with an epoch": Situation(forgotten_with_an_epoch_that_one_has_seen),
}
