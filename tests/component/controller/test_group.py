"""A group at one controller: each decision is written once, even if answers are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest

from tests.support.clocks import ManualClock
from tests.support.worlds.memory_meta_store import Contents, Fault, MemoryStore
from tests.support.worlds.replica_records import member_of, record_of_three
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView
from tidemill.controller.election.decide import live_of, release
from tidemill.controller.election.membership import ChangeRejection, change_sync_state_set
from tidemill.controller.election.record import CutTail, GroupRecord
from tidemill.controller.election.registration import Registration, register
from tidemill.controller.election.replacement import replace_master
from tidemill.controller.election.sessions import (
    ElectionTiming,
    GroupObservation,
    Heartbeat,
    ReplicaHealth,
)
from tidemill.controller.group import (
    QUIET_MS,
    START_WAIT_MS,
    TRANSFER_GIVE_UP_MS,
    BrokerGroupControl,
)
from tidemill.controller.meta_store import StoreUnreachable
from tidemill.controller.metrics import ControllerMetrics
from tidemill.controller.record_json import from_text, to_text

NAME = "broker-0"
WAIT_S = 20.0


class RecordingListener:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.views: list[ReplicationView] = []
        self.transfers: list[tuple[int, int]] = []

    def send_view(self, view: ReplicationView) -> None:
        self.views.append(view)

    def end_session(self) -> None:
        raise AssertionError("no test removes a group")

    def hand_over(self, *, epoch: int, target: ReplicaId) -> None:
        self.transfers.append((epoch, target))


class World:
    """Several controllers with one store and one clock."""

    def __init__(self, controllers: int = 1) -> None:
        self.clock = ManualClock()
        self.contents = Contents()
        self.metrics = ControllerMetrics()
        self.stores = [MemoryStore(self.contents) for _ in range(controllers)]
        self.groups = [
            BrokerGroupControl(
                NAME,
                store,
                clock=self.clock,
                timing=ElectionTiming(),
                rank=lambda rank=rank: rank,  # type: ignore[misc]  # each has its own
                metrics=self.metrics,
            )
            for rank, store in enumerate(self.stores)
        ]
        self.store, self.group = self.stores[0], self.groups[0]

    async def begin(self, record: GroupRecord | None = None) -> None:
        """Store a record, and send heartbeats of all replicas to all controllers."""
        await self.store.create(NAME, record or record_of_three())
        self.hear(0, 1, 2)
        for group in self.groups:
            await group.reconcile()

    def hear(self, *replicas: int, log_end: int = 100) -> None:
        for group in self.groups:
            for replica in replicas:
                group.note_heartbeat(
                    member_of(replica), beat(is_master=replica == 0, log_end=log_end)
                )

    @property
    def record(self) -> GroupRecord:
        return self.contents.records[NAME].record


def beat(*, is_master: bool = False, log_end: int = 100) -> Heartbeat:
    return Heartbeat(
        is_master=is_master,
        epoch_seen=3,
        version_seen=7,
        log_epoch=3,
        log_end=log_end,
        durable_end=log_end,
        confirm=log_end,
        health=ReplicaHealth.OK,
        page_age_ms=0,
    )


async def turns(until: Callable[[], bool]) -> None:
    """Let the loop turn until a condition is true; the time-out of the scenario limits this."""
    while not until():  # noqa: ASYNC110  # The condition has no event.
        await asyncio.sleep(0)


def generate_latest_of(metrics: ControllerMetrics) -> str:
    registry = CollectorRegistry()

    class Collector:
        def collect(self) -> Iterable[Metric]:
            return metrics.collector(dict, lambda: True)()

    registry.register(Collector())
    return generate_latest(registry).decode()


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario

    asyncio.run(run())


def test_one_write_replaces_a_dead_master_and_reaches_all_listeners() -> None:
    async def scenario() -> None:
        world, listener = World(), RecordingListener()
        await world.begin()
        world.group.listeners.add(listener)
        world.clock.advance(400)
        world.group.note_death(member_of(0))
        world.clock.advance(20)
        await world.group.reconcile()
        assert world.record.master == member_of(1)
        assert (world.record.epoch, world.record.version) == (4, 8)
        assert world.record.sss == {member_of(1), member_of(2)}
        last = world.record.history[-1]
        assert (last.source, last.target, last.detected_ms) == (0, 1, 20)
        assert last.at_ms == world.clock.wall_ms()
        assert [view.master for view in listener.views] == [member_of(1)]
        # A second decision changes nothing.
        await world.group.reconcile()
        assert world.record.epoch == 4

    play(scenario())


def test_an_election_with_a_lost_answer_is_found_by_its_id() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        world.store.faults = [Fault.LOST_ANSWER]
        world.group.note_death(member_of(0))
        await world.group.reconcile()
        await world.group.reconcile()
        assert (world.record.epoch, world.record.version) == (4, 8)
        view = world.group.view()
        assert view is not None
        assert view.epoch == 4

    play(scenario())


def test_a_pending_election_is_prevented_before_the_next_one() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        world.store.faults = [Fault.LATE]
        world.group.note_death(member_of(0))
        await world.group.reconcile()
        assert (world.record.epoch, world.record.version) == (3, 7)  # a write without a change
        await world.group.reconcile()
        assert world.record.epoch == 4
        after = world.record
        await world.store.deliver_late()
        assert world.record == after

    play(scenario())


@pytest.mark.parametrize("fault", ["unreachable", "damaged"])
def test_a_failed_store_raises_an_alarm_until_the_election_is_done(fault: str) -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        setattr(world.store, f"is_{fault}", True)
        world.group.note_death(member_of(0))
        running = asyncio.ensure_future(world.group.run())
        await turns(lambda: bool(world.group.alarm))
        assert world.group.alarm.startswith(f"the store is {fault}: ")
        setattr(world.store, f"is_{fault}", False)
        world.hear(1, 2)  # The event triggers the next decision at once.
        await turns(lambda: world.record.epoch == 4 and not world.group.alarm)
        running.cancel()
        assert world.record.master == member_of(1)

    play(scenario())


def test_two_concurrent_elections_make_one_epoch() -> None:
    async def scenario() -> None:
        world = World(controllers=2)
        await world.begin()
        for group in world.groups:
            group.note_death(member_of(0))
        await world.groups[1].reconcile()
        assert world.record.epoch == 3  # The deputy waits for its turn.
        world.clock.advance(ElectionTiming().deputy_step_ms)
        world.hear(1, 2)
        await asyncio.gather(*(group.reconcile() for group in world.groups))
        for group in world.groups:
            await group.reconcile()
        assert world.record.epoch == 4
        assert {group.view() for group in world.groups} == {world.group.view()}

    play(scenario())


def test_a_late_watch_is_not_mistaken_for_a_restored_store() -> None:
    """If replicas have seen a newer epoch than this controller, it reads the store first."""

    async def scenario() -> None:
        world = World(controllers=2)
        await world.begin()
        late = world.groups[1]
        world.clock.advance(200)
        world.group.note_death(member_of(0))
        await world.group.reconcile()
        assert late.stored is not None
        assert (world.record.epoch, late.stored.record.epoch) == (4, 3)
        for n in (1, 2):
            late.note_heartbeat(member_of(n), beat()._replace(epoch_seen=4))
        await late.reconcile()
        assert late.alarm == ""
        assert late.stored.record.epoch == 4

    play(scenario())


def newer_version(record: GroupRecord, _observation: object) -> GroupRecord:
    return record._replace(version=record.version + 1)


def test_a_record_that_replicas_have_seen_newer_is_not_changed_until_an_operator_replaces_it() -> (
    None
):
    """A write would raise the version, and so hide that the record is outdated."""

    async def scenario() -> None:
        world = World()
        await world.begin()
        for n in range(3):
            world.group.note_heartbeat(member_of(n), beat()._replace(version_seen=8))
        await world.group.reconcile()
        assert "version 8 of the record, which has version 7" in world.group.alarm
        assert "broker-group transfer broker-0 --unclean --to 0" in world.group.alarm
        refusal = await world.group.change(newer_version)
        assert isinstance(refusal, ChangeRejection)
        assert "version 8" in refusal.why
        assert world.record.version == 7

        def replace(
            record: GroupRecord, observation: GroupObservation
        ) -> GroupRecord | ChangeRejection:
            timing = ElectionTiming()
            return replace_master(record, ReplicaId(0), observation, timing, reason="restored")

        assert await world.group.change(replace, corrects_record=True) is None
        await world.group.reconcile()
        assert world.group.alarm == ""
        assert world.record.version > 8
        assert await world.group.change(newer_version) is None

    play(scenario())


def test_a_heartbeat_that_overtakes_the_answer_of_a_read_does_not_make_the_record_outdated() -> (
    None
):
    async def scenario() -> None:
        world = World(controllers=2)
        await world.begin()
        late, reads = world.groups[1], world.stores[1].answers_reads

        async def write() -> None:
            assert await world.group.change(newer_version) is None
            for n in range(3):
                late.note_heartbeat(
                    member_of(n), beat()._replace(version_seen=world.record.version)
                )

        for act in (late.reconcile, lambda: late.change(newer_version)):
            await write()
            reads.clear()
            task = asyncio.ensure_future(act())
            for _ in range(5):  # The read takes place, and its answer is in flight.
                await asyncio.sleep(0)
            await write()
            reads.set()
            assert not isinstance(await task, ChangeRejection)
            assert late.alarm == ""
            await late.reconcile()
            assert late.alarm == ""

    play(scenario())


def test_refresh_reads_a_run_that_a_late_watch_missed() -> None:
    async def scenario() -> None:
        world = World(controllers=2)
        await world.begin()
        run, late = member_of(1, 1), world.groups[1]
        asked = Registration(run, member_of(1).incarnation, "store-1", "h", is_clean=True)
        assert await world.group.change(lambda record, _: register(record, asked)) is None
        assert late.stored is not None
        assert late.stored.record.find_member(run.replica_id) == member_of(1)
        await late.refresh()
        assert late.stored.record.find_member(run.replica_id) == run
        world.stores[1].is_unreachable = True
        await late.refresh()  # The known record stays.

    play(scenario())


def test_a_proposal_is_judged_against_the_stored_record_without_a_rebase() -> None:
    async def scenario() -> None:
        world = World(controllers=2)
        await world.begin()
        proposal = Proposal(3, 7, member_of(0), frozenset({member_of(0), member_of(1)}))

        def propose(record: GroupRecord, _observation: object) -> GroupRecord | ChangeRejection:
            live = {member_of(n) for n in range(3)}
            return change_sync_state_set(record, proposal, live)

        results = await asyncio.gather(*(group.change(propose) for group in world.groups))
        assert sorted(result is None for result in results) == [False, True]
        assert world.record.version == 8

    play(scenario())


def test_a_prevented_proposal_is_made_again() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        world.store.faults = [Fault.LATE]
        proposal = Proposal(3, 7, member_of(0), frozenset({member_of(0), member_of(1)}))
        live = {member_of(n) for n in range(3)}
        result = await world.group.change(
            lambda record, _: change_sync_state_set(record, proposal, live)
        )
        assert result is None
        after = world.record
        assert after.sss == proposal.sss
        await world.store.deliver_late()
        assert world.record == after

    play(scenario())


def test_a_request_to_an_unreachable_store_is_not_reported_as_rejected() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        world.store.is_unreachable = True
        with pytest.raises(StoreUnreachable):
            await world.group.change(lambda _record, _observation: ChangeRejection("never called"))

    play(scenario())


def test_a_transfer_is_requested_until_it_is_given_up() -> None:
    async def scenario() -> None:
        world, listener = World(), RecordingListener()
        await world.begin(record_of_three()._replace(transfer=ReplicaId(2)))
        world.group.listeners.add(listener)
        await world.group.reconcile()
        assert listener.transfers == [(3, 2)]
        world.clock.advance(TRANSFER_GIVE_UP_MS + 1)
        world.hear(0, 1, 2)
        await world.group.reconcile()
        assert world.record.transfer is None
        assert world.record.epoch == 3
        assert 'election_result="keep_current_master"} 1.0' in generate_latest_of(world.metrics)

    play(scenario())


def test_a_group_without_live_replicas_raises_an_alarm() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        for replica in range(3):
            world.group.note_death(member_of(replica))
        await world.group.reconcile()
        assert "replicas 0, 1 and 2 have all confirmed messages" in world.group.alarm
        assert world.record.epoch == 3

    play(scenario())


def test_a_controller_that_starts_waits_for_the_replicas_before_the_alarm() -> None:
    """A machine starts the controller and the replicas together, and the replicas take longer."""

    async def scenario() -> None:
        world = World()
        await world.store.create(NAME, record_of_three())
        for _ in range(4):
            await world.group.reconcile()
            assert world.group.alarm == ""
            world.clock.advance(START_WAIT_MS // 4)
        await world.group.reconcile()
        assert "replicas 0, 1 and 2 have all confirmed messages" in world.group.alarm

    play(scenario())


def test_a_group_is_founded_by_its_first_replica() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin(GroupRecord(min_in_sync=1))
        founder = ReplicaRun(ReplicaId(0), "f" * 32)
        one = record_of_three().replicas[0][1]._replace(incarnation=founder.incarnation)
        await world.group.change(
            lambda record, _: record.with_replica(ReplicaId(0), one)._replace(
                version=record.version + 1
            )
        )
        world.group.note_heartbeat(
            founder, beat()._replace(epoch_seen=0, version_seen=0, log_epoch=0)
        )
        await world.group.reconcile()
        assert (world.record.epoch, world.record.master) == (1, founder)

    play(scenario())


def test_outage_and_cuts_are_added_to_the_history() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        world.clock.advance(400)
        world.hear(1, 2)
        world.group.note_death(member_of(0))
        world.clock.advance(30)
        await world.group.reconcile()
        assert world.record.master == member_of(1)
        world.clock.advance(50)
        cut = CutTail(ReplicaId(2), epoch=4, offset=90, size_bytes=10, records=1)
        leading = beat(is_master=True)._replace(epoch_seen=4, writable_epoch=4)
        world.group.note_heartbeat(member_of(1), leading)
        world.group.note_heartbeat(member_of(2), beat()._replace(epoch_seen=4, cut=cut))
        await world.group.reconcile()
        assert world.record.history[-1].away_ms is None, "proposals come first"
        world.clock.advance(QUIET_MS)
        world.group.note_heartbeat(member_of(1), leading)
        world.group.note_heartbeat(member_of(2), beat()._replace(epoch_seen=4, cut=cut))
        await world.group.reconcile()
        last = world.record.history[-1]
        assert (last.detected_ms, last.away_ms, last.cuts) == (30, 80, (cut,))
        assert from_text(to_text(world.record)) == world.record
        version = world.record.version
        world.clock.advance(QUIET_MS)
        world.group.note_heartbeat(member_of(1), leading)
        await world.group.reconcile()
        assert world.record.version == version, "it is written once"
        exposed = generate_latest_of(world.metrics)
        assert 'rocketmq_ha_failover_seconds_sum{broker_group="broker-0",reason="died"} 0.08' in (
            exposed
        )

    play(scenario())


def test_the_outage_of_a_transfer_begins_when_the_master_stops_sends() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        world.clock.advance(100)

        def hand_over(record: GroupRecord, observation: GroupObservation) -> GroupRecord:
            after = release(
                record,
                epoch=3,
                master=member_of(0),
                target=ReplicaId(1),
                live=live_of(record, observation, ElectionTiming()),
            )
            assert after is not None
            last = after.history[-1]._replace(detected_ms=25)
            return after._replace(history=(*after.history[:-1], last))

        assert await world.group.change(hand_over) is None
        world.clock.advance(40)
        leading = beat(is_master=True)._replace(epoch_seen=4, writable_epoch=4)
        world.group.note_heartbeat(member_of(1), leading)
        await world.group.reconcile()
        world.clock.advance(QUIET_MS)
        world.group.note_heartbeat(member_of(1), leading)
        await world.group.reconcile()
        last = world.record.history[-1]
        assert (last.reason, last.detected_ms, last.away_ms) == ("the master handed over", 25, 65)
        assert 'election_result="new_master_elected"} 1.0' in generate_latest_of(world.metrics)
        assert last.at_ms > 0

    play(scenario())
